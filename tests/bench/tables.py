"""All tables of docs/benchmarks.md that come from commands: runs them one after another and writes one Markdown file.

python tests/bench/tables.py OUT.md BUNDLE... [--text wiki.txt] [--rows test.jsonl] [--dense MODEL]

What a bundle is decides what is run: see `commands`. A command that fails is named in the file, with its error. Run it
with nothing else running; `make bench` does.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
CONTEXTS = "128,2048"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("bundles", type=Path, nargs="+")
    parser.add_argument("--text", type=Path, help="a text: prompts come from it, and quality by threshold is measured")
    parser.add_argument("--rows", type=Path, help="rows for bundles that classify")
    parser.add_argument("--dense", type=Path, help="the model that an R-CLA bundle came from")
    parser.add_argument("--against", choices=["transformers"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--contexts", default=CONTEXTS)
    arguments = parser.parse_args()
    parts = ["# Measured tables", "", "Written by `make bench`; each table with its command and machine.", ""]
    for bundle in arguments.bundles:
        for command in commands(bundle, arguments):
            print(shlex.join(command), file=sys.stderr, flush=True)
            parts += [*section(command), ""]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text("\n".join(parts), encoding="utf-8")


def commands(bundle: Path, asked: argparse.Namespace) -> Iterator[list[str]]:
    """Generation at every context, at one and eight rows; a mixture also drawn from; rows a second; quality by tau."""
    manifest = json.loads((bundle / "adapt.json").read_text(encoding="utf-8"))
    methods = {method["name"] for method in manifest["methods"]}
    bench = [sys.executable, "-m", "adapt_llm", "bench", str(bundle), "--rounds", str(asked.rounds)]
    if "2dee" in methods:
        if asked.rows:
            yield [*bench[:-2], "-i", str(asked.rows)]
        return
    text = ["--text", str(asked.text)] if asked.text else []
    dense = ["--dense", str(asked.dense)] if asked.dense and "rcla" in methods else []
    floor = ["--floor"] if "river" in methods else []
    against = ["--against", asked.against] if asked.against and (dense or "rcla" not in methods) else []
    yield [*bench, "--context", asked.contexts, *text, *dense, *floor, *against]
    yield [*bench, "--batch-size", "8", "--no-memory", *text, *dense, *floor]
    if "nvium" in methods:
        yield [*bench, "--temperature", "1", "--no-memory", *text]
    if "river" in methods:
        yield [*bench, "--lossless", "--no-memory", *text]
        if asked.text:
            yield [sys.executable, str(HERE / "exits.py"), str(bundle), "--text", str(asked.text)]


def section(command: list[str]) -> list[str]:
    """One command's table, or why there is none."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.md"
        reported = "bench" in command
        full = [*command, "--report", str(report)] if reported else command
        done = subprocess.run(full, capture_output=True, text=True, encoding="utf-8", check=False)
        if done.returncode:
            return [f"`{shlex.join(command)}` failed:", "", "```", done.stderr.strip()[-2000:], "```"]
        if not reported:
            return [f"`{shlex.join(command)}`", "", done.stdout]
        lines = report.read_text(encoding="utf-8").replace(f" --report {report}", "")
        return lines.splitlines()


if __name__ == "__main__":
    main()
