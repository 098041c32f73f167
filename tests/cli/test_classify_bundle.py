"""From `adapt convert --method 2dee` to labels, on a tiny model, all through the command line and without fakes."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from adapt_llm.cli.app import app

WORDS = {"good": ("splendid", "wonderful", "excellent"), "bad": ("boring", "dreadful", "rubbish")}
FILLER = ("the film was", "we saw it and it was", "all of it is", "her part in it seems")


def adapt(*args: object, stdin: str | None = None) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(arg) for arg in args], input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def rows(seed: int, count: int) -> list[dict[str, str]]:
    draw = random.Random(seed)
    made = []
    for number in range(count):
        label = ("bad", "good")[number % 2]
        sentences = [f"So {draw.choice(FILLER)} {draw.choice(WORDS[label])}." for _ in range(draw.randint(1, 4))]
        made.append({"id": number, "text": " ".join(sentences), "label": label})
    return made


def write(path: Path, lines: list[dict[str, str]]) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def bundle(toy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    data = write(folder / "train.jsonl", rows(0, 160))
    args = ["--method", "2dee", "--data", data, "-o", folder / "toy-2dee", "--prompt", "Label: ", "--max-tokens", "180"]
    code, out, err = adapt("convert", toy_model, *args, "--epochs", "12", "-q", "--threads", "1")
    assert (code, err) == (0, "")
    return Path(out.strip())


def test_the_same_labels_however_they_are_asked_for(bundle: Path, tmp_path: Path) -> None:
    lines = rows(1, 30)
    file, out = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    assert adapt("run", bundle, "-i", file, "-o", out, "-q")[0] == 0
    whole = out.read_bytes()
    answers = [json.loads(line) for line in whole.splitlines()]
    labels = [answer["label"] for answer in answers]
    assert sum(label == line["label"] for label, line in zip(labels, lines, strict=True)) >= 24

    def table(text: str) -> list[tuple[str, float]]:
        return [(label, float(number)) for label, number in (line.split("\t") for line in text.splitlines())]

    def same(found: list[tuple[str, float]]) -> bool:
        wanted = [(answer["label"], pytest.approx(answer["confidence"], abs=1e-4)) for answer in answers]
        return found == wanted

    piped = adapt("run", bundle, "-q", stdin="".join(f"{line['text']}\n" for line in lines))
    assert piped[0] == 0
    assert same(table(piped[1]))
    shards = [adapt("run", bundle, "-i", file, "--shard", f"{n}/3", "--format", "text", "-q")[1] for n in (1, 2, 3)]
    joined = [line for some in zip(*(shard.splitlines() for shard in shards), strict=True) for line in some]
    assert same(table("\n".join(joined)))
    one = [table(adapt("run", bundle, line["text"])[1])[0] for line in lines[:4]]
    assert [label for label, _ in one] == labels[:4]
    out.write_bytes(whole[: len(whole) * 3 // 5])
    assert adapt("run", bundle, "-i", file, "-o", out, "--resume", "-q")[0] == 0
    assert [json.loads(line)["label"] for line in out.read_bytes().splitlines()] == labels


def test_sentences_as_given(bundle: Path, tmp_path: Path) -> None:
    lines = [{"sentences": ["So all of it is boring.", "So all of it is rubbish."]}, {"sentences": []}]
    code, out, _ = adapt("run", bundle, "-i", write(tmp_path / "in.jsonl", lines), "--full", "-q")
    first, second = map(json.loads, out.splitlines())
    assert (code, first["label"], first["sentences"], first["layers"], first["work"]) == (3, "bad", 2, 4, 1.0)
    assert "error" in second


def test_evaluation_agrees_with_running(bundle: Path, tmp_path: Path) -> None:
    lines = rows(2, 40)
    file = write(tmp_path / "test.jsonl", lines)
    code, out, err = adapt("eval", bundle, "--labels", file, "--json", "-q")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["dense"]["work"] == 1.0
    for args, figures in (("--full", found["dense"]), ("--one-d", found["one_d"])):
        answers = [json.loads(line) for line in adapt("run", bundle, "-i", file, args, "-q")[1].splitlines()]
        right = [answer["label"] == line["label"] for answer, line in zip(answers, lines, strict=True)]
        assert figures["accuracy"] == pytest.approx(sum(right) / len(right))
        assert figures["mean_layers"] == pytest.approx(sum(answer["layers"] for answer in answers) / len(answers))


def test_inspect(bundle: Path) -> None:
    code, out, _ = adapt("inspect", bundle)
    assert code == 0
    assert "  labels       bad, good" in out
    assert "dense + adapter" in out
    assert max(map(len, out.splitlines()[1:])) <= 80
    facts = json.loads(adapt("inspect", bundle, "--json")[1])
    assert [layer["adapter"] for layer in facts["layers"]] == [256] * 4


def test_other_commands(bundle: Path, tmp_path: Path) -> None:
    assert adapt("verify", bundle)[0] == 0
    assert adapt("chat", bundle)[0] == 2
    code, out, _ = adapt("export", bundle, "--format", "hf", "-o", tmp_path / "hf", "-q")
    assert code == 0
    assert (Path(out.strip()) / "config.json").exists()


def test_labels_without_transformers_and_sockets(bundle: Path) -> None:
    script = (
        "import socket, sys\n"
        "def closed(*_): raise AssertionError('a socket')\n"
        "socket.socket.connect = closed\n"
        "from adapt_llm.cli.app import app\n"
        "code = app(['run', sys.argv[1], 'all of it is rubbish'], standalone_mode=False)\n"
        "print(code, 'transformers' in sys.modules, file=sys.stderr)"
    )
    args = [sys.executable, "-c", script, str(bundle)]
    run = subprocess.run(args, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL)
    assert run.stderr == "0 False\n"
    assert run.stdout.count("\t") == run.stdout.count("\n") == 1
