"""What the build of every method begins with, and what each says of the programs that made a bundle.

Knows the work folder and a plan's source; no method.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import torch

from .. import __version__
from ..runtime.progress import Reporter
from .opening import OpenedPlan
from .workspace import Workspace
from .writer import place_configs, place_text_files


@contextmanager
def begin(plan: OpenedPlan[Any], reporter: Reporter) -> Iterator[Workspace]:
    """Open the work folder, or take it up, with the source's configuration and text files in it.

    Raises what `Workspace` raises.
    """
    request, source = plan.request, plan.source
    with Workspace(request.output, plan.fingerprint(), force=request.force, resume=request.resume) as work:
        if work.resumed:
            reporter.note(f"Resuming the unfinished work in {work.folder}.")
        place_configs(work, source.config, source.generation_config, tied=plan.arch.tied)
        place_text_files(work, source.text_files())
        yield work


def libraries() -> dict[str, str]:
    """Return the programs that make a bundle, and their versions."""
    return {"adapt-llm": __version__, "torch": torch.__version__, "safetensors": version("safetensors")}
