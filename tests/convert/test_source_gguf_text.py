"""Tokenizers out of GGUF metadata, against transformers' and sentencepiece's own."""

import json
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from adapt_llm.convert.gguf_tokenizer import PRE_TOKENIZERS, generation_config, text_files
from adapt_llm.errors import FormatError, UnsupportedError
from adapt_llm.runtime.progress import SilentReporter

CORPUS = [
    "The quick brown fox doesn't jump over 1234567 lazy dogs; we'll see, they've said 'no'.",
    "def f(x):\n    return x ** 2  # square\n\n\nclass A:\n\tpass\r\n",
    "안녕하세요, 반갑습니다. 한국어 문장입니다. 자연어 처리 2024년 11월",
    "emoji 😀👩‍👩‍👧‍👦 naïve café ½ ² ٣٤ 日本語テキスト",
]
MIXED = "".join(CORPUS) + "   trailing   spaces \n\n  x 00 12 345 DON'T I'Ll a\u0301 "
TEXTS = st.text(alphabet=st.sampled_from([*"abcXYZ '0129\n\t\r.,!_/", "é", "한", "국", "어", "😀", "½", "\u0301", "▁"]))


def byte_level_metadata(**extra: object) -> dict[str, Any]:
    """A small byte-level vocabulary, as llama.cpp writes it."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|begin|>", "<|im_end|>"],
    )
    trained.train_from_iterator(CORPUS * 2, trainer)
    model = json.loads(trained.to_str())["model"]
    tokens = [token for token, _ in sorted(model["vocab"].items(), key=lambda item: item[1])]
    tokens += ["<think>", "[PAD0]"]
    kinds = [3, 3] + [1] * (len(tokens) - 4) + [4, 5]
    ggml = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": kinds,
        "merges": [" ".join(pair) for pair in model["merges"]],
        "bos_token_id": 0,
        "eos_token_id": 1,
        "padding_token_id": 1,
        **extra,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in ggml.items()}


def load(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_str(text_files(metadata, SilentReporter())["tokenizer.json"].decode("utf-8"))


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_rule_gives_the_text_back(pre: str) -> None:
    tokenizer = load(byte_level_metadata(pre=pre))
    assert tokenizer.decode(tokenizer.encode(MIXED, add_special_tokens=False).ids) == (
        MIXED.replace("a\u0301", "á") if "qwen" in pre else MIXED
    )


# One number and one contraction tell the rules apart: how each cuts "I'Ll 12345 don't".
CUTS = {
    "gpt-2": ["I", "'", "Ll", "Ġ12345", "Ġdon", "'t"],
    "smollm": ["I", "'", "Ll", "Ġ", "1", "2", "3", "4", "5", "Ġdon", "'t"],
    "llama-bpe": ["I", "'Ll", "Ġ", "123", "45", "Ġdon", "'t"],
    "qwen2": ["I", "'Ll", "Ġ", "1", "2", "3", "4", "5", "Ġdon", "'t"],
    "tekken": ["I", "'Ll", "Ġ", "1", "2", "3", "4", "5", "Ġdon", "'t"],
    "gpt-4o": ["I'Ll", "Ġ", "123", "45", "Ġdon't"],
}


@pytest.mark.parametrize("pre", CUTS)
def test_how_the_rules_cut(pre: str) -> None:
    cut = load(byte_level_metadata(pre=pre)).pre_tokenizer.pre_tokenize_str("I'Ll 12345 don't")
    assert [piece for piece, _ in cut] == CUTS[pre]


@pytest.mark.parametrize(
    ("pre", "loaded"), [("qwen2", transformers.Qwen2Tokenizer), ("gpt-2", transformers.GPT2Tokenizer)]
)
@settings(max_examples=60)
@given(text=TEXTS)
def test_the_rules_are_those_of_transformers(pre: str, loaded: type, text: str) -> None:
    metadata = byte_level_metadata(pre=pre)
    vocabulary = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    theirs = loaded(vocab=vocabulary, merges=merges, unk_token=None, bos_token=None, eos_token=None, pad_token=None)
    ours = load(metadata)
    assert ours.encode(text, add_special_tokens=False).ids == theirs.encode(text, add_special_tokens=False)


def test_special_tokens() -> None:
    tokenizer = load(byte_level_metadata())
    ids = tokenizer.encode("a<think>b<|im_end|>", add_special_tokens=False).ids
    size = tokenizer.get_vocab_size()
    assert size - 2 in ids
    assert ids[-1] == 1
    assert tokenizer.decode(ids) == "a<think>b"
    added = tokenizer.get_added_tokens_decoder()
    assert {added[index].content: added[index].special for index in added} == {
        "<|begin|>": True,
        "<|im_end|>": True,
        "<think>": False,
    }


@pytest.mark.parametrize(
    ("pre", "stated", "expected"),
    [("gpt-2", None, False), ("llama-bpe", None, True), ("llama-bpe", False, False), ("gpt-2", True, True)],
)
def test_beginning_of_text(pre: str, stated: bool | None, expected: bool) -> None:
    extra = {} if stated is None else {"add_bos_token": stated}
    metadata = byte_level_metadata(pre=pre, **extra)
    assert (load(metadata).encode("fox").ids[0] == 0) is expected
    config = json.loads(text_files(metadata, SilentReporter())["tokenizer_config.json"])
    assert config["add_bos_token"] is expected
    assert (config["bos_token"], config["eos_token"], config["pad_token"]) == ("<|begin|>", "<|im_end|>", "<|im_end|>")


def test_end_of_text_can_be_added() -> None:
    ids = load(byte_level_metadata(add_bos_token=True, add_eos_token=True)).encode("fox", "dog").ids
    assert (ids[0], ids[-1], ids.count(0), ids.count(1)) == (0, 1, 2, 2)


def test_chat_template_and_ends() -> None:
    metadata = byte_level_metadata(eos_token_id=0) | {"tokenizer.chat_template": "{{ '한' }}"}
    assert text_files(metadata, SilentReporter())["chat_template.jinja"] == "{{ '한' }}".encode()
    assert "chat_template.jinja" not in text_files(byte_level_metadata(), SilentReporter())
    assert generation_config(metadata) == {"eos_token_id": [0, 1], "bos_token_id": 0, "pad_token_id": 1}
    assert generation_config(byte_level_metadata())["eos_token_id"] == 1


class Warnings(SilentReporter):
    def __init__(self) -> None:
        self.said: list[str] = []

    def warn(self, text: str) -> None:
        self.said.append(text)


def test_a_file_without_a_rule_is_told() -> None:
    reporter = Warnings()
    metadata = byte_level_metadata(pre="default") | {"general.architecture": "qwen2"}
    files = text_files(metadata, reporter)
    assert files == text_files(byte_level_metadata(pre="qwen2"), SilentReporter())
    assert "taking 'qwen2'" in reporter.said[0]


@pytest.mark.parametrize(
    ("extra", "error", "message"),
    [
        ({"pre": "jais"}, UnsupportedError, "rule 'jais'"),
        ({"model": "bert"}, UnsupportedError, "kind 'bert'"),
        ({"tokens": []}, FormatError, "no vocabulary"),
        ({"merges": ["a zzz"]}, FormatError, "contradicts itself"),
        ({"token_type": [1]}, FormatError, "one type for each token"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, FormatError, "a token twice"),
        ({"model": "llama"}, FormatError, "no scores"),
    ],
)
def test_what_is_refused(extra: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        text_files(byte_level_metadata(**extra), SilentReporter())


def sentencepiece_metadata(pieces: list[tuple[str, float, int]], **extra: object) -> dict[str, Any]:
    ggml = {
        "model": "llama",
        "tokens": [piece for piece, _, _ in pieces],
        "scores": [score for _, score, _ in pieces],
        "token_type": [kind for _, _, kind in pieces],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **extra,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in ggml.items()}


SPECIALS = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
BYTES = [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
WORDS = [
    (piece, -float(index), 1) for index, piece in enumerate(["he", "▁he", "ll", "▁hell", "o", "▁", "h", "e", "l", "w"])
]


def test_sentencepiece_by_hand() -> None:
    tokenizer = load(sentencepiece_metadata(SPECIALS + BYTES + WORDS))
    encoded = tokenizer.encode("hello w한")
    # ▁he and ll join to ▁hell; 한 is in no piece and becomes its three bytes.
    assert encoded.tokens == ["<s>", "▁hell", "o", "▁", "w", "<0xED>", "<0x95>", "<0x9C>"]
    assert tokenizer.decode(encoded.ids) == "hello w한"
    assert tokenizer.encode("<s>").ids == [1, 1]


def test_sentencepiece_without_a_first_space() -> None:
    tokenizer = load(sentencepiece_metadata(SPECIALS + BYTES + WORDS, add_space_prefix=False, add_bos_token=False))
    assert tokenizer.encode("hell he").tokens == ["he", "ll", "▁he"]
    assert tokenizer.decode(tokenizer.encode(" hell").ids) == " hell"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> object:
    """A sentencepiece BPE model like Llama 2's: byte fallback, no normalisation, digits apart."""
    library = pytest.importorskip("sentencepiece", reason="needs the extra [slow-tokenizers]")
    folder = tmp_path_factory.mktemp("spm")
    (folder / "text.txt").write_text("\n".join(line for text in CORPUS for line in text.splitlines()) * 3, "utf-8")
    library.SentencePieceTrainer.train(
        input=str(folder / "text.txt"),
        model_prefix=str(folder / "m"),
        vocab_size=520,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        character_coverage=0.98,
        minloglevel=2,
    )
    return library.SentencePieceProcessor(model_file=str(folder / "m.model"))


@settings(max_examples=100)
@given(text=TEXTS)
def test_sentencepiece_itself(trained: object, text: str) -> None:
    def kind(index: int) -> int:
        flags = {2: trained.is_unknown(index), 3: trained.is_control(index), 6: trained.is_byte(index)}
        return next((number for number, is_it in flags.items() if is_it), 1)

    pieces = [(trained.id_to_piece(i), trained.get_score(i), kind(i)) for i in range(trained.vocab_size())]
    tokenizer = load(sentencepiece_metadata(pieces, add_bos_token=False))
    assert tokenizer.encode(text).ids == (trained.encode(text) if text else [])
    ids = trained.encode(MIXED)
    assert tokenizer.encode(MIXED).ids == ids
    assert tokenizer.decode(ids) == MIXED
