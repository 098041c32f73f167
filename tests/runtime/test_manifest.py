"""adapt.json: what is accepted, what is refused and with which remedy, and that its text is stable."""

import json
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from adapt_llm.errors import FormatError, UnsupportedError
from adapt_llm.runtime import manifest as m
from adapt_llm.runtime.architecture import Architecture
from adapt_llm.runtime.methods import METHODS, River
from adapt_llm.runtime.progress import SilentReporter


class Warnings(SilentReporter):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def warn(self, text: str) -> None:
        self.texts.append(text)


@pytest.fixture
def plain(factory: ModuleType) -> m.Manifest:
    return factory.manifest(Architecture.from_config(factory.config()))


def changed(plain: m.Manifest, **changes: object) -> str:
    return json.dumps({**json.loads(plain.dumps()), **changes})


def test_it_comes_back_as_it_went(plain: m.Manifest) -> None:
    assert m.loads(plain.dumps()) == plain
    assert isinstance(m.loads(plain.dumps()).method(River), River)


def test_order_without_meaning_leaves_no_trace(plain: m.Manifest) -> None:
    record = m.FileRecord(sha256="a" * 64, bytes=1)
    one = plain.model_copy(update={"files": {"a": record, "b": record}, "libraries": {"x": "1", "y": "2"}})
    two = plain.model_copy(update={"files": {"b": record, "a": record}, "libraries": {"y": "2", "x": "1"}})
    assert one.dumps() == two.dumps()


@given(noise=st.floats(-1e-9, 1e-9))
def test_floats_keep_six_digits(noise: float) -> None:
    quality = m.Quality(
        tokens=1, text="t", dense_perplexity=25.3612345 + noise, perplexity=26, kl=0.01, agreement=1, mean_depth=2
    )
    base = m.Base(id="x", config_sha256="0" * 64)
    river = River(quantizer="rtn", group_size=32, exit_layers=(2,), tau=0.9)
    data = json.loads(m.Manifest(base=base, methods=(river,), quality=quality).dumps())
    assert data["quality"]["dense_perplexity"] == 25.3612


def test_a_newer_format_names_the_version_needed(plain: m.Manifest) -> None:
    with pytest.raises(UnsupportedError, match=r"9\.1"):
        m.loads(changed(plain, format_version=2, needs_adapt="9.1", base="of another shape"))


def test_an_unknown_required_feature_is_refused(plain: m.Manifest) -> None:
    with pytest.raises(UnsupportedError, match=r"teleport.*adapt-llm 7\.0"):
        m.loads(changed(plain, required=["river", "teleport"], needs_adapt="7.0"))


def test_an_unknown_optional_feature_warns(plain: m.Manifest) -> None:
    seen = Warnings()
    assert m.loads(changed(plain, optional=["sparkle"], sparkle={"much": 1}), reporter=seen).optional == ("sparkle",)
    assert "sparkle" in seen.texts[0]


def test_an_unknown_method_is_named(plain: m.Manifest) -> None:
    with pytest.raises(FormatError, match="nosuch"):
        m.loads(changed(plain, methods=[{"name": "nosuch"}]))


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format_version": true}', '{"format_version": 0}'])
def test_what_is_no_manifest_is_a_format_error(text: str) -> None:
    with pytest.raises(FormatError):
        m.loads(text)


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("base", {"id": "x"}, "base.config_sha256"),
        ("trained", "perhaps", "trained"),
        ("methods", [], "methods"),
        ("files", {"../x": {"sha256": "0" * 64, "bytes": 1}}, "files"),
        ("files", {"adapt.json": {"sha256": "0" * 64, "bytes": 1}}, "adapt.json"),
        ("files", {"x": {"sha256": "0" * 63, "bytes": 1}}, "files.x.sha256"),
        ("backbone", {"mode": "reference"}, "backbone"),
        ("backbone", {"mode": "symlink"}, "backbone.mode"),
    ],
)
def test_the_message_names_the_field(plain: m.Manifest, key: str, value: object, named: str) -> None:
    with pytest.raises(FormatError, match=named):
        m.loads(changed(plain, **{key: value}))


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b"], ids=["NUL", "surrogate"])
@pytest.mark.parametrize("where", ["files", "backbone", "id", "revision", "libraries", "text"])
def test_no_name_that_the_system_refuses(plain: m.Manifest, where: str, name: str) -> None:
    base, files = json.loads(plain.dumps())["base"], {name: {"sha256": "0" * 64, "bytes": 1}}
    quality = {"tokens": 1, "text": name, **dict.fromkeys(("dense_perplexity", "perplexity", "kl"), 1.0)}
    changes: dict[str, dict[str, object]] = {
        "files": {"files": files},
        "backbone": {"backbone": {"mode": "reference", "files": files}},
        "id": {"base": {**base, "id": name}},
        "revision": {"base": {**base, "revision": name}},
        "libraries": {"libraries": {name: "1"}},
        "text": {"quality": {**quality, "agreement": 1.0, "mean_depth": 1.0}},
    }
    with pytest.raises(FormatError, match=r"not a file name|NUL byte") as caught:
        m.loads(changed(plain, **changes[where]))
    assert str(caught.value).isprintable()


def test_a_method_that_is_there_twice(plain: m.Manifest) -> None:
    river = json.loads(plain.dumps())["methods"][0]
    with pytest.raises(FormatError, match="twice"):
        m.loads(changed(plain, methods=[river, {**river, "tau": 0.5}]))


@pytest.mark.parametrize("path", ["/srv/model", "~/model", "C:\\models\\x", "\\\\host\\x", "file:///x"])
def test_no_absolute_path_goes_in_or_out(plain: m.Manifest, path: str) -> None:
    with pytest.raises(FormatError, match="path of one machine"):
        m.loads(changed(plain, base={**json.loads(plain.dumps())["base"], "id": path}))


@pytest.mark.parametrize(
    "changes",
    [
        {"exit_layers": [3, 2]},
        {"exit_layers": []},
        {"exit_layers": [2, 2]},
        {"entry_layer": 3},
        {"entry_layer": 1},
        {"tau": 1.5},
        {"tau": float("nan")},
        {"bits": 8},
        {"group_size": 7},
        {"entry_layer": 4, "exit_layers": [4], "resident": 2},
    ],
)
def test_river_settings_that_contradict_themselves(factory: ModuleType, changes: dict) -> None:
    arch = Architecture.from_config(factory.config())
    with pytest.raises(ValidationError):
        factory.river_settings(arch, **changes)


def test_every_method_is_registered_under_its_own_name() -> None:
    for name, settings in METHODS.items():
        assert settings.model_fields["name"].default == name
