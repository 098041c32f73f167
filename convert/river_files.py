"""A River bundle's exit layers, taken over into a bundle that is made of it. Knows files, no method."""

from ..runtime.bundle import RIVER
from ..runtime.progress import Reporter
from .opening import Opened
from .workspace import Workspace
from .writer import place_bytes, place_file


def place_exit_layers(work: Workspace, opened: Opened, reporter: Reporter, *, link: bool) -> None:
    """Put the exit layers' files into the output as they are; nothing where the source has none."""
    bundle = opened.bundle
    if bundle is None or not (names := bundle.weight_files(RIVER)):
        return
    with reporter.task("Copy the exit layers", bundle.weight_bytes(RIVER)) as task:
        for name in names:
            place_file(work, name, bundle.path / name, task.advance, link=link)
    index = f"{RIVER}.safetensors.index.json"
    place_bytes(work, index, (bundle.path / index).read_bytes())
