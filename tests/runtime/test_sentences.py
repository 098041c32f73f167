"""Sentences: the pieces are the text again, whatever the text, and they are what a reader calls a sentence."""

import time

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from adapt_llm.errors import UsageError
from adapt_llm.runtime.sentences import detect_language, in_cluster, size, split_sentences

CLUSTERS = ["👩‍👩‍👧", "🇰🇷", "👍🏽", "e\u0301", "각", "한", "\u1112\u1161\u11ab", "क्ष", "กำ", "❤️", "\r\n", "가\u0301"]
PARTS = [
    *CLUSTERS, "\r", "\n", "\n\n", "\u2028", "\u200b", "\u00a0", " ", "   ", "\t", "\x1c", "\0", "a", "Word ", "word. ",
    "Dr. ", "U.S. ", "3.14 ", "...", "…", "?!", '"', "”", "“", "'", "(", ")", "」", "라고 ", "와요. ",
    "좋아요.그런데 ", "ㅋㅋㅋ ", "ㅠㅠ", "。", "本", "か", "<br />", "<BR>", "<p>", "- ", ", ", "\ufeff", "\U000e0061",
    "\uff9e", ":) ", "http://a.b/c?d=e ",
]  # fmt: skip
mixed = st.one_of(st.text(max_size=40), st.lists(st.sampled_from(PARTS), max_size=60).map("".join))
languages = st.sampled_from([None, "en", "ko", "ja", "zh", "de", "zz", "ko-KR", "pt_BR"])


def pieces(text: str, language: str | None = None) -> list[str]:
    """The sentences alone, without our joining of short ones."""
    return [piece.strip() for piece in split_sentences(text, language, least=1)]


@settings(max_examples=400, deadline=None)
@given(text=mixed, language=languages, least=st.integers(1, 30), more=st.integers(0, 60))
def test_pieces_are_the_text(text: str, language: str | None, least: int, more: int) -> None:
    most = 2 * least + more
    result = split_sentences(text, language, least=least, most=most)
    assert "".join(result) == text
    if text.strip():
        assert all(piece.strip() for piece in result)
    else:
        assert len(result) == bool(text)
    if size(text) >= least:
        assert min(map(size, result), default=least) >= least
    assert max(map(size, result), default=0) <= most + 1  # a character of size two


@settings(max_examples=300, deadline=None)
@given(text=st.lists(st.sampled_from(PARTS), max_size=80).map("".join), most=st.integers(20, 60))
def test_no_piece_begins_inside_a_character(text: str, most: int) -> None:
    starts = set()
    for piece in split_sentences(text, least=3, most=most)[:-1]:
        starts.add((max(starts) if starts else 0) + len(piece))
    inside = {start for start in starts if in_cluster(text, start)}
    assert not inside


@pytest.mark.parametrize("one", CLUSTERS)
@pytest.mark.parametrize("other", [*CLUSTERS, "a", " ", "가"])
def test_clusters_are_those_of_unicode(one: str, other: str) -> None:
    text = f"{one}{other}{one}"
    ends = {match.end() for match in regex.finditer(r"\X", text)}
    # Conjuncts (UAX 29, GB9c) apart: which version of the rules `regex` has decides about क्ष.
    where = [at for at in range(1, len(text)) if text[at - 1 : at + 1] != "\u094d\u0937"]
    assert [in_cluster(text, at) for at in where] == [at not in ends for at in where]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("정말 맛있어요. 또 올게요! 언제 열어요? 네", ["정말 맛있어요.", "또 올게요!", "언제 열어요?", "네"]),
        ("정말 좋다.그런데 비싸다.", ["정말 좋다.", "그런데 비싸다."]),
        ('"다시는 안 가요."라고 말했다. 끝.', ['"다시는 안 가요."라고 말했다.', "끝."]),
        ("그는 “정말 좋다. 최고다!”라고 말했다. 끝.", ["그는 “정말 좋다. 최고다!”라고 말했다.", "끝."]),
        ('그녀는 "왜? 무슨 일이야?" 하고 물었다. 끝.', ['그녀는 "왜? 무슨 일이야?" 하고 물었다.', "끝."]),
        ("‘좋아.’라며 웃었다. 끝.", ["‘좋아.’라며 웃었다.", "끝."]),
        ("“안 돼.” 그가 말했다.", ["“안 돼.”", "그가 말했다."]),
        ("재밌어요ㅋㅋㅋ 또 볼게요ㅎㅎ 최고 ㅠㅠ 눈물", ["재밌어요ㅋㅋㅋ", "또 볼게요ㅎㅎ", "최고 ㅠㅠ", "눈물"]),
        ("배송이 빨라요\n포장도 꼼꼼해요\r\n추천", ["배송이 빨라요", "포장도 꼼꼼해요", "추천"]),
        ("가격은 3.14달러였다. 3.5점 드립니다.", ["가격은 3.14달러였다.", "3.5점 드립니다."]),
        ("a.b@c.co.kr로 문의. https://a.kr/x.y?z=1. 참고.", ["a.b@c.co.kr로 문의.", "https://a.kr/x.y?z=1.", "참고."]),
        ("음... 별로… 그냥 그래요.", ["음...", "별로… 그냥 그래요."]),
        ("최고예요! 😍👍🏽 또 살게요.", ["최고예요! 😍👍🏽", "또 살게요."]),
        ("(진짜예요. 믿으세요.) 추천!", ["(진짜예요. 믿으세요.) 추천!"]),
    ],
)
def test_korean(text: str, expected: list[str]) -> None:
    assert pieces(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Dr. Smith left the U.S. in Jan. 2020. Why?!", ["Dr. Smith left the U.S. in Jan. 2020.", "Why?!"]),
        ("It is, e.g. this one. No way!!! OK", ["It is, e.g. this one.", "No way!!!", "OK"]),
        ('"He said so. Really." she said. End.', ['"He said so. Really." she said.', "End."]),
        ('I am tall. "Unclosed. And more.', ["I am tall.", '"Unclosed.', "And more."]),
        ("One.<br /><br />Two<BR>three. <p>Four", ["One.<br /><br />", "Two<BR>", "three. <p>", "Four"]),
        (
            "A heading\n\nhard wrapped\ntext goes on.\n- A list",
            ["A heading", "hard wrapped\ntext goes on.", "- A list"],
        ),
        ("Good...The end. Wait... what?", ["Good...", "The end.", "Wait... what?"]),
        ("Really.😍 Yes. I paid $3.50.", ["Really.😍", "Yes.", "I paid $3.50."]),
    ],
)
def test_english(text: str, expected: list[str]) -> None:
    assert pieces(text, "en") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("“你好。”他说。今天很好！", ["“你好。”他说。", "今天很好！"]),
        ("「そうだ。」と彼は言った。本当？", ["「そうだ。」と彼は言った。", "本当？"]),
        ("«Да. Нет.» — сказал он. Хорошо!", ["«Да. Нет.» — сказал он.", "Хорошо!"]),
        ("यह अच्छा है। मुझे पसंद है।", ["यह अच्छा है।", "मुझे पसंद है।"]),
        ("هذا جيد. هل تحب؟ نعم.", ["هذا جيد.", "هل تحب؟", "نعم."]),
    ],
)
def test_other_languages(text: str, expected: list[str]) -> None:
    assert pieces(text) == expected


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("아이폰 iPhone 15 Pro Max 좋아요", "ko"),
        ("iPhone 15 Pro Max", "en"),
        ("東京タワーに行った", "ja"),
        ("今天很好", "zh"),
        ("Москва iPhone", "ru"),
        ("สวัสดี", "th"),
        ("1234 !! 😍", "en"),
        ("", "en"),
    ],
)
def test_language_is_told_by_the_script(text: str, code: str) -> None:
    assert detect_language(text) == code


def test_short_sentences_are_joined_to_the_next_and_the_last_to_the_one_before() -> None:
    text = "No. Never. This one is long enough to stand. 1. And so is this one, I would think. Bye."
    assert split_sentences(text, "en", least=20) == [
        "No. Never. This one is long enough to stand. ",
        "1. And so is this one, I would think. Bye.",
    ]
    assert split_sentences("짧다. 이 문장은 충분히 길다.", least=12) == ["짧다. 이 문장은 충분히 길다."]
    assert split_sentences("a. b.", least=20) == ["a. b."]


def test_long_sentences_are_cut_where_a_clause_or_a_word_ends() -> None:
    clauses = "배송이 정말 빨랐어요 포장도 꼼꼼했습니다 다음에 또 주문할게요 감사합니다 "
    parts = split_sentences(clauses * 10, least=10, most=60)
    assert all(part.endswith(("요 ", "다 ")) for part in parts)
    assert len(parts) > 10
    parts = split_sentences("one two, three four five; " * 9, "en", least=60, most=120)
    assert len(parts) == 2
    assert parts[0].endswith((", ", "; "))
    parts = split_sentences("word " * 200, "en", least=10, most=100)
    assert all(part.endswith("word ") for part in parts)
    assert {size(part) for part in parts} <= set(range(80, 101))
    assert [len(part) for part in split_sentences("x" * 1000, "en", least=10, most=300)] == [250] * 4
    family = "👩‍👩‍👧"
    assert all(len(part) % len(family) == 0 for part in split_sentences(family * 299, least=10, most=301))


@pytest.mark.parametrize(
    "text",
    [
        "\n" * 200_000,
        '"' * 200_000,
        " " * 200_000,
        "a. " * 60_000,
        "가" * 200_000,
        ("\n" + " " * 999) * 200,
        "<br>" * 50_000,
    ],
)
def test_no_text_takes_long(text: str) -> None:
    start = time.process_time()
    assert "".join(split_sentences(text)) == text
    assert time.process_time() - start < 5  # 0.3 s here; one rule that looks back from everywhere takes minutes


def test_impossible_requests_are_refused() -> None:
    with pytest.raises(UsageError, match="sentences of 0 to 9"):
        split_sentences("a", least=0, most=9)
    with pytest.raises(UsageError, match="sentences of 5 to 9"):
        split_sentences("a", least=5, most=9)
    with pytest.raises(UsageError, match="not Unicode"):
        split_sentences("a\ud800")
