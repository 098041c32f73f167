"""How fast this machine reads memory, measured now: the limit of decoding one token at a time.

Knows no models.
"""

import time
from collections.abc import Callable

import torch

from ..quant.kernels import native

BUFFER_BYTES = 512 << 20
"""More than any cache that a token's weights could stay in."""
GPU_BUFFER_BYTES = 2 << 30
"""So much that launching and waiting do not count: an H200 reads it in half a millisecond."""
_PASSES = 3
_COLUMNS = 1024


class MemoryReader:
    """A buffer larger than the caches, read through in the fastest of a few ways. Threads are torch's.

    On the CPU the ways are torch's sum of integers, which does little arithmetic for a byte, and this package's own
    bf16 product where it is built: so no product of ours can seem faster than the limit.
    """

    def __init__(self, device: torch.device, nbytes: int | None = None) -> None:
        if nbytes is None:
            nbytes = GPU_BUFFER_BYTES if device.type == "cuda" else BUFFER_BYTES
        row_bytes = 2 * _COLUMNS
        self._words = torch.ones(max(1, nbytes // row_bytes) * row_bytes // 8, dtype=torch.int64, device=device)
        self._ways: list[Callable[[], object]] = [self._words.sum]
        if device.type == "cpu" and native.available():
            row, weight = torch.ones(1, _COLUMNS).bfloat16(), self._words.view(torch.bfloat16).view(-1, _COLUMNS)
            self._ways.append(lambda: native.bf16_matmul(row, weight))

    def bytes_per_second(self) -> float:
        """Best of three readings in each way: whatever else the machine does makes a reading slower, never faster."""
        return self._words.nbytes / min(self._seconds(way) for way in self._ways for _ in range(_PASSES))

    def _seconds(self, way: Callable[[], object]) -> float:
        self._wait()
        started = time.perf_counter()
        way()
        self._wait()
        return time.perf_counter() - started

    def _wait(self) -> None:
        if self._words.is_cuda:
            torch.cuda.synchronize(self._words.device)
