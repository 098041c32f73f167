"""What the rows of an output are made with, kept beside it until it is whole: `--resume` must not mix settings.

Knows files and JSON; nothing of what is in a bundle, and no rows. An output that is whole has no such file.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from ..errors import UsageError
from ..runtime.json_text import parse_json
from .writing import write_whole

Settings = Mapping[str, object]
"""Name, as people know it -> value, anything that JSON holds: what answers depend on."""


def place(output: Path) -> Path:
    """Return where the settings of `output` are kept."""
    return output.with_name(f".{output.name}.adapt-run")


def begin(output: Path, settings: Settings) -> None:
    """Keep the settings before the first row is written; of an output that is no file there is nothing to resume."""
    if settings and (output.is_file() or not output.exists()):
        write_whole(place(output), json.dumps(settings, ensure_ascii=False) + "\n")


def check(output: Path, settings: Settings) -> None:
    """Refuse to go on with other settings than those kept; where none are kept there is nothing to compare.

    Raises UsageError that names the first difference.
    """
    before = _read(place(output))
    now = json.loads(json.dumps(settings))
    for name in before if settings else ():
        if before[name] != now.get(name):
            what = f"{output} was begun with {name} {_said(before[name])}, not {_said(now.get(name))}"
            raise UsageError(what, "Give the settings of the first run, or start again with --force")


def end(output: Path) -> None:
    """Forget the settings: the output is whole."""
    place(output).unlink(missing_ok=True)


def manifest_digest(path: Path) -> str:
    """Return a short hash of a bundle's manifest: another bundle has another one, and so has the same one, tuned."""
    from ..runtime.manifest import MANIFEST_NAME  # noqa: PLC0415

    try:
        return hashlib.sha256((path / MANIFEST_NAME).read_bytes()).hexdigest()[:12]
    except OSError:
        return ""  # opening the bundle says what is wrong with it


def _read(path: Path) -> dict[str, object]:
    try:
        found = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _said(value: object) -> str:
    return "unset" if value is None else json.dumps(value, ensure_ascii=False)
