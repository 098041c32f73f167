"""The one place where commands reach into the rooms below; each import happens when it is called.

torch comes in with these imports and with nothing else, so that help, completion and errors of usage do without.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..runtime.progress import Reporter

if TYPE_CHECKING:
    from ..convert.request import ConvertRequest, RiverSettings


def describe(path: Path, *, resident: int | None, cache_dir: Path | None, reporter: Reporter) -> dict[str, Any]:
    """Return what is in a bundle, by the keys of `inspect --json`."""
    from ..runtime.bundle import Bundle  # noqa: PLC0415
    from ..runtime.describe import describe as describe_bundle  # noqa: PLC0415

    bundle = Bundle.open(path, cache_dir=cache_dir, reporter=reporter)
    return describe_bundle(bundle, resident=resident)


def verify(path: Path, *, cache_dir: Path | None, reporter: Reporter) -> dict[str, Any]:
    """Check a bundle and run its self-check; return the keys of `verify --json`."""
    from ..runtime.verify import verify as verify_bundle  # noqa: PLC0415

    return verify_bundle(path, reporter=reporter, cache_dir=cache_dir).as_dict()


def plan(request: "ConvertRequest", reporter: Reporter) -> Any:  # noqa: ANN401 - convert.river.Plan, seen by its users
    """Plan a conversion: what will be read, written and needed."""
    from ..convert.river import plan as plan_conversion  # noqa: PLC0415

    return plan_conversion(request, reporter)


def build(planned: Any, reporter: Reporter) -> Path:  # noqa: ANN401 - as above
    """Carry a plan out; return the bundle's folder."""
    from ..convert.river import build as build_bundle  # noqa: PLC0415

    return build_bundle(planned, reporter)


def convert_request(**values: Any) -> "ConvertRequest":  # noqa: ANN401 - the fields of ConvertRequest
    """Say what is asked for, checked. Raises UsageError."""
    from ..convert.request import ConvertRequest  # noqa: PLC0415

    return ConvertRequest(**values)


def river_settings(**values: Any) -> "RiverSettings":  # noqa: ANN401 - the fields of RiverSettings
    """Say how the river is asked for, checked. Raises UsageError."""
    from ..convert.request import RiverSettings  # noqa: PLC0415

    return RiverSettings(**values)


def quality(path: Path) -> dict[str, Any] | None:
    """Return the figures that conversion measured."""
    from ..runtime.manifest import MANIFEST_NAME, read_manifest  # noqa: PLC0415

    measured = read_manifest(path / MANIFEST_NAME).quality
    return None if measured is None else measured.model_dump(mode="json")


def export(
    path: Path, form: Literal["gptq", "hf"], output: Path, *, force: bool, cache_dir: Path | None, reporter: Reporter
) -> Path:
    """Write a bundle in another form; return where it is."""
    from ..convert.export import export as export_bundle  # noqa: PLC0415
    from ..runtime.bundle import Bundle  # noqa: PLC0415

    bundle = Bundle.open(path, cache_dir=cache_dir, reporter=reporter)
    return export_bundle(bundle, form, output, reporter=reporter, force=force)
