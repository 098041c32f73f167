"""Junctions beside a frozen backbone: texts run through it once, and what the junctions see of them goes to the disk.

Pieces of some thousand tokens each, mapped into memory when read: the states at the junctions, and what the last exit,
which nothing changes, gives the targets. Knows blocks, batches and the work folder; no manifest.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Self

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ..runtime.architecture import Architecture
from ..runtime.decoder import Decoder
from ..runtime.junctions import Junctions
from ..runtime.progress import Reporter
from ..runtime.quality import LOGIT_BYTES
from .junction_states import states_at
from .nvium_model import Readings
from .pace import Paced
from .sequences import Batch, Sequences
from .trainable import IGNORED
from .workspace import Workspace
from .writer import write_piece

PIECE_TOKENS = 4096
"""Tokens of a piece, about: what a kill costs at most."""
_STATES, _TARGETS, _LAST, _COUNTS, _ENDS = "states", "targets", "last", "counts", "ends"


@dataclass(frozen=True, slots=True)
class StateBatch(Batch):
    """Tokens that count, R in all: `states` bf16 [N - 1, R, hidden] at the junctions, `last` [R] = log pi_N(target).

    `targets` is [R]; ids are of no use any more.
    """

    states: Tensor
    last: Tensor

    def to(self, device: torch.device | str) -> Self:
        """See `Batch.to`."""
        targets, states, last = (x.to(device) for x in (self.targets, self.states, self.last))
        return type(self)(targets, targets, self.counts, states, last)


class JunctionModel(nn.Module):
    """Junctions in training, in float32, before a head that is not. A `nvium_model.Reads`."""

    def __init__(
        self,
        arch: Architecture,
        points: Sequence[int],
        start: Mapping[str, Tensor],
        head: Tensor,
        *,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self._head, self._softcap = head.to(device), arch.logit_softcap
        self._added = {name: nn.Parameter(tensor.detach().clone().to(device)) for name, tensor in start.items()}
        for name, parameter in self._added.items():
            self.register_parameter(name.replace(".", "/"), parameter)  # torch allows no dots
        self._junctions = Junctions.of(arch, points, self._added)

    def trained(self) -> dict[str, nn.Parameter]:
        """See `steering.Learner.trained`."""
        return dict(self._added)

    def junction_tensors(self) -> dict[str, Tensor]:
        """The junctions by their stored names. Not copies."""
        return {name: parameter.detach() for name, parameter in self._added.items()}

    def readings(self, batch: Batch) -> Readings:
        """See `nvium_model.Reads`."""
        if not isinstance(batch, StateBatch):
            raise TypeError("junctions beside a frozen backbone read stored states")
        read = [junction.read(h.float()) for junction, h in zip(self._junctions, batch.states, strict=True)]
        x, scores = torch.stack([x for x, _ in read]), [score for _, score in read]
        return Readings(x, scores, batch.targets, self._head, self._softcap, batch.last)


class States:
    """Stored sequences, some side by side as a batch. A `training.Sampled`."""

    def __init__(self, pieces: Sequence[Path]) -> None:
        self._paths = tuple(pieces)
        self._spans: list[tuple[int, int, int]] = []  # piece, first token, tokens
        self._pieces: list[dict[str, Tensor]] = []
        for number, path in enumerate(pieces):
            with safe_open(path, framework="pt") as file:
                self._pieces.append({name: file.get_tensor(name) for name in (_STATES, _TARGETS, _LAST)})
                counts = file.get_tensor(_COUNTS).tolist()
            ends = torch.tensor(counts).cumsum(0).tolist()
            self._spans += [(number, end - count, count) for end, count in zip(ends, counts, strict=True)]

    def __len__(self) -> int:
        return len(self._spans)

    def ends(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The states at the junctions [N - 1, R, hidden] and what the last exit gives the head [R, hidden].

        Of the first pieces, which have it.
        """
        for tensors, path in zip(self._pieces, self._paths, strict=True):
            with safe_open(path, framework="pt") as file:
                if _ENDS not in file.keys():  # noqa: SIM118 - no mapping
                    return
                yield tensors[_STATES], file.get_tensor(_ENDS)

    def batch(self, indices: Sequence[int]) -> StateBatch:
        """See `training.Sampled`."""
        spans = [self._spans[index] for index in indices]

        def cut(name: str, dim: int) -> Tensor:
            return torch.cat(
                [self._pieces[piece][name].narrow(dim, begin, count) for piece, begin, count in spans], dim
            )

        targets = cut(_TARGETS, 0).long()
        return StateBatch(targets, targets, tuple(count for _, _, count in spans), cut(_STATES, 1), cut(_LAST, 0))


@dataclass(frozen=True)
class StateWriter:
    """Texts through a frozen backbone. `points`: blocks before each junction.

    together: pieces that climb at once; more than one where blocks are not kept, so that each is read less often.
    ends: tokens at least (or all) of which `States.ends` can be asked.
    """

    frame: Decoder
    points: tuple[int, ...]
    together: int = 1
    ends: int = 0

    def write(self, work: Workspace, data: Sequences, chosen: Sequence[int], reporter: Reporter) -> States:
        """Store the sequences `chosen` of `data`, in this order; pieces that are there already are skipped.

        Raises ResourceError on a full disk. Memory does not grow with the number of sequences.
        """
        size = max(1, PIECE_TOKENS // data.length)
        count = ceil(len(chosen) / size)
        missing = [number for number in range(count) if not work.has(_name(number))]
        with reporter.task("Read the text", count) as bar:
            task = Paced(bar, count, reporter, step=f"{size * data.length} tokens")
            task.advance(count - len(missing))
            for begin in range(0, len(missing), self.together):
                group = missing[begin : begin + self.together]
                batches = [data.batch(list(chosen[number * size : (number + 1) * size])) for number in group]
                for number, tensors in zip(group, self._read(batches), strict=True):
                    spared = () if number * size * data.length < self.ends else (_ENDS,)
                    kept = {name: tensor for name, tensor in tensors.items() if name not in spared}
                    write_piece(work, _name(number), kept)
                task.advance(len(group))
        return States([work.piece(_name(number)) for number in range(count)])

    @torch.inference_mode()
    def _read(self, batches: Sequence[Batch]) -> list[dict[str, Tensor]]:
        """What is stored of each batch."""
        found = states_at(self.frame, batches, [*self.points, self.frame.arch.num_layers])
        stored: list[dict[str, Tensor]] = []
        for batch, (*early, end) in zip(batches, found, strict=True):
            counted = batch.targets != IGNORED
            targets, end = batch.targets[counted], self.frame.final_norm(end)  # noqa: PLW2901 - what its head sees
            stored.append(
                {
                    _STATES: torch.stack([h.to("cpu", torch.bfloat16) for h in early]),
                    _TARGETS: targets.int(),
                    _LAST: _likelihoods(self.frame, end, targets.to(end.device)).cpu(),
                    _COUNTS: counted.sum(1).int(),
                    _ENDS: end.to("cpu", torch.bfloat16),
                }
            )
        return stored


def _likelihoods(frame: Decoder, x: Tensor, targets: Tensor) -> Tensor:
    """Log-likelihoods [R] of the targets [R] where the head multiplies x [R, hidden]; float32."""
    step = max(1, LOGIT_BYTES // (4 * frame.arch.vocab_size))
    parts = zip(x.split(step), targets.split(step), strict=True)
    return torch.cat([-cross_entropy(frame.scores(some), wanted, reduction="none") for some, wanted in parts])


def _name(number: int) -> str:
    """Of a piece in the work folder."""
    return f"exits-{number:05d}.safetensors"
