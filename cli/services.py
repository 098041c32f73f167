"""The one place where commands reach into the rooms below; each import happens when it is called.

torch comes in with these imports and with nothing else, so that help, completion and errors of usage do without.
"""

import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from ..runtime import process
from ..runtime.progress import Reporter
from .collector import import_torch
from .generation import Choices
from .preload import tokenizer_beside_torch
from .text_classifier import TextClassifier

if TYPE_CHECKING:
    from ..convert.labelled import LabelledData
    from ..convert.recipes import Plan
    from ..convert.request import ConvertRequest
    from ..runtime.bundle import Bundle
    from ..runtime.methods import TwoDee
    from ..runtime.options import GenerationOptions, SessionOptions
    from ..runtime.schedule import Mode
    from ..runtime.session import Session
    from .classification import Point
    from .eval_tasks import TasksRequest

CPU_BATCH = 16
"""Documents at once where nothing is said: on a CPU, and elsewhere."""
GPU_BATCH = 64


def describe(path: Path, *, resident: int | None, cache_dir: Path | None, reporter: Reporter) -> dict[str, Any]:
    """Return what is in a bundle, by the keys of `inspect --json`."""
    from ..runtime.bundle import Bundle  # noqa: PLC0415

    bundle = Bundle.open(path, cache_dir=cache_dir, reporter=reporter)
    import_torch()
    from ..runtime.describe import describe as describe_bundle  # noqa: PLC0415

    return describe_bundle(bundle, resident=resident)


def verify(path: Path, *, cache_dir: Path | None, reporter: Reporter) -> dict[str, Any]:
    """Check a bundle and run its self-check; return the keys of `verify --json`."""
    import_torch()
    from ..runtime.verify import verify as verify_bundle  # noqa: PLC0415

    return verify_bundle(path, reporter=reporter, cache_dir=cache_dir, self_check=_self_check).as_dict()


def _self_check(bundle: "Bundle") -> Sequence[str]:
    """Run the text that conversion ran; return what comes out differently."""
    from ..runtime.models import self_check  # noqa: PLC0415

    return self_check(bundle)


def plan(request: "ConvertRequest[Any]", reporter: Reporter) -> "Plan":
    """Plan a conversion: what will be read, written and needed."""
    import_torch()
    from ..convert.recipes import recipe  # noqa: PLC0415

    return recipe(request.method).plan(request, reporter)


def build(planned: "Plan", reporter: Reporter) -> Path:
    """Carry a plan out; return the bundle's folder."""
    from ..convert.recipes import recipe  # noqa: PLC0415

    return recipe(planned.request.method).build(planned, reporter)


def convert_request(method: str, settings: Mapping[str, Any], **values: Any) -> "ConvertRequest[Any]":  # noqa: ANN401
    """Say what is asked for, checked. `settings` are the method's own. Raises UsageError."""
    from ..convert.recipes import request  # noqa: PLC0415

    return request(method, settings, **values)


def quality(path: Path) -> dict[str, Any] | None:
    """Return the figures that conversion measured."""
    from ..runtime.manifest import MANIFEST_NAME, read_manifest  # noqa: PLC0415

    measured = read_manifest(path / MANIFEST_NAME).quality
    return None if measured is None else measured.model_dump(mode="json")


def export(
    path: Path, form: Literal["gptq", "hf"], output: Path, *, force: bool, cache_dir: Path | None, reporter: Reporter
) -> Path:
    """Write a bundle in another form; return where it is."""
    from ..runtime.bundle import Bundle  # noqa: PLC0415

    bundle = Bundle.open(path, cache_dir=cache_dir, reporter=reporter)
    import_torch()
    from ..convert.export import export as export_bundle  # noqa: PLC0415

    return export_bundle(bundle, form, output, reporter=reporter, force=force)


def open_session(path: Path, settings: Mapping[str, Any], reporter: Reporter) -> "Session":
    """Open a bundle and load its model. `settings` are the fields of SessionOptions."""
    bundle, options = _opened(path, settings, reporter)
    tokenizer = tokenizer_beside_torch(path)
    import_torch()
    from ..runtime.session import load_session  # noqa: PLC0415

    return load_session(bundle, tokenizer, options, reporter=reporter)


def twodee(path: Path) -> "TwoDee | None":
    """Return the settings of a bundle that classifies, None for one that generates. Reads the manifest alone."""
    from ..runtime.bundle import check_is_bundle  # noqa: PLC0415
    from ..runtime.manifest import MANIFEST_NAME, read_manifest  # noqa: PLC0415
    from ..runtime.methods import TwoDee  # noqa: PLC0415

    check_is_bundle(path)
    return read_manifest(path / MANIFEST_NAME).method(TwoDee)


def mode(point: "Point") -> "Mode":
    """Return how documents run at an operating point."""
    from ..runtime.schedule import Full, OneD, Rule, TwoD  # noqa: PLC0415

    if point.thresholds is not None:
        return TwoD(Rule(*point.thresholds), point.layer)
    return Full() if point.layer is None else OneD(point.layer)


def open_classifier(path: Path, settings: Mapping[str, Any], reporter: Reporter) -> TextClassifier:
    """Open a bundle that classifies and load its model. `settings` are the fields of SessionOptions."""
    bundle, options = _opened(path, settings, reporter)
    tokenizer = tokenizer_beside_torch(path)
    import_torch(options.threads)
    from ..runtime.classify_loading import document_reader, load_classifier, settings_of  # noqa: PLC0415

    stored = settings_of(bundle)
    reader = document_reader(stored, tokenizer)
    classifier = load_classifier(bundle, options, reporter, reader=reader)
    at_once = CPU_BATCH if classifier.decoder.device.type == "cpu" else GPU_BATCH
    return TextClassifier(
        labels=stored.labels,
        layers=classifier.layers,
        batch_size=at_once,
        reader=reader,
        classifier=classifier,
    )


def _opened(path: Path, settings: Mapping[str, Any], reporter: Reporter) -> "tuple[Bundle, SessionOptions]":
    """Check the fields of SessionOptions, and open a bundle without its model. No torch: errors come at once."""
    from ..runtime.options import SessionOptions  # noqa: PLC0415

    options = SessionOptions(**settings)
    from ..runtime.bundle import Bundle  # noqa: PLC0415

    return Bundle.open(path, cache_dir=options.cache_dir, reporter=reporter), options


def text_quality(
    path: Path, text: str, settings: Mapping[str, Any], *, limit: int | None, reporter: Reporter
) -> dict[str, Any]:
    """Measure a bundle on a text; return the keys of `eval --text --json`. `settings` are fields of SessionOptions."""
    bundle, options = _opened(path, settings, reporter)
    import_torch(options.threads)
    from ..runtime.text_quality import text_quality as measure  # noqa: PLC0415

    return measure(bundle, text, options, limit=limit, reporter=reporter).to_dict()


def task_quality(
    path: Path, request: "TasksRequest", settings: Mapping[str, Any], reporter: Reporter
) -> dict[str, Any]:
    """Run tasks of lm-evaluation-harness; return the keys of `eval --tasks --json`. Raises AdaptError without it."""
    from ..runtime.task_quality import SEED, TaskSettings, check_harness  # noqa: PLC0415
    from ..runtime.task_quality import task_quality as measure  # noqa: PLC0415

    check_harness()
    asked = {name: getattr(request, name) for name in ("include", "few_shot", "limit", "batch_size", "chat", "system")}
    seed = SEED if request.seed is None else request.seed
    tasks = TaskSettings(request.names, seed=seed, full_depth=request.full_depth, **asked)
    return measure(open_session(path, settings, reporter), tasks, reporter)


def tune(path: Path, values: Mapping[str, Any], settings: Mapping[str, Any], reporter: Reporter) -> dict[str, Any]:
    """Tune a bundle; return the keys of `tune --json`.

    `values` are fields of TuneRequest, `settings` of SessionOptions. Raises UsageError for what cannot be asked.
    """
    from ..convert.tune_request import TuneRequest  # noqa: PLC0415
    from ..runtime.options import SessionOptions  # noqa: PLC0415

    request = TuneRequest(path, options=SessionOptions(**settings), **values)
    import_torch()
    from ..convert.tune import tune as carry_out  # noqa: PLC0415 - torch, after the request was checked

    return carry_out(request, reporter).to_dict()


def bench(
    path: Path,
    values: Mapping[str, Any],
    settings: Mapping[str, Any],
    sampling: Mapping[str, Any],
    *,
    memory: bool,
    reporter: Reporter,
) -> dict[str, Any]:
    """Race a bundle that generates; return the keys of `bench --json`.

    `values` are fields of BenchOptions, `settings` of SessionOptions, `sampling` of Sampling.
    """
    from ..runtime.options import Sampling, SessionOptions  # noqa: PLC0415

    session, law = SessionOptions(**settings), Sampling(**sampling)
    import_torch()
    from ..runtime.bench_bundle import BenchOptions  # noqa: PLC0415 - torch, after the options were checked
    from ..runtime.bench_report import bench as measure  # noqa: PLC0415

    options = BenchOptions(session=session, sampling=law, **values)
    found = measure(path, options, memory=memory, reporter=reporter)
    return {"machine": machine(), **found}


def texts(inputs: Sequence[str], field: str | None) -> "tuple[list[str | Sequence[str]], list[str]]":
    """Return the texts (or sentences) of all rows that have one, and what is wrong with the others.

    Raises UsageError, FormatError for bad files.
    """
    from ..runtime.row_content import CLASSIFY_KEYS  # noqa: PLC0415
    from ..runtime.rows import check_inputs, read_rows  # noqa: PLC0415

    check_inputs(inputs)
    found: list[str | Sequence[str]] = []
    problems: list[str] = []
    for row in read_rows(inputs, field_name=field, keys=CLASSIFY_KEYS):
        if row.content is None:
            problems.append(f"row {row.number}: {row.error}")
        else:
            found.append(cast("str | list[str]", row.content))
    return found, problems


def labelled(path: Path, field: str | None, label_field: str, labels: Sequence[str]) -> "LabelledData":
    """Read labelled rows. Raises UsageError, FormatError; also for a label that is not among `labels`."""
    from ..convert.labelled import read_labelled  # noqa: PLC0415

    return read_labelled(path, text_field=field, label_field=label_field, labels=labels)


def machine() -> dict[str, str]:
    """Return what figures depend on: versions, processor, threads."""
    import torch  # noqa: PLC0415

    from .. import __version__  # noqa: PLC0415

    cuda = torch.cuda.is_initialized()
    return {
        "adapt": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "system": platform.platform(terse=True),
        "device": torch.cuda.get_device_name() if cuda else f"{platform.machine()}, {torch.get_num_threads()} threads",
    }


def generation_options(choices: Choices, *, row: int = 0) -> "GenerationOptions":
    """Return how to answer. Raises UsageError for a value out of its range."""
    from ..runtime.options import GenerationOptions, Sampling  # noqa: PLC0415

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
    return process.peak_memory()
