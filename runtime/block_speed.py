"""How long a dense block, a 4-bit block and the rest of a token take here, measured on the model itself.

Batch 1, token by token through the cache, as generation runs; dense and 4-bit tokens in turn, so that whatever else the
machine does falls on both. Knows models, no files and no rule.
"""

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from .exits import ExitPolicy, FixedExit
from .generate import Model, StepOutput
from .river import River
from .tuned import BlockSpeed

CONTEXT, TOKENS = 64, 3
"""Tokens in the cache before those that are timed, and tokens timed in a round."""
GREEDY = 48
ROUNDS, SECONDS = 9, 8.0
"""Rounds at most, and the time after which no other begins."""


@torch.inference_mode()
def measure_blocks(model: River, entry_layer: int, ids: Tensor) -> BlockSpeed:
    """Time a River model with all its blocks and exit layers, none of them dense in the river, on ids [1, S].

    Figures have three digits: the next ones are never the same twice.
    """
    decoder, count = model.decoder, model.decoder.arch.num_layers
    ids = ids[:, : CONTEXT + TOKENS].to(decoder.device)
    dense = _Timed(model, FixedExit(count), ids)
    river = _Timed(model, FixedExit(entry_layer - 1), ids)
    hidden = decoder.embed(ids[:, :1])
    contenders = [
        dense,
        river,
        lambda: _timed(lambda: decoder.logits(decoder.embed(ids[:, :1]) + hidden), decoder.device),
    ]
    rounds: list[list[float]] = []
    began = time.perf_counter()
    while len(rounds) < 2 or (len(rounds) <= ROUNDS and time.perf_counter() - began < SECONDS):
        rounds.append([contender() for contender in contenders])
    whole, left, rest = (median(times) for times in zip(*rounds[1:], strict=True))  # the first one warms up
    block = max((whole - rest) / count, 1e-6)
    small = max((left - rest - (entry_layer - 1) * block) / (count - entry_layer + 1), 1e-6)
    return BlockSpeed(
        device=_device(decoder.device),
        threads=torch.get_num_threads(),
        dtype=str(decoder.dtype).removeprefix("torch."),
        dense_block_ms=_three(block),
        river_block_ms=_three(small),
        rest_ms=_three(rest),
    )


@torch.inference_mode()
def measure_greedy(model: Model, ids: Tensor) -> float:
    """Return the milliseconds a token of the greedy text of GREEDY tokens behind ids [1, S]."""
    cache = model.new_cache(1, ids.shape[1] + 2 * GREEDY)  # drafts need room beyond the text
    output = model.prefill(ids, cache)
    began = time.perf_counter()
    for _ in range(GREEDY):
        output = model.decode(output.logits.argmax(-1, keepdim=True).cpu(), cache)
    return _three((time.perf_counter() - began) * 1000 / GREEDY)


class _Timed:
    """Milliseconds a token of one policy, from the same place in the text each time."""

    def __init__(self, model: River, policy: ExitPolicy, ids: Tensor) -> None:
        self._model = River(model.decoder, model.exits, policy)
        self._start, self._rest = ids[:, :-TOKENS], ids[:, -TOKENS:].split(1, 1)
        self._cache = model.new_cache(1, ids.shape[1])
        self._model.prefill(self._start, self._cache)

    def __call__(self) -> float:
        self._cache.truncate(self._start.shape[1])
        return _timed(self._run, self._model.decoder.device) / len(self._rest)

    def _run(self) -> list[StepOutput]:
        return [self._model.decode(token, self._cache) for token in self._rest]


def _timed(work: Callable[[], object], device: torch.device) -> float:
    """Milliseconds."""
    _wait(device)
    began = time.perf_counter()
    work()
    _wait(device)
    return (time.perf_counter() - began) * 1000


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _three(value: float) -> float:
    return float(f"{value:.3g}")
