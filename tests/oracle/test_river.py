"""River against transformers, float32: exits forced, tokens leaving on their own, blocks dropped and streamed."""

from collections.abc import Callable, Sequence
from types import ModuleType

import pytest
import torch

from adapt_llm.quant.layout import Int4Matrix, round_scale
from adapt_llm.runtime.block import Block
from adapt_llm.runtime.exit_layers import LazyBlocks, exit_block
from adapt_llm.runtime.exits import CosineExit, FixedExit, Route
from adapt_llm.runtime.offload import StreamedBlocks
from adapt_llm.runtime.pass_store import PassStore
from adapt_llm.runtime.quality import Track, push, score
from adapt_llm.runtime.river import River
from adapt_llm.runtime.routing import Ladder
from adapt_llm.runtime.store import open_safetensors

NAMES = ["llama", "llama-tied", "llama-biases", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "smollm3"]
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}
LENGTH = 17
CPU = {"device": "cpu", "dtype": torch.float32}


def rounded(weight: torch.Tensor) -> Int4Matrix:
    """Round to 4 bits, one group per row: coarse enough for every exit to show in the logits."""
    low, high = weight.float().min(1, keepdim=True).values, weight.float().max(1, keepdim=True).values
    scales = round_scale((high - low) / 15)
    zeros = (-low / scales).round().clamp(1, 15)
    codes = (weight.float() / scales + zeros).round().clamp(0, 15).to(torch.uint8)
    return Int4Matrix(codes, scales, zeros.to(torch.uint8), weight.shape[1])


class Tiny:
    """A tiny model with an exit layer for every block."""

    def __init__(self, model) -> None:
        self.model, self.arch = model, model.decoder.arch
        store = open_safetensors(model.folder)
        self.matrices = [
            {name: rounded(store.read(name)) for name in self.arch.block_matrices(index)}
            for index in range(self.arch.num_layers)
        ]
        self.exits: Sequence[Block] = [
            exit_block(self.arch, store, index, matrices, **CPU) for index, matrices in enumerate(self.matrices)
        ]

    def river(self, policy, **options) -> River:
        return River(self.model.decoder, self.exits, policy, **options)

    def oracle(self, ids: torch.Tensor, depth: int) -> torch.Tensor:
        """transformers' logits with blocks depth + 1 … L replaced by their dequantised copies."""
        state = {name: tensor.clone() for name, tensor in self.model.reference.state_dict().items()}
        replaced = dict(state)
        for matrices in self.matrices[depth:]:
            replaced |= {name: matrix.dequantize() for name, matrix in matrices.items()}
        try:
            self.model.reference.load_state_dict(replaced, strict=True)
            return self.model.expected(ids)
        finally:
            self.model.reference.load_state_dict(state, strict=True)


@pytest.fixture(scope="module")
def tinies(tiny_model: Callable) -> Callable[[str], Tiny]:
    made: dict[str, Tiny] = {}

    def get(name: str) -> Tiny:
        if name not in made:
            made[name] = Tiny(tiny_model(name))
        return made[name]

    return get


def by_token(river: River, ids: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    cache, logits, depths = river.new_cache(1, ids.shape[1]), [], []
    with torch.inference_mode():
        for at in range(ids.shape[1]):
            out = river.decode(ids[:, at : at + 1], cache)
            logits.append(out.logits)
            depths.append(out.depth)
    return torch.stack(logits, 1), depths


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_forced_exit_is_the_model_with_dequantised_blocks(name: str, depth: int, tinies, tiny: ModuleType) -> None:
    model, ids = tinies(name), tiny.random_ids(1, LENGTH)
    depth = min(depth, model.arch.num_layers)
    river = model.river(FixedExit(depth))
    expected = model.oracle(ids, depth)
    logits, depths = by_token(river, ids)
    torch.testing.assert_close(logits, expected, **TOLERANCE)
    assert depths == [depth] * LENGTH
    with torch.inference_mode():
        out = river.prefill(ids, river.new_cache(1, LENGTH))
    torch.testing.assert_close(out.logits, expected[:, -1], **TOLERANCE)
    assert out.depth == depth
    assert depth == model.arch.num_layers or not torch.allclose(expected, model.model.expected(ids), **TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
def test_a_threshold_of_one_is_the_dense_model(name: str, tinies, tiny: ModuleType) -> None:
    model, ids = tinies(name), tiny.random_ids(1, LENGTH)
    river = model.river(CosineExit.uniform(1.0, model.arch.num_layers))
    logits, depths = by_token(river, ids)
    torch.testing.assert_close(logits, model.model.expected(ids), **TOLERANCE)
    assert set(depths) == {model.arch.num_layers}


def mixed_policy(model: Tiny, ids: torch.Tensor) -> CosineExit:
    """A threshold by which some tokens leave early and some late."""
    dense = model.river(FixedExit(model.arch.num_layers))
    step = dense.decoder.step(None, ids)
    kv = PassStore(model.arch)
    h = dense.decoder.embed(ids)
    thresholds = []
    with torch.inference_mode():
        for block in dense.decoder.blocks:
            before, h = h, block(h, step, kv)
            cosines = torch.cosine_similarity(before, h, dim=-1).flatten().sort().values
            middle = cosines.numel() // 2
            thresholds.append(float(cosines[middle - 1 : middle + 1].mean()))  # no token lies on it
    return CosineExit(tuple(thresholds))


@pytest.mark.parametrize("held", [0, 2])
@pytest.mark.parametrize("name", NAMES)
def test_all_tokens_at_once_leave_where_they_leave_one_by_one(name: str, held: int, tinies, tiny: ModuleType) -> None:
    model, ids = tinies(name), tiny.random_ids(1, LENGTH)
    river = model.river(mixed_policy(model, ids), held=held)
    logits, depths = by_token(river, ids)
    with torch.inference_mode():
        h, together = river.climb_rows(river.decoder.embed(ids), river.decoder.step(None, ids), PassStore(model.arch))
        at_once = river.decoder.logits(h)
    assert len(set(depths)) > 1, "the policy does not mix"
    assert together[0].tolist() == depths
    assert depths[:held] == [model.arch.num_layers] * held
    torch.testing.assert_close(at_once, logits, **TOLERANCE)


@pytest.mark.parametrize("held", [0, 1])
@pytest.mark.parametrize("name", ["llama", "gemma2", "phi3"])
def test_block_by_block_quality_is_that_of_the_running_model(name: str, held: int, tinies, tiny: ModuleType) -> None:
    model, ids = tinies(name), tiny.random_ids(2, LENGTH)
    count, decoder = model.arch.num_layers, model.model.decoder
    policy = mixed_policy(model, ids)
    with torch.inference_mode():
        start = decoder.embed(ids)
        ways = (FixedExit(count), Route(policy, held=held), FixedExit(1), FixedExit(1))
        tracks = [Track.start(way, start) for way in ways]
        step = decoder.step(None, ids[:1])
        for layer in range(1, count + 1):
            push(tracks, step, Ladder(model.arch, decoder.blocks, model.exits), layer)
        dense, mixed, floor, twin = score(tracks, ids, decoder.logits, count)
    rows = [by_token(model.river(policy, held=held), row[None]) for row in ids]
    logits, depths = torch.cat([row[0] for row in rows]), [depth for row in rows for depth in row[1]]
    nll = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    log_dense = model.model.expected(ids)[:, :-1].log_softmax(-1)
    kl = (log_dense.exp() * (log_dense - logits[:, :-1].log_softmax(-1))).sum(-1).mean()
    assert mixed.perplexity == pytest.approx(float(nll.exp()), rel=1e-4)
    assert mixed.kl == pytest.approx(float(kl), rel=1e-3, abs=1e-6)
    assert mixed.mean_depth == pytest.approx(sum(depths) / len(depths))
    assert sum(mixed.exit_histogram) == ids.numel()
    assert (dense.kl, dense.agreement, dense.mean_depth) == (0.0, 1.0, count)
    assert floor == twin
    assert floor.mean_depth == 1
    assert floor.kl > 0


def test_rows_of_a_batch_leave_as_they_would_alone(tinies, tiny: ModuleType) -> None:
    model, ids = tinies("qwen2"), tiny.random_ids(3, LENGTH)
    river = model.river(mixed_policy(model, ids))
    cache = river.new_cache(3, LENGTH)
    with torch.inference_mode():
        together = [river.decode_rows(ids[:, at : at + 1], cache) for at in range(LENGTH)]
    for row in range(3):
        logits, depths = by_token(river, ids[row : row + 1])
        torch.testing.assert_close(torch.cat([out[row : row + 1] for out, _ in together], 1), logits, **TOLERANCE)
        assert [int(depth[row, 0]) for _, depth in together] == depths


def test_the_batch_leaves_together_when_its_last_row_may(tinies, tiny: ModuleType) -> None:
    """Eq. (1): the minimum over the rows."""
    model, ids = tinies("llama"), tiny.random_ids(4, 1)
    river = model.river(mixed_policy(model, ids))
    alone = [by_token(river, ids[row : row + 1])[1][0] for row in range(4)]
    with torch.inference_mode():
        assert river.decode(ids, river.new_cache(4, 1)).depth >= max(alone)


def test_dropped_blocks_are_never_asked_for(tinies, tiny: ModuleType) -> None:
    model, ids = tinies("llama"), tiny.random_ids(1, LENGTH)

    def load(index: int) -> Block:
        if index >= 2:
            raise AssertionError(f"block {index + 1} was loaded")
        return whole[index]

    river = model.river(CosineExit.uniform(1.0, model.arch.num_layers), resident=2)
    whole, river.decoder.blocks = river.decoder.blocks, LazyBlocks(2, load)
    try:
        logits, depths = by_token(river, ids)
        assert set(depths) == {2}
        torch.testing.assert_close(logits, model.oracle(ids, 2), **TOLERANCE)
        with torch.inference_mode():
            _, rows = river.decode_rows(ids, river.new_cache(1, LENGTH))
        assert rows.unique().tolist() == [2]
    finally:
        river.decoder.blocks = whole


def test_streamed_blocks_are_the_blocks(tinies, tiny: ModuleType) -> None:
    model, ids = tinies("llama"), tiny.random_ids(1, 5)
    blocks, fetched = model.model.decoder.blocks, []

    def fetch(index: int) -> Block:
        fetched.append(index)
        return blocks[index]

    river = model.river(FixedExit(model.arch.num_layers))
    river.decoder.blocks = StreamedBlocks(blocks[:1], len(blocks), fetch, torch.device("cpu"))
    try:
        logits, _ = by_token(river, ids)
    finally:
        river.decoder.blocks = blocks
    torch.testing.assert_close(logits, model.model.expected(ids), **TOLERANCE)
    assert fetched == [*range(1, len(blocks))] * 5, "each block travels once a token, and only when needed"


@pytest.mark.parametrize("held", [0, 1])
def test_dense_prefill_ignores_the_rule(held: int, tinies, tiny: ModuleType) -> None:
    """The prompt of a later turn, too."""
    model, ids = tinies("qwen2"), tiny.random_ids(1, LENGTH)
    river = model.river(FixedExit(1), dense_prefill=True, held=held)
    with torch.inference_mode():
        cache, expected = river.new_cache(1, LENGTH), model.model.expected(ids)
        for part in (slice(0, 9), slice(9, LENGTH)):
            out = river.prefill(ids[:, part], cache)
            assert out.depth == model.arch.num_layers
            torch.testing.assert_close(out.logits, expected[:, part.stop - 1], **TOLERANCE)
        short = model.river(FixedExit(1), dense_prefill=True, held=held, resident=2)
        out = short.prefill(ids, short.new_cache(1, LENGTH))
    assert out.depth == 2, "as deep as blocks are resident"
    torch.testing.assert_close(out.logits, model.oracle(ids, 2)[:, -1], **TOLERANCE)


# -- the first tokens of a sequence stay -----------------------------------------------------------------------------


def staying(model: Tiny, ids: torch.Tensor, held: int) -> torch.Tensor:
    """Logits [1, S, V] where the first `held` tokens go through a dense river, and the others leave after block 1."""
    dense, paper = model.river(FixedExit(model.arch.num_layers)), model.river(FixedExit(1))
    cache = dense.new_cache(1, ids.shape[1])
    with torch.inference_mode():
        parts = [
            (dense if at < held else paper).decode(ids[:, at : at + 1], cache).logits for at in range(ids.shape[1])
        ]
    return torch.stack(parts, 1)


@pytest.mark.parametrize("held", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_held_tokens_take_the_backbone_and_others_the_river(name: str, held: int, tinies, tiny: ModuleType) -> None:
    model, ids = tinies(name), tiny.random_ids(1, LENGTH)
    expected, river = staying(model, ids, held), model.river(FixedExit(1), held=held)
    logits, depths = by_token(river, ids)
    torch.testing.assert_close(logits, expected, **TOLERANCE)
    assert depths == [model.arch.num_layers] * held + [1] * (LENGTH - held)
    paper, _ = by_token(model.river(FixedExit(1)), ids)
    assert not torch.allclose(paper[:, held], logits[:, held], **TOLERANCE), "later tokens hear the difference"


@pytest.mark.parametrize("cuts", [(), (1,), (2, 3), (9,), (9, 12)])
def test_a_prompt_that_leaves_holds_its_first_tokens(cuts: tuple[int, ...], tinies, tiny: ModuleType) -> None:
    """The paper's rule for prompts, in one turn or several: later turns hold nothing, as their positions are later."""
    model, ids = tinies("llama"), tiny.random_ids(1, LENGTH)
    expected, river = staying(model, ids, 2), model.river(FixedExit(1), held=2)
    cache = river.new_cache(1, LENGTH)
    with torch.inference_mode():
        for first, last in zip((0, *cuts), (*cuts, LENGTH), strict=True):
            out = river.prefill(ids[:, first:last], cache)
            torch.testing.assert_close(out.logits, expected[:, last - 1], **TOLERANCE)
            assert out.depth == (1 if last > 2 else model.arch.num_layers)


def test_a_later_turn_after_going_back_holds_by_position(tinies, tiny: ModuleType) -> None:
    """A cache cut to nothing begins a sequence again; cut to one token, it goes on with it."""
    model, ids = tinies("llama"), tiny.random_ids(1, LENGTH)
    river = model.river(FixedExit(1), held=1)
    cache, (expected, _) = river.new_cache(1, LENGTH), by_token(river, ids)
    with torch.inference_mode():
        for kept in (0, 1, 0, 5):
            cache.truncate(kept)
            out = river.prefill(ids[:, max(cache.lengths[0]) :], cache)
            torch.testing.assert_close(out.logits, expected[:, -1], **TOLERANCE)
            assert out.depth == 1
        cache.truncate(0)
        assert river.decode(ids[:, :1], cache).depth == model.arch.num_layers


@pytest.mark.parametrize("together", [False, True])
def test_rows_hold_by_their_own_position(together: bool, tinies, tiny: ModuleType) -> None:
    """Rows that begin at 0, 1 and 5: the first is held, the others leave, whether alone or together."""
    model, ids, starts = tinies("qwen2"), tiny.random_ids(3, LENGTH), (0, 1, 5)
    river = model.river(FixedExit(1), held=1)
    cache, count = river.new_cache(3, LENGTH), model.arch.num_layers
    with torch.inference_mode():
        for row, start in enumerate(starts):
            if start:
                river.prefill(ids[row : row + 1, :start], cache.rows(row))
        for at in range(3):
            tokens = torch.stack([ids[row, start + at] for row, start in enumerate(starts)])[:, None]
            if together:
                out = river.decode(tokens, cache)
                logits, depths = out.logits, [out.depth]
            else:
                found, left = river.decode_rows(tokens, cache)
                logits, depths = found[:, 0], left[:, 0].tolist()
            assert depths == ([1] if together else [count if at == 0 else 1, 1, 1])
            for row, start in enumerate(starts):
                alone, _ = by_token(river, ids[row : row + 1, : start + at + 1])
                torch.testing.assert_close(logits[row], alone[0, -1], **TOLERANCE)


def test_held_tokens_go_no_deeper_than_blocks_are_resident(tinies, tiny: ModuleType) -> None:
    model, ids = tinies("llama"), tiny.random_ids(1, LENGTH)
    river = model.river(FixedExit(1), held=2, resident=2)
    logits, depths = by_token(river, ids)
    assert depths == [2, 2, *[1] * (LENGTH - 2)]
    torch.testing.assert_close(logits[:, :2], model.oracle(ids, 2)[:, :2], **TOLERANCE)
    with torch.inference_mode():
        _, rows = river.decode_rows(ids, river.new_cache(1, LENGTH))
        out = river.prefill(ids, river.new_cache(1, LENGTH))
    assert rows[0].tolist() == depths
    assert out.depth == 1
    torch.testing.assert_close(out.logits, logits[:, -1], **TOLERANCE)
