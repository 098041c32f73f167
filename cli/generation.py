"""How to generate, as the command line says it: options, their spellings, and the figures of an answer.

Knows no model: values become `runtime.conversation.GenerationOptions` in `services`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import UsageError
from .charts import histogram, human_bytes
from .options import SAMPLING

if TYPE_CHECKING:
    from ..runtime.stream import GenerationStats


@dataclass(frozen=True)
class Choices:
    """How to choose tokens and when to stop. A seed of None or below 0 is another one each time."""

    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_id: tuple[int, ...] = ()
    ignore_eos: bool = False

    def set(self, assignment: str) -> "Choices":
        """Return these with `name=value` changed. Raises UsageError."""
        name, equals, text = (part.strip() for part in assignment.partition("="))
        name = _ALIASES.get(name := name.replace("-", "_"), name)
        if not equals or name not in _READERS:
            raise UsageError(f"cannot set '{assignment}'", f"Give one of {', '.join(_READERS)} as name=value")
        try:
            return replace(self, **{name: _READERS[name](text)})
        except ValueError as error:
            raise UsageError(
                f"{name}={text} is not possible", "Give a number, or true or false for a switch"
            ) from error

    def lines(self) -> Iterator[str]:
        """Yield `name=value` for each, as `set` reads it; of several stops one behind the other."""
        for name in _READERS:
            yield f"{name}={_shown(getattr(self, name))}"


def _shown(value: object) -> str:
    match value:
        case tuple():
            return ", ".join(str(part).replace("\n", "\\n") for part in value)
        case None | bool():
            return str(value).lower()
        case _:
            return str(value)


def _count_or_none(text: str) -> int | None:
    number = _integer_or_none(text)
    if number is not None and number < 1:
        raise ValueError(text)
    return number


def _integer_or_none(text: str) -> int | None:
    return None if text.lower() in {"", "none"} else int(text)


def _seed(text: str) -> int | None:
    number = _integer_or_none(text)
    if number is not None and number < -1:
        raise ValueError(text)
    return number


def _stops(text: str) -> tuple[str, ...]:
    return (text.replace("\\n", "\n"),) if text else ()


def _switch(text: str) -> bool:
    words = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    if text.lower() not in words:
        raise ValueError(text)
    return words[text.lower()]


_ALIASES = {
    "temp": "temperature",
    "max_new_tokens": "max_tokens",
    "n": "max_tokens",
    "repeat_penalty": "repetition_penalty",
}
_READERS = {
    "max_tokens": _count_or_none,
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
    "seed": _seed,
    "stop": _stops,
    "ignore_eos": _switch,
}


def sampling(
    *,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            "--max-new-tokens",
            "-n",
            "--n-predict",
            min=1,
            metavar="N",
            rich_help_panel=SAMPLING,
            help="New tokens at most (default: 512; in a chat, as many as the context holds).",
        ),
    ] = None,
    temperature: Annotated[
        float,
        typer.Option(
            "--temperature", "--temp", min=0, metavar="X", rich_help_panel=SAMPLING, help="0: the most probable token."
        ),
    ] = 0.0,
    greedy: Annotated[
        bool, typer.Option("--greedy", rich_help_panel=SAMPLING, help="The same as --temperature 0.")
    ] = False,
    top_p: Annotated[
        float,
        typer.Option(
            "--top-p",
            metavar="X",
            rich_help_panel=SAMPLING,
            help="Smallest set with this probability, above 0 and at most 1.",
        ),
    ] = 1.0,
    top_k: Annotated[
        int, typer.Option("--top-k", min=0, metavar="N", rich_help_panel=SAMPLING, help="The N most probable; 0: all.")
    ] = 0,
    min_p: Annotated[
        float,
        typer.Option(
            "--min-p",
            min=0,
            max=1,
            metavar="X",
            rich_help_panel=SAMPLING,
            help="At least this share of the best one's.",
        ),
    ] = 0.0,
    repetition_penalty: Annotated[
        float,
        typer.Option(
            "--repetition-penalty",
            "--repeat-penalty",
            metavar="X",
            rich_help_panel=SAMPLING,
            help="Above 0. Above 1: tokens that were there already become less probable.",
        ),
    ] = 1.0,
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed",
            min=-1,
            metavar="N",
            rich_help_panel=SAMPLING,
            help="Same seed, same text (-1: another each time).",
        ),
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option("--stop", metavar="TEXT", rich_help_panel=SAMPLING, help="End before this text; may be repeated."),
    ] = None,
    stop_token_id: Annotated[
        list[int] | None,
        typer.Option(
            "--stop-token-id", metavar="ID", rich_help_panel=SAMPLING, help="End at this token; may be repeated."
        ),
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", rich_help_panel=SAMPLING, help="Go on past the model's own end.")
    ] = False,
) -> Choices:
    """Read the sampling options. Raises UsageError."""
    if greedy and temperature:
        raise UsageError(f"--greedy and --temperature {temperature:g} exclude each other", "Leave one of them out")
    return Choices(
        max_tokens=max_tokens,
        temperature=0.0 if greedy else temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=tuple(stop or ()),
        stop_token_id=tuple(stop_token_id or ()),
        ignore_eos=ignore_eos,
    )


System = Annotated[
    str | None, typer.Option("--system", "--system-prompt", "-sys", metavar="TEXT", help="The system message.")
]
Raw = Annotated[
    bool, typer.Option("--raw", "--no-chat-template", help="Continue the text as it is, without the chat template.")
]
Stats = Annotated[bool, typer.Option("--stats", help="Speed, depth and memory on stderr at the end.")]


def check_template(template: str | None, *, system: str | None, raw: bool) -> None:
    """Refuse what only a chat template gives a meaning where --raw says that there is none. Raises UsageError."""
    given = [name for name, value in (("--chat-template", template), ("--system", system)) if value is not None]
    if raw and given:
        raise UsageError(f"--raw uses no chat template, which {given[0]} is for", "Leave one of them out")


def figures(stats: "GenerationStats") -> Mapping[str, object]:
    """Return the figures of one answer by stable keys."""
    return {
        "prompt_tokens": stats.prompt_tokens,
        "tokens": stats.tokens,
        "finish_reason": stats.finish_reason,
        "mean_depth": rounded(stats.mean_depth, 2),
        "prefill_tokens_per_s": rounded(stats.prefill_tokens_per_s, 2),
        "decode_tokens_per_s": rounded(stats.decode_tokens_per_s, 2),
        "first_token_ms": rounded(stats.first_token_ms, 1),
        "acceptance": rounded(stats.acceptance, 4),
        "tokens_per_verify": rounded(stats.tokens_per_verify, 3),
        "exit_histogram": {str(depth): count for depth, count in sorted(stats.exit_histogram.items())},
        "pass_rows": {str(rows): count for rows, count in sorted(stats.pass_rows.items())},
    }


def rounded(value: float | None, digits: int) -> float | None:
    """Round what is known."""
    return None if value is None else round(value, digits)


def report(stats: "GenerationStats", memory: int | None = None) -> Iterator[str]:
    """Yield lines for people: speed, depth with a bar chart, memory in bytes."""
    kept = f", {stats.reused_tokens} of them kept from before" if stats.reused_tokens else ""
    yield (
        f"{stats.prompt_tokens} prompt tokens{kept}, first token after {stats.first_token_ms:.0f} ms; "
        f"{stats.tokens} new tokens{_rate(stats.decode_tokens_per_s)}"
    )
    if stats.mean_depth is not None:
        yield f"mean depth {stats.mean_depth:.1f} blocks"
    if stats.acceptance is not None and stats.tokens_per_verify is not None:
        yield (
            f"{stats.drafted} tokens drafted, {stats.acceptance:.0%} accepted; "
            f"{stats.tokens_per_verify:.2f} tokens for each dense pass"
        )
    deepest = max(stats.exit_histogram, default=0)
    yield from histogram([stats.exit_histogram.get(depth, 0) for depth in range(1, deepest + 1)])
    if stats.mean_pass_rows is not None:
        longest = max(stats.pass_rows)
        yield f"passes above an exit took along {stats.mean_pass_rows - 1:.1f} waiting tokens, {longest - 1} at most"
    if memory is not None:
        yield f"memory {human_bytes(memory)}"


def _rate(rate: float | None) -> str:
    return "" if rate is None else f", {rate:.1f} tokens/s"
