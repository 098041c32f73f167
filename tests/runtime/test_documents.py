"""Documents: every token in one sentence, the sentence that its characters are in, for every kind of tokenizer."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from adapt_llm.errors import UsageError
from adapt_llm.runtime.documents import Document, DocumentReader
from adapt_llm.runtime.sentences import split_sentences
from adapt_llm.runtime.text import Tokenizer

CORPUS = ["정말 맛있어요. 또 올게요! 배송이 빨라요. ", "This is it. It goes on, and on. The end. ", "    x = 1\n\n"] * 3
KOREAN = (
    '정말 맛있어요! 또 올게요 😍👩‍👩‍👧. "다시는 안 가요."라고 말했다. '
    "좋아요.그런데 똻값이 비싸다… 정말 오랜만에 왔습니다"
)
SPECIAL = "<|im_end|>"


def byte_level() -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, special_tokens=["<s>", SPECIAL])
    backend.train_from_iterator(CORPUS, trainer)
    return Tokenizer(backend, {"bos_token": "<s>"})


def sentencepiece(*, metaspace: bool) -> Tokenizer:
    """Bytes for what the vocabulary lacks; the space before the text is a normaliser's or a pre-tokeniser's."""
    characters = ["<unk>", "<s>", SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"aei정요.말", "요."]
    vocab = {token: index for index, token in enumerate(characters)} | {"▁정": len(characters)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab, [("요", "."), ("▁", "정")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    if metaspace:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken(SPECIAL, special=True)])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocab["<s>"])])
    return Tokenizer(backend, {"bos_token": "<s>"})


TOKENIZERS = {
    "byte-level": byte_level(),
    "prepend": sentencepiece(metaspace=False),
    "metaspace": sentencepiece(metaspace=True),
}
everyone = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)


def reader(tokenizer: Tokenizer, **options: int) -> DocumentReader:
    return DocumentReader(tokenizer, **{"max_tokens": 4096, "least": 4, "most": 40} | options)


def ends_by_bytes(tokenizer: Tokenizer, ids: Sequence[int], text: str, pieces: Sequence[str], before: int) -> list[int]:
    """Sentence ends without any offsets: where the bytes of each token are in the text, `before` of them in front."""
    data, stops = text.encode(), list(accumulate(len(piece.encode()) for piece in pieces))
    at, owners = -before, Counter()
    for token in ids:
        raw = tokenizer.pieces(tokenizer.backend.id_to_token(token))
        start = max(0, at + (len(raw) - len(raw.lstrip()) if raw.strip() else 0))
        while data[start] & 0xC0 == 0x80:  # inside a character, which belongs where it begins
            start -= 1
        owners[bisect_right(stops, start)] += 1
        at += len(raw)
    return list(accumulate(owners[index] for index in sorted(owners)))


PARTS = [
    "정말 ",
    "요. ",
    "값",
    "😍",
    "👩‍👩‍👧",
    "e\u0301",
    "a",
    "Word ",
    "word. ",
    "\n\n",
    "\r\n",
    "   ",
    "…",
    SPECIAL,
    '"',
    "라고 ",
]  # fmt: skip
texts = st.lists(st.sampled_from(PARTS), max_size=40).map("".join).filter(str.strip)


@everyone
@settings(max_examples=100, deadline=None)
@given(text=texts)
def test_a_token_is_in_the_sentence_of_its_characters(tokenizer: Tokenizer, text: str) -> None:
    document = reader(tokenizer).read(text)
    before = 0 if tokenizer.backend.decoder.__class__.__name__ == "ByteLevel" else 1
    before = 0 if before and tokenizer is TOKENIZERS["metaspace"] and text.startswith(" ") else before
    pieces = split_sentences(text, least=4, most=40)
    assert list(document.ends) == ends_by_bytes(tokenizer, document.ids, text, pieces, before)


@everyone
@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=60).filter(str.strip), max_tokens=st.integers(1, 60))
def test_ends_rise_to_the_last_token_whatever_the_text(tokenizer: Tokenizer, text: str, max_tokens: int) -> None:
    whole, cut = reader(tokenizer).read(text), reader(tokenizer, max_tokens=max_tokens).read(text)
    for document in (whole, cut):
        assert all(one < other for one, other in pairwise((0, *document.ends)))
        assert document.ends[-1] == len(document.ids)
    assert cut.ids == whole.ids[:max_tokens]
    assert cut.truncated == (len(whole.ids) > max_tokens)
    assert cut.ends == (*(end for end in whole.ends if end < len(cut.ids)), len(cut.ids))
    assert whole.truncated is False


@everyone
def test_korean_sentences_are_whole(tokenizer: Tokenizer) -> None:
    document = reader(tokenizer).read(KOREAN)
    shown = [tokenizer.decode(document.ids[start:stop]) for start, stop in pairwise((0, *document.ends))]
    assert [part.strip() for part in shown] == [
        "정말 맛있어요!",
        "또 올게요 😍👩‍👩‍👧.",
        '"다시는 안 가요."라고 말했다.',
        "좋아요.",
        "그런데 똻값이 비싸다… 정말 오랜만에 왔습니다",
    ]


@everyone
def test_control_tokens_in_a_text_are_text_and_in_a_prompt_are_not(tokenizer: Tokenizer) -> None:
    control = tokenizer.added_id(SPECIAL)
    assert control not in reader(tokenizer).read(f"a {SPECIAL} b {SPECIAL}").ids
    assert control in reader(tokenizer).prefix(f"a {SPECIAL}")
    assert control in tokenizer.encode(SPECIAL)  # the tokenizer is left as it was


def test_the_prefix_has_one_bos_where_the_tokenizer_uses_one() -> None:
    with_bos, without = TOKENIZERS["prepend"], TOKENIZERS["byte-level"]
    bos = with_bos.bos_id
    assert reader(with_bos).prefix("") == [bos]
    assert reader(with_bos).prefix("a")[0] == bos
    assert reader(with_bos).prefix("<s>a").count(bos) == 1
    assert reader(without).prefix("") == []
    assert without.bos_id not in reader(without).prefix("a")
    assert bos not in reader(with_bos).read("a").ids


@pytest.mark.parametrize(
    ("sentences", "text"),
    [
        (["a one.", "b two."], "a one. b two."),
        (["a one. ", "b two."], "a one. b two."),
        (["a one.", " b two."], "a one. b two."),
        (["私は。", "行く。"], "私は。行く。"),
        (["가요.", "와요."], "가요. 와요."),
        (["one"], "one"),
    ],
)
def test_given_sentences_are_kept(sentences: list[str], text: str) -> None:
    tokenizer = TOKENIZERS["byte-level"]
    document = reader(tokenizer, least=30, most=90).read(sentences)
    assert tokenizer.decode(document.ids) == text
    assert len(document.ends) == len(sentences)
    first = tokenizer.decode(document.ids[: document.ends[0]])
    assert first.strip() == sentences[0].strip()


def test_sentences_without_tokens_belong_to_the_next() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "<unk>": 2}, unk_token="<unk>"))
    backend.normalizer = normalizers.Replace(tokenizers.Regex("[^ab ]"), "")
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    blind = reader(Tokenizer(backend))
    assert blind.read(["?", "a b", "!", "b", "."]) == Document((0, 1, 1), (2, 3))
    with pytest.raises(UsageError, match="no token"):
        blind.read("?!")


@pytest.mark.parametrize("empty", ["", " \n", [], ["", " "]])
def test_empty_texts_are_refused(empty: str | list[str]) -> None:
    with pytest.raises(UsageError, match="the text is empty"):
        reader(TOKENIZERS["byte-level"]).read(empty)


def test_other_refusals() -> None:
    for text in ("a\ud800", ["a", "\udfff"]):
        with pytest.raises(UsageError, match="not Unicode"):
            reader(TOKENIZERS["byte-level"]).read(text)
    with pytest.raises(UsageError, match="at most 0 tokens"):
        reader(TOKENIZERS["byte-level"], max_tokens=0)
    with pytest.raises(UsageError, match="sentences of 30"):
        reader(TOKENIZERS["byte-level"], least=30)


def test_of_a_long_text_only_the_beginning_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def watched(text: str, *arguments: object, **options: int) -> list[str]:
        seen.append(len(text))
        return split_sentences(text, *arguments, **options)

    monkeypatch.setattr("adapt_llm.runtime.documents.split_sentences", watched)
    short = reader(TOKENIZERS["byte-level"], max_tokens=10)
    document = short.read("word and so on. " * 10_000)
    assert (len(document.ids), document.truncated, seen) == (10, True, [1280])


def test_a_long_text_of_few_tokens_is_read_whole() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    document = reader(Tokenizer(backend), max_tokens=4).read("a" + " " * 9999 + "a")
    assert document == Document((0, 0), (2,), truncated=False)


@pytest.mark.model
@pytest.mark.parametrize("name", ["qwen2.5-coder-0.5b-instruct", "smollm2-135m-instruct"])
def test_real_tokenizers(models: dict[str, object], name: str) -> None:
    tokenizer = Tokenizer.load(models[name])
    document = reader(tokenizer).read(KOREAN)
    pieces = split_sentences(KOREAN, least=4, most=40)
    assert list(document.ends) == ends_by_bytes(tokenizer, document.ids, KOREAN, pieces, 0)
    assert tokenizer.decode(document.ids) == KOREAN
