"""Compile the Triton kernels for a GPU (compute capability 9.0 by default) where there is none. Run by test_triton.py.

python tests/quant/compile_triton.py [90]
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from adapt_llm.quant.gpu import kernels
from adapt_llm.quant.gpu.products import FEW_ROWS, ONE_ROW
from adapt_llm.quant.probe import TRITON_ROWS

POINTERS = {"flag": "*i32", "words": "*i32", "order": "*i64", "scales": "*bf16"}
NUMBERS = {"M": "i32", "N": "i32", "stride": "i32"}
ROUNDED = ("x", "weight", "words", "scales", "bias", "out")  # torch's tensors begin at multiples of 16 bytes


def product(rows: int, dtype: str, zeros: str, *, both: bool, extra: bool, run: int) -> ASTSource:
    tile = ONE_ROW if rows == 1 else FEW_ROWS
    constants = {"K": 4096, "W": 512, "group": 16 * run, "BOTH": both, "HAS_ORDER": extra, "HAS_BIAS": extra}
    constants |= {"ROWS": rows, "BLOCK_N": tile.block_n, "WORDS": tile.words, "BLOCK_K": tile.block_k}
    constants |= {"RUN": run, "STAGES": tile.stages}
    return source(kernels.flagged, constants, {"zeros": zeros}, default=f"*{dtype}")


def rule(dtype: str) -> ASTSource:
    signature = {"thresholds": "*fp32", "position": "*i64", "depth": "*i32", "layer": "i32", "held": "i32"}
    return source(kernels.exit_rule, {"D": 4096, "BLOCK": 1024}, signature, default=f"*{dtype}")


def source(kernel: triton.JITFunction, constants: dict, given: dict, *, default: str) -> ASTSource:
    known = {**POINTERS, **NUMBERS, **given}
    signature = {name: "constexpr" if name in constants else known.get(name, default) for name in kernel.arg_names}
    aligned = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in ROUNDED if name in signature}
    return ASTSource(kernel, signature, {(kernel.arg_names.index(k),): v for k, v in constants.items()}, aligned)


def main() -> None:
    target = GPUTarget("cuda", int(sys.argv[1]) if len(sys.argv) > 1 else 90, 32)
    sources = {
        f"{rows} rows, {dtype}, zeros {zeros}, both {both}, run {run}": product(
            rows, dtype, zeros, both=both, extra=extra, run=run
        )
        for rows, dtype, zeros, both, extra, run in (
            (1, "bf16", "*u8", True, False, 8),
            (1, "bf16", "*bf16", False, True, 2),
            (1, "fp32", "*fp32", True, True, 1),
            (TRITON_ROWS, "bf16", "*u8", True, False, 8),
            (TRITON_ROWS, "fp16", "*bf16", False, True, 1),
        )
    }
    sources["rule, bf16"] = rule("bf16")
    for name, made in sources.items():
        found = triton.compile(made, target=target, options={"num_warps": 4})
        text = found.asm["ptx"]
        facts = f"shared {found.metadata.shared}, cp.async {'cp.async' in text}, mma {'mma.sync' in text}"
        print(f"{name}: {facts}, {usage(found.asm['cubin'])}", flush=True)


def usage(binary: bytes) -> str:
    """Registers and stack (spills) of a kernel, as NVIDIA's tool in Triton's wheel reads them."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        found = subprocess.run([str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True)
    return re.search(r"REG:\d+ STACK:\d+", found.stdout)[0]


if __name__ == "__main__":
    main()
