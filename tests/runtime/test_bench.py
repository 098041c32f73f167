"""The race: order of turns, which figures come out of which laps, what passes must read. No time is asserted."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from adapt_llm.errors import AdaptError, ResourceError, UnsupportedError, UsageError
from adapt_llm.quant.kernels import native8
from adapt_llm.quant.linear import DenseLinear
from adapt_llm.runtime import batch, bench_memory
from adapt_llm.runtime.bench import Lap, Trial, race, spread
from adapt_llm.runtime.bench_bundle import BenchOptions, Field
from adapt_llm.runtime.bench_report import bench
from adapt_llm.runtime.options import SessionOptions
from adapt_llm.runtime.progress import SilentReporter
from adapt_llm.runtime.sampling import Sampling

TEXT = "a ferry crosses the river twice a day, and on market days three times. "


@pytest.fixture(scope="module")
def river(factory: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A River bundle of four blocks to which every byte is a token."""
    model = factory.model_folder(tmp_path_factory.mktemp("bench") / "model", vocab_size=264)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(model / "tokenizer.json"))
    return factory.bundle(model, model.parent / "river")


class Fast:
    """A machine whose memory gives 1 GB/s."""

    def __init__(self, events: list[str] | None = None) -> None:
        self.events = events

    def bytes_per_second(self) -> float:
        if self.events is not None:
            self.events.append("read")
        return 1e9


class Runner:
    """Takes `seconds` for four tokens, and `prompt` for the prompt."""

    def __init__(self, name: str, events: list[str], seconds: float = 2.0, prompt: float = 0.5) -> None:
        self.name, self.events, self.seconds, self.prompt = name, events, seconds, prompt

    def lap(self, *, afresh: bool) -> Lap:
        self.events.append(f"{self.name}{'*' if afresh else ''}")
        return Lap(self.seconds, 4, 1, self.prompt if afresh else None, {2: 3, 4: 1}, 4e9)


def run(*runners: Runner, rounds: int) -> Trial:
    return race(runners, 100, 1, rounds=rounds, reader=Fast(runners[0].events), reporter=SilentReporter())


def test_all_run_in_every_round_and_each_begins_in_turn() -> None:
    events: list[str] = []
    run(Runner("a", events), Runner("b", events), Runner("c", events), rounds=3)
    warm_up = ["a*", "b*", "c*"]
    assert events == [*warm_up, "read", "a*", "b*", "c*", "read", "b*", "c*", "a*", "read", "c*", "a*", "b*"]


def test_long_prompts_are_timed_in_fewer_rounds() -> None:
    events: list[str] = []
    trial = run(Runner("a", events, prompt=6.0), Runner("b", events, prompt=3.0), rounds=4)
    assert trial.prefill_rounds == 2
    assert events[2:] == ["read", "a*", "b*", "read", "b*", "a*", "read", "a", "b", "read", "b", "a"]
    assert run(Runner("a", [], prompt=100.0), rounds=3).prefill_rounds == 1


def test_figures_are_medians_and_ratios_are_of_one_round() -> None:
    laps = {
        "dense": [Lap(seconds, 4, 1, 2.0, {}, 2e9) for seconds in (4.0, 8.0, 40.0)],
        "method": [Lap(seconds, 4, 1, 1.0, {2: 4}, 1e9) for seconds in (2.0, 8.0, 10.0)],
    }
    trial = Trial(100, 1, laps, [1e9, 1e9, 1e9])
    assert trial.speedup("method", "dense")["decode"] == {"median": 2.0, "min": 1.0, "max": 4.0}
    assert trial.speedup("method", "dense")["prefill"] == {"median": 2.0, "min": 2.0, "max": 2.0}
    figures = trial.figures("dense")
    assert figures["decode_tokens_per_s"] == 0.5
    assert figures["decode_ms"] == {"median": 2000.0, "min": 1000.0, "max": 10000.0}
    assert (figures["prefill_tokens_per_s"], figures["first_token_ms"]) == (50.0, 2000.0)
    assert (figures["bytes_per_pass"], figures["limit_ms"], figures["used_fraction"]) == (500_000_000, 500.0, 0.25)
    assert trial.depths("method") == {2: 12}


def test_rows_count_as_tokens() -> None:
    trial = Trial(10, 8, {"dense": [Lap(4.0, 4, 8, 2.0, {}, None)]}, [1e9])
    figures = trial.figures("dense")
    assert (figures["decode_tokens_per_s"], figures["prefill_tokens_per_s"]) == (8.0, 40.0)
    assert figures["used_fraction"] is None


def test_spread_keeps_four_digits() -> None:
    assert spread([1.23456, 3.0, 2.0]) == {"median": 2.0, "min": 1.235, "max": 3.0}


def measured(path: Path, **changes: Any) -> dict[str, Any]:
    options = BenchOptions(**{"contexts": (24,), "tokens": 3, "rounds": 2, "text": TEXT, **changes})
    sizes = {"dense": 1000, "method": 2000, "floor": 3000}
    return bench(path, options, reader=Fast(), measure=lambda _path, _options, name: sizes[name])


def test_stable_keys(river: Path) -> None:
    found = measured(river, floor=True)
    keys = {"decode_tokens_per_s", "prefill_tokens_per_s", "first_token_ms", "peak_memory_bytes"}
    for name, size in (("dense", 1000), ("method", 2000)):
        assert keys <= found[name].keys()
        assert found[name]["peak_memory_bytes"] == size
    assert found["speedup"].keys() == {"decode", "prefill"}
    assert found["speedup"]["decode"].keys() == {"median", "min", "max"}
    assert found["bandwidth"]["measured_gb_per_s"] == 1.0
    assert found["bandwidth"]["used_fraction"] == found["method"]["used_fraction"]
    assert sum(found["exit_histogram"].values()) == 2 * 3
    assert found["dense"]["mean_depth"] is None
    assert found["trials"][0]["contenders"]["floor"]["exit_histogram"] == {"1": 6}
    assert found["settings"]["contexts"] == [24]
    json.dumps(found)


def test_every_context_and_every_number_of_rows_is_a_trial(river: Path) -> None:
    found = measured(river, contexts=(8, 20), rows=(1, 3), session=SessionOptions(tau=-1.0))
    assert [(each["context"], each["batch_size"]) for each in found["trials"]] == [(8, 1), (8, 3), (20, 1), (20, 3)]
    several = found["trials"][1]["contenders"]["method"]
    assert several["exit_histogram"] == {"1": 2 * 3 * 3}
    assert several["bytes_per_pass"] > found["trials"][0]["contenders"]["method"]["bytes_per_pass"]
    assert found["settings"]["tau"] == -1.0


def test_the_dense_twin_shares_the_weights_and_gives_the_dense_text(river: Path) -> None:
    field = Field(river, BenchOptions())
    method: Any = field.model("method")
    assert field.model("dense").decoder is method.decoder
    dropped = Field(river, BenchOptions(session=SessionOptions(resident=2)))
    dropped.model("method")
    twin: Any = dropped.model("dense")
    assert len(twin.decoder.blocks) == 4  # all of them, although the method drops two


def test_another_dense_model(river: Path, factory: ModuleType, tmp_path: Path) -> None:
    other = river.parent / "model"
    found = measured(river, dense=other)
    assert found["settings"]["dense_model"] == "model"
    with pytest.raises(UsageError, match="another vocabulary"):
        measured(river, dense=factory.model_folder(tmp_path / "small"))
    with pytest.raises(UsageError, match="neither a bundle nor"):
        measured(river, dense=tmp_path)


def test_the_prompt_is_not_run_again_for_every_round(river: Path) -> None:
    options = BenchOptions(contexts=(24,), tokens=3, text=TEXT)
    lane = Field(river, options).contender("method", 24, 1)
    first, again = lane.lap(afresh=True), lane.lap(afresh=False)
    assert first.first_token_seconds is not None
    assert again.first_token_seconds is None
    assert (first.steps, again.steps, sum(again.depths.values())) == (3, 3, 3)
    rows = Field(river, options).contender("method", 24, 2)
    assert rows.lap(afresh=False).first_token_seconds is not None  # it has no prompt yet
    assert rows.lap(afresh=False).first_token_seconds is None


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"contexts": (0,)}, "contexts"),
        ({"rows": ()}, "rows"),
        ({"rounds": 0}, "nothing to measure"),
        ({"transformers": True, "sampling": Sampling(temperature=1.0)}, "greedy"),
    ],
)
def test_what_cannot_be(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        BenchOptions(**options)


def test_more_rows_than_there_is_memory_for_are_refused_before_anything_is_measured(
    river: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "free_memory", lambda _device: 1 << 20)
    reader = Fast([])
    with pytest.raises(ResourceError, match="Keys and values of 100000 texts of 28 tokens take") as caught:
        bench(river, BenchOptions(contexts=(24,), tokens=3, rounds=2, text=TEXT, rows=(1, 100_000)), reader=reader)
    assert "--batch-size" in caught.value.hint
    assert reader.events == []
    assert measured(river)["trials"][0]["batch_size"] == 1


def test_contexts_beyond_the_positions_are_refused(river: Path) -> None:
    with pytest.raises(UsageError, match="positions reach 256"):
        Field(river, BenchOptions(contexts=(250,)))
    with pytest.raises(UsageError, match="no token"):
        Field(river, BenchOptions(text="")).contender("method", 8, 1)


@pytest.fixture
def job(river: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The job that `measure` sends to another process, run in this one."""
    sent: dict[str, Any] = {}

    def launch(_command: list[str], **settings: Any) -> Any:
        sent.update(json.loads(settings["input"]))
        return type("Done", (), {"returncode": 0, "stdout": json.dumps({"bytes": 7}), "stderr": ""})

    monkeypatch.setattr(bench_memory.subprocess, "run", launch)
    options = BenchOptions(session=SessionOptions(tau=0.5, cache_dir=river), contexts=(16, 99), text=TEXT, floor=True)
    assert bench_memory.measure(river, options, "floor") == 7
    return sent


def test_memory_is_measured_of_one_contender_alone(job: dict[str, Any], river: Path) -> None:
    assert (job["name"], job["context"], job["session"]["cache_dir"]) == ("floor", 16, str(river))
    assert bench_memory.run(job) > 1 << 20


def test_a_process_that_fails_says_why(river: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(*_: Any, **__: Any) -> Any:
        return type("Done", (), {"returncode": 1, "stdout": "", "stderr": "Traceback\nMemoryError: too much\n"})

    monkeypatch.setattr(bench_memory.subprocess, "run", launch)
    with pytest.raises(AdaptError, match="too much"):
        bench_memory.measure(river, BenchOptions(), "dense")


def test_figures_are_not_lost_where_memory_cannot_be_measured(river: Path) -> None:
    def measure(_path: Path, _options: BenchOptions, name: str) -> int:
        if name == "dense":
            raise AdaptError("memory of dense could not be measured")
        return 7

    said: list[str] = []
    reporter = SilentReporter()
    reporter.warn = said.append
    options = BenchOptions(contexts=(8,), tokens=1, rounds=1, text=TEXT)
    found = bench(river, options, reader=Fast(), measure=measure, reporter=reporter)
    assert (found["dense"]["peak_memory_bytes"], found["method"]["peak_memory_bytes"]) == (None, 7)
    assert said == ["memory of dense could not be measured"]


def test_transformers_refuses_in_one_line(river: Path, tmp_path: Path) -> None:
    field = Field(river, BenchOptions(contexts=(16,), transformers=True, dense=tmp_path))
    with pytest.raises(UnsupportedError, match="transformers cannot load"):
        field.contender("transformers", 16, 1)


def test_transformers_on_the_same_files(river: Path) -> None:
    lane = Field(river, BenchOptions(contexts=(16,), tokens=3, transformers=True)).contender("transformers", 16, 1)
    first, again = lane.lap(afresh=True), lane.lap(afresh=False)
    assert (first.first_token_seconds is None, again.first_token_seconds) == (False, None)
    assert (again.steps, again.rows, again.bytes_read) == (3, 1, None)


def test_the_head_in_eight_bits(river: Path) -> None:
    """Only the method's: the dense twin keeps its 16 bits."""
    field = Field(river, BenchOptions(session=SessionOptions(head_bits=8)))
    method: Any = field.model("method")
    dense: Any = field.model("dense")
    assert isinstance(dense.decoder.head, DenseLinear)
    if not native8.available():
        pytest.skip("no 8-bit product here")
    assert method.decoder.head.nbytes < 0.6 * dense.decoder.head.nbytes
    h = torch.randn(1, 1, 64).bfloat16()
    exact, rounded = dense.decoder.logits(h), method.decoder.logits(h)
    assert 0 < (rounded - exact).norm() / exact.norm() < 0.02


def test_a_head_that_stays_says_why(river: Path) -> None:
    said: list[str] = []
    reporter = SilentReporter()
    reporter.warn = said.append
    model: Any = Field(river, BenchOptions(session=SessionOptions(head_bits=8, dtype="fp32")), reporter).model("method")
    assert isinstance(model.decoder.head, DenseLinear)
    assert any("stays in 16 bits" in text for text in said)
    found = measured(river, tokens=1, rounds=1, session=SessionOptions(head_bits=8, dtype="fp32"))
    assert found["settings"]["head_bits"] == 16  # what ran, not what was asked for
    with pytest.raises(UsageError, match="lossless"):
        SessionOptions(head_bits=8, lossless=True)
