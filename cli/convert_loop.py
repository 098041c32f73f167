"""The options of `adapt convert` that the methods which train have in common. A method's defaults hold for None."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from .options import LOOP, TRAINING


def training_options(
    *,
    data: Annotated[
        list[Path] | None,
        typer.Option(
            "--data",
            metavar="FILE",
            rich_help_panel=TRAINING,
            help="What to train on; may be given again. rcla, nvium: .txt, or jsonl with text, prompt and "
            "completion, or messages. 2dee: labelled rows, jsonl, csv or tsv.",
        ),
    ] = None,
    validation: Annotated[
        Path | None,
        typer.Option(
            "--validation", metavar="FILE", rich_help_panel=TRAINING, help="Held-out data (default: a part of --data)."
        ),
    ] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            "--learning-rate",
            "--lr",
            metavar="X",
            rich_help_panel=TRAINING,
            help="At its highest (default: rcla 5e-6, with --lora 1e-4; nvium 1e-3, with --train all 1e-4). 2dee: of "
            "the classifiers alone, also with --lora (default: 1e-3).",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option("--seed", min=0, metavar="N", rich_help_panel=TRAINING, help="Of every draw (default: 0)."),
    ] = None,
) -> dict[str, Any]:
    """Read the options of the methods that train."""
    return dict(locals())


def lora_options(
    *,
    lora: Annotated[
        int | None,
        typer.Option(
            "--lora",
            min=1,
            metavar="R",
            rich_help_panel=TRAINING,
            help="Train low-rank updates of rank R and merge them (default: rcla all weights, 2dee classifiers only).",
        ),
    ] = None,
) -> dict[str, Any]:
    """Read what the methods that may train low-rank updates ask."""
    return dict(locals())


def loop_options(
    *,
    steps: Annotated[
        int | None,
        typer.Option("--steps", min=1, metavar="N", rich_help_panel=LOOP, help="Optimiser steps (default: 1000)."),
    ] = None,
    sequence_length: Annotated[
        int | None,
        typer.Option(
            "--sequence-length", min=2, metavar="N", rich_help_panel=LOOP, help="Tokens of a sequence (default: 1024)."
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option("--batch-size", min=1, metavar="N", rich_help_panel=LOOP, help="Sequences a step (default: 16)."),
    ] = None,
    micro_batch: Annotated[
        int | None,
        typer.Option(
            "--micro-batch", min=1, metavar="N", rich_help_panel=LOOP, help="Sequences a pass (default: 4,096 tokens)."
        ),
    ] = None,
    loss_on: Annotated[
        Literal["all", "answers"] | None,
        typer.Option("--loss-on", rich_help_panel=LOOP, help="Learn every token, or answers only (default: all)."),
    ] = None,
    packed: Annotated[
        bool | None,
        typer.Option("--packed/--no-packed", rich_help_panel=LOOP, help="Join short texts into full sequences."),
    ] = None,
    gradient_checkpointing: Annotated[
        bool | None,
        typer.Option(
            "--gradient-checkpointing/--no-gradient-checkpointing",
            rich_help_panel=LOOP,
            help="Compute activations twice to save memory (default: where they take over 2 GiB).",
        ),
    ] = None,
    checkpoint_every: Annotated[
        int | None,
        typer.Option(
            "--checkpoint-every",
            min=1,
            metavar="N",
            rich_help_panel=LOOP,
            help="Steps between checkpoints (default: 50).",
        ),
    ] = None,
) -> dict[str, Any]:
    """Read the options of the methods that train on texts."""
    return dict(locals())
