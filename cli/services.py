"""The one place where commands reach into the rooms below; each import happens when it is called.

torch comes in with these imports and with nothing else, so that help, completion and errors of usage do without.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..runtime.progress import Reporter
from .generation import Choices

if TYPE_CHECKING:
    from ..convert.request import ConvertRequest, RiverSettings
    from ..runtime.bundle import Bundle
    from ..runtime.conversation import GenerationOptions
    from ..runtime.session import Session


def describe(path: Path, *, resident: int | None, cache_dir: Path | None, reporter: Reporter) -> dict[str, Any]:
    """Return what is in a bundle, by the keys of `inspect --json`."""
    from ..runtime.bundle import Bundle  # noqa: PLC0415
    from ..runtime.describe import describe as describe_bundle  # noqa: PLC0415

    bundle = Bundle.open(path, cache_dir=cache_dir, reporter=reporter)
    return describe_bundle(bundle, resident=resident)


def verify(path: Path, *, cache_dir: Path | None, reporter: Reporter) -> dict[str, Any]:
    """Check a bundle and run its self-check; return the keys of `verify --json`."""
    from ..runtime.verify import verify as verify_bundle  # noqa: PLC0415

    return verify_bundle(path, reporter=reporter, cache_dir=cache_dir, self_check=_self_check).as_dict()


def _self_check(bundle: "Bundle") -> Sequence[str]:
    """Run the text that conversion ran; return what comes out differently."""
    from ..runtime.loading import load_river  # noqa: PLC0415
    from ..runtime.options import SessionOptions  # noqa: PLC0415
    from ..runtime.self_check import compare, run_self_check  # noqa: PLC0415
    from ..runtime.text import Tokenizer  # noqa: PLC0415

    recorded = bundle.manifest.self_check
    if recorded is None:
        return ()
    everything = bundle.architecture.num_layers  # as at conversion: the check is of the files, not of a placement
    model = load_river(bundle, SessionOptions(device="cpu", resident=everything, cache_dir=bundle.cache_dir))
    return compare(recorded, run_self_check(model, Tokenizer.load(bundle.path)))


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


def open_session(path: Path, settings: Mapping[str, Any], reporter: Reporter) -> "Session":
    """Open a bundle and load its model. `settings` are the fields of SessionOptions."""
    from ..runtime.options import SessionOptions  # noqa: PLC0415

    options = SessionOptions(**settings)
    from ..runtime.session import open_session as open_bundle  # noqa: PLC0415 - torch, after the options were checked

    return open_bundle(path, options, reporter=reporter)


def generation_options(choices: Choices, *, row: int = 0) -> "GenerationOptions":
    """Return how to answer. Raises UsageError for a value out of its range."""
    from ..runtime.conversation import GenerationOptions  # noqa: PLC0415
    from ..runtime.sampling import Sampling  # noqa: PLC0415

    sampling = Sampling(
        temperature=choices.temperature,
        top_k=choices.top_k,
        top_p=choices.top_p,
        min_p=choices.min_p,
        seed=choices.seed,
        repetition_penalty=choices.repetition_penalty,
    )
    return GenerationOptions(
        sampling=sampling,
        max_tokens=choices.max_tokens,
        stop=choices.stop,
        stop_ids=choices.stop_token_id,
        ignore_eos=choices.ignore_eos,
        row=row,
    )


def peak_memory() -> int:
    """Return the most memory this process has had so far, in bytes; that of the GPU where one was used."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_reserved())
    if sys.platform == "win32":
        import psutil  # noqa: PLC0415

        return int(psutil.Process().memory_info().peak_wset)
    import resource  # noqa: PLC0415 - not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) if sys.platform == "darwin" else int(peak) * 1024
