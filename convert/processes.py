"""One process or several: which one this is, on which device, and sums over all of them.

On accelerate, which reads what `torchrun` and `accelerate launch` set and opens the connection. Knows no model.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, distributed

from ..errors import AdaptError


@dataclass(frozen=True)
class Processes:
    """One process among `count`; it computes on `device`. The one that `leads` writes and reports."""

    index: int
    count: int
    device: torch.device

    @property
    def leads(self) -> bool:
        """Whether this process writes files and reports."""
        return self.index == 0

    def add_up(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by its sum over all processes."""
        if self.count == 1:
            return
        works = [distributed.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work in works:
            if work is not None:
                work.wait()

    def wait(self) -> None:
        """Until every process is here."""
        if self.count > 1:
            distributed.barrier()


def join(device: torch.device | str) -> Processes:
    """Meet the other processes, if this one was started with others. AdaptError without accelerate.

    `device` is the kind of device; on one with several GPUs each process takes its own.
    """
    try:
        from accelerate import PartialState  # noqa: PLC0415 - only training needs it
    except ImportError as error:
        raise AdaptError("Training needs accelerate", "pip install 'adapt-llm[train]'") from error
    wanted = torch.device(device)
    state = PartialState(cpu=wanted.type == "cpu")
    # On a CPU accelerate says "cpu:0", which is not "cpu" to torch: parameters moved there would be copies.
    own = state.device if state.num_processes > 1 and wanted.type != "cpu" else None
    return Processes(state.process_index, state.num_processes, own or wanted)
