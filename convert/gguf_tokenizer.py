"""tokenizer.json and its companions from the metadata of a GGUF file.

Knows the two kinds of vocabulary that decoders use: byte-level BPE ("gpt2") and sentencepiece BPE ("llama"). Knows no
tensor. The splitting expressions are those of the original tokenizers, which llama.cpp names in `tokenizer.ggml.pre`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from ..errors import FormatError, UnsupportedError
from ..runtime.progress import Reporter

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TAIL_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_TAIL}"
_TEKKEN = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|{_TAIL_SLASH}"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{_TAIL_SLASH}"
)
# Names of tokens that end a turn or a text, whatever the metadata say; only control tokens are taken by name.
_END_NAMES = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>")


class Kind(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class PreTokenizer:
    """How text is cut before byte-level BPE. `pattern` None = the expression of GPT-2."""

    pattern: str | None = None
    single_digits: bool = False
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False


_LLAMA3_PRE = PreTokenizer(_LLAMA3, ignore_merges=True, add_bos=True)
_QWEN2_PRE = PreTokenizer(_QWEN2, nfc=True)
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "gpt-2": PreTokenizer(),
    "smollm": PreTokenizer(single_digits=True),
    "llama-bpe": _LLAMA3_PRE,
    "llama3": _LLAMA3_PRE,
    "llama-v3": _LLAMA3_PRE,
    "smaug-bpe": PreTokenizer(_LLAMA3),
    "qwen2": _QWEN2_PRE,
    "deepseek-r1-qwen": _QWEN2_PRE,
    "tekken": PreTokenizer(_TEKKEN, ignore_merges=True, add_bos=True),
    "gpt-4o": PreTokenizer(_GPT4O),
}


@dataclass(frozen=True)
class Vocabulary:
    """The tokenizer part of the metadata."""

    data: Mapping[str, Any]

    def get(self, key: str, default: object = None) -> Any:  # noqa: ANN401 - typed by the file
        """The value of `tokenizer.ggml.<key>`."""
        return self.data.get(f"tokenizer.ggml.{key}", default)

    @property
    def tokens(self) -> list[str]:
        """Token texts in order of their ids."""
        tokens = self.get("tokens")
        if not tokens:
            raise FormatError("the GGUF file has no vocabulary", "Use a file that holds the whole model.")
        return tokens

    @property
    def kinds(self) -> list[int]:
        """One `Kind` for each token."""
        return self.get("token_type") or [int(Kind.NORMAL)] * len(self.tokens)

    def special(self, key: str) -> str | None:
        """Text of a special token such as "bos"; None if the file names none."""
        index = self.get(f"{key}_token_id")
        return None if index is None or index >= len(self.tokens) else self.tokens[index]


def text_files(metadata: Mapping[str, Any], reporter: Reporter) -> dict[str, bytes]:
    """tokenizer.json, tokenizer_config.json and, if the file has one, chat_template.jinja.

    Raises `UnsupportedError` for a kind of vocabulary or a splitting rule that is not known, `FormatError` for
    vocabularies that contradict themselves.
    """
    vocabulary = Vocabulary(metadata)
    kind = vocabulary.get("model")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in builders:
        raise UnsupportedError(
            f"the GGUF vocabulary is of kind '{kind}'", "Supported: gpt2 (byte-level BPE), llama (sentencepiece)."
        )
    tokenizer, add_bos = builders[kind](vocabulary, reporter)
    _add_tokens(tokenizer, vocabulary)
    add_bos = bool(vocabulary.get("add_bos_token", add_bos)) and vocabulary.special("bos") is not None
    _add_post_processor(tokenizer, vocabulary, add_bos=add_bos)
    files = {
        "tokenizer.json": tokenizer.to_str().encode("utf-8"),
        "tokenizer_config.json": _tokenizer_config(vocabulary, add_bos=add_bos),
    }
    template = metadata.get("tokenizer.chat_template")
    return {**files, "chat_template.jinja": template.encode("utf-8")} if template else files


def generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """bos, pad and every token that ends a text or a turn."""
    vocabulary = Vocabulary(metadata)
    ends = [vocabulary.get(f"{key}_token_id") for key in ("eos", "eot", "eom")]
    control = {text: index for index, text in enumerate(vocabulary.tokens) if vocabulary.kinds[index] == Kind.CONTROL}
    ends += [control.get(name) for name in _END_NAMES]
    unique = list(dict.fromkeys(end for end in ends if end is not None))
    config: dict[str, Any] = {"eos_token_id": unique[0] if len(unique) == 1 else unique} if unique else {}
    for name, key in (("bos_token_id", "bos"), ("pad_token_id", "padding")):
        if vocabulary.get(f"{key}_token_id") is not None:
            config[name] = vocabulary.get(f"{key}_token_id")
    return config


def _pre_tokenizer(vocabulary: Vocabulary, reporter: Reporter) -> PreTokenizer:
    name = vocabulary.get("pre", "default")
    if name == "default":
        # Files from before llama.cpp named the rule. The architecture tells it for all but GPT-2-like models.
        architecture = vocabulary.data.get("general.architecture", "")
        llama3 = architecture == "llama" and len(vocabulary.tokens) == 128256
        name = "llama-bpe" if llama3 else "qwen2" if architecture.startswith("qwen") else "gpt-2"
        reporter.warn(f"the GGUF file does not name its pre-tokenizer; taking '{name}'. A newer file would name it")
    if name not in PRE_TOKENIZERS:
        hint = f"Known: {', '.join(sorted(PRE_TOKENIZERS))}."
        raise UnsupportedError(f"the GGUF file cuts text by the rule '{name}', which is not known", hint)
    return PRE_TOKENIZERS[name]


def _byte_level(vocabulary: Vocabulary, reporter: Reporter) -> tuple[Tokenizer, bool]:
    pre = _pre_tokenizer(vocabulary, reporter)
    pairs = [merge.partition(" ") for merge in vocabulary.get("merges", [])]
    merges = [(left, right) for left, _, right in pairs]
    tokenizer = _bpe(vocabulary, merges, ignore_merges=pre.ignore_merges)
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if pre.single_digits else []
    if pre.pattern:
        steps.append(pre_tokenizers.Split(Regex(pre.pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.pattern is None))
    # The stubs type these properties as read only or not at all.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()  # pyright: ignore[reportAttributeAccessIssue]
    return tokenizer, pre.add_bos


def _bpe(vocabulary: Vocabulary, merges: list[tuple[str, str]], **options: str | bool | None) -> Tokenizer:
    tokens = vocabulary.tokens
    ids = {token: index for index, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        raise FormatError("the GGUF vocabulary holds a token twice", "Convert the file again.")
    if len(vocabulary.kinds) != len(tokens):
        raise FormatError("the GGUF vocabulary has not one type for each token", "Convert the file again.")
    try:
        return Tokenizer(models.BPE(vocab=ids, merges=merges, **options))
    except Exception as error:  # tokenizers raises plain Exception for a merge that is not in the vocabulary
        raise FormatError(f"the GGUF vocabulary contradicts itself ({error})", "Convert the file again.") from error


def _sentencepiece(vocabulary: Vocabulary, _reporter: Reporter) -> tuple[Tokenizer, bool]:
    """As the tokenizer.json files of Llama 2, Mistral, Phi-3 and Gemma are made."""
    prefix = bool(vocabulary.get("add_space_prefix", True))
    tokenizer = _bpe(
        vocabulary,
        merges_from_scores(vocabulary),
        unk_token=vocabulary.special("unknown"),
        fuse_unk=True,
        byte_fallback=True,
    )
    spaces = normalizers.Replace(" ", "▁")
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    decoder = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    decoder += [decoders.Strip(content=" ", left=1, right=0)] if prefix else []
    tokenizer.normalizer = normalizer  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.Sequence(decoder)  # pyright: ignore[reportAttributeAccessIssue]
    return tokenizer, True


def merges_from_scores(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Every way to make a token of two others, best score first.

    sentencepiece joins the neighbours that give the token of the highest score; as merges, that is the list of all
    pairs in order of the score of what they make, and inside one token by the ids of its parts.
    """
    scores = vocabulary.get("scores")
    if scores is None:
        raise FormatError("the GGUF vocabulary has no scores", "Convert the file again.")
    mergeable = {Kind.NORMAL, Kind.USER_DEFINED}
    ids = {
        token: index
        for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
        if kind in mergeable
    }
    ranked = []
    for token, index in ids.items():
        for cut in range(1, len(token)):
            left, right = ids.get(token[:cut]), ids.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[index], index, left, right, (token[:cut], token[cut:])))
    return [pair for *_, pair in sorted(ranked)]


def _add_tokens(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    added = []
    for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True):
        if kind in (Kind.CONTROL, Kind.UNKNOWN, Kind.USER_DEFINED):
            added.append(AddedToken(token, special=kind != Kind.USER_DEFINED, normalized=False))
    tokenizer.add_tokens(added)


def _add_post_processor(tokenizer: Tokenizer, vocabulary: Vocabulary, *, add_bos: bool) -> None:
    eos = vocabulary.special("eos") if vocabulary.get("add_eos_token", False) else None
    bos = vocabulary.special("bos") if add_bos else None
    single = [token for token in (bos, "$A", eos) if token]
    pair = [*single, *(f"{token}:1" for token in (bos, "$B", eos) if token)]
    specials = [(token, tokenizer.token_to_id(token)) for token in (bos, eos) if token]
    processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=specials)
    tokenizer.post_processor = processor  # pyright: ignore[reportAttributeAccessIssue]


def _tokenizer_config(vocabulary: Vocabulary, *, add_bos: bool) -> bytes:
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": add_bos,
        "add_eos_token": bool(vocabulary.get("add_eos_token", False)),
        "clean_up_tokenization_spaces": False,
        **{name: token for name, key in names.items() if (token := vocabulary.special(key)) is not None},
    }
    return json.dumps(config, indent=2, ensure_ascii=False).encode("utf-8")
