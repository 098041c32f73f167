"""The token stream: exact transcripts from a model that answers from what its cache holds."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapt_llm.errors import AdaptError, ResourceError, UsageError
from adapt_llm.runtime.generate import PromptCache, generate
from adapt_llm.runtime.sampling import Sampling
from adapt_llm.runtime.stops import StopMatcher, Stops
from adapt_llm.runtime.stream import GenerationStats, TokenRecord, TokenStream

FAKES = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("chat_fakes.py"))))
TOKENIZER = FAKES.byte_tokenizer()
END = TOKENIZER.added_id("<|im_end|>")


def says(text: str, **options: object) -> object:
    """A model that answers `text` to a prompt that ends in '>'."""
    return FAKES.FakeModel(TOKENIZER, lambda _: text, **options)


def run(model: object, prompt: str = "ab>", *, context: int = 200, **options: object) -> TokenStream:
    options = {"sampling": Sampling(), "stops": Stops.of(TOKENIZER), "max_tokens": 50, **options}
    cache = options.pop("cache", None) or PromptCache(model, context)
    return generate(model, TOKENIZER.encode(prompt), tokenizer=TOKENIZER, cache=cache, **options)


def text_of(stream: TokenStream) -> str:
    return "".join(record.text for record in stream)


def test_a_stream_ends_at_the_stop_token_which_has_no_text() -> None:
    model = says("hi!<|im_end|>")
    records = list(run(model))
    assert [(r.index, r.text, r.finish_reason) for r in records] == [
        (0, "h", None),
        (1, "i", None),
        (2, "!", None),
        (3, "", "stop"),
    ]
    assert records[-1].id == END
    assert [r.depth for r in records] == [0, 1, 2, 0]
    assert model.calls == [("prefill", 3), ("decode", 1), ("decode", 1), ("decode", 1)]


def test_arguments_are_checked_before_the_model_runs() -> None:
    model = says("x")
    with pytest.raises(UsageError, match="prompt is empty"):
        run(model, "")
    with pytest.raises(UsageError, match="max_tokens is 0"):
        run(model, max_tokens=0)
    with pytest.raises(AdaptError, match="has 200 tokens; the context holds 200"):
        run(model, "x" * 200)
    with pytest.raises(UsageError, match="stop string is empty"):
        Stops.of(TOKENIZER, [""])
    assert model.calls == []


def test_length_ends_a_stream_at_max_tokens_and_flushes() -> None:
    model = says("한국<|im_end|>")
    records = list(run(model, max_tokens=4))
    assert [r.text for r in records] == ["", "", "한", "\ufffd"]
    assert records[-1].finish_reason == "length"
    assert len(model.calls) == 4  # the last token is not decoded


def test_the_context_ends_a_stream_that_nothing_else_ends() -> None:
    model = says("x" * 500)
    stream = run(model, context=10, max_tokens=None)
    assert text_of(stream) == "x" * 7
    assert stream.stats.finish_reason == "length"


@pytest.mark.parametrize(
    ("answer", "stop", "expected"),
    [
        ("one END two", ["END"], "one "),
        ("one ENND two<|im_end|>", ["END"], "one ENND two"),
        ("aab aabc", ["aabc", "zz"], "aab "),
        ("ends in EN<|im_end|>", ["END"], "ends in EN"),
        ("a<|other|>b", ["<|other|>"], "a"),
        ("x한y", ["한"], "x"),
        ("abcd", ["abcd", "bc"], "a"),
        ("stop at once", ["s"], ""),
    ],
)
def test_stop_strings_cut_the_text_across_tokens(answer: str, stop: list[str], expected: str) -> None:
    stream = run(says(answer), stops=Stops.of(TOKENIZER, stop))
    records = list(stream)
    assert "".join(r.text for r in records) == expected
    assert records[-1].finish_reason == "stop"
    assert all(r.finish_reason is None for r in records[:-1])


def test_text_that_may_begin_a_stop_string_is_held_back_and_let_go() -> None:
    records = list(run(says("aENx<|im_end|>"), stops=Stops.of(TOKENIZER, ["END"])))
    assert [r.text for r in records] == ["a", "", "", "ENx", ""]


@settings(max_examples=300)
@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=3),
    cuts=st.lists(st.integers(1, 5), max_size=30),
)
def test_how_text_is_cut_into_pieces_makes_no_difference(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher, got, rest, stopped = StopMatcher(stops), "", text, False
    for cut in [*cuts, len(text)]:
        if not stopped and rest:
            safe, stopped = matcher.push(rest[:cut])
            got, rest = got + safe, rest[cut:]
    got += "" if stopped else matcher.flush()
    ends = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    assert got == (text[: min(ends)[1]] if ends else text)
    assert stopped == bool(ends)


def test_ignore_eos_goes_past_the_end_but_not_past_what_is_asked_for() -> None:
    model = says("a<|im_end|>b<|other|>c")
    assert text_of(run(model, stops=Stops.of(TOKENIZER, ignore_eos=True), max_tokens=5)) == "abc"
    assert text_of(run(model, stops=Stops.of(TOKENIZER, ["<|other|>"], ignore_eos=True))) == "ab"
    assert text_of(run(model, stops=Stops.of(TOKENIZER, ids=[TOKENIZER.encode("b")[0]], ignore_eos=True))) == "a"


def test_cancelling_ends_with_the_token_in_hand_and_flushes() -> None:
    answers = iter([False, False, True])
    records = list(run(says("한국"), cancelled=lambda: next(answers)))
    assert [r.finish_reason for r in records] == [None, None, "cancelled"]
    assert "".join(r.text for r in records) == "한"
    answers = iter([False, True])
    records = list(run(says("한국"), cancelled=lambda: next(answers)))
    assert "".join(r.text for r in records) == "\ufffd"


def test_the_cache_holds_prompt_and_answer_without_the_last_token() -> None:
    model = says("hi<|im_end|>")
    cache = PromptCache(model, 200)
    list(run(model, cache=cache))
    assert cache.ids == model.caches[0].ids == TOKENIZER.encode("ab>hi")
    list(run(model, "ab>hi<|im_end|>c>", cache=cache))
    assert model.calls[3] == ("prefill", 3)
    assert cache.ids == model.caches[0].ids == TOKENIZER.encode("ab>hi<|im_end|>c>hi")


@settings(max_examples=50, deadline=None)
@given(first=st.text("ab", min_size=1, max_size=12), second=st.text("ab", min_size=1, max_size=12))
def test_a_continued_cache_answers_as_a_fresh_one(first: str, second: str) -> None:
    def model() -> object:
        return FAKES.FakeModel(TOKENIZER, lambda text: f"={text.partition('=')[0][::-1]}<|im_end|>")

    shared = model()
    cache = PromptCache(shared, 200)
    list(run(shared, first, cache=cache))
    stream = run(shared, second, cache=cache)
    assert text_of(stream) == text_of(run(model(), second))
    common = next((n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
    expected = min(len(first), len(second)) if common is None else common
    assert stream.stats.reused_tokens == min(expected, len(second) - 1)
    assert cache.ids == shared.caches[-1].ids


def test_a_prompt_that_is_all_in_the_cache_still_runs_its_last_token() -> None:
    model = says("hi<|im_end|>")
    cache = PromptCache(model, 200)
    for _ in range(2):
        stream = run(model, cache=cache)
        assert text_of(stream) == "hi"
    assert (stream.stats.prompt_tokens, stream.stats.reused_tokens) == (3, 2)


@pytest.mark.parametrize("break_at", [3, 4, 6])
def test_an_interrupt_inside_the_model_leaves_a_usable_cache(break_at: int) -> None:
    model = says("hello<|im_end|>")
    cache = PromptCache(model, 200)
    model.break_at = break_at
    with pytest.raises(KeyboardInterrupt):
        list(run(model, cache=cache))
    assert len(cache.ids) < break_at
    model.break_at = None
    assert text_of(run(model, cache=cache)) == "hello"
    assert cache.ids == model.caches[0].ids


def test_closing_a_stream_leaves_a_usable_cache() -> None:
    model = says("hello<|im_end|>")
    cache = PromptCache(model, 200)
    stream = run(model, cache=cache)
    assert next(stream).text == "h"
    stream.close()
    assert list(stream) == []
    assert cache.ids == TOKENIZER.encode("ab>")
    assert text_of(run(model, "ab>h", cache=cache)) == "ello"


def test_a_static_cache_is_made_once_for_prompt_and_answer_not_for_the_context() -> None:
    model = says("x" * 600)
    list(run(model, context=5000, max_tokens=600))
    assert [cache.capacity for cache in model.caches if cache.ids] == [640]


def test_a_static_cache_that_is_too_small_is_replaced_and_filled_again() -> None:
    model = says("hi<|im_end|>")
    cache = PromptCache(model, 5000)
    list(run(model, cache=cache, max_tokens=10))
    stream = run(model, "ab>hi" + "x" * 500 + ">", cache=cache, max_tokens=10)
    assert text_of(stream) == "hi"
    assert stream.stats.reused_tokens == 0
    assert cache.ids == model.caches[-1].ids


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't allocate memory: you tried to allocate 9 bytes")])
def test_no_memory_for_the_cache_is_said_so(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise error

    model = says("x")
    monkeypatch.setattr(model, "new_cache", refuse)
    with pytest.raises(ResourceError, match="keys and values of 64 tokens"):
        list(run(model))


def test_a_growing_cache_grows_as_needed_and_keeps_what_it_has() -> None:
    model = says("x" * 3000, cache=FAKES.GrowingCache)
    cache = PromptCache(model, 4000)
    stream = run(model, cache=cache, max_tokens=None)
    next(stream)
    assert model.caches[0].capacity == 576
    for record in stream:
        if record.index == 1200:
            break
    assert model.caches[0].capacity == 2304
    assert len(model.caches) == 1
    assert cache.ids == model.caches[0].ids


def test_sampling_with_a_seed_repeats_and_rows_differ() -> None:
    def once(seed: int, row: int) -> str:
        model = says("hello")
        sampling = Sampling(temperature=30.0, seed=seed)
        return text_of(run(model, sampling=sampling, row=row, max_tokens=30))

    assert once(1, 0) == once(1, 0)
    assert len({once(1, 0), once(1, 1), once(2, 0)}) == 3


def test_stats_summarise_a_stream() -> None:
    stats = GenerationStats(prompt_tokens=10, reused_tokens=4)
    assert stats.mean_depth is None
    for index, (depth, seconds) in enumerate([(8, 0.5), (2, 0.1), (4, 0.1), (2, 0.2)]):
        stats.add(TokenRecord(index, 1, "a", depth, seconds, "stop" if index == 3 else None))
        assert stats.mean_depth == [8, 2, 3, pytest.approx(8 / 3)][index]
    assert stats.exit_histogram == {2: 2, 4: 1}
    assert stats.first_token_ms == 500
    assert stats.prefill_tokens_per_s == 12
    assert stats.decode_tokens_per_s == pytest.approx(3 / 0.4)
    assert (stats.tokens, stats.finish_reason, stats.prefill_depth) == (4, "stop", 8)


def test_the_time_of_the_reader_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("adapt_llm.runtime.generate.time.perf_counter", lambda: now[0])
    stream = run(says("abc<|im_end|>"))
    for _ in stream:
        now[0] += 100
    assert stream.stats.decode_seconds == 0
    assert stream.stats.decode_tokens_per_s is None
