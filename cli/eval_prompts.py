"""`adapt eval --prompts`: completions of prompts, as rows that the checker of another program (HumanEval's) takes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..runtime.rows import STDIN, Row
from . import services
from .generation import Choices
from .run_generate import COLUMNS, Run
from .run_rows import RowsRequest
from .state import State

EXAMPLES = """\
  adapt eval qwen-river --prompts HumanEval.jsonl.gz -o samples.jsonl --code --max-tokens 512
  adapt eval qwen-river --prompts HumanEval.jsonl.gz -o samples.jsonl --code --samples 10 --temperature 0.2 --seed 1
"""

MAX_TOKENS = 512
CODE_STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
"""Where a completed function is over (HumanEval: arXiv 2107.03374, section 2.3)."""
COMPLETION = ("completion", *COLUMNS[1:])


@dataclass(frozen=True)
class PromptsRequest(RowsRequest):
    """Rows with a prompt each, completed `samples` times. Of a row's own keys only `task_id` is kept."""

    samples: int = 1
    limit: int | None = None
    code: bool = False
    chat: bool = False
    batch_size: int | None = None

    @classmethod
    def of(cls, prompts: str, output: Path | None, *, samples: int, code: bool, resume: bool) -> "PromptsRequest":
        """Read prompts from a file (- is stdin), write jsonl."""
        where = None if output is None or str(output) == STDIN else output
        form = "jsonl" if prompts == STDIN else None
        own: dict[str, Any] = {"samples": samples, "code": code}
        return cls(inputs=(prompts,), output=where, form="jsonl", input_form=form, resume=resume, **own)

    def rows(self) -> Iterator[Row]:
        """Return every prompt as often as it is to be completed; each completion is a row of its own."""
        for row in islice(super().rows(), self.limit):
            for sample in range(1, self.samples + 1):
                number = (row.number - 1) * self.samples + sample
                yield replace(row, number=number, fields=_kept(row))


def check_chat(template: str | None, *, system: str | None, chat: bool) -> None:
    """Refuse what means nothing without --apply-chat-template. Raises UsageError."""
    for flag, value in (("--system", system), ("--chat-template", template)):
        if value is not None and not chat:
            raise UsageError(f"{flag} is for prompts in a chat template", "Add --apply-chat-template")


def _kept(row: Row) -> dict[str, object]:
    kept: dict[str, object] = {"task_id": row.fields.get("task_id", row.number)}
    return kept if row.content is None else {**kept, "prompt": row.content}


def complete_prompts(
    bundle: Path,
    request: PromptsRequest,
    settings: Mapping[str, Any],
    choices: Choices,
    *,
    system: str | None,
    state: State,
) -> None:
    """Complete and write. `settings` are the fields of SessionOptions; the exit code is 3 when some rows failed."""
    if services.twodee(bundle) is not None:
        raise UsageError(f"{bundle} classifies; prompts need a bundle that generates", "Measure it with --labels FILE")
    check_chat(settings["chat_template"], system=system, chat=request.chat)
    stops = (*choices.stop, *CODE_STOPS) if request.code else choices.stop
    choices = replace(choices, max_tokens=choices.max_tokens or MAX_TOKENS, stop=stops)
    how: dict[str, Any] = {"system": system, "raw": not request.chat, "batch_size": request.batch_size}
    Run(state, bundle, settings, choices, stats=state.verbose, columns=COMPLETION, **how).rows(request)
