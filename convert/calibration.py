"""The text that conversion looks at: one part quantises, another part, never seen by the quantiser, judges.

Knows texts and tokens; no weights.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import UsageError

if TYPE_CHECKING:
    from ..runtime.text import Tokenizer

SEQUENCE = 512
"""Tokens of one sequence."""
JUDGED = 4
"""Sequences that judge at most; at least a quarter of the text."""
CHARACTERS_A_TOKEN = 24
"""More than any text has on average."""
SHIPPED = "calibration.txt"


@dataclass(frozen=True)
class CalibrationText:
    """`quantise` [n, S] and `judge` [m, S] are token ids of disjoint parts; `name` is no path."""

    name: str
    sha256: str
    quantise: Tensor
    judge: Tensor

    @property
    def tokens(self) -> int:
        """Tokens that are looked at."""
        return self.quantise.numel() + self.judge.numel()


def read_text(path: Path | None) -> tuple[str, bytes]:
    """Return name and bytes of a text; None is the one that comes with the package. Raises UsageError."""
    if path is None:
        return SHIPPED, (files(__name__.rpartition(".")[0]) / SHIPPED).read_bytes()
    try:
        return path.name, path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", "Name a UTF-8 text with --calibration.") from error


def load_calibration(path: Path | None, tokenizer: "Tokenizer", *, tokens: int, max_positions: int) -> CalibrationText:
    """Tokenise a text and split it: the last quarter (JUDGED sequences at most) judges, up to `tokens` quantise.

    Raises UsageError for a text that is not UTF-8 or too short for one sequence of each part.
    """
    name, data = read_text(path)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} is not UTF-8 text", "Save it as UTF-8.") from error
    text = text[: CHARACTERS_A_TOKEN * (tokens + JUDGED * SEQUENCE)]  # a huge file is not tokenised whole
    whole = sequences(tokenizer, tokenizer.encode(text, add_special_tokens=False), min(SEQUENCE, max_positions))
    if len(whole) < 2:
        need = f"give at least {2 * min(SEQUENCE, max_positions)} tokens"
        raise UsageError(f"{name} is too short to calibrate", need)
    length = whole.shape[1]
    judged = min(JUDGED, max(1, len(whole) // 4))
    wanted = max(1, -(-tokens // length))
    digest = hashlib.sha256(data).hexdigest()
    return CalibrationText(name, digest, whole[: len(whole) - judged][:wanted], whole[len(whole) - judged :])


def sequences(tokenizer: "Tokenizer", tokens: Sequence[int], length: int) -> Tensor:
    """Cut a text's tokens into whole sequences [n, length], each begun as the model saw texts begin."""
    ids = torch.tensor(tokens, dtype=torch.int64)
    start = [tokenizer.bos_id] if tokenizer.adds_bos and tokenizer.bos_id is not None else []
    own = length - len(start)
    rows = ids[: ids.numel() // own * own].view(-1, own)
    return torch.cat([torch.tensor(start, dtype=torch.int64).expand(len(rows), len(start)), rows], dim=1)
