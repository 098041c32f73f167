"""Labelled texts: read from files of rows, checked, and split into rows that train and rows that judge.

Knows rows, texts and label names; knows no tokenizer, no model and no tensor.
"""

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import FormatError, UsageError
from ..runtime.row_content import CLASSIFY_KEYS
from ..runtime.rows import STDIN, Row, check_inputs, read_rows

SKIPPED_SHARE = 0.01
"""Rows without a text or a label are left out up to this share; more of them are an error."""

_FORMS = (".jsonl", ".ndjson", ".csv", ".tsv", ".tab")  # rows.input_form, without plain text

Text = str | tuple[str, ...]
"""A text, or its sentences."""


@dataclass(frozen=True)
class LabelledData:
    """Texts and their labels, in the order of the files."""

    name: str
    """The files' names, without folders."""
    sha256: str
    """Of the files' bytes, one after the other (`cat FILES | sha256sum`)."""
    texts: tuple[Text, ...]
    labels: tuple[int, ...]
    """For each text the index of its label in `names`."""
    names: tuple[str, ...]
    skipped: int = 0
    """Rows left out because they have no text or no label."""
    first_skipped: str = ""
    """The first of them, as a sentence for the user."""
    rows: tuple[int, ...] = ()
    """Where in the files each text is, from 1; empty where that is not known."""

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def counts(self) -> tuple[int, ...]:
        """Texts of each label, in the order of `names`."""
        found = Counter(self.labels)
        return tuple(found[index] for index in range(len(self.names)))

    def select(self, rows: Iterable[int]) -> "LabelledData":
        """Return the data with these rows only, in the order given."""
        chosen = list(rows)
        texts, labels = tuple(self.texts[row] for row in chosen), tuple(self.labels[row] for row in chosen)
        return replace(self, texts=texts, labels=labels, rows=tuple(self.rows[row] for row in chosen if self.rows))


@dataclass(frozen=True)
class Split:
    """Rows that train and rows that judge; no text is in both."""

    train: LabelledData
    validation: LabelledData
    dropped: int = 0
    """Training rows left out because the validation file that was given has their text too."""


def read_labelled(
    paths: Path | Sequence[Path],
    *,
    text_field: str | None = None,
    label_field: str = "label",
    labels: Sequence[str] | None = None,
    readable: Callable[[Text], bool] | None = None,
) -> LabelledData:
    """Read labelled rows of jsonl, csv or tsv files, plain or gzipped.

    The text is under `text_field`, else under `sentences`, `prompt` or `text`; the label, a string, a whole number or
    true or false, is under `label_field`. Labels keep their names. They are numbered as `labels` lists them, else in
    natural order ("2" before "10"). A text that is not `readable`, one without a token, counts as no text.

    Raises:
        UsageError: a file that is missing or holds no labelled rows, a column that is not there.
        FormatError: too many rows without a text or a label (SKIPPED_SHARE), a label that `labels` does not have, or
            fewer than two labels.

    """
    files = [paths] if isinstance(paths, Path) else list(paths)
    _check_files(files)
    texts: list[Text] = []
    found: list[str] = []
    places: list[int] = []
    problems: list[str] = []
    for row in read_rows([str(path) for path in files], field_name=text_field, keys=CLASSIFY_KEYS):
        try:
            text, label = _text_of(row, readable), _label_of(row.fields, label_field)
        except ValueError as error:
            problems.append(f"row {row.number}: {error}")
            continue
        if labels is not None and label not in labels:
            where = f"row {row.number} of {', '.join(path.name for path in files)}"
            hint = "Leave rows of other labels out of the file, or train with them"
            raise FormatError(f"{where} has the label '{label}', not one of {', '.join(labels)}", hint)
        texts.append(text)
        places.append(row.number)
        found.append(label)
    name = ", ".join(path.name for path in files)
    _check_problems(name, problems, len(texts))
    names = tuple(labels) if labels is not None else _ordered(set(found))
    if len(names) < 2:
        only = f"only the label '{names[0]}'" if names else "no labelled rows"
        raise FormatError(f"{name} has {only}", "A classifier needs rows of two labels or more")
    index = {label: at for at, label in enumerate(names)}
    numbers = tuple(index[label] for label in found)
    skipped = (len(problems), "".join(problems[:1]))
    return LabelledData(name, _sha256(files), tuple(texts), numbers, names, *skipped, tuple(places))


def _check_files(files: Sequence[Path]) -> None:
    names = [str(path) for path in files]
    if STDIN in names:
        raise UsageError("labelled rows come from a file, not from stdin", "Save them first: they are read twice")
    check_inputs(names, form="any")
    for name in names:
        if Path(name.removesuffix(".gz")).suffix.lower() not in _FORMS:
            raise UsageError(f"{name}: labelled rows are jsonl, csv or tsv", "Rename the file if it is one of them")


def _text_of(row: Row, readable: Callable[[Text], bool] | None) -> Text:
    """Raise ValueError for a row without a text."""
    if row.error is not None or row.content is None:
        raise ValueError(row.error or "no text")
    text = row.content if isinstance(row.content, str) else tuple(str(sentence) for sentence in row.content)
    if readable is not None and not readable(text):
        raise ValueError("the text has no token")
    return text


def _label_of(fields: Mapping[str, object], key: str) -> str:
    """Return a label's name. Raises ValueError."""
    if key not in fields:
        raise ValueError(f"no key '{key}' among {', '.join(fields)}")
    value = fields[key]
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer():  # programs write whole numbers so once a column has a gap
        value = int(value)
    if isinstance(value, int):
        return str(value)
    if not isinstance(value, str) and value is not None:
        raise ValueError(f"'{key}' is neither a string nor a whole number")
    if not value or not value.strip():
        raise ValueError(f"'{key}' is empty")
    return value.strip()


def _check_problems(name: str, problems: Sequence[str], good: int) -> None:
    total = good + len(problems)
    if not total:
        raise FormatError(f"{name} has no rows")
    if len(problems) > SKIPPED_SHARE * total:
        message = f"{name}: {len(problems)} of {total} rows have no text or no label, the first in {problems[0]}"
        hint = "Name the keys with --field and --label-field, or mend the rows"
        raise FormatError(message, f"{hint}; up to {SKIPPED_SHARE:.0%} are left out")


def _ordered(names: Iterable[str]) -> tuple[str, ...]:
    """Sort with numbers by value: whole numbers of either sign, and numbers inside names."""
    names = list(names)
    if all(re.fullmatch(r"-?[0-9]{1,18}", name) for name in names):
        return tuple(sorted(names, key=lambda name: (int(name), name)))
    return tuple(sorted(names, key=lambda name: ([_natural(part) for part in re.split(r"([0-9]{1,18})", name)], name)))


def _natural(part: str) -> tuple[int, str]:
    return (int(part), "") if part.isascii() and part.isdigit() else (-1, part)


def _sha256(files: Sequence[Path]) -> str:
    total = hashlib.sha256()
    for path in files:
        with path.open("rb") as stream:
            while block := stream.read(1 << 20):
                total.update(block)
    return total.hexdigest()


def split(data: LabelledData, share: float, seed: int) -> Split:
    """Hold back about `share` of each label's rows.

    Rows with the same text (but for its spaces) stay together, so that nothing judged was seen in training. Which
    texts are held back depends on the seed and on the texts, not on their order.

    Raises:
        FormatError: a label with fewer than two different texts.

    """
    groups = _groups(data)
    held: set[int] = set()
    for label, name in enumerate(data.names):
        own = {key: rows for key, rows in groups.items() if min(data.labels[row] for row in rows) == label}
        held.update(_held_back(own, share, seed))
        inside = sum(1 for row, number in enumerate(data.labels) if number == label and row in held)
        if not 0 < inside < data.counts[label]:
            raise _too_few(data, name, len(own))
    rows = range(len(data))
    return Split(data.select(row for row in rows if row not in held), data.select(sorted(held)))


def _groups(data: LabelledData) -> dict[str, list[int]]:
    """Group rows by their text."""
    groups: dict[str, list[int]] = defaultdict(list)
    for row, text in enumerate(data.texts):
        groups[_same(text)].append(row)
    return groups


def _same(text: Text) -> str:
    return " ".join((text if isinstance(text, str) else " ".join(text)).split())


def _held_back(groups: Mapping[str, Sequence[int]], share: float, seed: int) -> list[int]:
    """Take whole groups in random order until the share is reached; the smallest one if all are too large."""
    order = sorted(groups, key=lambda text: hashlib.sha256(f"{seed}\n{text}".encode()).digest())
    wanted = max(1, round(share * sum(map(len, groups.values()))))
    taken: list[int] = []
    for text in order[:-1]:  # the last one trains, whatever the share
        if len(taken) + len(groups[text]) <= wanted:
            taken += groups[text]
    if not taken and order:
        taken = list(min((groups[text] for text in order), key=len))
    return taken


def _too_few(data: LabelledData, name: str, texts: int) -> FormatError:
    message = f"{data.name}: the label '{name}' has {texts} different texts; both parts of a split need some"
    names = f" (of {len(data.names)} labels)" if len(data.names) > 20 else ""
    return FormatError(message + names, "Add rows, leave the label out, or give a file of your own with --validation")


def split_given(data: LabelledData, validation: LabelledData) -> Split:
    """Judge on rows of another file. Training rows with a text of that file are left out, and counted.

    Read the other file with `labels=data.names`.

    Raises:
        FormatError: a label is missing in one of the parts.

    """
    if validation.names != data.names:
        raise ValueError("the two files' labels are numbered differently")
    judged = {_same(text) for text in validation.texts}
    train = data.select(row for row, text in enumerate(data.texts) if _same(text) not in judged)
    for part, what in ((train, "to train on"), (validation, "to judge on")):
        for name, count in zip(part.names, part.counts, strict=True):
            if not count:
                raise FormatError(f"{part.name} has no rows of the label '{name}' {what}", "Add some")
    return Split(train, validation, dropped=len(data) - len(train))


def class_weights(data: LabelledData) -> tuple[float, ...]:
    """Return n / (C n_c) for each label c, so that all labels weigh the same (scikit-learn's "balanced").

    Raises:
        FormatError: a label has no rows.

    """
    for name, count in zip(data.names, data.counts, strict=True):
        if not count:
            raise FormatError(f"{data.name} has no rows of the label '{name}'")
    return tuple(len(data) / (len(data.names) * count) for count in data.counts)
