"""N-vium's cache through everything that happens to a sequence, and an N-vium bundle from its folder to its answer."""

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from adapt_llm.errors import FormatError, UsageError
from adapt_llm.runtime.bundle import Bundle
from adapt_llm.runtime.decoder import Decoder
from adapt_llm.runtime.dense import Dense
from adapt_llm.runtime.describe import describe
from adapt_llm.runtime.generate import PromptCache, generate
from adapt_llm.runtime.manifest import FileRecord, read_manifest
from adapt_llm.runtime.methods import Nvium as Settings
from adapt_llm.runtime.models import load_model, self_check
from adapt_llm.runtime.nvium import Nvium
from adapt_llm.runtime.options import SessionOptions
from adapt_llm.runtime.progress import SilentReporter
from adapt_llm.runtime.sampling import Sampler, Sampling
from adapt_llm.runtime.self_check import run_mixture_check
from adapt_llm.runtime.stack import Stack
from adapt_llm.runtime.stops import Stops
from adapt_llm.runtime.text import Tokenizer
from adapt_llm.runtime.verify import verify

NM = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "oracle" / "nvium_models.py")))
FAKES = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("chat_fakes.py"))))
TOKENIZER = FAKES.byte_tokenizer()
POINTS = (1, 3)
PURE = Sampling(temperature=1.0, seed=4)


@pytest.fixture(scope="module")
def decoder(tiny_model: Callable) -> Decoder:
    return tiny_model("gemma3").decoder


@pytest.fixture(scope="module")
def tensors(decoder: Decoder) -> dict[str, torch.Tensor]:
    return NM.junction_tensors(decoder, POINTS)


@pytest.fixture
def model(decoder: Decoder, tensors: dict) -> Nvium:
    return NM.model(decoder, POINTS, tensors)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("decode"), st.integers(1, 6)),
        st.tuples(st.just("prefill"), st.integers(1, 5)),
        st.tuples(st.just("truncate"), st.floats(0, 1)),
        st.tuples(st.just("interrupt"), st.integers(0, 7)),
        st.tuples(st.just("flush"), st.just(0)),
        st.tuples(st.just("grow"), st.just(0)),
    ),
    min_size=1,
    max_size=9,
)


class Interrupted(Exception):  # noqa: N818 - stands for Ctrl-C
    pass


class Breaking:
    """Blocks of which one breaks off, before or after it has stored its keys and values."""

    def __init__(self, blocks: list, at: int, *, after: bool) -> None:
        self._blocks, self._at, self._after = blocks, at, after

    def __getitem__(self, layer: int):
        if layer != self._at:
            return self._blocks[layer]

        def broken(*args: object) -> None:
            if self._after:
                self._blocks[layer](*args)
            raise Interrupted

        return broken


def interrupted(model: Nvium, cache: object, ids: list[int], where: int) -> None:
    """A decode that may break off in block `where // 2`; what it had stored is cut off, as `PromptCache` does."""
    decoder = model.decoder
    whole = decoder.blocks
    decoder.blocks = Breaking(whole, where // 2, after=where % 2 == 1)
    try:
        model.decode(torch.tensor([[5]]), cache, Sampler(Sampling(temperature=0.5)))
    except Interrupted:
        pass
    finally:
        decoder.blocks = whole
    cache.truncate(len(ids))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=ACTIONS, seed=st.integers(0, 999))
def test_whatever_happened_the_cache_holds_its_ids(actions: list, seed: int, model: Nvium, tensors: dict) -> None:
    generator = torch.Generator().manual_seed(seed)
    sampler = Sampler(Sampling(temperature=1.0, seed=seed))
    with torch.inference_mode():
        cache, ids = model.new_cache(1, 60), [7]
        model.prefill(torch.tensor([ids]), cache, sampler)
        for action, value in actions:
            fresh = torch.randint(3, 97, (8,), generator=generator).tolist()
            if action == "decode":
                for token in fresh[:value]:
                    model.decode(torch.tensor([[token]]), cache, sampler)
                    ids.append(token)
            elif action == "prefill":
                model.prefill(torch.tensor([fresh[:value]]), cache, sampler)
                ids += fresh[:value]
            elif action == "truncate":
                del ids[max(1, int(value * len(ids))) :]
                cache.truncate(len(ids))
            elif action == "interrupt":
                interrupted(model, cache, ids, value)
            elif action == "grow":
                cache.grow(cache.capacity + 3)
            else:
                model.flush(cache)
            assert cache.length(0) == len(ids)
            assert [cache.waiting(k) for k in range(2)] == [cache.length(k) - cache.length(k + 1) for k in range(2)]
        found = model.score(torch.tensor([[9]]), cache)[0, -1]
    expected = NM.mixture(model.decoder, POINTS, tensors, [*ids, 9])[-1].log().float()
    torch.testing.assert_close(found, expected, atol=5e-5, rtol=1e-4)


def test_queues_are_bounded_and_memory_is_constant(tiny_model: Callable) -> None:
    decoder = tiny_model("gemma3").decoder
    leaving = NM.junction_tensors(decoder, POINTS, biases=30.0)  # nothing ever passes the first junction
    model = NM.model(decoder, POINTS, leaving, max_deferred=5)
    cache, sampler, longest, held = model.new_cache(1, 64), Sampler(PURE), 0, []
    with torch.inference_mode():
        output = model.prefill(torch.tensor([[5, 6]]), cache, sampler)
        for _ in range(60):
            output = model.decode(torch.tensor([[sampler(output.logits[0])]]), cache, sampler)
            assert output.depth == 1
            longest = max(longest, cache.waiting(0), cache.waiting(1))
            held.append(sum(states.untyped_storage().nbytes() for row in cache._queues for q in row for _, states in q))
    assert longest == 5
    assert max(held[30:]) <= max(held[:30]) == 5 * 48 * 4
    assert max(output.passes, default=6) == 6


def test_one_stream_over_another_conversation_is_as_fresh(model: Nvium) -> None:
    """Turns over one cache, cut where the texts part, against a new cache each time."""

    def run(ids: list[int], cache: PromptCache, seed: int) -> list[int]:
        sampling = Sampling(temperature=1.0, seed=seed)
        stream = generate(
            model, ids, tokenizer=TOKENIZER, sampling=sampling, stops=Stops((), ()), cache=cache, max_tokens=9
        )
        return [record.id for record in stream]

    kept, ids = PromptCache(model, 62), [4, 5, 6]
    for seed in range(4):
        found = run(ids, kept, seed)
        assert found == run(ids, PromptCache(model, 62), seed)
        ids = [*ids, *found[: 3 * seed], 8 + seed]


def test_options_of_another_method_are_refused_by_name(bundle: Path, built: Path) -> None:
    opened = Bundle.open(bundle)
    for options, flag in (({"tau": 0.9}, "--tau"), ({"resident": 1}, "--resident")):
        with pytest.raises(UsageError, match=f"^{flag} is for generating with River bundles"):
            load_model(opened, SessionOptions(**options))
    for options, flag in (({"piggyback": False}, "--no-piggyback"), ({"max_deferred": 3}, "--max-deferred")):
        with pytest.raises(UsageError, match=f"^{flag} is for generating with N-vium bundles"):
            load_model(Bundle.open(built), SessionOptions(**options))
    with pytest.raises(UsageError, match=r"^--max-deferred 0 is not possible"):
        SessionOptions(max_deferred=0)


def test_a_price_below_zero_is_a_controllers() -> None:
    def made(beta: float, target: float | None) -> Settings:
        return Settings(junctions=POINTS, router_width=48, trained="routers", beta=beta, target_depth=target)

    assert made(-0.1, 0.6).beta == -0.1
    with pytest.raises(ValueError, match=r"beta -0\.1 is below 0"):
        made(-0.1, None)


@pytest.fixture
def bundle(factory: ModuleType, tmp_path: Path) -> Path:
    """A folder with junctions after blocks 1 and 3, as conversion would leave it."""
    folder = factory.model_folder(tmp_path / "bundle", vocab_size=320)
    TOKENIZER.backend.save(str(folder / "tokenizer.json"))
    return sealed(folder, factory)


def sealed(folder: Path, factory: ModuleType, points: tuple[int, ...] = POINTS, **changes: object) -> Path:
    """Write junctions and a manifest that lists what is there."""
    arch = factory.Architecture.from_config(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    made = SimpleNamespace(arch=arch, final_norm=SimpleNamespace(weight=torch.ones(arch.hidden_size)))
    if points:
        save_file(NM.junction_tensors(made, points, biases=-1.0), folder / "junctions.safetensors")
    settings_ = Settings(junctions=points, router_width=48, trained="routers", beta=0.1, **changes)
    manifest = factory.manifest(arch, required=("nvium",), methods=(settings_,), quality=None)
    names = (path for path in folder.iterdir() if path.name != "adapt.json")
    files = {path.name: record(path) for path in names}
    text = manifest.model_copy(update={"files": files}).dumps()
    (folder / "adapt.json").write_text(text, encoding="utf-8")
    return folder


def record(path: Path) -> FileRecord:
    import hashlib  # noqa: PLC0415

    data = path.read_bytes()
    return FileRecord(sha256=hashlib.sha256(data).hexdigest(), bytes=len(data))


def test_a_bundle_opens_answers_and_describes_itself(bundle: Path) -> None:
    opened = Bundle.open(bundle)
    model = load_model(opened, SessionOptions(dtype="fp32", device="cpu", max_deferred=3))
    assert isinstance(model, Nvium)
    assert isinstance(model.decoder.blocks, Stack)
    ids = [3, 8, 40]
    found = model.score(torch.tensor([ids]), model.new_cache(1, 3))[0]
    expected = NM.mixture(model.decoder, POINTS, load_file(bundle / "junctions.safetensors"), ids).log().float()
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    facts = describe(opened)
    assert [layer["junction"] for layer in facts["layers"]] == [1, None, 2, None]
    assert facts["bytes"]["junctions"] == (bundle / "junctions.safetensors").stat().st_size
    assert facts["memory"]["junctions"] > 0
    assert read_manifest(bundle / "adapt.json").method(Settings).junctions == POINTS


def test_verify_looks_at_junctions_and_runs_the_mixture(bundle: Path) -> None:
    reporter = SilentReporter()
    assert verify(bundle, reporter=reporter, self_check=self_check).ok
    opened = Bundle.open(bundle)
    made = run_mixture_check(load_model(opened, SessionOptions(dtype="fp32", device="cpu")), Tokenizer.load(bundle))
    assert made.mixture_nll is not None
    assert made.mixture_nll != made.dense_nll
    stored = opened.manifest.model_copy(update={"self_check": made.model_copy(update={"mixture_nll": 1.0})})
    (bundle / "adapt.json").write_text(stored.dumps(), encoding="utf-8")
    (problem,) = verify(bundle, reporter=reporter, self_check=self_check).problems
    assert problem.what.startswith("mixture: ")


def test_verify_says_what_is_wrong_with_junctions(bundle: Path, factory: ModuleType) -> None:
    tensors = load_file(bundle / "junctions.safetensors")
    tensors["junctions.1.norm.weight"] = torch.ones(3)
    del tensors["junctions.2.router.head.bias"]
    save_file(tensors, bundle / "junctions.safetensors")
    manifest = read_manifest(bundle / "adapt.json")
    files = {**manifest.files, "junctions.safetensors": record(bundle / "junctions.safetensors")}
    (bundle / "adapt.json").write_text(manifest.model_copy(update={"files": files}).dumps(), encoding="utf-8")
    problems = {problem.what for problem in verify(bundle, reporter=SilentReporter()).problems}
    assert problems == {
        "junctions.2.router.head.bias is missing",
        "junctions.1.norm.weight has shape (3,), not (64,)",
    }


@pytest.mark.parametrize(
    ("points", "changes", "message"),
    [
        ((1, 4), {}, "a junction lies behind block 4, the model has 4"),
        ((1, 3), {"blocks": "4bit"}, "4-bit blocks run, and has none"),
    ],
)
def test_settings_that_do_not_fit_the_bundle_are_refused(
    bundle: Path, factory: ModuleType, points: tuple[int, ...], changes: dict, message: str
) -> None:
    sealed(bundle, factory, points, **changes)
    with pytest.raises(FormatError, match=message):
        load_model(Bundle.open(bundle), SessionOptions(dtype="fp32", device="cpu"))


def test_a_single_exit_runs_as_the_dense_model(bundle: Path, factory: ModuleType) -> None:
    (bundle / "junctions.safetensors").unlink()
    sealed(bundle, factory, points=())
    model = load_model(Bundle.open(bundle), SessionOptions(dtype="fp32", device="cpu"))
    assert isinstance(model, Dense)
    assert verify(bundle, reporter=SilentReporter(), self_check=self_check).ok
