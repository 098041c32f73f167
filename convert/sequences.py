"""Training sequences out of a file of tokens: packed or a row each, in an order that only a seed decides.

Knows no tokenizer and no model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from .token_file import read_tokens
from .trainable import IGNORED

LossOn = Literal["all", "answers"]


@dataclass(frozen=True, slots=True)
class Batch:
    """ids [B, S]; targets [B, S]: what comes next, -100 where it does not count; counts: columns of each row in use."""

    ids: Tensor
    targets: Tensor
    counts: tuple[int, ...]

    @property
    def counted(self) -> int:
        """Targets that count."""
        return int((self.targets != IGNORED).sum())

    def to(self, device: torch.device | str) -> "Batch":
        """The same on another device."""
        return Batch(self.ids.to(device), self.targets.to(device), self.counts)


class Sequences:
    """Sequences of at most `length` tokens to predict.

    Packed: rows follow each other and are cut every `length` tokens, so that each token is predicted once and there is
    no padding; a cut begins with `bos`, where the tokenizer uses one. What is left at the end is a sequence only with
    `partial`. Not packed: one row each, cut after `length`. Sequences in which nothing counts are left out.
    """

    def __init__(
        self,
        path: Path,
        *,
        length: int,
        packed: bool,
        bos: int | None,
        loss_on: LossOn = "all",
        partial: bool = False,
    ) -> None:
        self._ids, self._answers, ends = read_tokens(path)
        self.length = length
        self._bos, self._all = bos, loss_on == "all"
        self._spans = self._windows(partial=partial) if packed else self._rows(ends)
        if not self._all:
            self._spans = [(begin, end) for begin, end in self._spans if bool(self._counted(begin, end).any())]

    def __len__(self) -> int:
        return len(self._spans)

    @property
    def tokens(self) -> int:
        """Tokens in the file."""
        return len(self._ids)

    @property
    def answers(self) -> int:
        """Tokens in the file that are answers."""
        return int(self._answers.sum(dtype=torch.int64))

    def batch(self, indices: Sequence[int]) -> Batch:
        """These sequences, side by side; shorter ones are padded on the right."""
        rows = [self._row(*self._spans[index]) for index in indices]
        counts = tuple(len(ids) for ids, _ in rows)
        ids = torch.zeros(len(rows), max(counts), dtype=torch.int64)
        targets = torch.full_like(ids, IGNORED)
        for row, (own, wanted) in enumerate(rows):
            ids[row, : len(own)] = own
            targets[row, : len(own)] = wanted
        return Batch(ids, targets, counts)

    def _windows(self, *, partial: bool) -> list[tuple[int, int]]:
        """Ranges of tokens [begin, end). The first of a range only predicts, unless BOS goes before it."""
        total, begin = len(self._ids), 0
        spans: list[tuple[int, int]] = []
        while begin < total:
            bare = self._starts_bare(begin)
            end = begin + self.length + (not bare)
            if min(end, total) - begin > (not bare) and (partial or end <= total):
                spans.append((begin, min(end, total)))
            # Without BOS the last token of a range is also the first of the next: it predicts there.
            begin = end - (self._bos is None)
        return spans

    def _rows(self, ends: Tensor) -> list[tuple[int, int]]:
        stops = ends.tolist()
        spans: list[tuple[int, int]] = []
        for begin, end in zip([0, *stops], stops, strict=False):
            own = self.length + (not self._starts_bare(begin))
            if end - begin > own - self.length:
                spans.append((begin, min(end, begin + own)))
        return spans

    def _row(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        ids = self._ids[begin:end].long()
        counted = self._counted(begin, end)
        if self._starts_bare(begin):
            ids = torch.cat((torch.tensor([self._bos]), ids))
            counted = torch.cat((torch.tensor([False]), counted))
        return ids[:-1], torch.where(counted[1:], ids[1:], IGNORED)

    def _counted(self, begin: int, end: int) -> Tensor:
        if not self._all:
            counted = self._answers[begin:end].bool()
            if not self._starts_bare(begin):
                counted[:1] = False
            return counted
        ids = self._ids[begin:end]
        return torch.ones_like(ids, dtype=torch.bool) if self._bos is None else ids != self._bos

    def _starts_bare(self, begin: int) -> bool:
        """Whether BOS is missing before this token and has to be put there."""
        return self._bos is not None and int(self._ids[begin]) != self._bos


class Order:
    """Which sequences a step takes: all of them in a random order, then all again in another. No state but the seed."""

    def __init__(self, count: int, seed: int) -> None:
        self._count, self._seed = count, seed
        self._epoch = lru_cache(maxsize=2)(self._shuffled)

    def take(self, first: int, number: int) -> list[int]:
        """The sequences at places first, first + 1, … of the endless order."""
        places = range(first, first + number)
        return [int(self._epoch(place // self._count)[place % self._count]) for place in places]

    def _shuffled(self, epoch: int) -> Tensor:
        generator = torch.Generator().manual_seed((self._seed * 1_000_003 + epoch) % 2**63)
        return torch.randperm(self._count, generator=generator)
