"""The static token pass against the eager decode: every family, dense and River, token by token, over buckets.

On a CPU the captured function is called; a graph on a GPU replays the same function (tests/bench/gpu.py compares them).
"""

import copy
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from adapt_llm.errors import UsageError
from adapt_llm.quant.linear import DenseLinear
from adapt_llm.quant.quantizers import QUANTIZERS
from adapt_llm.runtime import batch, static
from adapt_llm.runtime.block import Block
from adapt_llm.runtime.cache import RotationChangedError
from adapt_llm.runtime.captured import CapturedDense, CapturedRiver, captured
from adapt_llm.runtime.decoder import Decoder, load_decoder
from adapt_llm.runtime.dense import Dense
from adapt_llm.runtime.exit_layers import LazyBlocks, exit_block
from adapt_llm.runtime.exits import CosineExit, ExitPolicy, FixedExit
from adapt_llm.runtime.graphs import Graphs
from adapt_llm.runtime.offload import StreamedBlocks
from adapt_llm.runtime.pass_store import PassStore
from adapt_llm.runtime.progress import SilentReporter
from adapt_llm.runtime.river import River
from adapt_llm.runtime.sampling import Sampler, Sampling
from adapt_llm.runtime.static_exits import joined
from adapt_llm.runtime.store import open_safetensors

LENGTH, PROMPT = 30, 5
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}
ALL = [
    "llama", "llama-tied", "llama-head-dim", "llama-biases", "llama-llama3", "llama-linear", "llama-yarn",
    "llama-yarn-mscale", "llama-dynamic", "mistral", "mistral-full", "ministral", "ministral3", "qwen2",
    "qwen2-window", "qwen2-yarn", "qwen3", "qwen3-window", "gemma2", "gemma3", "phi3", "phi3-longrope",
    "phi3-partial", "smollm3", "smollm3-window",
]  # fmt: skip


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets of 8, 16 and 32, so that a short text passes through several."""
    monkeypatch.setattr(static, "LEAST_BUCKET", 8)


def continued(model: Dense | River, ids: torch.Tensor, capacity: int = LENGTH) -> tuple[torch.Tensor, list]:
    """Logits and depths of all tokens behind the prompt, given one by one."""
    cache = model.new_cache(1, capacity)
    outputs = []
    with torch.inference_mode():
        model.prefill(ids[:, :PROMPT], cache)
        for at in range(PROMPT, ids.shape[1]):
            try:
                outputs.append(model.decode(ids[:, at : at + 1], cache))
            except RotationChangedError:
                cache.truncate(0)
                outputs.append(model.prefill(ids[:, : at + 1], cache))
    return torch.stack([output.logits for output in outputs], 1), [output.depth for output in outputs]


def test_all_families_are_here(tiny: ModuleType) -> None:
    assert set(ALL) == set(tiny.CASES)


@pytest.mark.parametrize("name", ALL)
def test_dense(name: str, tiny_model: Callable, tiny: ModuleType) -> None:
    dense, ids = Dense(tiny_model(name).decoder), tiny.random_ids(1, LENGTH)
    expected, _ = continued(dense, ids)
    logits, depths = continued(CapturedDense(dense), ids)
    torch.testing.assert_close(logits, expected, **TOLERANCE)
    assert set(depths) == {None}


@pytest.fixture
def no_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """An eager decode fails the test."""

    def refuse(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("the token ran eagerly")

    for model in (Dense, River):
        monkeypatch.setattr(model, "decode", refuse)


@pytest.fixture(scope="module")
def rivers(tiny_model: Callable) -> Callable[..., River]:
    """Name of a case and options of River -> a river whose exit layers are rounded coarsely."""
    made: dict[str, list] = {}

    def get(name: str, policy: ExitPolicy, **options) -> River:
        model = tiny_model(name)
        if name not in made:
            store = open_safetensors(model.folder)
            made[name] = [
                exit_block(
                    model.arch,
                    store,
                    index,
                    {
                        matrix: QUANTIZERS["rtn"](store.read(matrix).float(), group_size=8)
                        for matrix in model.arch.block_matrices(index)
                    },
                    device="cpu",
                    dtype=torch.float32,
                )
                for index in range(model.arch.num_layers)
            ]
        return River(model.decoder, made[name], policy, **options)

    return get


def mixing(river: River, ids: torch.Tensor) -> CosineExit:
    """Thresholds by which some tokens leave early and some late; no token lies on one."""
    kv, step = PassStore(river.decoder.arch), river.decoder.step(None, ids)
    h, thresholds = river.decoder.embed(ids), []
    with torch.inference_mode():
        for block in river.decoder.blocks:
            before, h = h, block(h, step, kv)
            cosines = torch.cosine_similarity(before, h, dim=-1).flatten().sort().values
            middle = 2 * cosines.numel() // 3
            thresholds.append(float(cosines[middle - 1 : middle + 1].mean()))
    return CosineExit(tuple(thresholds))


@pytest.mark.parametrize("held", [0, 9])
@pytest.mark.parametrize("name", ["llama", "llama-biases", "mistral", "qwen3", "gemma2", "gemma3", "phi3", "smollm3"])
def test_river_leaves_where_the_eager_one_does(name: str, held: int, rivers, tiny: ModuleType) -> None:
    ids = tiny.random_ids(1, LENGTH)
    river = rivers(name, FixedExit(99))
    river = rivers(name, mixing(river, ids), held=held)
    expected, depths = continued(river, ids)
    logits, found = continued(CapturedRiver(river), ids)
    assert found == depths
    assert len(set(depths)) > 1, "the policy does not mix"
    assert set(found[: max(0, held - PROMPT)]) <= {river.decoder.arch.num_layers}
    torch.testing.assert_close(logits, expected, **TOLERANCE)


POLICIES = {
    "never": CosineExit((1.0, 1.0, -2.0)),
    "always": CosineExit((-1.0, -1.0, -2.0)),
    "late": CosineExit((-1.0, -1.0, -2.0), entry_layer=3),
    "fixed": FixedExit(1),
    "deep": FixedExit(3),
}


@pytest.mark.parametrize("resident", [None, 2])
@pytest.mark.parametrize("held", [0, 9])
@pytest.mark.parametrize("policy", POLICIES)
def test_rules_that_do_not_look(policy: str, held: int, resident: int | None, rivers, tiny: ModuleType) -> None:
    ids = tiny.random_ids(1, 14)
    river = rivers("llama", POLICIES[policy], held=held, resident=resident)
    expected, depths = continued(river, ids)
    logits, found = continued(CapturedRiver(river), ids)
    assert found == depths
    torch.testing.assert_close(logits, expected, **TOLERANCE)


@pytest.mark.parametrize("sharing", [(0, 0, 2), (0, 0, 0)])
def test_shared_keys_and_values(sharing: tuple[int, ...], tiny_model: Callable, tiny: ModuleType) -> None:
    model, ids = tiny_model("llama"), tiny.random_ids(1, 20)
    dense = Dense(load_decoder(model.arch.share(sharing), model.store, device="cpu", dtype=torch.float32))
    expected, _ = continued(dense, ids)
    torch.testing.assert_close(continued(CapturedDense(dense), ids)[0], expected, **TOLERANCE)


def test_a_block_that_stays_dense_and_blocks_before_the_first_exit(rivers, tiny: ModuleType) -> None:
    """As loaded from a bundle: the river's block is the backbone's own, and there is no exit layer below the entry."""
    ids = tiny.random_ids(1, 14)
    plain = rivers("llama", CosineExit((-1.0, -1.0, -2.0), entry_layer=2))

    def load(index: int) -> Block:
        if index == 0:
            raise IndexError("block 1 has no exit layer")
        return plain.decoder.blocks[1] if index == 1 else plain.exits[index]

    river = River(plain.decoder, LazyBlocks(3, load), plain.policy)
    expected, depths = continued(river, ids)
    logits, found = continued(CapturedRiver(river), ids)
    assert (found, set(found)) == (depths, {1})
    torch.testing.assert_close(logits, expected, **TOLERANCE)


def tokens(model: Dense | River, ids: torch.Tensor, count: int, cache=None) -> list[int]:
    """Greedy tokens behind the prompt; the model may choose them itself."""
    cache = cache or model.new_cache(1, ids.shape[1] + count)
    sampler = Sampler(Sampling())
    chosen = []
    with torch.inference_mode():
        output = model.prefill(ids, cache, sampler)
        for _ in range(count):
            chosen.append(output.token if output.token is not None else sampler(output.logits[0]))
            output = model.decode(torch.tensor([[chosen[-1]]]), cache, sampler)
    return chosen


def test_the_token_is_chosen_on_the_device_and_is_the_sampler_s(tiny_model: Callable, tiny: ModuleType) -> None:
    dense, ids = Dense(tiny_model("llama").decoder), tiny.random_ids(1, PROMPT)
    graphs = CapturedDense(dense)
    assert tokens(graphs, ids, 12) == tokens(dense, ids, 12)
    cache = graphs.new_cache(1, 20)
    graphs.prefill(ids, cache)
    sampler = Sampler(Sampling())
    output = graphs.decode(ids[:, :1], cache, sampler)
    assert output.token == sampler(output.logits[0])
    warm = graphs.decode(ids[:, :1], cache, Sampler(Sampling(temperature=1, seed=1)))
    assert warm.token is None
    strict = graphs.decode(ids[:, :1], cache, Sampler(Sampling(repetition_penalty=1.2)))
    assert strict.token is None


def test_ties_go_to_the_lowest_id_and_broken_logits_to_the_sampler(tiny_model: Callable, tiny: ModuleType) -> None:
    model, ids = tiny_model("llama"), tiny.random_ids(1, PROMPT)
    decoder = copy.copy(model.decoder)
    for head, expected in ((torch.zeros_like, 0), (lambda weight: torch.full_like(weight, torch.nan), None)):
        decoder.head = DenseLinear(head(model.decoder.head.weight))
        graphs = CapturedDense(Dense(decoder))
        cache = graphs.new_cache(1, 20)
        graphs.prefill(ids, cache)
        assert graphs.decode(ids[:, :1], cache, Sampler(Sampling())).token == expected


def test_a_cache_lends_its_memory_on_and_growing_moves_it(tiny_model: Callable, tiny: ModuleType, no_eager) -> None:
    graphs, ids = CapturedDense(Dense(tiny_model("llama").decoder)), tiny.random_ids(1, PROMPT)
    first = graphs.new_cache(1, 40)
    alone = tokens(graphs, ids, 3, first)
    place = first.buffers(0)[0].data_ptr()
    for _ in range(2):  # the second comes and goes while the first is in use
        assert graphs.new_cache(1, 40).buffers(0)[0].data_ptr() != place
    del first
    second = graphs.new_cache(1, 40)
    assert second.buffers(0)[0].data_ptr() == place
    assert tokens(graphs, ids, 3, second) == alone
    larger = second.capacity + 10
    second.grow(larger)
    second.truncate(PROMPT)
    with torch.inference_mode():
        for _ in range(larger - PROMPT - 1):
            graphs.decode(ids[:, :1], second, None)
    assert second.lengths[0] == (larger - 1,)
    third = graphs.new_cache(1, 40)  # the second is in use
    assert third.buffers(0)[0].data_ptr() != second.buffers(0)[0].data_ptr()


def test_broken_numbers_of_an_earlier_text_do_not_reach_the_next(
    tiny_model: Callable, tiny: ModuleType, no_eager: None
) -> None:
    graphs, ids = CapturedDense(Dense(tiny_model("llama").decoder)), tiny.random_ids(1, PROMPT)
    cache = graphs.new_cache(1, 40)
    expected = tokens(graphs, ids, 3, cache)
    for buffer in cache.buffers(0):
        buffer.fill_(torch.nan)
    place = cache.buffers(0)[0].data_ptr()
    del cache, buffer
    cache = graphs.new_cache(1, 40)
    assert cache.buffers(0)[0].data_ptr() == place
    assert tokens(graphs, ids, 3, cache) == expected


def test_the_rows_of_a_batch_are_counted_by_the_token(tiny_model: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of graphs is larger than what was asked for."""
    dense = Dense(tiny_model("llama").decoder)
    free = 2 * 3 * dense.new_cache(1, 50).nbytes
    monkeypatch.setattr(batch, "free_memory", lambda _device: free)
    assert batch.suitable_batch(dense, 50) == batch.suitable_batch(CapturedDense(dense), 50) == 3


def test_weights_joined_by_two_models_are_in_memory_once(tiny_model: Callable) -> None:
    model = tiny_model("llama")
    decoder = load_decoder(model.arch, model.store, device="cpu", dtype=torch.float32)
    block, x = decoder.blocks[0], torch.randn(1, 2, model.arch.hidden_size)
    expected = [torch.cat(list(part(x)), -1) for part in (block.qkv, block.gate_up)]
    first, second = (joined(model.arch, block, anywhere=True) for _ in range(2))
    for part in ("qkv", "gate_up"):
        (whole,), (again,) = (getattr(each, part).linears for each in (first, second))
        assert whole.weight.data_ptr() == again.weight.data_ptr() == getattr(block, part).linears[0].weight.data_ptr()
        assert whole.weight.shape == again.weight.shape
    found = [torch.cat(list(part(x)), -1) for part in (second.qkv, second.gate_up)]
    torch.testing.assert_close(found, expected)


def test_what_has_no_graph_runs_eagerly(tiny_model: Callable, tiny: ModuleType) -> None:
    dense, ids = Dense(tiny_model("llama").decoder), tiny.random_ids(2, PROMPT)
    graphs = CapturedDense(dense)
    both = graphs.new_cache(2, 20)
    graphs.prefill(ids, both)
    assert graphs.decode(ids[:, :1], both).logits.shape[0] == 2
    foreign = dense.new_cache(1, 20)
    graphs.prefill(ids[:1], foreign)
    graphs.decode(ids[:1, :1], foreign)
    assert foreign.lengths[0] == (PROMPT + 1,)


def test_a_full_cache_is_refused_before_the_pass(tiny_model: Callable, tiny: ModuleType, no_eager) -> None:
    graphs, ids = CapturedDense(Dense(tiny_model("llama").decoder)), tiny.random_ids(1, PROMPT)
    cache = graphs.new_cache(1, 256)
    graphs.prefill(ids, cache)
    cache.stored(256)
    with pytest.raises(UsageError, match="needs 257 positions"):
        graphs.decode(ids[:, :1], cache)


def test_a_capture_that_fails_leaves_the_eager_decode(tiny_model: Callable, tiny: ModuleType, monkeypatch) -> None:
    dense, ids = Dense(tiny_model("llama").decoder), tiny.random_ids(1, PROMPT)
    graphs = CapturedDense(dense)

    def fail(_self: object, _key: object, _function: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(Graphs, "run", fail)
    assert tokens(graphs, ids, 6) == tokens(dense, ids, 6)
    assert graphs.graphs.broken == "operation not permitted when stream is capturing"


@pytest.mark.parametrize(("length", "bucket"), [(1, 8), (8, 8), (9, 16), (16, 16), (17, 20), (20, 20)])
def test_buckets(length: int, bucket: int) -> None:
    assert static.bucket_of(length, 20) == bucket


class Heard(SilentReporter):
    """What was said in detail."""

    def __init__(self) -> None:
        self.details: list[str] = []

    def detail(self, text: str) -> None:
        self.details.append(text)


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoders say that they are on a GPU; nothing runs."""
    monkeypatch.setattr(Decoder, "device", property(lambda _self: torch.device("cuda")))


def test_on_a_cpu_models_stay_as_they_are(rivers) -> None:
    heard, river = Heard(), rivers("llama", FixedExit(1))
    dense = Dense(river.decoder)
    assert captured(river, reporter=heard) is river
    assert captured(dense, reporter=heard) is dense
    assert heard.details == []


def test_on_a_gpu_the_way_is_chosen_and_said(rivers, on_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    heard, river = Heard(), rivers("llama", FixedExit(1))
    dense = Dense(river.decoder)
    assert isinstance(captured(dense, reporter=heard), CapturedDense)
    assert captured(dense, wanted=False, reporter=heard) is dense
    assert captured(river, reporter=heard) is river  # there is no GPU for Triton here
    monkeypatch.setattr("adapt_llm.runtime.captured.triton_works", lambda _device: True)
    graphs = captured(river, reporter=heard)
    assert isinstance(graphs, CapturedRiver)
    assert captured(graphs, reporter=heard) is graphs
    decoder = copy.copy(river.decoder)
    decoder.blocks = StreamedBlocks(decoder.blocks[:1], 3, decoder.blocks.__getitem__, torch.device("cpu"))
    streamed = River(decoder, river.exits, river.policy)
    assert captured(streamed, reporter=heard) is streamed
    assert heard.details == [
        "Tokens of a single text run as CUDA graphs.",
        "Tokens run kernel by kernel: --no-cuda-graphs.",
        "Tokens run kernel by kernel: River needs Triton for it, which is missing or fails its check here.",
        "Tokens of a single text run as CUDA graphs.",
        "Tokens run kernel by kernel: blocks are streamed from host memory.",
    ]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed (Linux only)")
def test_river_in_triton_s_interpreter(interpreted: Callable[[Path], None]) -> None:
    """A process of its own: the choice of the interpreter changes Triton for good."""
    file = Path(__file__).with_name("interpreted_river.py")
    interpreted(file)


@pytest.mark.slow
def test_the_script_for_a_gpu_runs_to_its_end(tmp_path: Path) -> None:
    """All of it on the CPU, small: what is measured means nothing, that it can be measured does."""
    script = Path(__file__).parents[1] / "bench" / "gpu.py"
    command = [sys.executable, str(script), "--tiny", "--rounds", "1", "--device", "cpu", "--out", str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
    result = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    assert {check["ok"] for check in result["checks"]} == {True, None}
    assert {row["way"] for row in result["models"]} >= {
        "dense, graph",
        "River at half depth, graph",
        "all 4-bit, graph",
    }
    assert all(row["ms"] > 0 and row["bytes"] > 0 for row in result["models"])
    page = (tmp_path / "gpu.md").read_text(encoding="utf-8")
    assert "| tiny | 16 | River at half depth, graph |" in page
