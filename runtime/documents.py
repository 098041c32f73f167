"""A text as a classifier reads it: token ids, and where among them each sentence ends.

Knows sentences and the tokenizer; knows no model, no tensor and no label.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

from ..errors import UsageError
from .sentences import LEAST, MOST, check_sizes, check_unicode, split_sentences, written_without_spaces
from .text import Tokenizer

_LONGEST_TOKEN = 128  # characters; runs of spaces or dashes are the longest entries of the usual vocabularies


@dataclass(frozen=True)
class Document:
    """One text of m sentences. Sentence s is `ids[ends[s - 1] : ends[s]]`; none is empty."""

    ids: tuple[int, ...]
    ends: tuple[int, ...]
    """Tokens up to and with each sentence, strictly rising; the last is `len(ids)`."""
    truncated: bool = False
    """Whether tokens were left out at the end; the last sentence may then be a part of one."""


class DocumentReader:
    """Turns texts into documents, always in the same way.

    Args:
        tokenizer: the backbone's.
        max_tokens: longer documents are cut, after a token.
        language: ISO 639 code of the texts; None guesses it text by text.
        least: size below which a sentence is joined to its neighbour (see `sentences.size`).
        most: size above which a sentence is cut.

    Raises:
        UsageError: sizes that do not fit together.

    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_tokens: int,
        language: str | None = None,
        least: int = LEAST,
        most: int = MOST,
    ) -> None:
        check_sizes(least, most)
        if max_tokens < 1:
            raise UsageError(f"documents of at most {max_tokens} tokens are empty")
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self.language = language
        self.least = least
        self.most = most

    def prefix(self, prompt: str) -> list[int]:
        """Return the ids that every document follows: BOS, where this tokenizer uses one, and the instruction.

        Control tokens spelled in the prompt are control tokens.
        """
        bos = [self.tokenizer.bos_id] if self.tokenizer.adds_bos and self.tokenizer.bos_id is not None else []
        ids = self.tokenizer.encode(prompt, add_special_tokens=False)
        ids = ids if bos and ids[:1] == bos else bos + ids
        self.tokenizer.check_known(ids)
        return ids

    def read(self, text: str | Sequence[str]) -> Document:
        """Tokenise a text once, as a whole, and say which tokens are which sentence's.

        A list of strings is taken as the sentences. If none of them begins or ends with space they are joined by
        spaces (nothing after Chinese or Japanese); else as they are. A sentence without a token of its own belongs to
        the next one. Control tokens spelled in the text (`<|im_end|>`) are plain text.

        Raises:
            UsageError: no text, a text without a token, or one that is not Unicode.
            FormatError: a token that the model does not have.

        """
        pieces = [text] if isinstance(text, str) else list(text)
        if not any(piece.strip() for piece in pieces):
            raise UsageError("the text is empty")
        for piece in pieces:
            check_unicode(piece)
        given = None if isinstance(text, str) else _spaced(pieces)
        whole = pieces[0] if given is None else "".join(given)
        enough = self.max_tokens * _LONGEST_TOKEN
        document = self._document(whole[:enough], given, cut=len(whole) > enough)
        if document.truncated and len(document.ids) < self.max_tokens:
            document = self._document(whole, given, cut=False)  # mostly characters that are no tokens
        return document

    def _document(self, text: str, given: list[str] | None, *, cut: bool) -> Document:
        pieces = given or split_sentences(text, self.language, least=self.least, most=self.most)
        with _plain_text(self.tokenizer):
            encoding = self.tokenizer.backend.encode(text, add_special_tokens=False)
        ids = encoding.ids[: self.max_tokens]
        if not ids:
            raise UsageError("the text has no token")
        self.tokenizer.check_known(ids)
        starts = list(_starts(text, encoding.offsets))
        ends = (bisect_left(starts, stop) for stop in accumulate(map(len, pieces)))
        distinct = {min(end, len(ids)) for end in ends if end} | {len(ids)}
        return Document(tuple(ids), tuple(sorted(distinct)), truncated=cut or len(encoding.ids) > len(ids))


def _starts(text: str, offsets: Sequence[tuple[int, int]]) -> Iterator[int]:
    """Yield where each token begins, in characters, never falling.

    A token of a word has the space before it, which is the end of the sentence before: its first other character
    counts. The tokens of one character (an emoji in bytes) share its offsets.
    """
    reached = 0
    for start, stop in offsets:
        blank = len(text[start:stop]) - len(text[start:stop].lstrip())
        first = start if start + blank == stop else start + blank
        reached = max(reached, first)
        yield reached


def _spaced(sentences: Sequence[str]) -> list[str]:
    if any(piece != piece.strip() for piece in sentences):
        return list(sentences)
    spaced = [one if not one or written_without_spaces(one[-1]) else f"{one} " for one in sentences[:-1]]
    return [*spaced, sentences[-1]]


@contextmanager
def _plain_text(tokenizer: Tokenizer) -> Iterator[None]:
    """Within, control tokens spelled in a text are characters like any other. Not for several threads at once."""
    backend = tokenizer.backend
    before = backend.encode_special_tokens
    backend.encode_special_tokens = True
    try:
        yield
    finally:
        backend.encode_special_tokens = before
