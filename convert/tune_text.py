"""The text that `adapt tune` looks at, cut in two: settings are chosen on one half and reported on the other.

Knows texts and tokens; no weights.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..errors import FormatError, UsageError
from ..runtime.config_types import check_known
from ..runtime.method_settings import TextUsed
from ..runtime.text import Tokenizer
from .calibration import CHARACTERS_A_TOKEN, SEQUENCE, sequences
from .tune_request import TuneRequest

FEWEST = 8
"""Sequences, unless the text is so short that they would have less than SHORTEST tokens."""
SHORTEST = 16


def _read(path: Path | None) -> tuple[str, bytes, str]:
    if path is None:
        raise UsageError("There is no text", "Give one with --text FILE")
    try:
        data = path.read_bytes()
        return path.name, data, data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FormatError(f"{path} is not UTF-8 text", "Save it as UTF-8.") from error
    except IsADirectoryError as error:
        raise UsageError(f"{path} is a folder", "Give a text in it with --text FILE") from error
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", "Give a text with --text FILE") from error


@dataclass(frozen=True)
class Halves:
    """Token ids of disjoint sequences of one length: `choose` [n, S] and `report` [m, S]."""

    used: TextUsed
    choose: Tensor
    report: Tensor


def read_halves(request: TuneRequest, tokenizer: Tokenizer, *, max_positions: int, vocab_size: int) -> Halves:
    """Take sequences from all over the text, `limit_tokens` in all, and deal them out by the seed.

    Raises UsageError for a text that cannot be read or is too short; FormatError for one that is not UTF-8, and where
    tokenizer and model disagree.
    """
    name, data, text = _read(request.text)
    whole = text[: 4 * CHARACTERS_A_TOKEN * request.limit_tokens]  # a huge file is not tokenised whole
    ids = tokenizer.encode(whole, add_special_tokens=False)
    length = min(SEQUENCE, max_positions, min(len(ids), request.limit_tokens) // FEWEST)
    if length < SHORTEST:
        raise UsageError(f"{request.text} is too short to tune on", f"Give at least {FEWEST * SHORTEST} tokens.")
    check_known(max(ids), vocab_size)
    rows = sequences(tokenizer, ids, length)
    count = min(len(rows), request.limit_tokens // length)
    rows = rows[[at * len(rows) // count for at in range(count)]]
    order = torch.randperm(count, generator=torch.Generator().manual_seed(request.seed))
    used = TextUsed(name=name, sha256=hashlib.sha256(data).hexdigest(), tokens=rows.numel())
    return Halves(used, rows[order[: count // 2].sort().values], rows[order[count // 2 :].sort().values])
