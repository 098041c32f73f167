"""Options that several commands share, spelled and explained the same everywhere."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..errors import UsageError

OUTPUT = "Output"
MACHINE = "Machine"
SAMPLING = "Sampling"
ROWS = "Many rows"
HUB = "Hugging Face Hub"
RIVER = "River"
TRAINING = "Training (rcla, nvium, 2dee)"
LOOP = "Training on texts (rcla, nvium)"
RCLA = "R-CLA"
TWODEE = "2D early exit"
NVIUM = "N-vium"

DTYPES = {"auto": "auto", "bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}
DTYPES |= {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}


def _remember(name: str, *, on: bool) -> Callable[[typer.Context, bool], bool]:
    """Make a callback that keeps a flag where errors and reporters find it."""

    def remember(ctx: typer.Context, value: bool) -> bool:
        if value and ctx.obj is not None:
            setattr(ctx.obj, name, on)
        return value

    return remember


def _remember_log(ctx: typer.Context, value: Path | None) -> Path | None:
    if value is not None and ctx.obj is not None:
        ctx.obj.log_file = value
    return value


Verbose = Annotated[
    bool,
    typer.Option(
        "-v",
        "--verbose",
        callback=_remember("verbose", on=True),
        is_eager=True,
        rich_help_panel=OUTPUT,
        help="Say more; show the traceback of an error (env: ADAPT_DEBUG=1).",
    ),
]
Quiet = Annotated[
    bool,
    typer.Option(
        "-q",
        "--quiet",
        callback=_remember("quiet", on=True),
        is_eager=True,
        rich_help_panel=OUTPUT,
        help="No progress, notices, warnings or summary on stderr; errors only.",
    ),
]
NoProgress = Annotated[
    bool,
    typer.Option(
        "--no-progress",
        callback=_remember("progress", on=False),
        is_eager=True,
        rich_help_panel=OUTPUT,
        help="No progress on stderr.",
    ),
]
LogFile = Annotated[
    Path | None,
    typer.Option(
        "--log-file",
        callback=_remember_log,
        is_eager=True,
        rich_help_panel=OUTPUT,
        metavar="FILE",
        help="Append notices and warnings to FILE, each with the time (UTC).",
    ),
]
Json = Annotated[bool, typer.Option("--json", rich_help_panel=OUTPUT, help="Write JSON on stdout, for scripts.")]


def shared(
    verbose: Verbose = False, quiet: Quiet = False, no_progress: NoProgress = False, log_file: LogFile = None
) -> None:
    """Options that every command has; their values are kept in `ctx.obj` by their callbacks."""


def device(text: str) -> str:
    """Check auto, cpu, cuda or cuda:N. Raises UsageError."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", text):
        raise UsageError(f"--device {text} is not auto, cpu, cuda or cuda:N")
    return text


def dtype(text: str) -> str:
    """Return the short name of a number format. Raises UsageError."""
    if text not in DTYPES:
        raise UsageError(f"--dtype {text} is not auto, bf16, fp16 or fp32")
    return DTYPES[text]


def draft(text: str) -> int | None:
    """Return a number of tokens, None for auto. Raises UsageError."""
    if text == "auto":
        return None
    if not text.isdecimal():
        raise UsageError(f"--draft {text} is not a number or auto")
    return int(text)


def head_bits(text: str) -> int:
    """Check 16 or 8. Raises UsageError."""
    if str(text) not in ("16", "8"):
        raise UsageError(f"--head-bits {text} is neither 16 nor 8")
    return int(text)


def _dtype_names(incomplete: str) -> list[str]:
    return [name for name in ("auto", "bf16", "fp16", "fp32") if name.startswith(incomplete)]


def _device_names(incomplete: str) -> list[str]:
    return [name for name in ("auto", "cpu", "cuda", "cuda:0") if name.startswith(incomplete)]


Device = Annotated[
    str,
    typer.Option(
        "--device",
        callback=device,
        metavar="auto|cpu|cuda[:N]",
        autocompletion=_device_names,
        rich_help_panel=MACHINE,
        help="Where to compute.",
    ),
]
DtypeOption = Annotated[
    str,
    typer.Option(
        "--dtype",
        callback=dtype,
        metavar="auto|bf16|fp16|fp32",
        autocompletion=_dtype_names,
        rich_help_panel=MACHINE,
        help="Number format of the dense part.",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(  # torch crashes on a number that the system cannot give
        "--threads", min=1, max=1024, metavar="N", rich_help_panel=MACHINE, help="CPU threads (default: all cores)."
    ),
]
CacheDir = Annotated[
    Path | None,
    typer.Option("--cache-dir", rich_help_panel=HUB, metavar="DIR", help="The Hub's cache (env: HF_HOME)."),
]
Force = Annotated[bool, typer.Option("--force", "--overwrite", help="Replace an output that is there.")]


def opening(
    *,
    device: Device = "auto",
    dtype: DtypeOption = "auto",
    threads: Threads = None,
    head_bits: Annotated[
        int,
        typer.Option(
            "--head-bits",
            parser=head_bits,
            metavar="16|8",
            rich_help_panel=MACHINE,
            help="8: the LM head in 8 bits, which every token reads whole (CPU, bf16).",
        ),
    ] = 16,
    ctx_size: Annotated[
        int | None,
        typer.Option(
            "--ctx-size",
            "-c",
            "--max-seq-len",
            min=1,
            metavar="N",
            rich_help_panel=MACHINE,
            help="Tokens of context, prompt and answer together (default: 4096, or what the prompt needs; text: 1024).",
        ),
    ] = None,
    gpu_memory: Annotated[
        str | None,
        typer.Option(
            "--gpu-memory",
            metavar="SIZE|PCT|auto",
            rich_help_panel=MACHINE,
            help="GPU memory to use (8GiB, 90%, auto).",
        ),
    ] = None,
    cuda_graphs: Annotated[
        bool,
        typer.Option(
            "--cuda-graphs/--no-cuda-graphs",
            rich_help_panel=MACHINE,
            help="GPU: run a token as one CUDA graph where that can be, or kernel by kernel.",
        ),
    ] = True,
    resident: Annotated[
        int | None,
        typer.Option(
            "--resident",
            min=1,
            metavar="N",
            rich_help_panel=RIVER,
            help="Dense blocks loaded, from the first on; a token that would go deeper stays in the river.",
        ),
    ] = None,
    offload: Annotated[
        Literal["drop", "stream"],
        typer.Option("--offload", rich_help_panel=RIVER, help="The other blocks: never run, or streamed to the GPU."),
    ] = "drop",
    tau: Annotated[
        float | None,
        typer.Option(
            "--tau", metavar="X", rich_help_panel=RIVER, help="Exit threshold (default: the bundle's; 1: dense)."
        ),
    ] = None,
    lossless: Annotated[
        bool,
        typer.Option(
            "--lossless", rich_help_panel=RIVER, help="The river only drafts: the dense model's text, made faster."
        ),
    ] = False,
    draft: Annotated[
        int | None,
        typer.Option(
            "--draft",
            parser=draft,
            metavar="N|auto",
            rich_help_panel=RIVER,
            help="Tokens drafted at a time with --lossless (default: as many as pay).",
        ),
    ] = None,
    prefill: Annotated[
        Literal["exit", "dense"],
        typer.Option("--prefill", rich_help_panel=RIVER, help="Prompts run through all blocks, or leave by the rule."),
    ] = "dense",
    per_exit_truncation: Annotated[
        bool,
        typer.Option(
            "--per-exit-truncation",
            rich_help_panel=NVIUM,
            help="Temperature and top-k, top-p, min-p act on the drawn exit, not on the mixture: faster, another law.",
        ),
    ] = False,
    piggyback: Annotated[
        bool,
        typer.Option(
            "--piggyback/--no-piggyback",
            rich_help_panel=NVIUM,
            help="Run what a token left out with later tokens, or at once; the text is the same.",
        ),
    ] = True,
    max_deferred: Annotated[
        int,
        typer.Option(
            "--max-deferred",
            min=1,
            metavar="N",
            rich_help_panel=NVIUM,
            help="Tokens that may wait at an exit; the text is the same.",
        ),
    ] = 64,
    chat_template: Annotated[
        str | None,
        typer.Option("--chat-template", metavar="FILE|NAME", help="A chat template: a jinja file, or a built-in name."),
    ] = None,
    cache_dir: CacheDir = None,
) -> dict[str, Any]:
    """Return how a bundle is opened; the names are those of `runtime.options.SessionOptions`."""
    return dict(locals())
