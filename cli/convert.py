"""`adapt convert`: from a model to a bundle."""

import json
import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..errors import UsageError
from . import services
from .console import make_reporter
from .options import HUB, RIVER, CacheDir, Device, DtypeOption, Force, Json, Threads

EXAMPLES = """\
  adapt convert Qwen/Qwen2.5-Coder-0.5B-Instruct --method river
  adapt convert meta-llama/Llama-3.1-8B --method river --resident 4 --token hf_… -o llama-river
  adapt convert ./model.Q8_0.gguf --method river --quantizer rtn --group-size 32
  adapt convert ./model --method river --max-loss 0.01 --calibration my-text.txt
  adapt convert ./model --method river --dry-run --json
"""

METHODS = ("river",)
_LATER = ("rcla", "nvium", "2dee")


def method_name(text: str) -> str:
    """Check a method's name. Raises UsageError."""
    if text in METHODS:
        return text
    available = f"Available: {', '.join(METHODS)}"
    if text in _LATER:
        raise UsageError(f"{text} is not in this version", available)
    raise UsageError(f"there is no method '{text}'", available)


def default_output(source: str, method: str) -> Path:
    """Name the bundle after the model: `Qwen/Qwen2.5-0.5B` becomes `Qwen2.5-0.5B-river` in the current folder."""
    path = Path(source)
    name = (path.resolve() if path.exists() else path).name.removesuffix(".gguf")
    return Path(f"{name}-{method}")


def _methods(incomplete: str) -> list[str]:
    return [name for name in METHODS if name.startswith(incomplete)]


def command(
    ctx: typer.Context,
    source: Annotated[str, typer.Argument(help="A Hub id, a Hugging Face folder, or a .gguf file.", metavar="SOURCE")],
    *,
    method: Annotated[
        str,
        typer.Option("--method", metavar="river", callback=method_name, autocompletion=_methods, help="What to build."),
    ],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="DIR", help="The bundle's folder (default: MODEL-METHOD, here)."),
    ] = None,
    force: Force = False,
    resume: Annotated[
        bool | None,
        typer.Option(
            "--resume/--no-resume",
            help="Insist on continuing a stopped conversion, or start afresh (default: continue if nothing changed).",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")] = False,
    untrained: Annotated[
        bool, typer.Option("--untrained", help="Allow a method that needs training to be written without it.")
    ] = False,
    backbone: Annotated[
        Literal["copy", "link", "reference"],
        typer.Option("--backbone", help="Dense weights: copied, hard-linked, or looked up in the Hub's cache."),
    ] = "copy",
    quantizer: Annotated[
        Literal["gptq", "hqq", "rtn"],
        typer.Option(
            "--quantizer", rich_help_panel=RIVER, help="How exit layers are rounded; rtn and hqq need no text."
        ),
    ] = "gptq",
    bits: Annotated[int, typer.Option("--bits", "--q-bits", rich_help_panel=RIVER, help="Bits per weight.")] = 4,
    group_size: Annotated[
        int | None,
        typer.Option(
            "--group-size",
            metavar="32|64|128|-1",
            rich_help_panel=RIVER,
            help="Weights that share a scale; -1: a whole row.",
        ),
    ] = None,
    symmetric: Annotated[bool, typer.Option("--symmetric", rich_help_panel=RIVER, help="No zero points.")] = False,
    entry_layer: Annotated[
        int, typer.Option("--entry-layer", min=2, metavar="N", rich_help_panel=RIVER, help="First exit layer, from 1.")
    ] = 2,
    tau: Annotated[
        float | None,
        typer.Option(
            "--tau", rich_help_panel=RIVER, help="Exit threshold (default: chosen for --max-loss).", metavar="X"
        ),
    ] = None,
    max_loss: Annotated[
        float,
        typer.Option(
            "--max-loss", metavar="X", rich_help_panel=RIVER, help="Accepted rise of perplexity: 0.02 is 2 %."
        ),
    ] = 0.1,
    calibration: Annotated[
        Path | None,
        typer.Option("--calibration", metavar="FILE", rich_help_panel=RIVER, help="A UTF-8 text (default: built in)."),
    ] = None,
    calibration_tokens: Annotated[
        int,
        typer.Option("--calibration-tokens", min=1, metavar="N", rich_help_panel=RIVER, help="How much of it is used."),
    ] = 8192,
    river_from: Annotated[
        str | None,
        typer.Option(
            "--river-from",
            metavar="SOURCE",
            rich_help_panel=RIVER,
            help="Take the 4-bit weights of this GPTQ checkpoint (Hub id or folder).",
        ),
    ] = None,
    resident: Annotated[
        int | None,
        typer.Option(
            "--resident", min=1, metavar="N", rich_help_panel=RIVER, help="Dense blocks kept in memory when it runs."
        ),
    ] = None,
    revision: Annotated[
        str | None, typer.Option("--revision", rich_help_panel=HUB, metavar="REF", help="Branch, tag or commit.")
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(
            "--token", "--hf-token", rich_help_panel=HUB, metavar="TOKEN", help="Access token (env: HF_TOKEN)."
        ),
    ] = None,
    cache_dir: CacheDir = None,
    offline: Annotated[
        bool, typer.Option("--offline", rich_help_panel=HUB, help="Never use the network (env: HF_HUB_OFFLINE=1).")
    ] = False,
    device: Device = "auto",
    dtype: DtypeOption = "auto",
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Build a bundle from a model.

    Prints the plan, converts layer by layer, and ends with a self-check whose figures go into the bundle. An
    interrupted conversion continues where it stopped. The bundle's path is written on stdout.
    """
    request = services.convert_request(
        source=source,
        output=output or default_output(source, method),
        method=method,
        river=services.river_settings(
            quantizer=quantizer,
            bits=bits,
            group_size=group_size,
            symmetric=symmetric,
            entry_layer=entry_layer,
            tau=tau,
            max_loss=max_loss,
            calibration=calibration,
            calibration_tokens=calibration_tokens,
            river_from=river_from,
            resident=resident,
        ),
        revision=revision,
        token=token,
        cache_dir=cache_dir,
        offline=offline,
        force=force,
        resume=resume,
        dry_run=dry_run,
        untrained=untrained,
        backbone=backbone,
        device=device,
        dtype=dtype,
        threads=threads,
    )
    _convert(ctx, request, as_json=as_json)


def _convert(ctx: typer.Context, request: Any, *, as_json: bool) -> None:  # noqa: ANN401 - convert.request.ConvertRequest
    reporter = make_reporter(ctx.obj)
    plan = services.plan(request, reporter)
    if request.dry_run:
        typer.echo(_dumps(plan.to_dict()) if as_json else "\n".join(plan.lines()))
        return
    for line in plan.lines():
        reporter.note(line)
    path = services.build(plan, reporter)
    quality = services.quality(path)
    if quality:
        reporter.note(figures(quality))
    reporter.note(f'Next: adapt run {shlex.quote(str(path))} "Hello"')
    typer.echo(_dumps({"bundle": str(path), "plan": plan.to_dict(), "quality": quality}) if as_json else path)


def figures(quality: dict[str, Any]) -> str:
    """Say in one line what the self-check measured."""
    return (
        f"Self-check on {quality['tokens']} tokens: perplexity {quality['perplexity']:.4g} "
        f"(dense {quality['dense_perplexity']:.4g}), KL {quality['kl']:.3g}, same next token "
        f"{quality['agreement']:.1%}, mean depth {quality['mean_depth']:.1f}"
    )


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, indent=2)
