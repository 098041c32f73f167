"""What every conversion does first: outputs checked, the source opened, device and dtype chosen.

Knows sources and bundles, no method.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Generic

import torch
from tokenizers import Tokenizer

from .. import __version__
from ..errors import FormatError, UnsupportedError
from ..runtime.architecture import Architecture
from ..runtime.bundle import Bundle
from ..runtime.loading import resolve_device, resolve_dtype
from ..runtime.method_settings import MethodSettings
from ..runtime.progress import Reporter
from ..runtime.safetensors_file import LFS_MARK
from .backbone import BackbonePlan, plan_backbone
from .request import ConvertRequest, MethodRequest, S_co
from .source import Source, open_source
from .source_bundle import BundleSource
from .source_scratch import open_scratch
from .workspace import check_output, check_replaceable, work_folder


@dataclass(frozen=True)
class Below:
    """What a bundle's manifest says that holds for a bundle made of it too; empty for a plain model."""

    methods: tuple[MethodSettings, ...] = ()
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    trained: bool = True


@dataclass(frozen=True)
class Opened:
    """A source that can be read, and where the work runs. `arch` has the source's own sharing map, if it has one."""

    request: ConvertRequest[MethodRequest]
    source: Source
    arch: Architecture
    device: torch.device
    dtype: torch.dtype

    @property
    def bundle(self) -> Bundle | None:
        """The bundle that the new method is put on, if the source is one."""
        return self.source.bundle if isinstance(self.source, BundleSource) else None

    @property
    def below(self) -> Below:
        """What the new manifest takes over from the source's."""
        if self.bundle is None:
            return Below()
        manifest = self.bundle.manifest
        return Below(manifest.methods, manifest.required, manifest.optional, manifest.trained)

    @cached_property
    def backbone(self) -> BackbonePlan:
        """How the 16-bit weights get into the new bundle when the method leaves them as they are."""
        return plan_backbone(
            files=self.source.weight_files,
            store=self.source.store,
            expected=self.arch.tensors(),
            tied=self.arch.tied,
            mode=self.request.backbone,
            revision=self.source.identity.revision,
            dtype=torch.bfloat16,
        )

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The source's tokenizer.json. Raises FormatError, by the name of the source, where it is damaged."""
        data = self.source.text_files()["tokenizer.json"]
        data = data.read_bytes() if isinstance(data, Path) else data
        if data.startswith(LFS_MARK):
            what = f"tokenizer.json of {self.source.identity.id} is a git-lfs pointer"
            raise FormatError(what, "Fetch the file itself: git lfs pull, or hf download.")
        try:
            return Tokenizer.from_str(data.decode("utf-8"))
        except Exception as error:
            what = f"tokenizer.json of {self.source.identity.id} is damaged: {error}"
            raise FormatError(what, "Download the model again.") from error


@dataclass(frozen=True)
class OpenedPlan(Generic[S_co]):
    """What the plan of every method is made from, and what it says of it."""

    request: ConvertRequest[S_co]
    opened: Opened

    @property
    def settings(self) -> S_co:
        """What was asked of the method."""
        return self.request.settings

    @property
    def source(self) -> Source:
        """What is converted."""
        return self.opened.source

    @property
    def arch(self) -> Architecture:
        """Its geometry, with the map of an R-CLA bundle."""
        return self.opened.arch

    @property
    def backbone(self) -> BackbonePlan:
        """How the 16-bit weights get into the bundle when the method leaves them as they are."""
        return self.opened.backbone

    @property
    def device(self) -> torch.device:
        """Where the work runs."""
        return self.opened.device

    @property
    def dtype(self) -> torch.dtype:
        """In which blocks run."""
        return self.opened.dtype

    def fingerprint(self) -> dict[str, Any]:
        """What the result's bytes depend on, as JSON; a method adds the content of its files."""
        return {
            **self.request.fingerprint(),
            "source": self.source.fingerprint(),
            "programs": {"adapt-llm": __version__, "torch": torch.__version__},
        }

    def to_dict(self) -> dict[str, Any]:
        """The plan for scripts; a method adds what it will do."""
        identity = self.source.identity
        return {
            "source": {"id": identity.id, "revision": identity.revision},
            "output": str(self.request.output),
            "method": self.request.method,
            "family": self.arch.family,
            "num_layers": self.arch.num_layers,
            "device": str(self.device),
        }

    @property
    def origin(self) -> str:
        """The source for people."""
        return f"{self.source.identity.id} ({self.arch.family}, {self.arch.num_layers} blocks)"


def open_request(
    request: ConvertRequest[MethodRequest],
    reporter: Reporter,
    *,
    stacks_on: Sequence[str] = (),
    inputs: Sequence[str] = (),
    drawn: int | None = None,
) -> Opened:
    """Open what a conversion reads. `stacks_on`: methods that may be below this one; `inputs`: sources besides SOURCE.

    `drawn`: a seed, where SOURCE gives a configuration and a tokenizer and its weights are drawn.

    Raises AdaptError of every kind; writes nothing.
    """
    if not work_folder(request.output).is_dir():
        check_output(request.output, force=request.force)
    if request.force:
        named = [Path(name).expanduser() for name in (request.source, *inputs)]
        check_replaceable(request.output, [*named, *request.settings.files])
    if request.threads is not None:
        torch.set_num_threads(request.threads)
    device = resolve_device(request.device)
    dtype = resolve_dtype(request.dtype, device)
    source = _open(request, reporter) if drawn is None else open_scratch(request.source, drawn)
    arch = source.architecture
    opened = Opened(request, source, arch, device, dtype)
    _check_stack(opened, stacks_on)
    _ = opened.tokenizer  # refused before the work, if it is damaged
    return opened


def _open(request: ConvertRequest[MethodRequest], reporter: Reporter) -> Source:
    return open_source(
        request.source,
        revision=request.revision,
        token=request.token,
        cache_dir=request.cache_dir,
        offline=request.offline,
        reporter=reporter,
    )


def _check_stack(opened: Opened, stacks_on: Sequence[str]) -> None:
    """Refuse a method on top of one that it does not go with."""
    for method in opened.below.methods:
        if method.name not in stacks_on:
            mine = opened.request.method
            what = f"{opened.request.source} is a {method.name} bundle, and {mine} does not go on top of it"
            others = f"It goes on {' or '.join(('a plain model', *stacks_on))}."
            raise UnsupportedError(what, f"{others} Convert the model that the bundle was made from.")
