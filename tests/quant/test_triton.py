"""The Triton kernels without a GPU: in Triton's interpreter, which must be chosen before Triton is imported."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from adapt_llm.quant.layout import Int4Matrix
from adapt_llm.quant.planes import Planes

INTERPRETED = Path(__file__).with_name("interpreted_triton.py")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed (Linux only)")
def test_in_the_interpreter(interpreted: Callable[[Path], None]) -> None:
    """A process of its own: the choice changes Triton for good."""
    interpreted(INTERPRETED)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed (Linux only)")
def test_kernels_compile_for_a_gpu_and_keep_to_its_registers(tmp_path: Path) -> None:
    """Triton and the ptxas in its wheel need no GPU to compile for one. A stack would be registers spilled."""
    found = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_triton.py"))],
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-4000:]
    lines = found.stdout.splitlines()
    assert len(lines) == 6
    assert all(line.endswith("STACK:0") for line in lines), found.stdout
    assert all("cp.async True" in line for line in lines if "rows" in line), "loads do not run ahead"
    assert all(("mma True" in line) is line.startswith("16 rows") for line in lines)


def test_nothing_imports_triton_on_a_cpu() -> None:
    program = """
import sys, torch
from adapt_llm.quant.layout import Int4Matrix
from adapt_llm.quant.linear import Int4Linear
codes, ones = torch.ones(16, 64, dtype=torch.uint8), torch.ones(16, 2)
Int4Linear([Int4Matrix(codes, ones, ones, 32)], None, "cpu", torch.bfloat16)(torch.ones(1, 64).bfloat16())
import adapt_llm.runtime.models
print("triton" in sys.modules)
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


@pytest.mark.parametrize(("K", "group_size"), [(3, 3), (64, 64), (144, 16), (256, 128), (640, 32)])
@pytest.mark.parametrize("float_zeros", [False, True])
def test_planes_give_their_matrix_back(K: int, group_size: int, float_zeros: bool) -> None:
    codes = torch.randint(0, 16, (5, K), dtype=torch.uint8)
    scales = (torch.rand(5, K // group_size) + 0.1).bfloat16().float()
    zeros = torch.rand(scales.shape) * 15 if float_zeros else torch.randint(1, 16, scales.shape, dtype=torch.uint8)
    matrix = Int4Matrix(codes, scales, zeros, group_size)
    planes = Planes.of(matrix, torch.device("cpu"))
    torch.testing.assert_close(planes.rows(0, 5), matrix.dequantize(), rtol=0, atol=0)
    torch.testing.assert_close(planes.rows(2, 4), matrix.dequantize()[2:4], rtol=0, atol=0)
    assert planes.nbytes == sum(kept.nbytes for kept in (planes.words, planes.scales, planes.zeros))
    assert planes.words.shape == (5, 16 * -(-K // 128))
