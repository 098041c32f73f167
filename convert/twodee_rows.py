"""The labelled rows of a 2D-EE conversion: read, checked for tokens, split; and the prompt that names their labels.

Knows the request and the tokenizer; knows no model.
"""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from ..errors import UsageError
from ..runtime.progress import Reporter
from .labelled import LabelledData, Split, Text, read_labelled, split, split_given
from .twodee_request import TwoDeeSettings

_NAMED_LABELS = 20
"""More labels than this are not listed in the prompt."""
_BEGINNING = 64
"""Characters that nearly always hold a token, so that few texts are read whole for it."""


def default_prompt(names: Sequence[str]) -> str:
    """Name the labels, so that the states of a text are about them."""
    if len(names) > _NAMED_LABELS:
        return "Classify the following text.\n\nText:\n"
    return f"Classify the following text as {', '.join(names[:-1])} or {names[-1]}.\n\nText:\n"


def has_token(tokenizer: Tokenizer, text: Text) -> bool:
    """Whether anything of a text is in the tokenizer's vocabulary."""
    whole = text if isinstance(text, str) else " ".join(text)
    return any(tokenizer.encode(part, add_special_tokens=False).ids for part in (whole[:_BEGINNING], whole))


def read_split(settings: TwoDeeSettings, tokenizer: Tokenizer, reporter: Reporter) -> Split:
    """Read the rows, and say which of them judge. Raises UsageError, FormatError as `read_labelled` and `split`."""
    if settings.data is None:
        raise UsageError("2dee needs labelled rows", "Give them with --data rows.jsonl.")

    def read(path: Path, labels: Sequence[str] | None) -> LabelledData:
        data = read_labelled(
            path,
            text_field=settings.field,
            label_field=settings.label_field,
            labels=labels,
            readable=lambda text: has_token(tokenizer, text),
        )
        if data.skipped:
            reporter.warn(f"{data.skipped} rows of {data.name} were left out; {data.first_skipped}.")
        return data

    data = read(settings.data, settings.labels)
    if settings.validation is None:
        return split(data, settings.validation_share, settings.seed)
    parts = split_given(data, read(settings.validation, data.names))
    if parts.dropped:
        reporter.warn(f"{parts.dropped} rows of {data.name} are in {settings.validation.name} too and do not train.")
    return parts
