"""A short text through the whole runtime, to see that a bundle gives what it gave when it was made.

Runs the model the way `run` does (prompt, then token by token through the cache) and once without a cache. Conversion
records the figures, `verify` compares. Knows no files.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import FormatError
from .dense import Dense
from .exits import FixedExit
from .manifest import SelfCheck
from .nvium import Nvium
from .pass_store import PassStore
from .river import River
from .text import Tokenizer

TEXT = (
    "The river leaves the mountains in the north and reaches the sea after three hundred miles. "
    "Most of its water comes from the snow of the winter before, so that it is highest in May. "
    "Two towns and a mill stand on its banks."
)
PROMPT_SHARE = 0.5
TOLERANCE = 0.02
"""Of the mean negative log-likelihood: wider than what other kernels round differently, narrower than any damage."""
SCORE_TOLERANCE = 0.05
"""Of a class's probability."""


def run_river_check(model: River, tokenizer: Tokenizer) -> SelfCheck:
    """Return the figures of the text. Raises FormatError where cached and uncached runs disagree.

    The paper's rule is asked for every token, held or not: the check is of the weights, and older records hold.
    """
    ids = self_check_ids(tokenizer, model.decoder.arch.max_positions).to(model.decoder.device)
    model = River(model.decoder, model.exits, model.policy, resident=model.deepest)
    with torch.inference_mode():
        dense = _uncached(model, ids, dense=True)
        alone = _uncached(model, ids, dense=False)
        cached = _cached(model, ids)
    _agree(dense, dense)
    _agree(alone, cached)
    return SelfCheck(tokens=ids.shape[1], dense_nll=dense, river_nll=cached)


def run_dense_check(model: Dense, tokenizer: Tokenizer, *, cached: bool = True) -> SelfCheck:
    """Return the figures of the text. Raises FormatError where cached and uncached runs disagree.

    Without `cached` every block is used once: token by token, blocks that are not kept would be read for each token.
    """
    decoder = model.decoder
    ids = self_check_ids(tokenizer, decoder.arch.max_positions).to(decoder.device)
    with torch.inference_mode():
        h = decoder.run(decoder.embed(ids), decoder.step(None, ids), PassStore(decoder.arch))
        alone = _nll(decoder.logits(h), ids)
        if not cached:
            _agree(alone, alone)
            return SelfCheck(tokens=ids.shape[1], dense_nll=alone)
        cache = model.new_cache(1, ids.shape[1])
        stepwise = _nll(torch.cat([model.score(part, cache) for part in _parts(ids)], dim=1), ids)
    _agree(alone, stepwise)
    return SelfCheck(tokens=ids.shape[1], dense_nll=stepwise)


def run_mixture_check(model: Nvium, tokenizer: Tokenizer, *, cached: bool = True) -> SelfCheck:
    """Return the figures of the text, by the backbone alone and by the mixture. Raises and `cached`: see above."""
    dense = run_dense_check(Dense(model.decoder), tokenizer, cached=cached)
    ids = self_check_ids(tokenizer, model.decoder.arch.max_positions).to(model.decoder.device)
    with torch.inference_mode():
        found = alone = _nll(model.read(ids).log_probabilities(slice(None)), ids)
        if cached:
            parts = _parts(ids)
            cache = model.new_cache(1, ids.shape[1])
            found = _nll(torch.cat([model.score(part, cache) for part in parts], dim=1), ids)
    _agree(alone, found)
    return dense.model_copy(update={"mixture_nll": found})


def _parts(ids: Tensor) -> list[Tensor]:
    """The prompt, then token by token."""
    prompt, count = int(ids.shape[1] * PROMPT_SHARE), ids.shape[1]
    return [ids[:, :prompt], *(ids[:, at : at + 1] for at in range(prompt, count))]


def _agree(alone: float, cached: float) -> None:
    if not math.isfinite(alone) or not math.isfinite(cached):
        raise FormatError("the self-check gives no finite likelihood", "The source's weights may be damaged.")
    if abs(cached - alone) > TOLERANCE * max(alone, 1.0):
        raise FormatError(
            f"the self-check fails: {cached:.4f} nats a token with a cache, {alone:.4f} without",
            "This is a bug; please report it with the model's name.",
        )


def self_check_ids(tokenizer: Tokenizer, max_positions: int) -> Tensor:
    """Return the text's tokens [1, S]."""
    return torch.tensor([tokenizer.encode(TEXT)[:max_positions]])


def compare(recorded: SelfCheck, found: SelfCheck) -> Sequence[str]:
    """Return what differs, in words."""
    pairs = [("dense", recorded.dense_nll, found.dense_nll), ("river", recorded.river_nll, found.river_nll)]
    pairs += [("mixture", recorded.mixture_nll, found.mixture_nll)]
    differing = [
        f"{name}: {now:.4f} nats a token, {then:.4f} when it was made"
        for name, then, now in pairs
        if then is not None and now is not None and abs(now - then) > TOLERANCE * max(then, 1.0)
    ]
    if any(abs(now - then) > SCORE_TOLERANCE for now, then in zip(found.scores, recorded.scores, strict=False)):
        said, scores = (", ".join(f"{score:.3f}" for score in check.scores) for check in (recorded, found))
        differing.append(f"classifier: {scores}, {said} when it was made")
    return differing


def _uncached(model: River, ids: Tensor, *, dense: bool) -> float:
    decoder = model.decoder
    step = decoder.step(None, ids)
    policy = FixedExit(model.deepest) if dense else model.policy
    runner = River(decoder, model.exits, policy, resident=model.deepest)
    h, _ = runner.climb_rows(decoder.embed(ids), step, PassStore(decoder.arch))
    return _nll(decoder.logits(h), ids)


def _cached(model: River, ids: Tensor) -> float:
    """The prompt without an exit, so that both runs treat it alike, then token by token."""
    count = ids.shape[1]
    cache = model.new_cache(1, count)
    logits = [model.decode_rows(part, cache)[0] for part in (ids[:, : int(count * PROMPT_SHARE)],)]
    logits += [
        model.decode(ids[:, at : at + 1], cache).logits[:, None] for at in range(int(count * PROMPT_SHARE), count)
    ]
    return _nll(torch.cat(logits, dim=1), ids)


def _nll(logits: Tensor, ids: Tensor) -> float:
    return float(torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]))
