"""CUDA graphs of functions that work on tensors at fixed places; elsewhere the functions are simply called.

Knows no models.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from .progress import Reporter, SilentReporter

T = TypeVar("T")
_WARM_UPS = 2  # the first compiles kernels and makes workspaces, which a capture may not


@dataclass(frozen=True)
class _Captured(Generic[T]):
    graph: torch.cuda.CUDAGraph
    output: T


class Graphs(Generic[T]):
    """One graph per key, captured when it is first asked for; all share one memory pool.

    A function may be run several times for one call, so running it again on the same inputs must change nothing. What
    it returns lies in the graph's own memory, until the same key is run again.
    """

    def __init__(self, device: torch.device, reporter: Reporter | None = None) -> None:
        self._device, self._reporter = device, reporter or SilentReporter()
        self.broken = ""
        """Why no graph can be made; empty as long as they can."""
        self._captured: dict[Hashable, _Captured[T]] = {}
        self._pool = None

    def __len__(self) -> int:
        return len(self._captured)

    def clear(self) -> None:
        """Forget all graphs: what they read or wrote has moved."""
        self._captured = {}
        self._pool = None

    def run(self, key: Hashable, function: Callable[[], T]) -> T:
        """Do what `function` does. Raises RuntimeError where it cannot be captured."""
        if self._device.type != "cuda":
            return function()
        found = self._captured.get(key)
        if found is None:
            found = self._captured[key] = self._capture(function)
        with torch.cuda.device(self._device):
            found.graph.replay()
        return found.output

    def attempt(self, key: Hashable, function: Callable[[], T]) -> T | None:
        """Do as `run`; None from the first capture on that failed, which is told once."""
        if self.broken:
            return None
        try:
            return self.run(key, function)
        except RuntimeError as error:
            self.broken = str(error).partition("\n")[0]
            self._reporter.warn(f"Tokens run without CUDA graphs, and slower: {self.broken}")
            return None

    def _capture(self, function: Callable[[], T]) -> _Captured[T]:
        with torch.cuda.device(self._device):
            side, present = torch.cuda.Stream(self._device), torch.cuda.current_stream(self._device)
            side.wait_stream(present)
            with torch.cuda.stream(side):
                for _ in range(_WARM_UPS):
                    function()
            present.wait_stream(side)
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=side):
                output = function()
        return _Captured(graph, output)
