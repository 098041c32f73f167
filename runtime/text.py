"""Text to token ids and back: tokenizer.json, beginning and end of a sequence, and decoding token by token.

Knows no model and no chat template. Uses the `tokenizers` library only, so nothing here imports transformers.
"""

import codecs
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from ..errors import FormatError, UsageError
from .config_types import check_known
from .json_text import parse_json
from .pieces import piece_decoder

END_OF_TURN = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eot|>",
    "<turn|>",
    "<|END_OF_TURN_TOKEN|>",
    "<end_of_utterance>",
)
"""Special tokens that end an answer in the templates of the families; each counts where the vocabulary has it."""

_MAX_HELD_TOKENS = 16


class Tokenizer:
    """A bundle's tokenizer.

    Args:
        backend: the loaded tokenizer.json.
        settings: tokenizer_config.json.
        eos_ids: end-of-sequence ids that the model's own configuration names.
        vocab_size: how many tokens the model knows; None: not known.

    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        settings: Mapping[str, Any] | None = None,
        eos_ids: Iterable[int] = (),
        *,
        vocab_size: int | None = None,
    ) -> None:
        self.backend = backend
        self.vocab_size = vocab_size
        self.settings: Mapping[str, Any] = settings or {}
        self._added = {added.content: index for index, added in backend.get_added_tokens_decoder().items()}
        self.special_ids = frozenset(i for i, added in backend.get_added_tokens_decoder().items() if added.special)
        self.bos_token = _content(self.settings.get("bos_token"))
        self.eos_token = _content(self.settings.get("eos_token"))
        self.stop_ids = frozenset(eos_ids) | frozenset(self._ids_of((self.eos_token or "", *END_OF_TURN)))
        self.pieces = piece_decoder(_decoder_settings(backend))

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Read tokenizer.json, tokenizer_config.json and the eos ids of config.json and generation_config.json.

        Raises:
            FormatError: tokenizer.json is missing, or a file is damaged.

        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise FormatError(f"{folder} has no tokenizer.json", "Convert the model again; conversion writes one.")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:
            raise FormatError(f"{path} cannot be read as a tokenizer: {error}", "The file may be cut.") from error
        backend.no_truncation()
        backend.no_padding()
        configs = [read_json(folder / name) for name in ("generation_config.json", "config.json")]
        configs += [config["text_config"] for config in configs if isinstance(config.get("text_config"), dict)]
        eos = {index for config in configs for index in _as_ids(config.get("eos_token_id"))}
        size = configs[-1].get("vocab_size")  # of the text model, where the config has several
        settings = read_json(folder / "tokenizer_config.json")
        return cls(backend, settings, eos, vocab_size=size if isinstance(size, int) else None)

    def _ids_of(self, tokens: Iterable[str]) -> list[int]:
        return [self._added[token] for token in tokens if token in self._added]

    def added_id(self, text: str) -> int | None:
        """Id of the added (control) token spelled exactly `text`, if there is one."""
        return self._added.get(text)

    @cached_property
    def bos_id(self) -> int | None:
        """Id of the beginning-of-sequence token, if one is named."""
        return None if self.bos_token is None else self.backend.token_to_id(self.bos_token)

    @property
    def size(self) -> int:
        """Number of tokens, added ones included."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def adds_bos(self) -> bool:
        """Whether a plain text begins with BOS: what `add_bos_token` says, else what the post-processor does."""
        asked = self.settings.get("add_bos_token")
        return self.bos_id is not None and (asked if isinstance(asked, bool) else self._post_processor_adds_bos)

    @cached_property
    def _post_processor_adds_bos(self) -> bool:
        return self.bos_id is not None and self.backend.encode("a").ids[:1] == [self.bos_id]

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        """The named special tokens (`bos_token`, `eos_token`, …), as chat templates see them."""
        named = {key: _content(value) for key, value in self.settings.items() if key.endswith("_token")}
        return {key: value for key, value in named.items() if value is not None}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokenise `text`.

        With `add_special_tokens` the result begins with exactly one BOS if this tokenizer uses one, even when the
        text spells one itself. Without (what a chat template returned) nothing is added or removed.

        Raises:
            UsageError: half a character in the text (a lone surrogate).
            FormatError: see `check_known`.

        """
        try:
            ids = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:  # all that can be wrong with a str
            raise UsageError("the text is not Unicode (lone surrogate)") from error
        if self.bos_id is not None and add_special_tokens and (self.adds_bos or self._post_processor_adds_bos):
            first = next((at for at, index in enumerate(ids) if index != self.bos_id), len(ids))
            ids = [self.bos_id] * self.adds_bos + ids[first:]
        self.check_known(ids)
        return ids

    def check_known(self, ids: Iterable[int]) -> None:
        """Raise FormatError for an id that the model does not have.

        Asked of the ids in use, not of the whole vocabulary: models are published whose tokenizer has more tokens than
        their embedding (a padding token added for training, say), and which never use them.
        """
        if self.vocab_size is not None:
            check_known(max(ids, default=0), self.vocab_size)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence of ids."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)


def resolve_symbols() -> None:
    """Have the tokenizers library look up now what it would look up in the system's libraries as it first reads a file.

    A look-up waits while a thread loads a library, and would hold Python's lock meanwhile. Costs nothing to speak of.
    """
    tokenizers.Tokenizer(tokenizers.models.BPE())  # its hash tables draw their seed from the system


def _decoder_settings(backend: tokenizers.Tokenizer) -> dict[str, Any] | None:
    """`decoder` of tokenizer.json, without writing the whole vocabulary out with it."""
    if backend.decoder is None:
        return None
    small = tokenizers.Tokenizer(tokenizers.models.BPE())
    small.decoder = backend.decoder
    return json.loads(small.to_str())["decoder"]


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; an absent file is an empty one.

    Raises:
        FormatError: not UTF-8, not JSON, or not an object.

    """
    if not path.is_file():
        return {}
    try:
        value = parse_json(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise FormatError(f"{path} is not valid JSON: {error}", "The file may be cut; copy it again.") from error
    if not isinstance(value, dict):
        raise FormatError(f"{path} is no JSON object", "The file may be cut; copy it again.")
    return value


def _content(token: object) -> str | None:
    """A special token is named by its text, or by an object that has it as `content`."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


def _as_ids(value: object) -> list[int]:
    if isinstance(value, list):
        return [item for item in value if isinstance(item, int)]
    return [value] if isinstance(value, int) else []


class IncrementalDecoder:
    """Decodes a growing sequence, one id at a time, and never prints half a character.

    The pieces and `flush` joined are `Tokenizer.decode` of all ids, with one exception: bytes that form no
    character become U+FFFD by the Unicode rule (one for each maximal invalid part), which is also what byte-level
    tokenizers do; byte-fallback decoders spoil the valid characters next to them too, and this does not.
    At most three bytes are held back. Cost per token does not depend on the length so far.

    Args:
        tokenizer: whose ids these are.
        skip_special_tokens: leave control tokens out of the text.
        after: ids whose text this one goes on from (plain completion), so that a leading space belongs to it.

    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, after: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._pieces = tokenizer.pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip = self._pieces is not None and self._pieces.strips_space and not after
        self._window = _Window(tokenizer, after)

    def push(self, token: int) -> str:
        """Take one id; return the text that is certain by now."""
        if token in self._skipped:
            return ""
        if self._pieces is None:
            return self._window.push(token)
        piece = self._tokenizer.backend.id_to_token(token)
        # A model's vocabulary may be padded beyond the tokenizer's; such ids have no text.
        return self._first_space(self._utf8.decode(self._pieces(piece))) if piece else ""

    def flush(self) -> str:
        """Return what was held back; an incomplete character becomes U+FFFD. Ready for a new text afterwards."""
        if self._pieces is None:
            return self._window.flush()
        text = self._first_space(self._utf8.decode(b"", final=True))
        self._utf8.reset()
        return text

    def _first_space(self, text: str) -> str:
        if not self._strip or not text:
            return text
        self._strip = False
        return text.removeprefix(" ")


class _Window:
    """Any other decoder: what a token adds is the difference it makes to the few tokens before it."""

    def __init__(self, tokenizer: Tokenizer, after: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = list(after[-1:])
        self._held: list[int] = []

    def push(self, token: int) -> str:
        self._held.append(token)
        text = self._new_text()
        if text.endswith("\ufffd") and len(self._held) < _MAX_HELD_TOKENS:
            return ""
        return self._accept(text)

    def flush(self) -> str:
        return self._accept(self._new_text())

    def _new_text(self) -> str:
        known = self._tokenizer.decode(self._context, skip_special_tokens=False)
        return self._tokenizer.decode(self._context + self._held, skip_special_tokens=False)[len(known) :]

    def _accept(self, text: str) -> str:
        self._context, self._held = self._held or self._context, []
        return text
