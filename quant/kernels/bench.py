"""Native products against torch's, in alternation: `python -m adapt_llm.quant.kernels.bench --rows 1 4 8`.

Weights are cycled through so that none is still in a cache. Trust the ratios; on a busy machine the GB/s are too low.
Knows nothing of models: the shapes are those of Qwen2.5-0.5B and SmolLM2-135M.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import torch
from torch import Tensor
from torch.nn.functional import linear

from . import native, packing

SHAPES = ((896, 896), (128, 896), (4864, 896), (896, 4864), (576, 576), (192, 576), (1536, 576), (576, 1536))
POOL_BYTES = 400_000_000  # more than any cache
BURST_SECONDS = 0.004
GROUP = 32


def main() -> None:
    """Print a line for each shape and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=25)
    options = parser.parse_args()
    if not native.available():
        sys.exit(native.why_not())
    torch.set_num_threads(options.threads)
    sys.stdout.write(f"{native.instruction_sets()[0]}, {options.threads} threads; medians in GB/s of weight bytes\n")
    pool = torch.randn(POOL_BYTES // 2).bfloat16()
    for N, K in SHAPES:
        for M in options.rows:
            sys.stdout.write(_line(pool, M, N, K, options.repeats) + "\n")


def _line(pool: Tensor, M: int, N: int, K: int, repeats: int) -> str:
    x = torch.randn(M, K).bfloat16()
    dense = list(pool[: pool.numel() // (N * K) * N * K].view(-1, N, K))
    packed = _packed(pool, N, K)
    runs = {
        "torch bf16": _Cycle(lambda i: linear(x, dense[i]), len(dense), 2 * N * K),
        "torch fp32": _Cycle(lambda i: linear(x.float(), dense[i].float()).bfloat16(), len(dense), 2 * N * K),
        "bf16": _Cycle(lambda i: native.bf16_matmul(x, dense[i]), len(dense), 2 * N * K),
        "int4": _Cycle(lambda i: native.int4_matmul(x, packed[i]), len(packed), packed[0].nbytes),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            times[name].append(run.burst())
    mid = {name: median(values) for name, values in times.items()}
    speeds = "  ".join(f"{name} {runs[name].nbytes / mid[name] / 1e9:5.1f}" for name in runs)
    torch_best = min(mid["torch bf16"], mid["torch fp32"])
    ratios = f"torch/bf16 x{torch_best / mid['bf16']:.2f}  bf16/int4 x{mid['bf16'] / mid['int4']:.2f}"
    ratios += f"  bf16 {2 * M * N * K / mid['bf16'] / 1e9:.0f} GFLOP/s"
    return f"{N:6} x {K:<5} rows {M:<4}  {speeds}  {ratios}"


def _packed(pool: Tensor, N: int, K: int) -> list[packing.PackedInt4]:
    """One true packed matrix, then views of the pool: random codes take as long as any."""
    scales = torch.ones(N, K // GROUP)
    first = packing.pack_int4(torch.zeros(N, K, dtype=torch.uint8), scales, scales * 8, GROUP)
    data = pool.view(torch.uint8)
    rows = data[: data.numel() // first.nbytes * first.nbytes].view(-1, first.nbytes)
    return [replace(first, data=row) for row in rows]


class _Cycle:
    """A product called with one weight after the other, a few milliseconds at a time."""

    def __init__(self, call: Callable[[int], object], count: int, nbytes: int) -> None:
        self.call, self.count, self.nbytes = call, count, nbytes
        self.at = 0

    def burst(self) -> float:
        """Mean seconds of one call."""
        calls = max(1, int(BURST_SECONDS * 15e9 / self.nbytes))
        start = time.perf_counter()
        for _ in range(calls):
            self.at = (self.at + 1) % self.count
            self.call(self.at)
        return (time.perf_counter() - start) / calls


if __name__ == "__main__":
    main()
