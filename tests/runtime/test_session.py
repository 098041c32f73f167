"""From a folder to an answer, with a fake model; and with real tokenizers where they are."""

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from adapt_llm.errors import AdaptError, UsageError
from adapt_llm.runtime.chat_formats import BUILT_IN
from adapt_llm.runtime.conversation import GenerationOptions
from adapt_llm.runtime.options import SessionOptions
from adapt_llm.runtime.session import Session, open_session
from adapt_llm.runtime.text import Tokenizer

FAKES = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("chat_fakes.py"))))
TOKENIZER = FAKES.byte_tokenizer()
OPTIONS = GenerationOptions(max_tokens=60)


def folder(path: Path, *, template: str | None = BUILT_IN["chatml"].source) -> Path:
    TOKENIZER.backend.save(str(path / "tokenizer.json"))
    settings = {} if template is None else {"chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return path


def session(path: Path, model: object = None, *, positions: int = 8192, **options: object) -> Session:
    model = model or FAKES.FakeModel(TOKENIZER, FAKES.echo)
    return Session(path, Tokenizer.load(path), model, positions, SessionOptions(**options))


def text_of(stream: object) -> str:
    return "".join(record.text for record in stream)


def test_a_prompt_goes_through_the_template_with_its_system_text(tmp_path: Path) -> None:
    model = FAKES.FakeModel(TOKENIZER, FAKES.echo)
    opened = session(folder(tmp_path), model)
    stream = opened.complete("abc", OPTIONS, system="S")
    assert text_of(stream) == "[1:cba]"
    seen = TOKENIZER.decode(model.caches[0].ids, skip_special_tokens=False)
    assert seen == ("<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nabc<|im_end|>\n<|im_start|>assistant\n[1:cba]")
    assert stream.stats.prompt_tokens == len(model.caches[0].ids) - len("[1:cba]")
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "y"},
        {"role": "user", "content": "zw"},
    ]
    assert text_of(opened.complete(messages, OPTIONS)) == "[2:wz]"


def test_prompts_do_not_touch_each_other(tmp_path: Path) -> None:
    opened = session(folder(tmp_path))
    one, two = opened.complete("abc", OPTIONS), opened.complete("xyz", OPTIONS)
    pairs = [(a.text, b.text) for a, b in zip(one, two, strict=True)]
    assert "".join(a for a, _ in pairs) == "[1:cba]"
    assert "".join(b for _, b in pairs) == "[1:zyx]"


def test_raw_and_base_models_continue_the_text(tmp_path: Path) -> None:
    model = FAKES.FakeModel(TOKENIZER, lambda text: f"<{text.partition('<')[0]}><|im_end|>")
    opened = session(folder(tmp_path), model)
    assert text_of(opened.complete("abc", OPTIONS, raw=True)) == "<abc>"
    base = session(folder(tmp_path, template=None), model)
    assert not base.converses
    assert text_of(base.complete("abc", OPTIONS)) == "<abc>"
    with pytest.raises(UsageError, match="needs a chat template"):
        base.complete("abc", OPTIONS, system="S")
    with pytest.raises(AdaptError, match="base model"):
        base.complete([{"role": "user", "content": "a"}], OPTIONS)
    with pytest.raises(UsageError, match="Messages need"):
        opened.complete([{"role": "user", "content": "a"}], OPTIONS, raw=True)


def test_a_base_model_chats_with_a_named_template_or_raw(tmp_path: Path) -> None:
    folder(tmp_path, template=None)
    with pytest.raises(AdaptError, match="base model"):
        session(tmp_path).chat()
    chat = session(tmp_path, chat_template="chatml").chat("S")
    assert text_of(chat.say("abc", OPTIONS)) == "[1:cba]"
    assert session(tmp_path).chat(raw=True).system is None


def test_two_system_texts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="two system texts"):
        session(folder(tmp_path)).complete([{"role": "system", "content": "a"}], OPTIONS, system="b")


def test_memory_follows_the_request_not_the_model(tmp_path: Path) -> None:
    model = FAKES.FakeModel(TOKENIZER, lambda _: "x")
    opened = session(folder(tmp_path), model, positions=131072)
    text_of(opened.complete("abc", OPTIONS))
    assert model.caches[-1].capacity == 128
    text_of(opened.complete("a" * 6000, OPTIONS))
    assert model.caches[-1].capacity <= 6000 + 60 + 128
    text_of(opened.complete("abc", GenerationOptions()))
    assert model.caches[-1].capacity == 4096


def test_ctx_size_is_the_limit_and_cannot_exceed_the_positions(tmp_path: Path) -> None:
    folder(tmp_path)
    with pytest.raises(UsageError, match="9000; the model's positions reach 8192"):
        session(tmp_path, ctx_size=9000)
    with pytest.raises(AdaptError, match="the context holds 50"):
        session(tmp_path, ctx_size=50).complete("a" * 60, OPTIONS)
    with pytest.raises(AdaptError, match="the context holds 100"):
        session(tmp_path, positions=100).complete("a" * 200, OPTIONS)


@pytest.mark.parametrize("values", [{"threads": 0}, {"ctx_size": 0}, {"resident": 0}, {"tau": 1.5}])
def test_options_that_nothing_could_satisfy_are_usage_errors(values: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=f"^--{next(iter(values)).replace('_', '-')} "):
        SessionOptions(**values)


def test_open_session_loads_the_model_of_the_bundle(
    tmp_path: Path, built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    for path in built.iterdir():
        (bundle / path.name).symlink_to(path)
    (bundle / "tokenizer.json").unlink(missing_ok=True)
    TOKENIZER.backend.save(str(bundle / "tokenizer.json"))
    monkeypatch.setattr("adapt_llm.runtime.bundle.check_size", lambda *_: None)  # the tokenizer is another one
    loaded = []

    def load(bundle: object, options: SessionOptions, reporter: object) -> object:
        loaded.append((bundle.path, options.tau))
        return FAKES.FakeModel(TOKENIZER, FAKES.echo)

    monkeypatch.setitem(sys.modules, "adapt_llm.runtime.models", SimpleNamespace(load_model=load))
    opened = open_session(bundle, SessionOptions(tau=0.9))
    assert loaded == [(bundle, 0.9)]
    assert opened.max_positions > 0
    assert opened.tokenizer.encode("a") == TOKENIZER.encode("a")
    with pytest.raises(UsageError, match="no bundle"):
        open_session(tmp_path / "none", SessionOptions())
