"""Many texts at once: prompts enter free rows of one cache, all rows decode in one pass, finished rows leave.

Knows the model only by a protocol: no weights, no exit rule, no chat template, no file and no terminal.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ..errors import AdaptError, ResourceError, UsageError, attempt
from .cache import KVCache, RotationChangedError
from .continuation import Continuation, Request
from .generate import Model, StepOutput
from .sampling import Sampler
from .stream import GenerationStats
from .text import Tokenizer

AHEAD = 16  # texts begun, for each row of the batch, past the oldest one that is not finished yet
CPU_ROWS = 8
"""At once where nothing is said: on a CPU, and elsewhere."""
GPU_ROWS = 32
_CAPACITY_STEP = 64
_LESS = "Lower --batch-size, --max-tokens or --ctx-size."
_END = object()


@runtime_checkable
class BatchModel(Model, Protocol):
    """A model that continues several sequences in one pass.

    A sequence enters by `prefill` into its row of the cache alone (`KVCache.rows(i)`, cut to 0 before), and may be
    moved to another row between passes (`KVCache.move`). What a model keeps of a sequence besides keys and values goes
    with both: its cache overrides `KVCache.narrow` and `move` as it does `truncate`. Every row of a cache that
    `decode_batch` is given holds a sequence: batches shrink, so that no pass computes for nobody.
    """

    def decode_batch(self, ids: Tensor, cache: KVCache, samplers: Sequence[Sampler]) -> list[StepOutput]:
        """Append one token to every row of `cache`: ids [B, 1], a sampler and a result (logits [1, V]) per row.

        Rows may be of different lengths. Each result is what `decode` would give the row alone. Raises
        RotationChangedError before anything is stored or drawn.
        """
        ...


@dataclass(frozen=True)
class Answer:
    """A finished text and its figures. The seconds of a token are those of the pass that it shared with others."""

    text: str
    stats: GenerationStats


Outcome = Answer | AdaptError
"""A text, or the error that is its own."""


def suitable_batch(model: BatchModel, context_size: int) -> int:
    """How many rows decode well at once.

    On a CPU a pass of eight rows costs little more than twice that of one, and from then on grows with the rows; a GPU
    has room for more. Keys and values of rows of `context_size` tokens may take half the memory that is free.
    """
    probe = model.new_cache(1, 1)
    fitting = free_memory(probe.device) // (2 * bytes_per_token(probe) * context_size)
    return max(1, min(CPU_ROWS if probe.device.type == "cpu" else GPU_ROWS, fitting))


def bytes_per_token(cache: KVCache) -> int:
    """Return the bytes of a token's keys and values. Caches of CUDA graphs are larger than what was asked for."""
    return cache.nbytes // (cache.batch * cache.capacity)


def free_memory(device: torch.device) -> int:
    """Return the bytes of a device's memory that nobody uses."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    import psutil  # noqa: PLC0415 - one text at a time does without

    return int(psutil.virtual_memory().available)


def check_room(probe: KVCache, rows: int, capacity: int, *, held: int = 0, hint: str) -> None:
    """Refuse more keys and values than there is memory for, which a system may answer by killing any process.

    Args:
        probe: a cache of the kind that is wanted.
        rows: how many texts.
        capacity: tokens of each.
        held: bytes of it that are there already.
        hint: what can be done.

    Raises:
        ResourceError: they take more than is free.

    """
    need, free = bytes_per_token(probe) * rows * capacity, free_memory(probe.device)
    if need - held > free:
        sizes = f"{need / 2**30:.1f} GiB; {(free + held) / 2**30:.1f} GiB are free"
        raise ResourceError(f"Keys and values of {rows} texts of {capacity} tokens take {sizes}", hint)


def answer_all(
    model: BatchModel, requests: Iterable[Request | None], *, tokenizer: Tokenizer, batch_size: int
) -> Iterator[Outcome]:
    """Continue texts, up to `batch_size` at once; yield one outcome for each, in their order, as its turn comes.

    A text is what it would be alone, up to the rounding of products that see more rows. A None among the requests says
    that none is there yet: those under way go on. What is kept does not grow with the number of texts.

    Raises:
        UsageError: a batch of none.
        ResourceError: no memory for keys and values.
        AdaptError: what befalls all texts alike.

    """
    if batch_size < 1:
        raise UsageError(f"batch_size is {batch_size}", "It must be 1 or more.")
    return _in_order(_Batch(model, tokenizer, batch_size), iter(requests))


def _in_order(batch: "_Batch", requests: Iterator[Request | None]) -> Iterator[Outcome]:
    answered: dict[int, Outcome] = {}
    read = written = 0
    more = True
    while more or batch.texts:
        while more and len(batch.texts) < batch.size and read - written < AHEAD * batch.size:
            request = next(requests, _END)
            if request is None:
                break
            if isinstance(request, Request):
                answered.update(batch.enter(read, request))
                read += 1
            else:
                more = False
        answered.update(batch.step())
        while written in answered:
            yield answered.pop(written)
            written += 1


@dataclass
class _Text:
    """A text under way. `ids`: prompt and answer, the last of them not yet in the cache."""

    place: int
    ids: list[int]
    growing: Continuation
    pieces: list[str] = field(default_factory=list)

    def take(self, output: StepOutput, started: float) -> Outcome | None:
        """Go on by one token; return the outcome where the text ends with it."""
        record = attempt(lambda now: self.growing.take(now, started), output)
        if isinstance(record, AdaptError):
            return record
        self.pieces.append(record.text)
        self.ids.append(record.id)
        return None if record.finish_reason is None else Answer("".join(self.pieces), self.growing.stats)


class _Batch:
    """Texts under way: text i has row i of the cache. A row that becomes free is filled by the last one."""

    def __init__(self, model: BatchModel, tokenizer: Tokenizer, size: int) -> None:
        self.size = size
        self.texts: list[_Text] = []
        self._model = model
        self._tokenizer = tokenizer
        self._cache: KVCache | None = None

    @torch.inference_mode()
    def enter(self, place: int, request: Request) -> dict[int, Outcome]:
        """Begin a text; return its outcome where that is known at once."""
        try:
            text = _Text(place, list(request.ids), Continuation(request, self._tokenizer))
        except AdaptError as error:
            return {place: error}
        started = time.perf_counter()
        whole = self._reserve(len(text.ids) + 1)
        outcome = text.take(self._prefill(text, whole.rows(len(self.texts))), started)
        if outcome is not None:
            return {place: outcome}
        self.texts.append(text)
        return {}

    @torch.inference_mode()
    def step(self) -> dict[int, Outcome]:
        """Decode one token of every text; return the outcomes of those that end."""
        texts = self.texts
        if not texts:
            return {}
        started = time.perf_counter()
        whole = self._reserve(max(len(text.ids) for text in texts))
        outputs = self._decode(whole)
        found: dict[int, Outcome] = {}
        for row in reversed(range(len(texts))):
            outcome = texts[row].take(outputs[row], started)
            if outcome is not None:
                found[texts[row].place] = outcome
                self._leave(row, whole)
        return found

    def _decode(self, whole: KVCache) -> Sequence[StepOutput]:
        texts = self.texts
        ids = torch.tensor([text.ids[-1:] for text in texts])
        part = whole if len(texts) == self.size else whole.rows(0, len(texts))
        try:
            return self._model.decode_batch(ids, part, [text.growing.sampler for text in texts])
        except RotationChangedError:
            return [self._alone(text, whole.rows(row)) for row, text in enumerate(texts)]

    def _alone(self, text: _Text, row: KVCache) -> StepOutput:
        try:
            return self._model.decode(torch.tensor([text.ids[-1:]]), row, text.growing.sampler)
        except RotationChangedError:  # longrope rotates all keys otherwise beyond the length first trained
            return self._prefill(text, row)

    def _prefill(self, text: _Text, row: KVCache) -> StepOutput:
        row.truncate(0)
        return self._model.prefill(torch.tensor([text.ids]), row, text.growing.sampler)

    def _leave(self, row: int, whole: KVCache) -> None:
        last = self.texts.pop()
        if row < len(self.texts):
            self.texts[row] = last
            whole.move(len(self.texts), row)

    def _reserve(self, length: int) -> KVCache:
        """The cache, with room for `length` tokens a row. It grows by doubling."""
        kept = self._cache
        if kept is not None and length <= kept.capacity:
            return kept
        wanted = length if kept is None else max(length, 2 * kept.capacity)
        capacity = -(-wanted // _CAPACITY_STEP) * _CAPACITY_STEP
        probe = self._model.new_cache(1, 1) if kept is None else kept
        if probe.device.type == "cpu":  # a GPU's allocator says no by itself
            check_room(probe, self.size, capacity, held=0 if kept is None else kept.nbytes, hint=_LESS)
        try:
            if kept is None:
                kept = self._cache = self._model.new_cache(self.size, capacity)
            else:
                kept.grow(capacity)
        except (MemoryError, RuntimeError) as error:  # torch's allocators raise RuntimeError
            raise ResourceError(
                f"There is no memory for keys and values of {self.size} rows of {capacity} tokens",
                _LESS,
            ) from error
        return kept
