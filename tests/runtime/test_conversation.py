"""Conversations word for word, with a model that answers from all that its cache holds."""

import json
import runpy
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from adapt_llm.errors import AdaptError, FormatError, UsageError
from adapt_llm.runtime.chat_formats import BUILT_IN
from adapt_llm.runtime.conversation import ChatParts, Conversation, GenerationOptions
from adapt_llm.runtime.sampling import Sampling
from adapt_llm.runtime.template import Template

FAKES = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("chat_fakes.py"))))
TOKENIZER = FAKES.byte_tokenizer()
OPTIONS = GenerationOptions(max_tokens=60)
CHATML = Template(BUILT_IN["chatml"].source)


def conversation(
    model: object = None, *, context: int = 1000, system: str | None = None, template: Template | None = CHATML
) -> Conversation:
    model = model or FAKES.FakeModel(TOKENIZER, FAKES.echo)
    return Conversation(ChatParts(model, TOKENIZER, template, context), system)


def say(chat: Conversation, text: str, options: GenerationOptions = OPTIONS) -> str:
    return "".join(record.text for record in chat.say(text, options))


def contents(chat: Conversation) -> list[str]:
    return [message["content"] for message in chat.messages]


def test_turns_are_read_as_the_template_writes_them_and_reuse_the_cache() -> None:
    model = FAKES.FakeModel(TOKENIZER, FAKES.echo)
    chat = conversation(model, system="Be brief.")
    assert say(chat, "abc") == "[1:cba]"
    first = len(TOKENIZER.encode("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nabc<|im_end|>\n"))
    first += len(TOKENIZER.encode("<|im_start|>assistant\n"))
    assert model.calls[0] == ("prefill", first)
    del model.calls[:]
    assert say(chat, "한국") == "[2:국한]"
    # The answer's end was chosen but not passed through the model; it comes with the new turn.
    new = "<|im_end|>\n<|im_start|>user\n한국<|im_end|>\n<|im_start|>assistant\n"
    assert model.calls[0] == ("prefill", len(TOKENIZER.encode(new)))
    assert sum(bool(cache.ids) for cache in model.caches) == 1
    seen = TOKENIZER.decode(model.caches[-1].ids, skip_special_tokens=False)
    assert seen == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nabc<|im_end|>\n"
        "<|im_start|>assistant\n[1:cba]<|im_end|>\n<|im_start|>user\n한국<|im_end|>\n<|im_start|>assistant\n[2:국한]"
    )
    assert contents(chat) == ["abc", "[1:cba]", "한국", "[2:국한]"]


def test_a_cancelled_answer_is_kept_and_its_turn_is_closed() -> None:
    model = FAKES.FakeModel(TOKENIZER, FAKES.echo)
    chat = conversation(model)
    answers = iter([False, False, True])
    list(chat.say("abc", OPTIONS, lambda: next(answers)))
    assert contents(chat) == ["abc", "[1:"]
    assert say(chat, "d") == "[2:d]"
    seen = TOKENIZER.decode(model.caches[-1].ids, skip_special_tokens=False)
    assert "<|im_start|>assistant\n[1:<|im_end|>\n<|im_start|>user\nd" in seen


@pytest.mark.parametrize("how", ["close", "break", "interrupt"])
def test_an_answer_cut_short_in_any_way_is_kept(how: str) -> None:
    model = FAKES.FakeModel(TOKENIZER, FAKES.echo)
    chat = conversation(model)
    stream = chat.say("abc", OPTIONS)
    got = next(stream).text + next(stream).text
    if how == "close":
        stream.close()
    elif how == "break":
        del stream
    else:
        model.break_at = 0
        with pytest.raises(KeyboardInterrupt):
            next(stream)
        model.break_at = None
    assert contents(chat) == ["abc", got] == ["abc", "[1"]
    assert say(chat, "d") == "[2:d]"


def test_a_turn_interrupted_before_its_answer_began_is_withdrawn() -> None:
    model = FAKES.FakeModel(TOKENIZER, FAKES.echo)
    chat = conversation(model)
    say(chat, "a")
    model.break_at = 0
    with pytest.raises(KeyboardInterrupt):
        list(chat.say("b", OPTIONS))
    with pytest.raises(KeyboardInterrupt):
        list(chat.regenerate(OPTIONS))
    model.break_at = None
    assert contents(chat) == ["a", "[1:a]"]
    chat.say("never read", OPTIONS)
    assert say(chat, "b") == "[2:b]"
    assert contents(chat) == ["a", "[1:a]", "b", "[2:b]"]


def test_a_stream_left_open_does_not_write_into_a_later_turn() -> None:
    chat = conversation()
    old = chat.say("a", OPTIONS)
    next(old)
    assert say(chat, "b") == "[1:b]"
    old.close()
    assert contents(chat) == ["b", "[1:b]"]


def test_an_empty_answer_is_an_answer() -> None:
    chat = conversation(FAKES.FakeModel(TOKENIZER, lambda _: "<|im_end|>"))
    assert say(chat, "a") == ""
    assert contents(chat) == ["a", ""]


def test_undo_clear_and_system() -> None:
    chat = conversation(system="S")
    say(chat, "a")
    say(chat, "b")
    assert chat.undo()
    assert contents(chat) == ["a", "[1:a]"]
    assert say(chat, "c") == "[2:c]"
    chat.clear()
    assert (chat.messages, chat.system, chat.turns) == ([], "S", 0)
    assert not chat.undo()
    chat.system = "T"
    assert say(chat, "d") == "[1:d]"


def test_regenerate_replaces_the_answer_with_another_of_the_same_seed() -> None:
    with pytest.raises(UsageError, match="no answer"):
        conversation().regenerate(OPTIONS)
    options = GenerationOptions(max_tokens=20, sampling=Sampling(temperature=50.0, seed=3), ignore_eos=True)

    def twice() -> list[str]:
        chat = conversation()
        answers = [say(chat, "a", options)]
        answers += ["".join(r.text for r in chat.regenerate(options)) for _ in range(2)]
        assert contents(chat) == ["a", answers[-1]]
        return answers

    first = twice()
    assert first == twice()
    assert len(set(first)) == 3


def test_a_history_longer_than_the_context_drops_the_oldest_turns_and_keeps_the_system_text() -> None:
    model = FAKES.FakeModel(TOKENIZER, FAKES.echo)
    chat = conversation(model, context=300, system="KEEP")
    options = GenerationOptions(max_tokens=30)
    dropped = []
    for turn in range(12):
        text = f"turn {turn:02d}"
        answer = say(chat, text, options)
        dropped.append(chat.dropped)
        assert answer == f"[{turn + 1 - chat.dropped}:{text[::-1]}]"
        seen = TOKENIZER.decode(model.caches[-1].ids, skip_special_tokens=False)
        assert seen.startswith("<|im_start|>system\nKEEP<|im_end|>\n<|im_start|>user\nturn")
        assert f"turn {chat.dropped:02d}" in seen
        assert f"turn {chat.dropped - 1:02d}" not in seen
    assert len(chat.messages) == 24
    assert dropped == sorted(dropped)
    steps = [b - a for a, b in pairwise(dropped)]
    assert dropped[-1] > 5
    assert max(steps) > 1, "turns go several at a time, so that the cache serves the turns between"
    assert 0 in steps[dropped.index(next(d for d in dropped if d)) :]


def test_a_message_that_cannot_fit_is_refused_with_numbers_and_changes_nothing() -> None:
    chat = conversation(context=400)
    say(chat, "a")
    with pytest.raises(AdaptError, match=r"has \d+ tokens; the context holds 400"):
        chat.say("x" * 400, OPTIONS)
    assert chat.dropped == 0
    assert contents(chat) == ["a", "[1:a]"]
    assert say(chat, "b") == "[2:b]"


def test_plain_completion_continues_one_growing_text() -> None:
    def count(text: str) -> str:
        """Answer in brackets how long the text since the last answer is."""
        if text.endswith(")"):
            return "<|im_end|>"
        said = text.rpartition(")")[2].partition("(")[0]
        return f"({len(said)})"

    model = FAKES.FakeModel(TOKENIZER, count)
    chat = conversation(model, template=None)
    assert say(chat, "abc") == "(3)"
    assert say(chat, "de") == "(2)"
    assert TOKENIZER.decode(model.caches[-1].ids, skip_special_tokens=False) == "abc(3)de(2)"
    with pytest.raises(UsageError, match="empty"):
        conversation(template=None).say("", OPTIONS)


def test_template_stops_end_an_answer_where_the_vocabulary_has_no_token() -> None:
    plain = Template(BUILT_IN["plain"].source, stops=BUILT_IN["plain"].stops)
    model = FAKES.FakeModel(TOKENIZER, lambda _: " yes\nUser: and more")
    chat = conversation(model, template=plain)
    assert say(chat, "a") == " yes"
    assert contents(chat) == ["a", " yes"]


def test_save_and_load_keep_every_character(tmp_path: Path) -> None:
    chat = conversation(system="간단히")
    say(chat, "똻 👩‍👩‍👧\n")
    path = tmp_path / "talk.json"
    chat.save(path)
    assert "똻" in path.read_text(encoding="utf-8")
    other = conversation()
    other.load(path)
    assert (other.system, other.messages) == (chat.system, chat.messages)
    assert say(other, "b") == say(chat, "b")
    assert [p.name for p in tmp_path.iterdir()] == ["talk.json"]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"messages": []}, "not a conversation"),
        ({"format": "adapt-conversation", "version": 2, "messages": []}, "not a conversation"),
        ({"format": "adapt-conversation", "version": 1, "messages": [{"role": "assistant", "content": "a"}]}, "user"),
        ({"format": "adapt-conversation", "version": 1, "messages": [{"role": "user", "content": 1}]}, "message 1"),
        ({"format": "adapt-conversation", "version": 1, "messages": [{"role": "user", "content": "a"}]}, "no answer"),
        ({"format": "adapt-conversation", "version": 1, "system": 3, "messages": []}, "system"),
        ([], "is no JSON object"),
    ],
)
def test_a_file_that_is_no_conversation_is_refused(tmp_path: Path, data: object, says: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    chat = conversation()
    say(chat, "a")
    with pytest.raises(FormatError, match=says):
        chat.load(path)
    assert contents(chat) == ["a", "[1:a]"]


@pytest.mark.parametrize("found", [b"my notes\n", b"{}", b'{"format": "adapt-conversation", "version": 2}', b""])
def test_what_is_no_conversation_is_not_saved_over(tmp_path: Path, found: bytes) -> None:
    path, chat = tmp_path / "notes.txt", conversation()
    path.write_bytes(found)
    with pytest.raises(UsageError, match="no saved conversation"):
        chat.save(path)
    assert path.read_bytes() == found
    path.unlink()
    chat.save(path)
    say(chat, "a")
    chat.save(path)
    assert len(json.loads(path.read_text(encoding="utf-8"))["messages"]) == 2


def test_paths_that_do_not_exist_are_errors(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no file"):
        conversation().load(tmp_path / "none.json")
    with pytest.raises(AdaptError, match="cannot be written"):
        conversation().save(tmp_path / "none" / "x.json")
