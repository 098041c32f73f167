"""The Hub: real downloads from a small server on the loopback that answers as the Hub does, and its refusals."""

import errno
import functools
import importlib.util
import json
import logging
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Self

import huggingface_hub.constants
import pytest
import torch
from huggingface_hub import hf_api
from safetensors.torch import save

from adapt_llm.convert import source_hub
from adapt_llm.convert.source import open_gptq, open_source
from adapt_llm.errors import AccessError, AdaptError, FormatError, ResourceError, UnsupportedError, UsageError
from adapt_llm.runtime.progress import SilentReporter

_SPEC = importlib.util.spec_from_file_location("hub_server", Path(__file__).with_name("hub_server.py"))
server_module = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(server_module)
COMMIT, CONFIG, Handler, Hub = (getattr(server_module, name) for name in ("COMMIT", "CONFIG", "Handler", "Hub"))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    state = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, state))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(hf_api.api, "endpoint", address)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "default-cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _seconds: None)
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "no-token"))
    yield state
    server.shutdown()
    server.server_close()
    thread.join()


class Progress(SilentReporter):
    """Remembers titles, totals and how much was done."""

    def __init__(self) -> None:
        self.total = self.done = 0.0
        self.warnings: list[str] = []

    def task(self, title: str, total: float) -> Self:
        self.total = total
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        return None

    def advance(self, amount: float = 1) -> None:
        self.done += amount

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def test_a_model_is_fetched(hub: Hub, tmp_path: Path) -> None:
    progress = Progress()
    source = open_source("org/tiny", cache_dir=tmp_path, reporter=progress)
    assert (source.identity.id, source.identity.revision) == ("org/tiny", COMMIT)
    assert str(tmp_path) not in repr(source.identity)
    assert source.generation_config == {"eos_token_id": 2}
    assert sorted(source.text_files()) == ["LICENSE", "tokenizer.json"]
    assert hub.served()[0] == "config.json"
    assert not [name for name in hub.served() if name.endswith((".bin", ".pth", ".py"))]
    assert progress.done == progress.total > 10_000
    assert all(source.store.read(name).isfinite().all() for name in source.store.names())


def test_the_second_run_fetches_nothing(hub: Hub, tmp_path: Path) -> None:
    first = open_source("org/tiny", cache_dir=tmp_path)
    hub.asked.clear()
    again = open_source("org/tiny", cache_dir=tmp_path)
    assert again.identity == first.identity
    assert again.fingerprint() == first.fingerprint()
    assert hub.served() == []


def test_offline_from_the_cache(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = open_source("org/tiny", cache_dir=tmp_path)
    hub.asked.clear()
    assert open_source("org/tiny", cache_dir=tmp_path, offline=True).identity == first.identity
    assert open_source("org/tiny", cache_dir=tmp_path, revision=COMMIT, offline=True).identity == first.identity
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert open_source("org/tiny", cache_dir=tmp_path).identity == first.identity
    assert hub.asked == []


def test_without_network_the_cache_serves_and_says_so(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_source("org/tiny", cache_dir=tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(
        huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:9/{repo_id}/{revision}/{filename}"
    )
    monkeypatch.setattr(hf_api.api, "endpoint", "http://127.0.0.1:9")
    progress = Progress()
    assert open_source("org/tiny", cache_dir=tmp_path, reporter=progress).identity == first.identity
    assert "cannot be reached" in progress.warnings[0]


def test_a_cut_connection_is_taken_up_where_it_broke(hub: Hub, tmp_path: Path) -> None:
    shard = "model-00002-of-00002.safetensors"
    hub.cut_after[shard] = 3000
    progress = Progress()
    source = open_source("org/tiny", cache_dir=tmp_path, reporter=progress)
    assert hub.served().count(shard) == 2
    assert progress.done == progress.total
    fetched = next(path for path in source.weight_files if path.name == shard)
    assert fetched.read_bytes() == hub.repositories["org/tiny"][shard]


def test_after_a_failed_run_only_the_rest_is_fetched(hub: Hub, tmp_path: Path) -> None:
    whole = dict(hub.repositories["org/tiny"])
    del hub.repositories["org/tiny"]["model-00002-of-00002.safetensors"]
    with pytest.raises(FormatError, match=r"lacks model-00002-of-00002\.safetensors, which its index names"):
        open_source("org/tiny", cache_dir=tmp_path)
    hub.repositories["org/tiny"] = whole
    open_source("org/tiny", cache_dir=tmp_path)
    assert hub.served().count("config.json") == 1


def test_the_token_is_sent(hub: Hub, tmp_path: Path) -> None:
    open_source("org/tiny", cache_dir=tmp_path, token="hf_secret")
    assert hub.tokens == {"Bearer hf_secret"}


GATED = {"X_Error_Code": "GatedRepo", "X_Error_Message": "Access to model is restricted"}
BAD_TOKEN = {"X_Error_Message": "Invalid credentials in Authorization header"}
NO_REPOSITORY = {"X_Error_Code": "RepoNotFound", "X_Error_Message": "Repository not found"}


@pytest.mark.parametrize(
    ("status", "headers", "what", "remedy"),
    [
        (403, GATED, "org/tiny is gated", r"Accept its terms at http\S+/org/tiny, then .*hf auth login.*HF_TOKEN"),
        (401, GATED, "org/tiny is gated", "Accept its terms"),
        (401, BAD_TOKEN, "does not accept the token", "hf auth login"),
        (401, {}, "no model org/tiny, or hides it", "private"),
        (404, NO_REPOSITORY, "no model org/tiny, or hides it", "Check the name"),
        (403, {"X_Error_Message": "no"}, "token has no right to read org/tiny", "read access"),
        (500, {}, r"cannot be reached|answered 500", "again"),
    ],
)
def test_each_refusal_is_told_apart(
    hub: Hub, tmp_path: Path, status: int, headers: dict[str, str], what: str, remedy: str
) -> None:
    hub.refuse["org/tiny"] = (status, headers)
    with pytest.raises(AccessError, match=what) as caught:
        open_source("org/tiny", cache_dir=tmp_path)
    assert caught.match(remedy)
    assert caught.value.exit_code == 4
    assert "\n" not in str(caught.value)
    assert hub.served() == []


def test_a_name_nobody_knows(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(AccessError, match=r"no model org/tinny.*nor is there a file or directory"):
        open_source("org/tinny", cache_dir=tmp_path)


def test_a_revision_that_is_not_there(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(AccessError, match="org/tiny has no revision 'v9'"):
        open_source("org/tiny", revision="v9", cache_dir=tmp_path)


def test_offline_and_not_cached(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(AccessError, match=r"not in the Hub cache, and the program is offline.*--offline"):
        open_source("org/tiny", cache_dir=tmp_path, offline=True)
    assert hub.asked == []


def test_offline_and_half_cached(hub: Hub, tmp_path: Path) -> None:
    source = open_source("org/tiny", cache_dir=tmp_path)
    source.weight_files[1].unlink()
    with pytest.raises(AccessError, match="only a part of org/tiny: model-00002-of-00002"):
        open_source("org/tiny", cache_dir=tmp_path, offline=True)


def test_no_network(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:9/{repo_id}/{revision}/{filename}"
    )
    with pytest.raises(AccessError, match=r"cannot be reached for org/tiny.*network") as caught:
        open_source("org/tiny", cache_dir=tmp_path)
    assert "\n" not in str(caught.value)


def test_no_network_is_one_line(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What huggingface_hub says of each retry stays away from the terminal."""
    monkeypatch.setattr(
        huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:9/{repo_id}/{revision}/{filename}"
    )
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _seconds: None)
    logger, said = logging.getLogger("huggingface_hub"), []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", said.append)
    monkeypatch.setattr(logger, "handlers", [handler])
    huggingface_hub.logging.set_verbosity_warning()  # as the library is when it comes
    with pytest.raises(AccessError, match="cannot be reached"):
        open_source("org/tiny", cache_dir=tmp_path)
    assert [record.getMessage() for record in said] == []


@pytest.mark.parametrize("weights", [["a"], {"a": 1}, {"a": {}}, None])
def test_an_index_that_names_no_files(hub: Hub, tmp_path: Path, weights: object) -> None:
    good = hub.repositories["org/tiny"]["model.safetensors.index.json"]
    bad = json.dumps({"weight_map": weights}).encode()
    hub.repositories["org/tiny"]["model.safetensors.index.json"] = bad
    with pytest.raises(FormatError, match=r"model\.safetensors\.index\.json is no index of shards"):
        open_source("org/tiny", cache_dir=tmp_path)
    hub.repositories["org/tiny"]["model.safetensors.index.json"] = good
    source = open_source("org/tiny", cache_dir=tmp_path / "other")
    index = source.weight_files[0].parent / "model.safetensors.index.json"
    index.unlink()
    index.write_bytes(bad)
    with pytest.raises(FormatError, match=r"model\.safetensors\.index\.json is no index of shards"):
        open_source("org/tiny", cache_dir=tmp_path / "other", offline=True)


def test_a_name_that_is_no_name(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="neither a Hub id nor a path"):
        open_source("org/na me", cache_dir=tmp_path)


def _change(hub: Hub, **config: object) -> None:
    hub.repositories["org/tiny"]["config.json"] = json.dumps({**CONFIG, **config}).encode()


def test_an_unsupported_model_costs_one_small_file(hub: Hub, tmp_path: Path) -> None:
    _change(hub, quantization_config={"quant_method": "gptq"})
    with pytest.raises(UnsupportedError, match="already quantised"):
        open_source("org/tiny", cache_dir=tmp_path)
    assert hub.served() == ["config.json"]


@pytest.mark.parametrize(
    ("kept", "error", "message"),
    [
        ((".json", ".bin"), UnsupportedError, "org/tiny has its weights as pickles only"),
        ((".json", ".gguf"), FormatError, "no safetensors files.*GGUF"),
        ((".bin",), FormatError, r"org/tiny has no config\.json"),
    ],
)
def test_a_repository_without_safetensors(
    hub: Hub, tmp_path: Path, kept: tuple[str, ...], error: type[AdaptError], message: str
) -> None:
    files = hub.repositories["org/tiny"]
    for name in list(files):
        if not name.endswith(kept) or name.endswith("index.json"):
            del files[name]
    with pytest.raises(error, match=message):
        open_source("org/tiny", cache_dir=tmp_path)
    assert "pytorch_model.bin" not in hub.served()


def test_a_damaged_cache_is_seen(hub: Hub, tmp_path: Path) -> None:
    shard = open_source("org/tiny", cache_dir=tmp_path).weight_files[0]
    blob = shard.resolve()
    blob.write_bytes(blob.read_bytes()[:-1])
    with pytest.raises(FormatError, match=f"{shard.name} has .* bytes in the Hub cache, the Hub says"):
        open_source("org/tiny", cache_dir=tmp_path)


def test_a_disk_too_small_is_told_before_fetching(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = source_hub.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(source_hub.shutil, "disk_usage", lambda _path: real._replace(free=6000))
    with pytest.raises(ResourceError, match="--cache-dir"):
        open_source("org/tiny", cache_dir=tmp_path)
    assert not [name for name in hub.served() if name.endswith(".safetensors")]


def test_a_disk_that_fills_up(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_arguments: object, **_options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.file_download.http_get", full)
    with pytest.raises(ResourceError, match=r"disk of the Hub cache is full.*--cache-dir"):
        open_source("org/tiny", cache_dir=tmp_path)


def test_a_gptq_checkpoint_from_the_hub(hub: Hub, tmp_path: Path) -> None:
    settings = {"bits": 4, "group_size": 128, "quant_method": "gptq", "sym": True}
    packed = save({"model.layers.0.mlp.up_proj.qweight": torch.ones(4, 48, dtype=torch.int32)})
    hub.repositories["org/tiny-gptq"] = {
        "config.json": json.dumps({**CONFIG, "quantization_config": settings}).encode(),
        "gptq_model-4bit-128g.safetensors": packed,
    }
    opened = open_gptq("org/tiny-gptq", cache_dir=tmp_path)
    assert (opened.name, opened.revision, opened.settings.group_size) == ("org/tiny-gptq", COMMIT, 128)
    assert list(opened.store.names()) == ["model.layers.0.mlp.up_proj.qweight"]


def test_a_name_without_an_owner(hub: Hub, tmp_path: Path) -> None:
    assert open_source("gpt2", cache_dir=tmp_path).identity.id == "gpt2"
