"""What `adapt convert --method 2dee` was asked for, as data. Knows no models."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from .request import MethodRequest, check_apart, demand


@dataclass(frozen=True)
class TwoDeeSettings(MethodRequest):
    """2D early exit as asked for.

    data: labelled rows (jsonl, csv, tsv; .gz). validation: rows to choose thresholds on; None holds back
    `validation_share` of `data`. labels: their names in order; None takes those in the data.
    prompt: read before every document; None makes one of the labels, "" leaves it out.
    max_drop: accuracy that may be given away for speed. max_tokens: longer documents are cut.
    lora: rank of a fine-tuning of the backbone (papers: 2dee section 3.1); None keeps it frozen.
    """

    method: ClassVar[str] = "2dee"
    file_fields: ClassVar[tuple[str, ...]] = ("data", "validation")
    data: Path | None = None
    validation: Path | None = None
    validation_share: float = 0.2
    labels: tuple[str, ...] | None = None
    field: str | None = None
    label_field: str = "label"
    prompt: str | None = None
    language: str | None = None
    hidden: int = 256
    epochs: int = 30
    learning_rate: float | None = None
    max_drop: float = 0.02
    max_tokens: int = 1024
    class_weights: bool = True
    lora: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        demand(self.data is not None, "2dee needs labelled rows", "Give them with --data rows.jsonl.")
        for path in self.files:
            demand(not path.is_dir(), f"{path} is a folder", "Name the files in it.")
            demand(path.is_file(), f"There is no file {path}")
        if self.data is not None and self.validation is not None:
            check_apart(self.validation, (self.data,))
        demand(
            self.language is None or re.fullmatch(r"[A-Za-z]{2,3}([-_][A-Za-z0-9]+)*", self.language) is not None,
            f"--language {self.language} is no code of a language",
            "Two or three letters of ISO 639: en, ko, yue.",
        )
        demand(0 < self.validation_share < 1, f"--validation-share {self.validation_share} is not between 0 and 1")
        demand(all(name.strip() for name in self.labels or ()), "--labels has an empty name", "Write it as a,b,c.")
        demand(
            self.labels is None or len(set(self.labels)) == len(self.labels) >= 2,
            "--labels needs two different names or more",
        )
        for flag, value in (("--hidden", self.hidden), ("--epochs", self.epochs), ("--max-tokens", self.max_tokens)):
            demand(value >= 1, f"{flag} {value} is not positive")
        demand(
            self.learning_rate is None or 0 < self.learning_rate < 1,
            f"--learning-rate {self.learning_rate} is not in (0, 1)",
        )
        demand(0 <= self.max_drop <= 1, f"--max-drop {self.max_drop} is no share of accuracy", "0.02 gives 2 % away.")
        demand(
            self.lora is None or self.lora >= 1, f"--lora {self.lora} is not a rank", "Use 8 to 64, or leave it out."
        )
