"""Tuning a 2D-EE bundle on labelled rows: thresholds and layers chosen anew on one half, reported on the other.

The classifiers stay as they are. Knows the order of things; Algorithm 1 is simulated in `frontier`.
"""

from collections.abc import Iterator, Sequence

import torch

from ..errors import UsageError
from ..runtime.bundle import Bundle
from ..runtime.classify_loading import document_reader, load_classifier
from ..runtime.label_quality import spread
from ..runtime.methods import Decision, FixedLayer, LabelledRows, Thresholds, TwoDee
from ..runtime.operating_point import best_accuracy, cheapest
from ..runtime.progress import Reporter
from ..runtime.text import Tokenizer
from ..runtime.tuned import Tuned
from .adapters import answers
from .features import PIECE_DOCUMENTS, Encoder, TextDocuments
from .frontier import Curve, Judged, decision, fixed_layers, measure, surface
from .labelled import LabelledData, read_labelled
from .tune_record import Outcome, fingerprint, same_file, store, with_method
from .tune_request import TuneRequest

FEWEST = 8
"""Labelled rows."""


def tune_twodee(bundle: Bundle, settings: TwoDee, request: TuneRequest, reporter: Reporter) -> Outcome:
    """Measure, choose and store. Raises UsageError and FormatError for rows that do not do."""
    if request.labels is None:
        raise UsageError(f"{bundle.path} classifies", "Tune it on labelled rows with --labels FILE")
    if request.min_speed is not None:
        raise UsageError("--min-speed is for texts", "Say what accuracy may be lost with --max-drop")
    data = _read(settings, request, reporter)
    if data.sha256 == settings.data.sha256:
        reporter.warn(f"{data.name} is the file that the classifiers were trained on: these figures are too good")
    drop = settings.max_drop if request.max_drop is None else request.max_drop
    known = _fingerprint(bundle, data, request)
    before = bundle.manifest.tuned
    if not request.again and before is not None and (before.fingerprint, before.limit) == (known, drop):
        reporter.note("Nothing has changed since the bundle was tuned on these rows.")
        return Outcome(before, measured=False, stored=False)
    rows = list(_judged(bundle, settings, data, request, reporter))
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(request.seed)).tolist()
    half = len(rows) // 2
    curve = measure([rows[at] for at in order[:half]], len(settings.labels), settings.readout)
    used = LabelledRows(name=data.name, sha256=data.sha256, rows=half, validation=len(rows) - half)
    chosen = _chosen(settings, curve, drop, used)
    tuned = Tuned(
        method="2dee",
        data=used,
        fingerprint=known,
        seed=request.seed,
        goal="max_drop",
        limit=drop,
        chosen=chosen.use,
        held_out=_held_out(chosen, [rows[at] for at in order[half:]]),
    )
    manifest = with_method(bundle.manifest, chosen, tuned=tuned)
    changed = request.store and not same_file(bundle.manifest, manifest)
    if changed:
        store(bundle, manifest)
    return Outcome(tuned, measured=True, stored=changed)


def _fingerprint(bundle: Bundle, data: LabelledData, request: TuneRequest) -> str:
    return fingerprint(
        bundle,
        request,
        rows=data.sha256,
        count=len(data),
        fields=(request.text_field, request.label_field),
    )


def _read(settings: TwoDee, request: TuneRequest, reporter: Reporter) -> LabelledData:
    if request.labels is None:
        raise UsageError("There are no labelled rows", "Give them with --labels FILE")
    data = read_labelled(
        request.labels, text_field=request.text_field, label_field=request.label_field, labels=settings.labels
    )
    if data.skipped:
        reporter.warn(f"{data.skipped} rows have no text or no label and are left out; the first: {data.first_skipped}")
    data = data.select(spread(len(data), request.limit))
    if len(data) < FEWEST:
        raise UsageError(f"{data.name} has {len(data)} labelled rows", f"Give at least {FEWEST}")
    return data


def _judged(
    bundle: Bundle, settings: TwoDee, data: LabelledData, request: TuneRequest, reporter: Reporter
) -> Iterator[Judged]:
    """Probabilities of every cell of every row; some documents are in memory at a time."""
    reader = document_reader(settings, Tokenizer.load(bundle.path))
    classifier = load_classifier(bundle, request.options, reporter, reader=reader)
    encoder = Encoder(classifier.decoder, tuple(reader.prefix(settings.prompt)))
    documents = TextDocuments(reader, data.texts)
    with reporter.task("Read the documents", len(documents)) as task:
        for first in range(0, len(documents), PIECE_DOCUMENTS):
            some = documents[first : first + PIECE_DOCUMENTS]
            (states,) = encoder.pooled([some])
            counts = [len(document.ends) for document in some]
            labels = data.labels[first : first + PIECE_DOCUMENTS]
            for found, label in zip(answers(classifier.adapters, states, counts), labels, strict=True):
                yield Judged.of(*found, label, settings.readout)
            task.advance(len(some))


def _chosen(settings: TwoDee, curve: Curve, drop: float, used: LabelledRows) -> TwoDee:
    wanted = best_accuracy(curve.layers) - drop
    two_d, one_d = cheapest(curve.frontier, wanted), cheapest(curve.layers, wanted) or curve.full
    changes = {
        "depth": curve.depth,
        "max_drop": drop,
        "use": "2d" if two_d is not None and two_d.work < one_d.work else "1d",
        "frontier": curve.frontier,
        "one_d": curve.layers,
        "full": curve.full,
        "chosen": two_d,
        "chosen_one_d": one_d,
        "validation_data": used,
    }
    return TwoDee.model_validate({**settings.model_dump(), **changes})


def _held_out(chosen: TwoDee, rows: Sequence[Judged]) -> dict[str, Decision]:
    """What full, 1D and 2D give on rows that nothing was chosen on."""
    layers = fixed_layers(rows, len(chosen.labels))
    found: dict[str, FixedLayer | Thresholds] = {"full": layers[-1], "1d": layers[chosen.chosen_one_d.layer - 1]}
    if chosen.chosen is not None:
        point, depth = chosen.chosen, chosen.depth
        cut = [Judged(row.cells[:depth], row.whole[:depth], row.label) for row in rows]
        run = surface(cut, [point.tau_ignore], [point.tau_acc])
        figures = decision(run.at(0, 0), rows, len(chosen.labels)).model_dump()
        found["2d"] = Thresholds(tau_ignore=point.tau_ignore, tau_acc=point.tau_acc, **figures)
    return {name: Decision.model_validate(point.model_dump()) for name, point in found.items()}
