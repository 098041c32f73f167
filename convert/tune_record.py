"""What `adapt tune` stores in a bundle, and how: adapt.json is replaced whole, no other file is touched.

Knows manifests; no method's settings.
"""

import hashlib
import json
from dataclasses import dataclass, replace
from typing import Any

from ..errors import AdaptError
from ..runtime.bundle import Bundle
from ..runtime.loading import resolve_device, resolve_dtype
from ..runtime.manifest import MANIFEST_NAME, Manifest
from ..runtime.method_settings import MethodSettings
from ..runtime.progress import Reporter
from ..runtime.tuned import Tuned
from .tune_request import TuneRequest
from .workspace import disk_errors, whole_file

MEASUREMENT = 1
"""Counts changes to what is measured: what another version stored is measured again."""


@dataclass(frozen=True)
class Outcome:
    """What came of it. `measured`: anything was; `stored`: adapt.json is another one than before."""

    tuned: Tuned
    measured: bool
    stored: bool

    def to_dict(self) -> dict[str, Any]:
        """The keys of `tune --json`."""
        return {**self.tuned.model_dump(mode="json"), "measured": self.measured, "stored": self.stored}


def fingerprint(bundle: Bundle, request: TuneRequest, **inputs: Any) -> str:  # noqa: ANN401 - anything that JSON holds
    """Return the sha256 of what measurements depend on: weights, seed, device, number format, and `inputs`."""
    device = resolve_device(request.options.device)
    place = {"device": device.type, "dtype": str(resolve_dtype(request.options.dtype, device))}
    files = {**bundle.manifest.backbone.files, **bundle.manifest.files}
    weights = {name: record.sha256 for name, record in files.items() if name.endswith(".safetensors")}
    known = {"version": MEASUREMENT, "weights": weights, "base": bundle.manifest.base.config_sha256, **place}
    known |= {"seed": request.seed, **inputs}
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode("utf-8")).hexdigest()


def still_valid(bundle: Bundle, known: str, request: TuneRequest, reporter: Reporter) -> Tuned | None:
    """What was measured before, where its fingerprint is `known` and nobody asked to measure again; says so."""
    before = bundle.manifest.tuned
    if request.again or before is None or before.fingerprint != known:
        return None
    reporter.note("Nothing that was measured has changed; the stored figures are used.")
    return before


def with_method(manifest: Manifest, settings: MethodSettings, **changes: Any) -> Manifest:  # noqa: ANN401 - its fields
    """Return a manifest in which `settings` stand for those of the same method, checked."""
    methods = [settings if method.name == settings.name else method for method in manifest.methods]
    data = {**manifest.model_dump(), **changes, "methods": [method.model_dump() for method in methods]}
    return Manifest.model_validate(data)


def store(bundle: Bundle, manifest: Manifest) -> Bundle:
    """Replace a bundle's adapt.json, whole or not at all; return the bundle as it is now.

    Raises ResourceError where the disk is full, AdaptError where it cannot be written.
    """
    path = bundle.path / MANIFEST_NAME
    try:
        with disk_errors(path, "Free some space; the bundle is as it was."), whole_file(path) as file:
            file.write(manifest.dumps().encode("utf-8"))
    except OSError as error:
        raise AdaptError(f"{path} cannot be written: {error.strerror}", "The bundle is as it was.") from error
    return replace(bundle, manifest=manifest)


def same_file(manifest: Manifest, other: Manifest) -> bool:
    """Whether both would be the same adapt.json."""
    return manifest.dumps() == other.dumps()
