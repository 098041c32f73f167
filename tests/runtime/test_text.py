"""Encoding with one BOS, the stop ids, and decoding token by token against decoding at once."""

import json
import random
from functools import cache
from pathlib import Path
from unicodedata import normalize

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

from adapt_llm.convert.source import open_source
from adapt_llm.errors import FormatError, UsageError
from adapt_llm.runtime.documents import DocumentReader
from adapt_llm.runtime.template import Template
from adapt_llm.runtime.text import IncrementalDecoder, Tokenizer

HARD = [
    "똻",
    "👩‍👩‍👧",
    "한국어 똻 문장입니다.",
    "a👩‍👩‍👧b",
    "naïve — “quoted”",
    " two  spaces ",
    "\n\t\x00",
    "🇰🇷 e\u0301",
]


@cache
def byte_level() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([*HARD, "the cat sat on the mat", "안녕하세요 세계"] * 20, trainer)
    backend.add_tokens([AddedToken("<tool_call>", special=False), AddedToken("한 글", special=False)])
    return backend


@cache
def sentencepiece(*, strip: bool = True) -> tokenizers.Tokenizer:
    """Llama 2's kind: `▁` for spaces, bytes for what the vocabulary lacks."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *"abcdehlorw", "▁a", "lo", "▁▁", "한"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [("▁", "a"), ("l", "o")], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    backend.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return backend


def stream(tokenizer: Tokenizer, ids: list[int], **options: object) -> list[str]:
    decoder = IncrementalDecoder(tokenizer, **options)
    return [*(decoder.push(index) for index in ids), decoder.flush()]


@settings(max_examples=300)
@given(st.text())
def test_byte_level_pieces_join_to_the_decoded_text(text: str) -> None:
    tokenizer = Tokenizer(byte_level())
    ids = tokenizer.encode(text)
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert pieces[-1] == ""
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


@settings(max_examples=200)
@given(st.lists(st.integers(0, 405), max_size=40), st.booleans())
def test_any_byte_level_ids_join_to_what_decoding_at_once_gives(ids: list[int], skip: bool) -> None:
    tokenizer = Tokenizer(byte_level())
    expected = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(stream(tokenizer, ids, skip_special_tokens=skip)) == expected


@settings(max_examples=300)
@given(st.text(alphabet="abcdelo 한똻é👩\u200d👧▁", max_size=30), st.booleans())
def test_sentencepiece_pieces_join_to_the_decoded_text(text: str, strip: bool) -> None:
    tokenizer = Tokenizer(sentencepiece(strip=strip))
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


def test_a_syllable_in_byte_tokens_is_held_until_it_is_whole() -> None:
    tokenizer = Tokenizer(sentencepiece())
    ids = [tokenizer.backend.token_to_id(f"<0x{byte:02X}>") for byte in "똻!".encode()]
    assert stream(tokenizer, ids) == ["", "", "똻", "!", ""]


def test_an_emoji_of_several_people_streams_whole_characters() -> None:
    tokenizer = Tokenizer(sentencepiece())
    ids = [tokenizer.backend.token_to_id(f"<0x{byte:02X}>") for byte in "👩‍👩‍👧".encode()]
    pieces = stream(tokenizer, ids)
    assert [piece for piece in pieces if piece] == list("👩‍👩‍👧")


def test_invalid_bytes_are_let_go_at_once_and_an_unfinished_one_at_the_end() -> None:
    tokenizer = Tokenizer(sentencepiece())

    def ids(*values: int) -> list[int]:
        return [tokenizer.backend.token_to_id(f"<0x{byte:02X}>") for byte in values]

    assert stream(tokenizer, ids(0xFF, 0x41)) == ["\ufffd", "A", ""]
    assert stream(tokenizer, ids(0xEB, 0x98)) == ["", "", "\ufffd"]
    assert stream(tokenizer, [*ids(0xEB, 0x98), tokenizer.backend.token_to_id("a")]) == ["", "", "\ufffda", ""]
    assert "".join(stream(tokenizer, ids(*[0x98] * 50))) == "\ufffd" * 50


def test_the_leading_space_is_dropped_in_an_answer_and_kept_in_a_continuation() -> None:
    tokenizer = Tokenizer(sentencepiece())
    ids = tokenizer.encode("a lo", add_special_tokens=False)
    assert "".join(stream(tokenizer, ids)) == "a lo"
    assert "".join(stream(tokenizer, ids, after=[7])) == " a lo"


def test_a_decoder_can_be_used_again_after_a_flush() -> None:
    tokenizer = Tokenizer(byte_level())
    decoder = IncrementalDecoder(tokenizer)
    half = tokenizer.encode("똻")[:1]
    assert "".join([*(decoder.push(i) for i in half), decoder.flush()]) == tokenizer.decode(half)
    assert "".join([*(decoder.push(i) for i in tokenizer.encode("ok")), decoder.flush()]) == "ok"


def test_ids_beyond_the_vocabulary_have_no_text() -> None:
    tokenizer = Tokenizer(byte_level())
    assert stream(tokenizer, [100_000]) == ["", ""]


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.Metaspace(), decoders.BPEDecoder()])
def test_other_decoders_are_followed_through_a_window(decoder: decoders.Decoder | None) -> None:
    words = {word: index for index, word in enumerate(["the", "▁cat", "##s", "sat</w>", ".", "▁▁"])}
    backend = tokenizers.Tokenizer(models.WordLevel(words, unk_token="the"))
    if decoder is not None:
        backend.decoder = decoder
    tokenizer = Tokenizer(backend)
    ids = [1, 2, 3, 0, 4, 5, 1, 0]
    if isinstance(decoder, decoders.BPEDecoder):
        ids = [3, 3, 0, 3]  # its last token always loses its space
    joined = "".join(stream(tokenizer, ids))
    assert joined == tokenizer.decode(ids)


def test_the_cost_of_a_token_does_not_grow_with_the_text() -> None:
    tokenizer = Tokenizer(byte_level())
    calls = 0

    class Counting:
        def __getattr__(self, name: str) -> object:
            nonlocal calls
            calls += 1
            return getattr(byte_level(), name)

    decoder = IncrementalDecoder(tokenizer)
    tokenizer.backend = Counting()
    for _ in range(1000):
        decoder.push(70)
    assert calls == 1000


@pytest.mark.model
@pytest.mark.parametrize("name", ["smollm2-135m-instruct.gguf", "qwen2.5-coder-0.5b-instruct.gguf"])
def test_real_vocabularies_stream_what_they_decode(name: str, models: dict[str, Path], tmp_path: Path) -> None:
    for file, data in open_source(str(models[name])).text_files().items():
        (tmp_path / file).write_bytes(data if isinstance(data, bytes) else data.read_bytes())
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.added_id("<|im_end|>") in tokenizer.stop_ids
    text = " ".join(HARD) + "<|im_start|>user\n1234 def f(x):\n\treturn x**2  # ✓"
    ids = tokenizer.encode(text)
    streamed = "".join(stream(tokenizer, ids, skip_special_tokens=False))
    assert normalize("NFC", streamed) == normalize("NFC", text)  # Qwen's tokenizer composes what it reads
    size, numbers = tokenizer.backend.get_vocab_size(), random.Random(0)
    for _ in range(50):
        ids = [numbers.randrange(size + 100) for _ in range(200)]
        assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)
    template = Template.from_folder(tmp_path, special_tokens=tokenizer.special_tokens, adds_bos=tokenizer.adds_bos)
    rendered = template.render([{"role": "system", "content": "S"}, {"role": "user", "content": "똻"}])
    assert rendered == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\n똻<|im_end|>\n<|im_start|>assistant\n"


def write(folder: Path, **files: object) -> Path:
    byte_level().save(str(folder / "tokenizer.json"))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return folder


def test_stop_ids_are_the_union_of_every_place_that_names_one(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        generation_config={"eos_token_id": [301, 302]},
        config={"eos_token_id": 303, "text_config": {"eos_token_id": 304}},
        tokenizer_config={"eos_token": {"content": "<s>"}},
    )
    im_end = byte_level().token_to_id("<|im_end|>")
    assert Tokenizer.load(folder).stop_ids == {301, 302, 303, 304, byte_level().token_to_id("<s>"), im_end}


@pytest.mark.parametrize(
    ("config", "first"), [({}, [0]), ({"add_bos_token": True}, [0]), ({"add_bos_token": False}, [])]
)
def test_a_text_begins_with_exactly_one_bos(config: dict[str, bool], first: list[int]) -> None:
    for with_processor in (True, False):
        backend = tokenizers.Tokenizer.from_str(byte_level().to_str())
        if with_processor:
            backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
        tokenizer = Tokenizer(backend, {"bos_token": "<s>", **config})
        expected = first if with_processor or config else []
        plain = byte_level().encode("the cat").ids
        assert tokenizer.encode("the cat") == expected + plain
        assert tokenizer.encode("the cat", add_special_tokens=False) == plain
        assert tokenizer.encode("<s>the cat", add_special_tokens=False) == [0, *plain]
        if tokenizer.adds_bos:
            assert tokenizer.encode("<s>the cat") == [0, *plain]
            assert tokenizer.encode("") == [0]


def test_a_spelled_token_survives_where_the_tokenizer_adds_no_bos() -> None:
    tokenizer = Tokenizer(byte_level(), {"bos_token": "<s>"})
    assert tokenizer.encode("<s><s>a")[:2] == [0, 0]


def test_defects_are_named(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model": {', encoding="utf-8")
    with pytest.raises(FormatError, match="cannot be read as a tokenizer"):
        Tokenizer.load(tmp_path)
    write(tmp_path)
    (tmp_path / "config.json").write_text("[1]", encoding="utf-8")
    with pytest.raises(FormatError, match="is no JSON object"):
        Tokenizer.load(tmp_path)
    for text in ("{", "[" * 200_000):
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
        with pytest.raises(FormatError, match="not valid JSON"):
            Tokenizer.load(tmp_path)


@pytest.mark.parametrize("nested", [False, True])
def test_ids_beyond_the_model_are_refused_where_they_are_used(tmp_path: Path, *, nested: bool) -> None:
    """A published tokenizer may have tokens that its model lacks, and texts that never use them."""
    backend = tokenizers.Tokenizer.from_str(byte_level().to_str())
    backend.add_special_tokens([AddedToken(f"<pad{number}>", special=True) for number in range(10)])
    size = byte_level().get_vocab_size()
    text = {"vocab_size": size}
    folder = write(tmp_path, config={"vocab_size": 9, "text_config": text} if nested else text)
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.size > size
    assert tokenizer.encode("the cat") == byte_level().encode("the cat").ids
    beyond = backend.token_to_id("<pad9>")
    for add_special_tokens in (True, False):
        with pytest.raises(FormatError, match=f"the tokenizer knows token {beyond}, the model only {size}"):
            tokenizer.encode("the <pad9> cat", add_special_tokens=add_special_tokens)
    reader = DocumentReader(tokenizer, max_tokens=10)
    with pytest.raises(FormatError, match=f"token {beyond}"):
        reader.prefix("<pad9>")
    reader.read("the <pad9> cat")  # plain text here
    tokenizer.vocab_size = 1
    with pytest.raises(FormatError, match="the model only 1"):
        reader.read("the cat")


def test_half_a_character_is_refused() -> None:
    with pytest.raises(UsageError, match="surrogate"):
        Tokenizer(byte_level()).encode("a\ud800")
