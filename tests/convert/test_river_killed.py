"""A whole conversion in a process of its own, killed with SIGKILL at random moments and run again: the same bytes."""

import hashlib
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

KILLS = 10
LONGEST = 1 / 6
"""Of the time that the whole work takes: at most so much lies between a start and its kill, so that several hit."""
COMMAND = "from adapt_llm.cli.app import main; main()"


def start(source: Path, output: Path, text: Path) -> subprocess.Popen[bytes]:
    options = ["--method", "river", "--quantizer", "gptq", "--group-size", "32", "--calibration", str(text)]
    command = [
        sys.executable,
        "-c",
        COMMAND,
        "convert",
        str(source),
        "-o",
        str(output),
        *options,
        "--threads",
        "1",
        "-q",
    ]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def started(work: Path) -> int:
    """Which start the work folder has seen last: every one writes its state anew."""
    state = work / "state.json"
    return state.stat().st_ino if state.exists() else 0


def wait_for_start(process: subprocess.Popen[bytes], work: Path, before: int) -> None:
    """Until the work begins: imports are not what is tested."""
    while process.poll() is None and started(work) == before:
        time.sleep(0.005)


def finish(process: subprocess.Popen[bytes]) -> None:
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors.decode()


def bytes_of(bundle: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(bundle.iterdir())}


@pytest.mark.slow
def test_killed_at_ten_random_moments_it_ends_the_same(tiny_llama: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("A river begins somewhere, and nobody agrees on where. 강은 흐른다. " * 600, encoding="utf-8")
    process = start(tiny_llama, tmp_path / "whole", text)
    wait_for_start(process, tmp_path / ".whole.adapt-work", 0)
    began = time.perf_counter()
    finish(process)
    longest = LONGEST * (time.perf_counter() - began)
    whole = bytes_of(tmp_path / "whole")
    cut, work = tmp_path / "cut", tmp_path / ".cut.adapt-work"
    chance = random.Random(20)
    kills = 0
    while kills < KILLS and not cut.exists():
        before = started(work)
        process = start(tiny_llama, cut, text)
        wait_for_start(process, work, before)
        time.sleep(chance.uniform(0, longest))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode in (-signal.SIGKILL, 0)
        assert not cut.exists() or bytes_of(cut) == whole, "the output appears whole or not at all"
        kills += process.returncode != 0
    if not cut.exists():
        finish(start(tiny_llama, cut, text))
    assert kills >= 3, "too few kills hit: the test shows nothing"
    assert bytes_of(cut) == whole
    assert not work.exists()
