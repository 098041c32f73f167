"""The most memory that one contender takes, measured in a process of its own.

In the process that compares them all contenders are loaded at once; here one runs alone, as
`python -m adapt_llm.runtime.bench_memory`. The job comes as JSON on stdin, the answer goes as JSON to stdout.
"""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import AdaptError
from .options import SessionOptions
from .process import peak_memory

if TYPE_CHECKING:
    from .bench_bundle import BenchOptions, Name

_TOKENS = 4
_PATHS = ("cache_dir",)


def measure(path: Path, options: "BenchOptions", name: "Name") -> int:
    """Return the bytes that contender `name` needs for the first context and number of rows, in another process.

    Raises AdaptError where that process failed.
    """
    session = {key: str(value) if key in _PATHS and value else value for key, value in asdict(options.session).items()}
    job = {
        "path": str(path.resolve()),
        "name": name,
        "session": session,
        "context": options.contexts[0],
        "rows": options.rows[0],
        "dense": None if options.dense is None else str(options.dense.resolve()),
        "text": options.text,
    }
    command = [sys.executable, "-m", __name__]
    done = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True, encoding="utf-8", check=False)  # noqa: S603 - this program
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
        raise AdaptError(f"memory of {name} could not be measured: {reason[0]}", "Leave it out with --no-memory.")
    return int(json.loads(done.stdout)["bytes"])


def run(job: dict[str, Any]) -> int:
    """Load one contender, run a short text, and return this process's peak."""
    from .bench_bundle import BenchOptions, Field, set_threads  # noqa: PLC0415 - torch, in the child alone

    session = SessionOptions(**{key: _path(key, value) for key, value in job["session"].items()})
    set_threads(session.threads)
    options = BenchOptions(
        session=session,
        contexts=(job["context"],),
        rows=(job["rows"],),
        tokens=_TOKENS,
        dense=None if job["dense"] is None else Path(job["dense"]),
        text=job["text"],
        floor=job["name"] == "floor",
    )
    field = Field(Path(job["path"]), options)
    field.contender(job["name"], job["context"], job["rows"]).lap(afresh=True)
    return peak_memory()


def _path(key: str, value: Any) -> Any:  # noqa: ANN401 - a field of SessionOptions
    return Path(value) if key in _PATHS and value else value


if __name__ == "__main__":
    sys.stdout.write(json.dumps({"bytes": run(json.loads(sys.stdin.read()))}))
