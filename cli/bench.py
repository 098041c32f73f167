"""`adapt bench`: how fast a bundle is against its own dense backbone, and how near to what the machine allows."""

import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..errors import UsageError
from . import bench_generation, bench_labels, services
from .bench_generation import Racing
from .bench_labels import RowsToTime
from .classification import OPENING, MaxDrop, Threshold, comparison, refuse
from .console import make_reporter
from .groups import Group
from .options import OUTPUT, ROWS, SAMPLING, Force, Json, opening
from .outputs import Outputs

EXAMPLES = """\
  adapt bench qwen-river
  adapt bench qwen-river --context 128,2048 --rounds 7 --floor --against transformers
  adapt bench smol-rcla --dense smol-tuned --context 8192 --max-tokens 16
  adapt bench qwen-river --batch-size 1,8 --plot speed.png --report speed.md
  adapt bench qwen-2dee -i reviews.jsonl --limit 96
  adapt bench qwen-river --json | jq '.speedup.decode.median, .bandwidth'
"""

_GENERATION = (
    *("context", "max_tokens", "temperature", "top_p", "top_k", "seed", "rounds", "dense", "against", "floor", "text"),
    *("memory", *OPENING),
)
_ROWS = ("field", "limit", "threshold", "max_drop")
_UNUSED = ("ctx_size", "chat_template")
RACE = "Race"


def _numbers(text: str, flag: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(f"{flag} {text} is not a list of numbers from 1 on", f"For example {flag} 1,8")
    return tuple(int(part) for part in parts)


def racing(
    *,
    context: Annotated[
        str,
        typer.Option(
            "--context", metavar="N[,N…]", rich_help_panel=RACE, help="Tokens of the prompt; each is a trial."
        ),
    ] = "128",
    max_tokens: Annotated[
        int,
        typer.Option(
            "--max-tokens", "--max-new-tokens", "-n", min=1, metavar="N", rich_help_panel=RACE, help="Tokens a round."
        ),
    ] = 32,
    rounds: Annotated[
        int, typer.Option("--rounds", min=1, metavar="N", rich_help_panel=RACE, help="Rounds; all run once in each.")
    ] = 5,
    dense: Annotated[
        Path | None,
        typer.Option(
            "--dense",
            metavar="PATH",
            rich_help_panel=RACE,
            help="Another dense model: a bundle, or a folder of safetensors.",
        ),
    ] = None,
    against: Annotated[
        Literal["transformers"] | None,
        typer.Option("--against", rich_help_panel=RACE, help="Also this library, on the same files."),
    ] = None,
    floor: Annotated[
        bool, typer.Option("--floor", rich_help_panel=RACE, help="Also River with every token leaving at once.")
    ] = False,
    text: Annotated[
        Path | None,
        typer.Option("--text", metavar="FILE", rich_help_panel=RACE, help="Prompts from this text (UTF-8)."),
    ] = None,
    memory: Annotated[
        bool, typer.Option("--memory/--no-memory", rich_help_panel=RACE, help="Peak memory, in processes of their own.")
    ] = True,
    temperature: Annotated[
        float, typer.Option("--temperature", "--temp", min=0, metavar="X", rich_help_panel=SAMPLING, help="0: greedy.")
    ] = 0.0,
    top_p: Annotated[float, typer.Option("--top-p", metavar="X", rich_help_panel=SAMPLING, help="As in run.")] = 1.0,
    top_k: Annotated[int, typer.Option("--top-k", min=0, metavar="N", rich_help_panel=SAMPLING, help="As in run.")] = 0,
    seed: Annotated[int, typer.Option("--seed", min=0, metavar="N", rich_help_panel=SAMPLING, help="As in run.")] = 0,
) -> Racing:
    """Read the options of a race."""
    sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
    return Racing(
        _numbers(context, "--context"), max_tokens, rounds, dense, against is not None, floor, text, memory, sampling
    )


def rows_to_time(
    *,
    inputs: Annotated[
        list[Path] | None,
        typer.Option("-i", "--input", "--labels", metavar="FILE", rich_help_panel=ROWS, help="Rows to classify."),
    ] = None,
    field: Annotated[
        str | None, typer.Option("--field", metavar="NAME", rich_help_panel=ROWS, help="Key or column of the text.")
    ] = None,
    limit: Annotated[
        int, typer.Option("--limit", min=1, metavar="N", rich_help_panel=ROWS, help="Only N rows, evenly over all.")
    ] = 64,
    threshold: Threshold = None,
    max_drop: MaxDrop = None,
) -> RowsToTime | None:
    """Read the options of classification; None without rows."""
    if not inputs:
        return None
    return RowsToTime(tuple(map(str, inputs)), field, limit, comparison(threshold=threshold, max_drop=max_drop))


def outputs(
    *,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.png", rich_help_panel=OUTPUT, help="Draw the speeds.")
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option("--report", metavar="FILE.md", rich_help_panel=OUTPUT, help="Write a Markdown page as well."),
    ] = None,
    force: Force = False,
    as_json: Json = False,
) -> Outputs:
    """Read where results go."""
    return Outputs(plot, report, force, as_json)


def command(
    ctx: typer.Context,
    bundle: Annotated[Path, typer.Argument(help="The bundle's folder.", metavar="BUNDLE")],
    *,
    batch_size: Annotated[
        str | None,
        typer.Option("--batch-size", "-b", metavar="N[,N…]", help="Texts at once; each is a trial (default: 1)."),
    ] = None,
    race: Annotated[Racing, Group(racing)],
    rows: Annotated[RowsToTime | None, Group(rows_to_time)],
    where: Annotated[Outputs, Group(outputs)],
    settings: Annotated[dict[str, Any], Group(opening)],
) -> None:
    """Measure how fast a bundle is.

    A bundle that generates runs against its own dense backbone in one process, in turn, round by round: decoding and
    prompts, the bytes that a token must read, and the share of the memory bandwidth, measured on the spot, that is
    used. Medians, and the least and the largest of all rounds.

    A bundle that classifies (2dee) takes the rows of -i through full, 1D and 2D, in turn.
    """
    reporter = make_reporter(ctx.obj)
    where.check()
    refuse(ctx, _UNUSED, "is for run and chat")
    sizes = None if batch_size is None else _numbers(batch_size, "--batch-size")
    command_line = shlex.join(["adapt", *ctx.obj.args])
    if services.twodee(bundle) is not None:
        refuse(ctx, _GENERATION, "is for bundles that generate")
        if rows is None:
            raise UsageError(f"{bundle} classifies; there is nothing to classify", "Give rows with -i FILE")
        if sizes is not None and len(sizes) > 1:
            raise UsageError("--batch-size is one number for a bundle that classifies")
        result = bench_labels.measure(bundle, rows, settings, batch_size=sizes[0] if sizes else None, reporter=reporter)
        bench_labels.publish(where, result, command_line)
        return
    if rows is not None:
        raise UsageError(f"{bundle} generates; it does not classify rows", "Leave -i out")
    refuse(ctx, _ROWS, "is for bundles that classify")
    result = bench_generation.measure(bundle, race, settings, sizes or (1,), reporter=reporter)
    bench_generation.publish(where, result, command_line)
