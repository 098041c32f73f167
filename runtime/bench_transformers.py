"""transformers as a contender on the same files: prefill, then greedy steps over its own cache.

The only module of the runtime that imports transformers, and only when `bench --against transformers` asks for it.
"""

import importlib.util
import inspect
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..errors import AdaptError, UnsupportedError
from .bench import Lap
from .loading import resolve_device, resolve_dtype
from .options import SessionOptions

if TYPE_CHECKING:
    from .bench_lanes import Prompt


def open_transformers(folder: Path, prompt: "Prompt", options: SessionOptions) -> "TransformersLane":
    """Load the model of a folder, no remote code. Raises AdaptError where transformers is missing or refuses."""
    if importlib.util.find_spec("transformers") is None:
        raise AdaptError("--against transformers needs transformers", "Install it: pip install transformers")
    import transformers  # noqa: PLC0415 - takes seconds

    device = resolve_device(options.device)
    dtype = resolve_dtype(options.dtype, device)
    library: Any = transformers
    library.utils.logging.disable_progress_bar()
    try:
        model = library.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError) as error:  # it has no errors of its own
        reason = " ".join(str(error).split())
        raise UnsupportedError(f"transformers cannot load {folder}: {reason}", "Leave --against out.") from error
    return TransformersLane(model.to(device).eval(), lambda: library.DynamicCache(config=model.config), prompt)


class TransformersLane:
    """A transformers model with a prompt; its forward is called directly, which costs less than its `generate`."""

    name = "transformers"

    def __init__(self, model: Any, make_cache: Callable[[], Any], prompt: "Prompt") -> None:  # noqa: ANN401 - its types are not imported
        self._model, self._make_cache, self._prompt = model, make_cache, prompt
        # Renamed in transformers 5; the old name goes in 5.40.
        self._keyword = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self._cache: Any = None
        self._first = torch.empty(0)

    @torch.inference_mode()
    def lap(self, *, afresh: bool) -> Lap:
        """See `bench.Contender`."""
        first = self._prefill() if afresh or not self._first.numel() else None
        ids, cache = self._first, self._cache
        started = time.perf_counter()
        for _ in range(self._prompt.tokens):
            ids = self._step(ids)
            ids.tolist()  # a token must be here before it can be printed
        seconds = time.perf_counter() - started
        cache.crop(-self._prompt.tokens)
        return Lap(seconds, self._prompt.tokens, len(self._prompt.rows), first, {}, None)

    def _prefill(self) -> float:
        ids = torch.tensor(self._prompt.rows, device=self._model.device)
        self._cache = self._make_cache()
        started = time.perf_counter()
        self._first = self._step(ids)
        self._first.tolist()
        return time.perf_counter() - started

    def _step(self, ids: torch.Tensor) -> torch.Tensor:
        output = self._model(input_ids=ids, use_cache=True, logits_to_keep=1, **{self._keyword: self._cache})
        return output.logits[:, -1].argmax(-1, keepdim=True)
