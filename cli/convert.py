"""`adapt convert`: from a model to a bundle."""

import json
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..errors import UsageError
from ..runtime.progress import Reporter, SilentReporter
from . import inspect_twodee, services
from .console import make_reporter
from .convert_loop import loop_options, lora_options, training_options
from .convert_options import nvium_options, rcla_options, river_options, twodee_options
from .convert_settings import settings_of
from .groups import Group
from .options import HUB, CacheDir, Device, DtypeOption, Force, Json, Threads

if TYPE_CHECKING:
    from ..convert.recipes import Plan

EXAMPLES = """\
  adapt convert Qwen/Qwen2.5-Coder-0.5B-Instruct --method river
  adapt convert meta-llama/Llama-3.1-8B --method river --resident 4 --token hf_… -o llama-river
  adapt convert ./model.Q8_0.gguf --method river --quantizer rtn --group-size 32
  adapt convert ./model --method river --max-loss 0.01 --calibration my-text.txt
  adapt convert ./model --method rcla --share-every 4 --data texts.jsonl --steps 2000
  adapt convert ./model --method 2dee --data reviews.jsonl --max-drop 0.02
  adapt convert ./model --method nvium --exits 4 --target-depth 0.7 --data texts.jsonl
  adapt convert ./model --method river --dry-run --json
"""

METHODS = ("river", "rcla", "2dee", "nvium")


def method_name(text: str) -> str:
    """Check a method's name. Raises UsageError."""
    if text in METHODS:
        return text
    available = f"Available: {', '.join(METHODS)}"
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
    source: Annotated[
        str, typer.Argument(help="A Hub id, a Hugging Face folder, a .gguf file, or a bundle.", metavar="SOURCE")
    ],
    *,
    method: Annotated[
        str,
        typer.Option(
            "--method", metavar="|".join(METHODS), callback=method_name, autocompletion=_methods, help="What to build."
        ),
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
    river: Annotated[dict[str, Any], Group(river_options)],
    training: Annotated[dict[str, Any], Group(training_options)],
    lora: Annotated[dict[str, Any], Group(lora_options)],
    loop: Annotated[dict[str, Any], Group(loop_options)],
    rcla: Annotated[dict[str, Any], Group(rcla_options)],
    twodee: Annotated[dict[str, Any], Group(twodee_options)],
    nvium: Annotated[dict[str, Any], Group(nvium_options)],
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
    groups = {"river": river, "training": training, "lora": lora, "loop": loop}
    groups |= {"rcla": rcla, "2dee": twodee, "nvium": nvium}
    request = services.convert_request(
        source=source,
        output=output or default_output(source, method),
        method=method,
        settings=settings_of(ctx, method, groups, untrained=untrained),
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
    leads = os.environ.get("RANK", "0") == "0"  # torchrun starts several processes: one writes, and speaks
    reporter = make_reporter(ctx.obj) if leads else SilentReporter()
    plan = services.plan(request, reporter)
    if not request.dry_run:
        for line in plan.lines():
            reporter.note(line)
        path = services.build(plan, reporter)
        if leads:
            _tell(path, plan, reporter, as_json=as_json)
    elif leads:
        typer.echo(_dumps(plan.to_dict()) if as_json else "\n".join(plan.lines()))


def _tell(path: Path, plan: "Plan", reporter: Reporter, *, as_json: bool) -> None:
    quality, twodee = services.quality(path), services.twodee(path)
    if twodee is not None:
        method = twodee.model_dump(mode="json")
        reporter.note(inspect_twodee.gained(method))
        quality = {**(quality or {}), **inspect_twodee.measured(method)}
    elif quality:
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
