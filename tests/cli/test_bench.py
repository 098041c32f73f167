"""`adapt bench`: what it asks of the rooms below, what it prints, and which options do not fit a bundle."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from adapt_llm.cli import bench_generation, services

Invoke = Callable[..., tuple[int, str, str]]


def figures(rate: float, **changes: Any) -> dict[str, Any]:
    ms = 1000 / rate
    return {
        "decode_tokens_per_s": rate,
        "prefill_tokens_per_s": 10 * rate,
        "first_token_ms": 50.0,
        "decode_ms": {"median": ms, "min": ms / 2, "max": ms * 2},
        "bytes_per_pass": 988_000_000,
        "limit_ms": ms / 2,
        "used_fraction": 0.5,
        "peak_memory_bytes": 1 << 30,
        "mean_depth": None,
        "exit_histogram": {},
        "speedup": {kind: {"median": 1.0, "min": 1.0, "max": 1.0} for kind in ("decode", "prefill")},
        **changes,
    }


DENSE = figures(20.0)
RIVER = figures(
    40.0,
    mean_depth=2.5,
    exit_histogram={"2": 5, "3": 5},
    speedup={
        "decode": {"median": 2.0, "min": 1.5, "max": 2.5},
        "prefill": {"median": 1.25, "min": 1.0, "max": 1.5},
    },
    peak_memory_bytes=None,
)
TRIAL = {"context": 128, "batch_size": 1, "prefill_rounds": 5, "measured_gb_per_s": 24.0}
FOUND: dict[str, Any] = {
    "bundle": "qwen-river",
    "base": "Qwen/Qwen2.5",
    "methods": ["river"],
    "layers": 4,
    "machine": {"device": "x86_64, 2 threads", "torch": "2.13.0", "adapt": "0.4"},
    "settings": {"dtype": "bfloat16", "tau": 0.5, "rounds": 5, "tokens": 32, "dense_model": None},
    "dense": DENSE,
    "method": RIVER,
    "speedup": RIVER["speedup"],
    "mean_depth": 2.5,
    "exit_histogram": RIVER["exit_histogram"],
    "bandwidth": {"measured_gb_per_s": 24.0, "used_fraction": 0.5},
    "trials": [
        {**TRIAL, "contenders": {"dense": DENSE, "method": RIVER, "floor": figures(44.0)}},
        {
            **TRIAL,
            "context": 2048,
            "prefill_rounds": 2,
            "contenders": {"dense": figures(10.0), "method": figures(20.0, used_fraction=None)},
        },
    ],
    "notes": ["Something to know."],
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []

    def measure(
        path: Path, values: dict[str, Any], settings: dict[str, Any], sampling: dict[str, Any], **rest: Any
    ) -> Any:
        calls.append({"path": path, **values, **settings, "sampling": sampling, **rest})
        return FOUND

    monkeypatch.setattr(services, "bench", measure)
    monkeypatch.setattr(services, "twodee", lambda _: None)
    return calls


def test_a_table(adapt: Invoke, asked: list[dict[str, Any]]) -> None:
    code, out, err = adapt("bench", "b")
    assert (code, err) == (0, "")
    lines = [line.strip() for line in out.splitlines()]
    river = next(line for line in lines if line.startswith("river tau 0.5"))
    for cell in ("40.0", "25.0 (12.5 to 50.0)", "2.00 (1.50 to 2.50)", "2.5", "988", "50%", "1.25 (1.00 to 1.50)"):
        assert cell in river
    assert any(line.startswith("dense") and "128 x 1" in line and "1.00 GiB" in line for line in lines)
    assert any(line.startswith("all 4-bit") for line in lines)
    assert any("2048 x 1" in line for line in lines)
    assert "prompts of 2048 tokens were timed in 2 of 5 rounds" in lines
    assert "Something to know." in lines
    assert "memory gives 24 GB/s" in out
    assert "depth at which tokens left, 128 x 1" in lines
    assert any("50.0%" in line for line in lines)


def test_what_is_asked_for(adapt: Invoke, asked: list[dict[str, Any]], tmp_path: Path) -> None:
    text = tmp_path / "t.txt"
    text.write_text("안녕 river", encoding="utf-8-sig")
    options = ["--context", "128,2048", "--batch-size", "1,8", "-n", "16", "--rounds", "7", "--floor", "--no-memory"]
    options += ["--against", "transformers", "--dense", "d", "--text", text, "--tau", "0.9", "--threads", "2"]
    assert adapt("bench", "b", *options, "--temp", "1", "--seed", "3")[0] == 0
    call = asked[0]
    assert (call["path"], call["contexts"], call["rows"]) == (Path("b"), (128, 2048), (1, 8))
    assert (call["tokens"], call["rounds"], call["dense"], call["text"]) == (16, 7, Path("d"), "안녕 river")
    assert (call["floor"], call["transformers"], call["memory"]) == (True, True, False)
    assert (call["tau"], call["threads"]) == (0.9, 2)
    assert call["sampling"] == {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 3}


def test_json_report_and_picture(
    adapt: Invoke, asked: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, picture = tmp_path / "r.md", tmp_path / "p.png"
    code, out, _ = adapt("bench", "b", "--json", "--report", report, "--plot", picture)
    assert (code, json.loads(out)) == (0, FOUND)
    page = report.read_text(encoding="utf-8")
    assert page.startswith("## qwen-river\n\n`adapt bench b --json")
    assert "| dense | 128 x 1 | 20.0 |" in page
    assert picture.read_bytes().startswith(b"\x89PNG")
    code, _, err = adapt("bench", "b", "--report", report)
    assert code == 2
    assert "--force" in err


def test_bars_have_their_least_and_largest() -> None:
    bars = bench_generation.bars(FOUND)
    assert bars["river tau 0.5"] == [("128 tokens", 40.0, 20.0, 80.0), ("2048 tokens", 20.0, 10.0, 40.0)]


def test_a_bundle_without_a_twin(adapt: Invoke, asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    alone = {**FOUND, "dense": None, "trials": [{**TRIAL, "contenders": {"method": figures(9.0, speedup=None)}}]}
    monkeypatch.setattr(services, "bench", lambda *_, **__: alone)
    code, out, _ = adapt("bench", "b")
    assert code == 0
    assert "9.0" in out


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--context", "0"], "not a list of numbers"),
        (["--batch-size", "1,x"], "not a list of numbers"),
        (["-i", "rows.txt"], "does not classify"),
        (["--max-drop", "0.1"], "bundles that classify"),
        (["--ctx-size", "64"], "--ctx-size is for run and chat"),
        (["--plot", "p.gif"], "pictures are"),
        (["--text", "missing.txt"], "cannot read"),
    ],
)
def test_refused(adapt: Invoke, asked: list[dict[str, Any]], options: list[str], reason: str) -> None:
    code, _, err = adapt("bench", "b", *options)
    assert (code, asked) == (2, [])
    assert reason in err


@pytest.fixture
def reviews(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    texts = [f"{'good' if number % 2 else 'bad'} one. two. three" for number in range(20)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ["FAIL", *texts]), encoding="utf-8")
    return path


def test_rows_a_second(classify: Invoke, fake: ModuleType, reviews: Path) -> None:
    code, out, err = classify("bench", "b", "-i", reviews, "--json")
    assert code == 0
    assert "1 rows are left out" in err
    found = json.loads(out)
    assert found["settings"]["rows"] == 20
    assert found["settings"]["chunks"] == 5
    assert found["rows_per_s"] > 0
    assert found["ways"].keys() == {"dense", "one_d", "two_d"}
    assert found["dense"]["work"] == 1.0
    assert found["work"] == found["ways"]["two_d"]["work"]
    assert found["speedup"]["over_dense"].keys() == {"median", "min", "max"}


@pytest.mark.parametrize(
    ("lines", "code", "reason"),
    [
        ([], 2, "there are no rows"),
        (['{"other": "x"}'], 2, "no row has a text; the first, row 1: "),
        (['{"text": "good one."}', "not json"], 0, "1 rows have no text and are left out; the first, row 2: "),
    ],
)
def test_rows_without_a_text_are_said(
    classify: Invoke, tmp_path: Path, lines: list[str], code: int, reason: str
) -> None:
    rows = tmp_path / "in.jsonl"
    rows.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    found, _, err = classify("bench", "b", "-i", rows)
    assert found == code
    assert reason in err


def test_waiting_tokens_do_not_count_the_pass_itself() -> None:
    method = figures(9.0, counts={"passes": 4, "pass_rows": 6})
    trial = {**TRIAL, "contenders": {"dense": DENSE, "method": method}}
    lines = list(bench_generation.page({**FOUND, "trials": [trial], "notes": []}))
    assert "passes above an exit took along 0.5 waiting tokens on average, prompts of 128 tokens" in lines


def test_no_column_has_another_ones_name() -> None:
    head = bench_generation.table(FOUND)[0]
    assert len(set(head)) == len(head)


def test_rows_as_a_table_and_a_picture(classify: Invoke, reviews: Path, tmp_path: Path) -> None:
    report, picture = tmp_path / "r.md", tmp_path / "p.png"
    args = ("bench", "b", "-i", reviews, "--limit", "10", "-b", "2", "--report", report, "--plot", picture)
    code, out, _ = classify(*args)
    assert code == 0
    lines = [line.split() for line in out.splitlines()]
    assert {"full", "1D", "2D"} <= {line[0] for line in lines if line}
    assert "2 at once" in out
    assert "| full | all layers |" in report.read_text(encoding="utf-8")
    assert picture.exists()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ([], "nothing to classify"),
        (["-i", "ROWS", "--context", "64"], "bundles that generate"),
        (["-i", "ROWS", "--draft", "3"], "bundles that generate"),
        (["-i", "ROWS", "--no-piggyback"], "bundles that generate"),
        (["-i", "ROWS", "--batch-size", "1,2"], "one number"),
        (["-i", "none.jsonl"], "no such file"),
    ],
)
def test_refused_where_rows_are_classified(classify: Invoke, reviews: Path, options: list[str], reason: str) -> None:
    code, _, err = classify("bench", "b", *[str(reviews) if option == "ROWS" else option for option in options])
    assert code == 2
    assert reason in err
