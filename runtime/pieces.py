"""What one vocabulary entry stands for in bytes, read from tokenizer.json's `decoder`.

Knows no ids and no state: one spelling in, its bytes out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


def _byte_level_table() -> dict[str, int]:
    """Character -> byte of byte-level BPE (GPT-2): printable bytes stand for themselves, the others from 256 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(shifted)}


class PieceDecoder(Protocol):
    """Turns one token's spelling in the vocabulary into the bytes it stands for."""

    @property
    def strips_space(self) -> bool:
        """Whether the first space of a text is dropped."""
        ...

    def __call__(self, piece: str) -> bytes:
        """Bytes of one piece; a character may need those of several."""
        ...


class _ByteLevel:
    strips_space = False

    def __init__(self) -> None:
        self._table = _byte_level_table()

    def __call__(self, piece: str) -> bytes:
        # An added token may hold characters outside the table; it then stands for itself, as in `tokenizers`.
        if all(character in self._table for character in piece):
            return bytes(self._table[character] for character in piece)
        return piece.encode()


@dataclass(frozen=True)
class _SentencePiece:
    """`▁` is a space, `<0xEA>` a byte (byte fallback), and the first space of a text may belong to no word."""

    replacements: tuple[tuple[str, str], ...]
    byte_fallback: bool
    strips_space: bool

    def __call__(self, piece: str) -> bytes:
        if self.byte_fallback and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            try:
                return bytes([int(piece[3:5], 16)])
            except ValueError:
                pass  # spelled like a byte and none: text
        for old, new in self.replacements:
            piece = piece.replace(old, new)
        return piece.encode()


def _flatten(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if not decoder:
        return []
    if decoder.get("type") == "Sequence":
        return [step for inner in decoder["decoders"] for step in _flatten(inner)]
    return [decoder]


def piece_decoder(decoder: Mapping[str, Any] | None) -> PieceDecoder | None:
    """Read tokenizer.json's `decoder`; None = of a kind that cannot be done one token at a time here."""
    steps = _flatten(decoder)
    kinds = [str(step.get("type")) for step in steps]
    if "ByteLevel" in kinds and set(kinds) <= {"ByteLevel", "Fuse"}:
        return _ByteLevel()
    if not kinds or not set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        return None
    replacements, strips = [], False
    for index, step in enumerate(steps):
        if kinds[index] == "Replace":
            if "String" not in step["pattern"]:
                return None
            replacements.append((step["pattern"]["String"], step["content"]))
        elif kinds[index] == "Strip":
            if "Fuse" not in kinds[:index] or (step["content"], step["start"], step["stop"]) != (" ", 1, 0):
                return None
            strips = True
    return _SentencePiece(tuple(replacements), "ByteFallback" in kinds, strips)
