"""Text to sentences, in many languages, so that the pieces joined are the text again, character by character.

The splitter is sentencex (rules for some 300 languages, no model, nothing fetched). Around it stand rules of our own:
quotations inside a sentence (Korean `"…."라고`), line breaks and HTML breaks as ends, and the size of a piece.
Pure Python: knows no tokenizer and no model.
"""

import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import accumulate, pairwise, takewhile
from math import ceil

from sentencex.sentencex import segment

from ..errors import UsageError
from .row_content import has_surrogate

LEAST = 30
"""With these two, English film reviews come to some 28 tokens a sentence."""
MOST = 300

_SCRIPTS = {
    "ko": re.compile("[\uac00-\ud7a3\u1100-\u11ff\u3130-\u318f]"),
    "ja": re.compile("[\u3040-\u30ff]"),
    "zh": re.compile("[\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"),
    "ru": re.compile("[\u0400-\u052f]"),
    "ar": re.compile("[\u0600-\u06ff\u0750-\u077f]"),
    "hi": re.compile("[\u0900-\u097f]"),
    "th": re.compile("[\u0e00-\u0e7f]"),
    "el": re.compile("[\u0370-\u03ff]"),
    "he": re.compile("[\u0590-\u05ff]"),
    "en": re.compile("[A-Za-z\u00c0-\u024f]"),
}
_WIDE = re.compile("[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3\uf900-\ufaff\U00020000-\U0003ffff]")
_SPACELESS = re.compile("[\u3001-\u3011\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\uff01-\uff60\U00020000-\U0003ffff]")
_DETECTED_CHARACTERS = 4096  # the beginning tells

_SPACES = re.compile(r"\s+")
_LINE_BREAK = re.compile("\r\n|[\n\r\u0085\u2028\u2029]")
_HTML_BREAK = re.compile(r"(?:<(?:/?p|(?:br|hr)\s{0,9}/?)>\s*)+", re.IGNORECASE)
_EMOJI = "\u2600-\u27bf\U0001f000-\U0001faff\u200d\ufe0f"
_EMOJI_AFTER_END = re.compile(rf"[.!?…。！？~]\s*[{_EMOJI}][{_EMOJI}\s]*")
_KOREAN_LAUGH = re.compile(r"[ㅋㅎㅠㅜ]{2,}[~!?.^]*\s+")

_CLOSING = "\"'”’»」』）)]"
_QUOTED_ON = re.compile(
    "[\uac00-\ud7a3]|\\s{0,2}(?:이?라[고는며]|하[고며]|하였|했다)"  # "…."라고 말했다
    r"|と|って|などと?"  # 「…。」と言った
    r"|.{0,3}[说說问問道喊叫答]"  # “……。”他说
    r"|\s{0,2}[,;—–-]|\s{0,2}[a-z\u00df-\u00ff\u0430-\u044f]"  # «…» — сказал; "…" she said
)
_OPENING_ALONE = re.compile("\\s[\"'“‘«「『（(\\[]$")

_CLAUSES = (
    re.compile(r"[다요죠네까]\s+|[.!?…。！？]\s*|[ㅋㅎㅠㅜ]{2,}\s*"),
    re.compile(r"[,;:，、；：)）\]」』”»—–]\s*"),
    re.compile(r"\s+"),
)

_LONGEST_CLUSTER = 64
_JOINER = "\u200d"
_MARKS = ("Mn", "Mc", "Me")
_EXTENDS = re.compile("[\u200c\u200d\u0e33\u0eb3\uff9e\uff9f\U0001f3fb-\U0001f3ff\U000e0020-\U000e007f]")
_FLAG = re.compile("[\U0001f1e6-\U0001f1ff]")
_JAMO = re.compile(
    "[\u1100-\u115f\ua960-\ua97c][\u1100-\u11ff\uac00-\ud7a3]|[\u1160-\u11ff\uac00-\ud7a3][\u1160-\u11ff]"
)


def detect_language(text: str) -> str:
    """Guess the language code from the script that most of the text's beginning is written in; `en` for none."""
    text = text[:_DETECTED_CHARACTERS]
    if text.isascii():
        return "en"
    counts = {code: len(script.findall(text)) for code, script in _SCRIPTS.items()}
    counts["ko"] *= 2  # a syllable says as much as two letters of the Latin names around it
    counts["zh"] *= 2
    if counts["ja"] * 10 > counts["zh"]:
        counts["ja"] = 2 * counts["ja"] + counts["zh"]
    best = max(counts, key=lambda code: counts[code])
    return best if counts[best] else "en"


def size(text: str) -> int:
    """Count characters that are no space; a Hangul syllable, a kana or a Han character counts as two."""
    bare = "".join(text.split())
    return len(bare) if bare.isascii() else len(bare) + len(_WIDE.findall(bare))


def check_sizes(least: int, most: int) -> None:
    """Raise UsageError unless 1 <= least and 2 least <= most, so that every piece can be both."""
    if least < 1 or most < 2 * least:
        message = f"sentences of {least} to {most} characters cannot be made"
        raise UsageError(message, "The longest must be at least twice the shortest")


def written_without_spaces(character: str) -> bool:
    """Whether text that ends in this character goes on without a space: Han, kana and their punctuation."""
    return bool(_SPACELESS.match(character))


def check_unicode(text: str) -> None:
    """Raise UsageError for a text with lone surrogates, which no tokenizer takes."""
    if has_surrogate(text):
        raise UsageError("the text is not Unicode (lone surrogate)", "It may have been read with a wrong encoding")


def split_sentences(text: str, language: str | None = None, *, least: int = LEAST, most: int = MOST) -> list[str]:
    """Cut a text into sentences; joined, they are exactly the text.

    Args:
        text: any Unicode text; blank text is one piece, empty text none.
        language: ISO 639 code, or None to guess it from the script.
        least: size (see `size`) below which a piece is joined to the next, the last one to the one before.
        most: size above which a piece is cut, where a clause or a word ends if there is such a place.

    Returns:
        Pieces with at least one character that is no space each, unless the text is blank. Space belongs to the
        sentence before it. No piece begins inside a character of several code points (emoji, combining marks, CR LF).

    Raises:
        UsageError: least and most do not fit together, or the text holds lone surrogates.

    """
    check_sizes(least, most)
    check_unicode(text)
    code = (language or detect_language(text)).replace("_", "-").split("-")[0].lower()
    pieces = _cut_at(text, sorted(_sentence_ends(text, code)))
    return [part for piece in _joined(pieces, least) for part in _shortened(piece, least, most)]


def _cut_at(text: str, cuts: list[int]) -> list[str]:
    return [text[start:stop] for start, stop in pairwise([0, *cuts, len(text)]) if start < stop]


def _sentence_ends(text: str, code: str) -> set[int]:
    """Return offsets, strictly inside the text, at which a sentence begins."""
    cuts = {cut for cut in _library_ends(text, code) if not _goes_on(text, cut)}
    cuts.update(_line_ends(text))
    if code == "ko":
        cuts |= {match.end() for match in _KOREAN_LAUGH.finditer(text)}
    for pattern in (_EMOJI_AFTER_END, _HTML_BREAK):
        cuts = _cut_behind(text, pattern, cuts)
    first = _after_spaces(text, 0)
    return {cut for cut in cuts if first < cut < len(text) and not in_cluster(text, cut)}


def _library_ends(text: str, code: str) -> Iterator[int]:
    """Where sentencex cuts, moved behind space.

    Its pieces are looked for in the text, since it drops characters of long runs of line breaks.
    """
    at = cut = 0
    for piece in segment(code, text):
        start = text.find(piece, at)
        if start < 0:
            return
        at = start + len(piece)
        if start >= cut:
            cut = _moved(text, start)
            yield cut


def _moved(text: str, cut: int) -> int:
    """Put space before the cut, and behind it an opening quote that sentencex left at the end of a sentence."""
    if _OPENING_ALONE.search(text, max(0, cut - 2), cut) and not text[cut : cut + 1].isspace():
        return cut - 1
    return _after_spaces(text, cut)


def _after_spaces(text: str, cut: int) -> int:
    match = _SPACES.match(text, cut)
    return match.end() if match else cut


def _goes_on(text: str, cut: int) -> bool:
    """Whether a sentence goes on behind the quotation that ends at the cut."""
    end = cut
    while end > 0 and text[end - 1].isspace():
        end -= 1
    return end > 0 and text[end - 1] in _CLOSING and bool(_QUOTED_ON.match(text, end))


def _line_ends(text: str) -> Iterator[int]:
    """Ends of lines, but not where one line of running text goes on in small letters on the next."""
    for run in _SPACES.finditer(text):
        breaks = len(_LINE_BREAK.findall(run[0]))
        if breaks and (breaks > 1 or not text[run.end() : run.end() + 1].islower()):
            yield run.end()


def _cut_behind(text: str, pattern: re.Pattern[str], cuts: set[int]) -> set[int]:
    """Move all cuts inside a match, or just before it, behind it."""
    moved: set[int] = set()
    inside: set[int] = set()
    for match in pattern.finditer(text):
        start, stop = match.span()
        while start > 0 and text[start - 1].isspace():
            start -= 1
        inside.update(range(start, stop))
        moved.add(stop)
    return (cuts - inside) | moved


def _joined(pieces: list[str], least: int) -> list[str]:
    """Join pieces below the least size to the next one, the last to the one before."""
    result: list[str] = []
    held = ""
    for piece in pieces:
        held += piece
        if size(held) >= least:
            result.append(held)
            held = ""
    if held and result:
        result[-1] += held
    elif held:
        result.append(held)
    return result


def _shortened(piece: str, least: int, most: int) -> Iterator[str]:
    """Cut a piece above the greatest size into parts of similar size."""
    if (left := size(piece)) <= most:
        yield piece
        return
    sizes = list(accumulate(map(size, piece)))  # sizes[k]: size of the first k + 1 characters
    start = 0
    while left > most:
        cut = _best_cut(piece, sizes, left, least, most)
        yield piece[start:cut]
        start, left = cut, sizes[-1] - sizes[cut - 1]
    yield piece[start:]


def _best_cut(piece: str, sizes: list[int], left: int, least: int, most: int) -> int:
    """Return the offset after which the rest begins: at a clause, at a space, or failing that between characters."""
    done, target = sizes[-1] - left, left / ceil(left / most)
    low = bisect_left(sizes, done + max(least, int(target / 2))) + 1
    high = max(low, bisect_right(sizes, done + min(most, left - least)))
    middle = bisect_left(sizes, done + target) + 1
    for clause in _CLAUSES:
        ends = [match.end() for match in clause.finditer(piece, low - 1, high)]
        ends = [end for end in ends if low <= end and not in_cluster(piece, end)]
        if ends:
            return min(ends, key=lambda end: abs(end - middle))
    middle = min(middle, high)
    back = range(middle, max(low, middle - _LONGEST_CLUSTER) - 1, -1)
    return next((cut for cut in back if not in_cluster(piece, cut)), middle)


def in_cluster(text: str, at: int) -> bool:
    """Whether the characters around an offset belong to one that a reader sees (near enough to Unicode's UAX 29)."""
    if not 0 < at < len(text):
        return False
    before, after = text[at - 1], text[at]
    if after.isascii() and before.isascii():
        return before == "\r" and after == "\n"
    if before == _JOINER or _EXTENDS.match(after) or unicodedata.category(after) in _MARKS:
        return True
    if _FLAG.match(after) and _FLAG.match(before):
        flags = takewhile(_FLAG.match, reversed(text[max(0, at - _LONGEST_CLUSTER) : at]))
        return sum(1 for _ in flags) % 2 == 1
    return bool(_JAMO.fullmatch(text, at - 1, at + 1))
