"""`adapt run`: an answer or a label for one text, on stdout; or for many rows, from files to a file."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..errors import UsageError
from ..runtime.rows import Shard
from . import services
from .classification import CLASSIFICATION, GENERATION, Asked, choose, classification, refuse
from .generation import Choices, Raw, Stats, System, check_template, sampling
from .groups import Group
from .options import ROWS, Force, Json, opening
from .prompts import STDIN, piped, single_prompt
from .run_classify import Classify
from .run_generate import Run
from .run_rows import OnError, RowsRequest
from .writing import check_new

EXAMPLES = """\
  adapt run qwen-river "Write a haiku about rivers"
  cat notes.txt | adapt run qwen-river "Summarise this."
  adapt run qwen-river -f prompt.txt --max-tokens 200 --temperature 0.7 --seed 1 --stats
  adapt run qwen-river -i questions.jsonl -o answers.jsonl --resume
  zcat big.jsonl.gz | adapt run qwen-river -i - --input-format jsonl --shard 1/4 -o part1.csv
  cat reviews.txt | adapt run qwen-2dee                    # label<TAB>confidence, one for each line
  adapt run qwen-2dee -i reviews.jsonl -o labels.csv --max-drop 0.04 --stats
"""

MAX_TOKENS = 512


def rows_request(
    *,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "-i", "--input", metavar="FILE", rich_help_panel=ROWS, help="Rows: txt, jsonl, csv, tsv, .gz; - is stdin."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="FILE", rich_help_panel=ROWS, help="Where results go (default: stdout)."
        ),
    ] = None,
    form: Annotated[
        Literal["text", "json", "jsonl", "csv", "tsv"] | None,
        typer.Option("--format", rich_help_panel=ROWS, help="Form of the output (default: by its name; else jsonl)."),
    ] = None,
    input_form: Annotated[
        Literal["txt", "jsonl", "csv", "tsv"] | None,
        typer.Option(
            "--input-format", rich_help_panel=ROWS, help="Form of the input (default: by its name; else txt)."
        ),
    ] = None,
    field_name: Annotated[
        str | None,
        typer.Option(
            "--field",
            metavar="NAME",
            rich_help_panel=ROWS,
            help="Key or column to read (default: messages, prompt, text).",
        ),
    ] = None,
    on_error: Annotated[
        OnError,
        typer.Option("--on-error", rich_help_panel=ROWS, help="A row that fails: keep its error, skip it, stop."),
    ] = "record",
    resume: Annotated[
        bool, typer.Option("--resume", rich_help_panel=ROWS, help="Continue an output that was cut short.")
    ] = False,
    shard: Annotated[
        str, typer.Option("--shard", metavar="I/N", rich_help_panel=ROWS, help="Every N-th row only, from the I-th on.")
    ] = "1/1",
    force: Force = False,
) -> RowsRequest:
    """Read the options of many rows."""
    return RowsRequest(
        inputs=inputs or [],
        output=None if output is None or str(output) == STDIN else output,
        form=form,
        input_form=input_form,
        field_name=field_name,
        on_error=on_error,
        resume=resume,
        force=force,
        shard=Shard.parse(shard),
    )


def command(
    ctx: typer.Context,
    bundle: Annotated[
        str | None, typer.Argument(help="The bundle's folder.", metavar="BUNDLE", show_default=False)
    ] = None,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROMPT", help="The prompt (- = stdin); after -i, more input files.", show_default=False
        ),
    ] = None,
    *,
    model: Annotated[
        str | None, typer.Option("-m", "--model", metavar="BUNDLE", help="The bundle, instead of the argument.")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option("-p", "--prompt", metavar="TEXT", help="The prompt; - is stdin.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("-f", "--file", metavar="FILE", help="Read the prompt from FILE.")
    ] = None,
    system: System = None,
    raw: Raw = False,
    no_stream: Annotated[bool, typer.Option("--no-stream", help="Write the answer when it is complete.")] = False,
    stats: Stats = False,
    request: Annotated[RowsRequest, Group(rows_request)],
    choices: Annotated[Choices, Group(sampling)],
    asked: Annotated[Asked, Group(classification)],
    settings: Annotated[dict[str, Any], Group(opening)],
    as_json: Json = False,
) -> None:
    """Generate from a prompt, or classify a text; or do so for many rows.

    What a bundle was made for decides: one with classifiers (2dee) gives a label and how sure it is, others generate.
    The text comes from the command line, a file or stdin. With -i, every row is answered by itself, in order, and
    written at once. To a bundle that classifies, lines piped in are rows.
    """
    path, texts = _bundle(model, bundle, words or [])
    source = Source(texts, prompt, file)
    twodee = services.twodee(path)
    if twodee is not None:
        refuse(ctx, GENERATION, f"is for bundles that generate; {path} classifies (2dee)")
        point = choose(twodee, asked)
        run = Classify(ctx.obj, path, settings, point, asked.batch_size, stats or ctx.obj.verbose)
        if not source and not request.inputs and piped():
            request = replace(request, inputs=[STDIN], form=request.form or _form_of_lines(request, as_json=as_json))
    else:
        refuse(ctx, CLASSIFICATION, f"is for bundles that classify (2dee); {path} generates")
        check_template(settings["chat_template"], system=system, raw=raw)
        if choices.max_tokens is None:
            choices = replace(choices, max_tokens=MAX_TOKENS)
        run = Run(
            ctx.obj, path, settings, choices, asked.batch_size, system=system, raw=raw, stats=stats or ctx.obj.verbose
        )
    if request.inputs:
        run.rows(source.rows(request, as_json=as_json))
        return
    if asked.batch_size is not None:
        raise UsageError("--batch-size is for many rows", "Give them with -i FILE, or -i - for stdin")
    text = source.single(request, joined=twodee is None)
    as_json = as_json or request.form in {"json", "jsonl"}
    if isinstance(run, Classify):
        run.single(text, request.output, as_json=as_json)
    else:
        run.single(text, request.output, as_json=as_json, stream=not no_stream)


@dataclass(frozen=True)
class Source:
    """What the command line says after the bundle: arguments, -p, -f."""

    texts: Sequence[str]
    prompt: str | None
    file: Path | None

    def __bool__(self) -> bool:
        return bool(self.texts) or self.prompt is not None or self.file is not None

    def rows(self, request: RowsRequest, *, as_json: bool) -> RowsRequest:
        """Return the request with the files after -i. Raises UsageError for a prompt besides."""
        if self.prompt is not None or self.file is not None:
            raise UsageError("-i brings its own prompts", "Leave out -p and -f")
        for name in self.texts:
            if name != STDIN and not Path(name).exists():
                hint = "After -i, arguments are more input files, and a row brings its own prompt"
                raise UsageError(f"{name}: no such file", hint)
        if as_json and request.form in {"text", "csv", "tsv"}:
            raise UsageError(f"--json and --format {request.form} exclude each other", "Leave one of them out")
        form = "jsonl" if as_json or request.form == "json" else request.form
        return replace(request, inputs=[*request.inputs, *self.texts], form=form)

    def single(self, request: RowsRequest, *, joined: bool) -> str:
        """Return the one text; `joined`: what is piped in goes before it. Raises UsageError."""
        if len(self.texts) > 1:
            raise UsageError("more than one argument after BUNDLE", "Put the prompt in quotes")
        _check_single(request)
        return single_prompt(self.texts[0] if self.texts else None, self.prompt, self.file, joined=joined)


def _form_of_lines(request: RowsRequest, *, as_json: bool) -> str | None:
    """Lines that are piped in give lines of label and confidence, unless a file's name or --json says otherwise."""
    return None if as_json or request.output is not None else "text"


def _bundle(model: str | None, bundle: str | None, words: list[str]) -> tuple[Path, list[str]]:
    """Return the bundle and the other arguments; with -m, all arguments are others."""
    texts = [*([] if bundle is None else [bundle]), *words]
    if model is not None:
        return Path(model), texts
    if not texts:
        raise UsageError("no BUNDLE given", "Try 'adapt run --help'")
    return Path(texts[0]), texts[1:]


def _check_single(request: RowsRequest) -> None:
    """Refuse what has a meaning for rows only."""
    given = {"--resume": request.resume, "--field": request.field_name, "--input-format": request.input_form}
    given |= {"--shard": request.shard.count > 1, "--on-error": request.on_error != "record"}
    given |= {f"--format {request.form}": request.form in {"csv", "tsv"}}
    wrong = [name for name, value in given.items() if value]
    if wrong:
        raise UsageError(f"{wrong[0]} is for many rows", "Give them with -i FILE, or -i - for stdin")
    check_new(request.output, force=request.force)
