"""`adapt run`: where prompts come from, what goes to stdout, and rows from files to files."""

import gzip
import hashlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from adapt_llm.cli import prompts, services
from adapt_llm.cli.generation import Choices
from adapt_llm.cli.options import opening
from adapt_llm.errors import UsageError
from adapt_llm.runtime.options import SessionOptions

Invoke = Callable[..., tuple[int, str, str]]
WHOLE = "nothing is left to do. --force makes them again\n"


def test_prompt_from_the_argument(adapt: Invoke) -> None:
    assert adapt("run", "b", "hello there") == (0, "hello there \n", "")


def test_answer_ends_with_one_newline(adapt: Invoke, fakes: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert adapt("run", "b", "NONE") == (0, "", "")
    line = fakes.TokenStream(iter([fakes.TokenRecord(0, 0, "a\n", None, 0.1, "stop")]), fakes.GenerationStats(1))
    monkeypatch.setattr(fakes.FakeSession, "complete", lambda *_a, **_k: line)
    assert adapt("run", "b", "x")[1] == "a\n"


def test_prompt_sources(adapt: Invoke, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"\xef\xbb\xbffrom a file\r\n")
    assert adapt("run", "b", "-p", "option")[1] == "option \n"
    assert adapt("run", "b", "--prompt", "-", stdin="piped\n")[1] == "piped \n"
    assert adapt("run", "b", "-", stdin="piped\n")[1] == "piped \n"
    assert adapt("run", "b", "-f", file)[1] == "from a file \n"
    assert adapt("run", "b", "-f", "-", stdin="piped")[1] == "piped \n"
    assert adapt("run", "b", stdin="piped")[1] == "piped \n"
    assert adapt("run", "-m", "b", "argument")[1] == "argument \n"


def test_a_file_that_never_ends_is_refused(adapt: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adapt_llm.cli.prompts.MOST_BYTES", 3 << 20)
    code, _, err = adapt("run", "b", "-f", "/dev/zero")
    assert (code, "/dev/zero has more than 3 MiB" in err) == (2, True)


def test_piped_text_comes_before_the_prompt(adapt: Invoke, fakes: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    session = fakes.FakeSession(Path("b"), {})
    monkeypatch.setattr(services, "open_session", lambda *_: session)
    adapt("run", "b", "Summarise.", stdin="line 1\nline 2\n")
    assert session.calls[0][0] == "line 1\nline 2\n\nSummarise."


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["run"], "no BUNDLE given. Try 'adapt run --help'"),
        (["run", "b"], "no prompt. Give one after BUNDLE, with -p or -f FILE, or pipe it in"),
        (["run", "b", "  "], "no prompt. Give one after BUNDLE, with -p or -f FILE, or pipe it in"),
        (["run", "b", "\udcff"], "the prompt is not UTF-8 text. Convert it, for example with iconv"),
        (
            ["run", "b", "x", "--threads", "1025"],
            "Invalid value for '--threads': Input should be less than or equal to 1024. Try 'adapt run --help'",
        ),
        (["run", "b", "x", "-p", "y"], "more than one prompt. Give it after BUNDLE, or with -p, or with -f"),
        (["run", "b", "two", "words"], "more than one argument after BUNDLE. Put the prompt in quotes"),
        (["run", "b", "-f", "/nope"], "/nope: no such file. -f takes a text file"),
        (["run", "b", "x", "--resume"], "--resume is for many rows. Give them with -i FILE, or -i - for stdin"),
        (
            ["run", "b", "x", "--format", "csv"],
            "--format csv is for many rows. Give them with -i FILE, or -i - for stdin",
        ),
        (["run", "b", "-i", "/nope.txt"], "/nope.txt: no such file. Give a file of rows, or - for stdin"),
        (["run", "b", "-i", "-", "-p", "x"], "-i brings its own prompts. Leave out -p and -f"),
        (["run", "b", "-i", "-", "--resume"], "--resume needs an output file. Give one with -o"),
        (["run", "gone", "x"], "there is no bundle at gone"),
    ],
)
def test_usage(adapt: Invoke, args: list[str], line: str) -> None:
    assert adapt(*args) == (2, "", f"adapt: error: {line}\n")


def test_stdin_that_is_not_text(adapt: Invoke) -> None:
    code, out, err = adapt("run", "b", stdin=b"\xb3\xaa")
    assert (code, out) == (1, "")
    assert err == "adapt: error: stdin is not UTF-8 text (byte 0). Convert it, for example with iconv\n"


def test_a_terminal_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal:
        def isatty(self) -> bool:
            return True

        @property
        def buffer(self) -> object:
            raise AssertionError("read from a terminal")

    monkeypatch.setattr(prompts.sys, "stdin", Terminal())
    assert prompts.single_prompt("x", None, None) == "x"
    with pytest.raises(UsageError):
        prompts.single_prompt(None, None, None)


def test_template_and_system(adapt: Invoke) -> None:
    assert adapt("run", "b", "hi", "--system", "SYS")[1] == "SYS hi \n"
    assert adapt("run", "b", "hi", "--raw")[1] == "RAW hi \n"
    assert adapt("run", "b", "hi", "-sys", "SYS")[1] == "SYS hi \n"
    assert adapt("run", "b", "hi", "--no-chat-template")[1] == "RAW hi \n"


def test_options_reach_the_session(adapt: Invoke, fakes: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []

    def remember(path: Path, settings: dict[str, object], reporter: object) -> object:
        opened.append(fakes.FakeSession(path, settings))
        return opened[-1]

    monkeypatch.setattr(services, "open_session", remember)
    line = "--max_new_tokens 7 --temp 0.5 --top-p .9 --top_k 40 --min-p .1 --seed 3 --stop a --stop b --ignore-eos"
    line += " --repeat-penalty 1.1 --stop-token-id 5 --device cpu --dtype bfloat16 --threads 2 -c 100 --tau 0.9"
    line += " --resident 4 --offload stream --prefill exit --gpu-memory 8GiB --chat-template chatml"
    adapt("run", "b", "x", *line.split())
    assert vars(opened[0].calls[0][1].choices) == {
        "max_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "seed": 3,
        "stop": ("a", "b"),
        "stop_token_id": (5,),
        "ignore_eos": True,
    }
    assert opened[0].settings == {
        "device": "cpu",
        "dtype": "bf16",
        "threads": 2,
        "ctx_size": 100,
        "gpu_memory": "8GiB",
        "resident": 4,
        "offload": "stream",
        "tau": 0.9,
        "lossless": False,
        "draft": None,
        "prefill": "exit",
        "chat_template": "chatml",
        "cache_dir": None,
        "head_bits": 16,
        "per_exit_truncation": False,
        "piggyback": True,
        "max_deferred": 64,
        "cuda_graphs": True,
    }
    adapt("run", "b", "x", "--greedy")
    assert opened[1].calls[0][1].choices.temperature == 0
    assert opened[1].calls[0][1].choices.max_tokens == 512


def test_settings_are_those_of_the_session(fakes: ModuleType) -> None:
    assert vars(SessionOptions(**opening())) == vars(SessionOptions())


def test_impossible_sampling_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match=r"^--top-p 0 is not possible"):
        services.generation_options(Choices(top_p=0))
    options = services.generation_options(Choices(max_tokens=3, stop=("a",), seed=1), row=9)
    assert (options.max_tokens, options.stop, options.sampling.seed, options.row) == (3, ("a",), 1, 9)


def test_json(adapt: Invoke) -> None:
    code, out, err = adapt("run", "b", "one two three", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {
        "text": "one two three ",
        "prompt_tokens": 13,
        "tokens": 4,
        "finish_reason": "stop",
        "mean_depth": 3.0,
        "prefill_tokens_per_s": 26.0,
        "decode_tokens_per_s": 2.0,
        "first_token_ms": 500.0,
        "acceptance": None,
        "tokens_per_verify": None,
        "exit_histogram": {"2": 1, "3": 1, "4": 1},
        "pass_rows": {},
    }
    assert adapt("run", "b", "one two three", "--format", "json")[1] == out


def test_stats(adapt: Invoke) -> None:
    code, out, err = adapt("run", "b", "one two three", "--stats")
    assert (code, out) == (0, "one two three \n")
    bar = "█" * 32
    assert err.split("\n") == [
        "13 prompt tokens, first token after 500 ms; 4 new tokens, 2.0 tokens/s",
        "mean depth 3.0 blocks",
        f"          2  {bar}  33.3%",
        f"          3  {bar}  33.3%",
        f"          4  {bar}  33.3%",
        "memory 3.00 GiB",
        "",
    ]


def test_single_answer_into_a_file(adapt: Invoke, tmp_path: Path) -> None:
    out = tmp_path / "answer.txt"
    assert adapt("run", "b", "안녕 👋", "-o", out) == (0, "", "")
    assert out.read_text("utf-8") == "안녕 👋 \n"
    assert adapt("run", "b", "x", "-o", out)[2] == f"adapt: error: {out} is there already. Replace it with --force\n"
    assert adapt("run", "b", "x", "-o", out, "--force")[0] == 0
    assert out.read_text("utf-8") == "x \n"


# --- rows


def source(tmp_path: Path, text: str, name: str = "in.jsonl") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


ROWS = """{"id": "a", "text": "one two"}
not json
{"id": "b", "messages": [{"role": "user", "content": "가"}]}
{"text": "FAIL"}
"""


def test_rows_to_stdout(adapt: Invoke, tmp_path: Path) -> None:
    code, out, err = adapt("run", "b", "-i", source(tmp_path, ROWS))
    assert code == 3
    lines = [json.loads(line) for line in out.rstrip("\n").split("\n")]
    for line in lines:
        assert len(line.pop("row_hash")) == 12
    assert lines == [
        {"id": "a", "row": 1, "text": "one two ", "tokens": 3, "finish_reason": "stop", "mean_depth": 3.5},
        {"row": 2, "error": "not JSON: Expecting value: line 1 column 1 (char 0)"},
        {
            "id": "b",
            "messages": [{"role": "user", "content": "가"}],
            "row": 3,
            "text": "가 ",
            "tokens": 2,
            "finish_reason": "stop",
            "mean_depth": 3.0,
        },
        {"text": None, "row": 4, "error": "The prompt does not fit. Shorten it."},
    ]
    assert "가" in out
    assert err.startswith("4 rows, 2 failed, ")
    assert err.rstrip().endswith("mean depth 3.3")


def test_on_error_skip(adapt: Invoke, tmp_path: Path) -> None:
    code, out, err = adapt("run", "b", "-i", source(tmp_path, ROWS), "--on-error", "skip")
    assert code == 3
    assert [json.loads(line)["row"] for line in out.rstrip("\n").split("\n")] == [1, 3]
    assert err.startswith("2 rows, 2 failed, ")


def test_on_error_fail(adapt: Invoke, tmp_path: Path) -> None:
    code, out, err = adapt("run", "b", "-i", source(tmp_path, ROWS), "--on-error", "fail")
    assert (code, out.count("\n")) == (1, 1)
    assert err.startswith("adapt: error: row 2: not JSON: ")
    code, _, err = adapt("run", "b", "-i", source(tmp_path, "FAIL\n", "a.txt"), "--on-error", "fail")
    assert (code, err) == (1, "adapt: error: row 1: The prompt does not fit. Shorten it.\n")


def test_lack_of_memory_is_not_a_rows_fault(adapt: Invoke, tmp_path: Path) -> None:
    assert adapt("run", "b", "-i", source(tmp_path, "ok\nFULL\n", "a.txt"))[0] == 5


def test_a_defect_is_not_a_rows_fault(adapt: Invoke, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        adapt("run", "b", "-i", source(tmp_path, "DEFECT\n", "a.txt"))


KEYS = ["id", "prompt", "row", "row_hash", "text", "tokens", "finish_reason", "mean_depth", "error"]
VALUES = ["x", "a", "1", hashlib.sha256(b"x\x1fa").hexdigest()[:12], "a ", "2", "stop", "3.0", ""]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("o.csv", f"{','.join(KEYS)}\n{','.join(VALUES)}\n"),
        ("o.tsv", "\t".join(KEYS) + "\n" + "\t".join(VALUES) + "\n"),
        ("o.txt", "a \n"),
    ],
)
def test_output_forms(adapt: Invoke, tmp_path: Path, name: str, content: str) -> None:
    out = tmp_path / name
    code, stdout, _ = adapt("run", "b", "-i", source(tmp_path, "id,prompt\nx,a\n", "in.csv"), "-o", out)
    assert (code, stdout) == (0, "")
    assert out.read_text("utf-8") == content


def test_inputs_after_i_and_stdin_rows(adapt: Invoke, tmp_path: Path) -> None:
    a, b = source(tmp_path, "one\n", "a.txt"), source(tmp_path, "two\n", "b.txt")
    assert adapt("run", "b", "-i", a, b, "--format", "text")[1] == "one \ntwo \n"
    assert adapt("run", "b", "-i", b, "-i", "-", "--format", "text", stdin="three\n")[1] == "two \nthree \n"
    out = adapt("run", "b", "-i", "-", "--input-format", "csv", "--format", "text", stdin="text\nx\n")[1]
    assert out == "x \n"


def test_gzip_input(adapt: Invoke, tmp_path: Path) -> None:
    path = tmp_path / "in.txt.gz"
    path.write_bytes(gzip.compress(b"a\nb\n"))
    assert adapt("run", "b", "-i", path, "--format", "text")[1] == "a \nb \n"


def test_an_output_is_not_overwritten(adapt: Invoke, tmp_path: Path) -> None:
    out, rows = tmp_path / "out.jsonl", source(tmp_path, "a\nb\n", "in.txt")
    adapt("run", "b", "-i", rows, "-o", out)
    before = out.read_bytes()
    code, _, err = adapt("run", "b", "-i", rows, "-o", out)
    assert (code, err) == (
        2,
        f"adapt: error: {out} is there already. Continue it with --resume, or replace it with --force\n",
    )
    assert adapt("run", "b", "-i", rows, "-o", out, "--force")[0] == 0
    assert out.read_bytes() == before
    assert adapt("run", "b", "-i", rows, "-o", rows)[2].startswith(f"adapt: error: {rows} is also an input")


def test_resume(adapt: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, rows = tmp_path / "out.jsonl", source(tmp_path, "a\nFAIL\nc\n", "in.txt")
    assert adapt("run", "b", "-i", rows, "-o", out, "--resume")[0] == 3
    whole = out.read_bytes()
    out.write_bytes(whole[:-20])
    code, _, err = adapt("run", "b", "-i", rows, "-o", out, "--resume")
    assert code == 3
    assert err.startswith("3 rows, 2 of them from before, 1 failed, ")
    assert out.read_bytes() == whole
    monkeypatch.setattr(services, "open_session", None)  # nothing left: no model is loaded
    assert adapt("run", "b", "-i", rows, "-o", out, "--resume") == (
        3,
        "",
        f"3 rows are there, 1 of them failed; {WHOLE}",
    )


@pytest.mark.parametrize("form", ["jsonl", "csv", "tsv", "txt"])
@pytest.mark.parametrize("torn", ['{"row": 9, "te', "x", '"a\n', ""])
def test_what_is_torn_behind_the_last_row_is_cut_off(adapt: Invoke, tmp_path: Path, form: str, torn: str) -> None:
    out, rows = tmp_path / f"out.{form}", source(tmp_path, "a\nb\n", "in.txt")
    assert adapt("run", "b", "-i", rows, "-o", out)[0] == 0
    whole = out.read_bytes()
    out.write_bytes(whole + torn.replace("\n", "" if form != "csv" else "\n").encode())
    assert adapt("run", "b", "-i", rows, "-o", out, "--resume") == (0, "", f"2 rows are there; {WHOLE}")
    assert out.read_bytes() == whole
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--temperature", "0.5"], "temperature 0.0, not 0.5"),
        (["--max-tokens", "9"], "max_tokens 512, not 9"),
        (["--seed", "3"], "seed unset, not 3"),
        (["--stop", "x"], 'stop [], not ["x"]'),
        (["--tau", "0.9"], 'tau unset, not "0.9"'),
        (["--head-bits", "8"], 'head_bits "16", not "8"'),
        (["--lossless"], 'lossless "False", not "True"'),
        (["--system", "Be short."], 'system unset, not "Be short."'),
        (["--raw"], "raw false, not true"),
    ],
)
def test_resume_with_other_settings(adapt: Invoke, tmp_path: Path, options: list[str], what: str) -> None:
    out, rows = tmp_path / "out.jsonl", source(tmp_path, "a\nDEFECT\n", "in.txt")
    with pytest.raises(ZeroDivisionError):
        adapt("run", "b", "-i", rows, "-o", out)
    before = out.read_bytes()
    code, _, err = adapt("run", "b", "-i", rows, "-o", out, "--resume", *options)
    assert code == 2
    assert err.startswith(f"adapt: error: {out} was begun with {what}. Give the settings of the first run, or ")
    assert out.read_bytes() == before
    with pytest.raises(ZeroDivisionError):  # the same settings, and others that change no answer, go on
        adapt("run", "b", "-i", rows, "-o", out, "--resume", "--threads", "1", "--batch-size", "2")


def test_resume_with_another_bundle_and_what_is_left_behind(adapt: Invoke, tmp_path: Path) -> None:
    out, manifest = tmp_path / "out.csv", tmp_path / "b" / "adapt.json"
    manifest.parent.mkdir()
    manifest.write_text("{}", encoding="utf-8")
    broken, rows = source(tmp_path, "a\nDEFECT\n", "in.txt"), source(tmp_path, "a\nb\n", "good.txt")
    with pytest.raises(ZeroDivisionError):
        adapt("run", manifest.parent, "-i", broken, "-o", out)
    manifest.write_text('{"tuned": 1}', encoding="utf-8")
    code, _, err = adapt("run", manifest.parent, "-i", rows, "-o", out, "--resume")
    assert code == 2
    assert "was begun with bundle " in err
    manifest.write_text("{}", encoding="utf-8")
    assert adapt("run", manifest.parent, "-i", rows, "-o", out, "--resume")[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "good.txt", "in.txt", "out.csv"]
    with pytest.raises(ZeroDivisionError):
        adapt("run", manifest.parent, "-i", broken, "-o", out, "--force", "--temperature", "1")
    assert adapt("run", manifest.parent, "-i", rows, "-o", out, "--force")[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "good.txt", "in.txt", "out.csv"]


def test_resume_of_another_input(adapt: Invoke, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    adapt("run", "b", "-i", source(tmp_path, "a\nb\n", "in.txt"), "-o", out)
    code, _, err = adapt("run", "b", "-i", source(tmp_path, "a\nx\n", "in.txt"), "-o", out, "--resume")
    assert code == 1
    assert err.startswith(f"adapt: error: {out}: output row 2 does not come from the input rows given. Give ")


def test_shards_together_are_the_whole(adapt: Invoke, tmp_path: Path) -> None:
    rows = source(tmp_path, "".join(f"r{n}\n" for n in range(7)), "in.txt")
    parts = [adapt("run", "b", "-i", rows, "--shard", f"{n}/3")[1].splitlines() for n in (1, 2, 3)]
    whole = adapt("run", "b", "-i", rows)[1].splitlines()
    assert sorted((line for part in parts for line in part), key=lambda line: json.loads(line)["row"]) == whole
    assert [len(part) for part in parts] == [3, 2, 2]


def test_seed_row_is_the_rows_number(
    adapt: Invoke, fakes: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    session = fakes.FakeSession(Path("b"), {})
    monkeypatch.setattr(services, "open_session", lambda *_: session)
    adapt("run", "b", "-i", source(tmp_path, "a\nb\nc\n", "in.txt"), "--shard", "2/2", "--seed", "5")
    assert [(prompt, options.row, options.choices.seed) for prompt, options in session.calls] == [("b", 2, 5)]


@pytest.mark.parametrize(("size", "at_once"), [("auto", "1 row"), ("1", "1 row"), ("3", "3 rows")])
def test_rows_at_once_change_nothing(adapt: Invoke, tmp_path: Path, size: str, at_once: str) -> None:
    rows = source(tmp_path, "a\n\nb FAIL\nc d\ne\n", "in.txt")
    code, out, err = adapt("run", "b", "-i", rows, "--format", "text", "--batch-size", size, "--stats")
    assert (code, out) == (3, "a \n\n\nc d \ne \n")
    assert "7 new tokens, " in err
    assert f" tokens/s with prompts, {at_once} at once\n" in err


def test_quiet_and_log(adapt: Invoke, tmp_path: Path) -> None:
    rows, log = source(tmp_path, "a\n", "in.txt"), tmp_path / "log"
    assert adapt("run", "b", "-i", rows, "-q", "--format", "text", "--log-file", log) == (0, "a \n", "")
    assert [line.split(" ", 1)[1][:6] for line in log.read_text("utf-8").splitlines()] == ["begin", "Rows", "1 rows"]


def test_text_output_says_what_failed(adapt: Invoke, tmp_path: Path) -> None:
    code, out, err = adapt("run", "b", "-i", source(tmp_path, "a\n\nb\n", "in.txt"), "--format", "text")
    assert (code, out) == (3, "a \n\nb \n")
    assert err.startswith("adapt: warning: row 2: the line is empty\n")


def test_empty_input(adapt: Invoke, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert adapt("run", "b", "-i", source(tmp_path, "", "in.txt"), "-o", out) == (0, "", "0 rows\n")
    assert out.read_bytes() == b""


# --- as another process


def test_dev_null_is_a_usage_error(program: list[str]) -> None:
    run = subprocess.run([*program, "run", "b"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == "adapt: error: no prompt. Give one after BUNDLE, with -p or -f FILE, or pipe it in\n"
    run = subprocess.run(
        [*program, "run", "b", "hi"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "hi \n", "")


def test_head_ends_it_quietly(program: list[str], tmp_path: Path) -> None:
    rows = source(tmp_path, "row\n" * 20_000, "in.txt")
    line = " ".join([*program, "run", "b", "-q", "-i", str(rows)])
    script = f"{line} | head -1 | wc -l; echo ${{PIPESTATUS[0]}}"
    run = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["1", "141"]
    assert run.stderr == ""


def test_rows_appear_as_they_come_and_survive_a_kill(program: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    args = [*program, "run", "b", "-i", "-", "-o", str(out), "-q"]
    with subprocess.Popen(args, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        for count in (1, 2):
            process.stdin.write(b"row\n")
            process.stdin.flush()  # the pipe stays open: a row is answered when its line is there
            deadline = time.monotonic() + 20
            while (not out.exists() or out.read_bytes().count(b"\n") < count) and time.monotonic() < deadline:
                time.sleep(0.02)
            assert out.read_bytes().count(b"\n") == count
        process.kill()
    rows = source(tmp_path, "row\nrow\nlast\n", "in.txt")
    subprocess.run([*program, "run", "b", "-i", str(rows), "-o", str(out), "--resume", "-q"], check=True)
    assert [json.loads(line)["row"] for line in out.read_text("utf-8").splitlines()] == [1, 2, 3]


def test_interrupted_rows_say_how_to_go_on(program: list[str], tmp_path: Path) -> None:
    out, rows = tmp_path / "out.txt", source(tmp_path, "first\nSLOW " + "x " * 100 + "\n", "in.txt")
    args = [*program, "run", "b", "-i", str(rows), "-o", str(out)]
    with subprocess.Popen(args, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 20
        while (not out.exists() or not out.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert err == "stopped; 1 rows are written. Go on with --resume\n"


def test_full_disk(program: list[str], tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    rows = source(tmp_path, "a\n", "in.txt")
    args = [*program, "run", "b", "-i", str(rows), "-o", "/dev/full", "--format", "jsonl"]
    run = subprocess.run(args, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert run.returncode == 5
    assert "the disk is full" in run.stderr
    assert "Traceback" not in run.stderr


def test_korean_and_emoji_through_an_ascii_locale(program: list[str]) -> None:
    environment = {**os.environ, "LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    text = "똻 👩‍👩‍👧 끝"
    run = subprocess.run([*program, "run", "b"], input=text.encode(), capture_output=True, env=environment, check=True)
    assert run.stdout.decode() == f"{text} \n"
