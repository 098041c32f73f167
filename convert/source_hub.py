"""A model on the Hugging Face Hub: what of it is fetched, and what each refusal means for the user.

The only module that imports huggingface_hub. Fetches config.json first, so that a missing right or an unsupported model
is known before anything heavy; then only safetensors, the tokenizer and licences, never a pickle.
"""

import errno
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

from huggingface_hub import HfApi, constants, hf_hub_download, logging
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

# The HTTP library's base error, wherever huggingface_hub takes it from (httpx or httpx2, by version).
from huggingface_hub.errors import HTTPError as TransportError  # pyright: ignore[reportPrivateImportUsage]

from ..errors import AccessError, AdaptError, FormatError, ResourceError, UsageError
from ..runtime.progress import Reporter, Task
from ..runtime.store import weight_map
from .source_directory import INDEX, SINGLE, SLOW_TOKENIZERS, TEXT_NAMES, is_licence, read_json, refuse_pickles

_TEXTS = frozenset({*TEXT_NAMES, *SLOW_TOKENIZERS, "merges.txt", "generation_config.json", "quantize_config.json"})
_LOGIN = "log in with `hf auth login`, or give --token or HF_TOKEN"
_CACHE_ELSEWHERE = "Free some, or give another place with --cache-dir."


@dataclass(frozen=True)
class HubModel:
    """Which model, and how to get at it. `token` None = what the user is logged in with."""

    id: str
    revision: str | None = None
    token: str | None = None
    cache_dir: Path | None = None
    offline: bool = False

    @property
    def is_offline(self) -> bool:
        """Asked for on the command line or by HF_HUB_OFFLINE."""
        return self.offline or constants.HF_HUB_OFFLINE

    @property
    def page(self) -> str:
        """Where a person looks at the model."""
        return f"{constants.ENDPOINT}/{self.id}"


def fetch(model: HubModel, check: Callable[[dict[str, Any]], None], reporter: Reporter) -> tuple[Path, str]:
    """Bring a model into the Hub cache, or find it there: its folder and commit hash.

    `check` sees config.json before anything else is fetched. Files that are in the cache are not fetched again, and a
    connection that breaks is taken up where it broke. Raises `AccessError` (no right, no such model, offline),
    `UnsupportedError` (pickles only, or what `check` raises), `FormatError` (incomplete), `ResourceError` (disk).
    """
    logging.set_verbosity_error()  # it warns of every retry; how it ends is told in one line, by `_explained`
    config = _config_path(model)
    folder, commit = config.parent, config.parent.name
    check(read_json(config))
    sizes = None if model.is_offline else _sizes(model, commit, reporter)
    if sizes is None:
        _check_cached(model, folder)
        return folder, commit
    pinned = HubModel(model.id, commit, model.token, model.cache_dir)
    wanted = _wanted(model, sizes, lambda: read_json(_download(pinned, INDEX)))
    _check_disk(wanted, folder)
    _download_all(pinned, wanted, reporter)
    return folder, commit


def _config_path(model: HubModel) -> Path:
    try:
        return _download(model, "config.json")
    except EntryNotFoundError as error:
        # Also what comes when there is no network; `_explained` has told that apart.
        raise FormatError(f"{model.id} has no config.json", f"Is it a language model? See {model.page}.") from error


def _download(model: HubModel, name: str, bar: type | None = None) -> Path:
    with _explained(model):
        path = hf_hub_download(
            model.id,
            name,
            revision=model.revision,
            token=model.token,
            cache_dir=model.cache_dir,
            local_files_only=model.is_offline,
            tqdm_class=cast("Any", bar or _bar(None)),
        )
    return Path(path)


@contextmanager
def _explained(model: HubModel) -> Iterator[None]:
    """Turn the Hub's errors into one line and what to do. Lets a file that a reachable repository lacks pass."""
    try:
        yield
    except LocalEntryNotFoundError as error:
        # Not in the cache either; the cause is why the Hub could not be asked.
        raise _explanation(model, error.__cause__ or OfflineModeIsEnabled(str(error))) from error
    except EntryNotFoundError:
        raise
    except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, TransportError, OSError) as error:
        raise _explanation(model, error) from error


def _explanation(model: HubModel, error: BaseException) -> AdaptError:
    if isinstance(error, HfHubHTTPError):
        return _refusal(model, error)
    if isinstance(error, HFValidationError):
        hint = "Give a Hub id such as org/name, a directory, or a .gguf file."
        return UsageError(f"'{model.id}' is neither a Hub id nor a path that exists", hint)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return ResourceError(f"the disk of the Hub cache is full, {model.id} is not whole", _CACHE_ELSEWHERE)
    if isinstance(error, OSError) and not isinstance(error, ConnectionError | TimeoutError):
        return FormatError(f"the download of {model.id} failed: {_first_line(error)}", "Run the same command again.")
    return _unreachable(model, error)


def _refusal(model: HubModel, error: HfHubHTTPError) -> AccessError:
    """The Hub answered, and the answer is no."""
    status = error.response.status_code
    what, hint = f"the Hub answered {status} for {model.id}", "Try again later; what was fetched is kept."
    if isinstance(error, GatedRepoError):
        what, hint = f"{model.id} is gated", f"Accept its terms at {model.page}, then {_LOGIN}."
    elif isinstance(error, RevisionNotFoundError):
        what, hint = f"{model.id} has no revision '{model.revision}'", f"See the branches at {model.page}/tree/main."
    elif status == 401 and "Invalid credentials" in str(error):
        what, hint = "the Hub does not accept the token", f"It may have expired: {_LOGIN}."
    elif isinstance(error, RepositoryNotFoundError) or status == 401:
        # Without a token the Hub answers 401 for what does not exist, too.
        what = f"the Hub has no model {model.id}, or hides it from you; nor is there a file or directory of this name"
        hint = f"Check the name; if the model is private, {_LOGIN}."
    elif status == 403:
        what = f"the token has no right to read {model.id}"
        hint = f"Give it read access to gated and private models, or ask at {model.page}."
    return AccessError(what, hint)


def _unreachable(model: HubModel, error: BaseException) -> AccessError:
    if model.is_offline or isinstance(error, OfflineModeIsEnabled):
        hint = "Run once without --offline and HF_HUB_OFFLINE, or point --cache-dir to where it is."
        return AccessError(f"{model.id} is not in the Hub cache, and the program is offline", hint)
    hint = "Check the network and proxy; what was fetched is kept, so run the same command again."
    return AccessError(f"{constants.ENDPOINT} cannot be reached for {model.id} ({_first_line(error)})", hint)


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def _sizes(model: HubModel, commit: str, reporter: Reporter) -> dict[str, int] | None:
    """Bytes of every file in the root of the repository; None when the Hub cannot be reached after all."""
    try:
        with _explained(model):
            info = HfApi(token=model.token).model_info(model.id, revision=commit, files_metadata=True)
    except AccessError as error:
        # config.json came from the cache, so the rest may be there as well.
        reporter.warn(f"{error.message}; using the copy in the Hub cache")
        return None
    files = {file.rfilename: file.size for file in info.siblings or []}
    return {name: size or 0 for name, size in files.items() if "/" not in name}


def _wanted(model: HubModel, sizes: Mapping[str, int], read_index: Callable[[], dict[str, Any]]) -> dict[str, int]:
    """The files to have, small ones first, with their sizes."""
    texts = {name for name in sizes if name in _TEXTS or is_licence(name)}
    weights = {SINGLE}
    if INDEX in sizes:
        weights = set(weight_map(read_index(), INDEX).values())
        texts.add(INDEX)
    elif SINGLE not in sizes:
        # GPTQ checkpoints use other names; of several files nobody knows which one is meant.
        weights = {name for name in sizes if name.endswith(".safetensors")}
        _check_one_weight_file(model, weights, sizes)
    missing = sorted(weights - sizes.keys())
    if missing:
        raise FormatError(f"{model.id} lacks {missing[0]}, which its index names", f"See {model.page}/tree/main.")
    return {name: sizes[name] for name in (*sorted(texts), *sorted(weights))}


def _check_one_weight_file(model: HubModel, weights: set[str], sizes: Mapping[str, int]) -> None:
    if len(weights) == 1:
        return
    if not weights and any(name.endswith((".bin", ".pt", ".pth")) for name in sizes):
        raise refuse_pickles(model.id)
    what = "several safetensors files and no index" if weights else "no safetensors files"
    raise FormatError(f"{model.id} has {what}", f"See {model.page}/tree/main; GGUF files are given as a local path.")


def _check_disk(wanted: Mapping[str, int], folder: Path) -> None:
    needed = sum(size for name, size in wanted.items() if not (folder / name).exists())
    free = shutil.disk_usage(folder).free
    if needed > free:
        what = f"{needed / 1e9:.1f} GB to fetch, {free / 1e9:.1f} GB free where the Hub cache is"
        raise ResourceError(what, _CACHE_ELSEWHERE)


def _download_all(model: HubModel, wanted: Mapping[str, int], reporter: Reporter) -> None:
    with reporter.task(f"fetching {model.id}", sum(wanted.values())) as task:
        for name, size in wanted.items():
            done = _Counted(task)
            try:
                path = _download(model, name, _bar(done))
            except EntryNotFoundError as error:
                raise FormatError(f"{model.id} lacks {name}, which it lists", "Run the same command again.") from error
            task.advance(size - done.amount)
            if path.stat().st_size != size:
                what = f"{name} has {path.stat().st_size} bytes in the Hub cache, the Hub says {size}"
                raise FormatError(what, f"Delete {path.resolve().name} from the cache and run the same command again.")


def _check_cached(model: HubModel, folder: Path) -> None:
    """Whether a cached snapshot has all its weights; the Hub cannot be asked."""
    index = folder / INDEX
    weights = set(weight_map(read_json(index), INDEX).values()) if index.exists() else {SINGLE}
    absent = sorted(name for name in weights if not (folder / name).exists())
    if absent and (index.exists() or not list(folder.glob("*.safetensors"))):
        hint = "Run once online: what is there already is kept."
        raise AccessError(f"the Hub cache has only a part of {model.id}: {absent[0]} is missing", hint)


class _Counted:
    """Passes progress on and remembers how much there was."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self.amount = 0.0

    def advance(self, amount: float = 1) -> None:
        self.amount += amount
        self._task.advance(amount)


def _bar(task: Task | None) -> type:
    """A class that huggingface_hub uses in place of tqdm."""

    class Bar:
        def __init__(self, *_args: object, initial: float = 0, **_options: object) -> None:
            self.update(initial)

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_exception: object) -> None:
            return None

        def update(self, amount: float | None = 1) -> None:
            if task is not None:
                task.advance(amount or 0)

        def close(self) -> None:
            """Nothing to close."""

    return Bar
