"""`adapt run` on a bundle that classifies, as a process: pipes that pause, tail -f, Ctrl-C, head, a kill."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path


def source(tmp_path: Path, text: str, name: str = "in.txt") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def _wait(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not what() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert what()


def test_lines_are_answered_as_they_come(classify_program: list[str]) -> None:
    with subprocess.Popen(
        [*classify_program, "run", "b", "-q"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for lines, labels in (("good\n", ["pos"]), ("bad\n\n", ["neg", ""]), ("bad\nFAIL\ngood\n", ["neg", "", "pos"])):
            process.stdin.write(lines.encode())
            process.stdin.flush()  # the pipe stays open, and far fewer lines than a batch are there
            assert [process.stdout.readline().decode().split("\t")[0] for _ in labels] == [
                name.strip() for name in labels
            ]
        process.stdin.write(b"go")  # half a line is no line
        process.stdin.flush()
        process.stdin.write(b"od")
        process.stdin.close()
        assert process.stdout.read() == b"pos\t0.876543\n"
    assert process.returncode == 3


def test_tail_follows_a_file(classify_program: list[str], tmp_path: Path) -> None:
    log, out = source(tmp_path, "good\nbad\n", "log.txt"), tmp_path / "labels"
    script = 'tail -n +1 -f "$0" | "$@" > "$OUT"'
    environment = {**os.environ, "OUT": str(out)}
    with subprocess.Popen(
        ["bash", "-c", script, str(log), *classify_program, "run", "b", "-q"], env=environment, start_new_session=True
    ) as shell:
        try:
            _wait(lambda: out.exists() and out.read_bytes().count(b"\n") == 2)
            with log.open("a") as stream:
                stream.write("good\n")
            _wait(lambda: out.read_text("utf-8") == "pos\t0.876543\nneg\t0.876543\npos\t0.876543\n")
        finally:
            os.killpg(shell.pid, signal.SIGTERM)


def test_ctrl_c_while_waiting_for_a_line(classify_program: list[str], tmp_path: Path) -> None:
    """The thread that reads must not keep the program from ending, nor make Python complain."""
    out = tmp_path / "out.jsonl"
    args = [*classify_program, "run", "b", "-i", "-", "-o", str(out)]
    with subprocess.Popen(args, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(b"good\n")
        process.stdin.flush()
        _wait(lambda: out.exists() and out.read_bytes().endswith(b"\n"))
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert process.stderr.read() == b"stopped; 1 rows are written. Go on with --resume\n"


def test_head_ends_it_quietly(classify_program: list[str]) -> None:
    line = " ".join([*classify_program, "run", "b", "-q"])
    script = f"yes good | {line} | head -2; echo ${{PIPESTATUS[1]}}"
    run = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout == "pos\t0.876543\npos\t0.876543\n141\n"
    assert run.stderr == ""


def test_a_kill_loses_no_row_and_doubles_none(classify_program: list[str], tmp_path: Path) -> None:
    rows = source(tmp_path, "".join(f"{'good ' * (1 + n % 7)}{n}\n" for n in range(5_000)))
    out = tmp_path / "out.jsonl"
    args = [*classify_program, "run", "b", "-q", "-i", str(rows), "-o", str(out)]
    with subprocess.Popen(args, stdin=subprocess.DEVNULL) as process:
        _wait(lambda: out.exists() and out.stat().st_size > 10_000)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert 0 < out.read_bytes().count(b"\n") < 5_000
    subprocess.run([*args, "--resume"], stdin=subprocess.DEVNULL, check=True)
    assert [json.loads(line)["row"] for line in out.read_text("utf-8").splitlines()] == list(range(1, 5_001))


def test_an_error_of_usage_needs_no_torch(tmp_path: Path) -> None:
    script = (
        "import sys; from adapt_llm.cli.app import app\n"
        "code = app(['run', sys.argv[1], 'good', '--full'], standalone_mode=False)\n"
        "print(code, 'torch' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        stdin=subprocess.DEVNULL,
    )
    assert run.stdout == "2 False\n"
    assert "adapt.json" in run.stderr
