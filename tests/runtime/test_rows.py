"""Rows in: every encoding oddity is a row or a row's error."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapt_llm.errors import FormatError, UsageError
from adapt_llm.runtime import rows as rows_module
from adapt_llm.runtime.row_content import CLASSIFY_KEYS
from adapt_llm.runtime.rows import Row, Shard, check_inputs, read_rows

SEPARATORS = "\u2028\u2029\x85\x0b\x0c\x1c"


def read(tmp_path: Path, name: str, data: bytes, field: str | None = None) -> list[Row]:
    path = tmp_path / name
    path.write_bytes(data)
    return list(read_rows([str(path)], field_name=field))


def test_text_lines_are_cut_at_newlines_only(tmp_path: Path) -> None:
    lines = read(tmp_path, "a.txt", f"a{SEPARATORS}b\r\nc\rd\nlast".encode())
    assert [row.content for row in lines] == [f"a{SEPARATORS}b", "c\rd", "last"]
    assert [row.number for row in lines] == [1, 2, 3]


def test_bom_belongs_to_the_file(tmp_path: Path) -> None:
    assert [row.content for row in read(tmp_path, "a.txt", b"\xef\xbb\xbfx\n\xef\xbb\xbfy\n")] == ["x", "\ufeffy"]
    assert read(tmp_path, "a.csv", b"\xef\xbb\xbftext\r\nhello\r\n")[0].content == "hello"


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv", "a.tsv"])
def test_empty_file_has_no_rows(tmp_path: Path, name: str) -> None:
    assert read(tmp_path, name, b"") == []


def test_cp949_bytes_spoil_their_row_only(tmp_path: Path) -> None:
    good, bad = "좋아요", "나빠요".encode("cp949")
    text = read(tmp_path, "a.txt", good.encode() + b"\n" + bad + b"\nok\n")
    assert [row.content for row in text] == [good, None, "ok"]
    assert text[1].error == "not UTF-8: byte 0xb3 at position 0"
    table = read(tmp_path, "a.csv", b"id,text\n1,ok\n2," + bad + b"\n3,ok\n")
    assert [row.error for row in table] == [None, "column 'text' is not UTF-8", None]
    assert table[1].fields["id"] == "2"
    jsonl = read(tmp_path, "a.jsonl", b'{"text": "' + bad + b'"}\n{"text": "ok"}\n')
    assert jsonl[0].error
    assert jsonl[1].content == "ok"


def test_jsonl_rows(tmp_path: Path) -> None:
    data = ['{"id": 1, "text": "a"}', "", '"just a string"', "[1]", "{", '{"id": 1}', '{"text": 3}', '{"text": " "}']
    parsed = read(tmp_path, "a.jsonl", "\n".join(data).encode())
    assert [row.content for row in parsed] == ["a", "just a string", None, None, None, None, None]
    assert parsed[0].fields == {"id": 1, "text": "a"}
    assert [row.error for row in parsed][2:] == [
        "not a JSON object",
        "not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
        "no key 'text', 'prompt' or 'messages'",
        "'text' is neither a string nor a list of messages with role and content",
        "'text' is empty",
    ]


def test_a_row_nested_too_deeply_spoils_itself_only(tmp_path: Path) -> None:
    deep = '{"text": ' + "[" * 200_000
    parsed = read(tmp_path, "a.jsonl", f'{deep}\n{{"text": "ok"}}\n'.encode())
    assert [(row.content, row.error) for row in parsed] == [(None, "JSON nested too deeply"), ("ok", None)]


def test_jsonl_content_keys(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    line = json.dumps({"text": "t", "prompt": "p", "messages": messages, "review": "r"}).encode()
    assert read(tmp_path, "a.jsonl", line)[0].content == messages
    assert read(tmp_path, "a.jsonl", line, "review")[0].content == "r"
    assert read(tmp_path, "a.jsonl", line, "body")[0].error == "no key 'body'"
    assert read(tmp_path, "a.jsonl", b'{"messages": [{"role": "user"}]}')[0].error
    assert read(tmp_path, "a.jsonl", b'{"text": "\\ud800"}')[0].error == "'text' is not Unicode text (lone surrogate)"
    assert read(tmp_path, "a.jsonl", b"[" * 100_000)[0].error


def test_sentences_are_content_where_rows_are_classified(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    values: list[object] = [["하나.", "둘."], [], ["a", " "], ["a", 3], 3, ["\ud800"], None]
    path.write_text("".join(json.dumps({"text": "t", "sentences": value}) + "\n" for value in values), encoding="utf-8")
    parsed = list(read_rows([str(path)], keys=CLASSIFY_KEYS))
    assert [row.content for row in parsed] == [["하나.", "둘."], None, None, None, "t", None, "t"]
    assert parsed[1].error == "'sentences' is neither a string nor a list of sentences, none of them empty"
    assert [row.content for row in read_rows([str(path)])] == ["t"] * 7
    path.write_text('{"sentences": 3}', encoding="utf-8")
    assert next(read_rows([str(path)], keys=CLASSIFY_KEYS)).error == parsed[1].error
    path.write_text('{"text": "t"}', encoding="utf-8")
    assert next(read_rows([str(path)], keys=CLASSIFY_KEYS, field_name="text")).content == "t"
    assert next(read_rows([str(path)], keys=CLASSIFY_KEYS, field_name="x")).error == "no key 'x'"


def test_each_use_of_rows_refuses_the_lists_of_the_other(tmp_path: Path) -> None:
    messages, sentences = [{"role": "user", "content": "hi"}], ["a", "b"]
    path = tmp_path / "a.jsonl"
    path.write_text(f"{json.dumps({'x': messages})}\n{json.dumps({'x': sentences})}\n{{}}\n", encoding="utf-8")
    names = [str(path)]
    assert [row.content for row in read_rows(names, field_name="x")] == [messages, None, None]
    assert [row.content for row in read_rows(names, field_name="x", keys=CLASSIFY_KEYS)] == [None, sentences, None]
    assert [row.error for row in read_rows(names, keys=CLASSIFY_KEYS)] == ["no key 'text', 'prompt' or 'sentences'"] * 3


def test_csv_quotes_and_line_breaks(tmp_path: Path) -> None:
    data = b'id,text\r\n1,"two\nlines, and ""quotes"""\r\n2,short,extra\r\n3\r\n\r\n4,end'
    parsed = read(tmp_path, "a.csv", data)
    assert [row.content for row in parsed] == ['two\nlines, and "quotes"', None, None, "end"]
    assert parsed[1].error == "3 cells where the header has 2: 'extra'"


def test_columns_of_one_name_keep_their_cells(tmp_path: Path) -> None:
    (row,) = read(tmp_path, "a.csv", b"x,text,x,x.1,x\n1,two,3,4,5\n")
    assert row.fields == {"x": "1", "text": "two", "x.2": "3", "x.1": "4", "x.3": "5"}


def test_tsv_has_no_quoting(tmp_path: Path) -> None:
    parsed = read(tmp_path, "a.tsv", b'id\ttext\n1\t"unbalanced\n2\tok\n')
    assert [row.content for row in parsed] == ['"unbalanced', "ok"]


def test_table_without_the_column_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no column prompt or text") as caught:
        read(tmp_path, "a.csv", b"id,review\n1,x\n")
    assert caught.value.hint == "It has id, review; choose one with --field"
    assert read(tmp_path, "a.csv", b"review\nx\n")[0].content == "x"
    assert read(tmp_path, "a.csv", b"id,review\n1,x\n", "review")[0].content == "x"


def test_long_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    megabyte = "가" * 350_000
    assert read(tmp_path, "a.txt", f"{megabyte}\nb\n".encode())[0].content == megabyte
    assert read(tmp_path, "a.csv", f'text\n"{megabyte}"\n'.encode())[0].content == megabyte
    monkeypatch.setattr(rows_module, "MAX_LINE_BYTES", 10)
    parsed = read(tmp_path, "a.txt", b"0123456789\n" + b"x" * 35 + b"\nb\n")
    assert [row.content for row in parsed] == ["0123456789", None, "b"]


def test_gzip_is_told_by_its_bytes(tmp_path: Path) -> None:
    data = gzip.compress(b'{"text": "a"}\n{"text": "b"}\n')
    assert [row.content for row in read(tmp_path, "a.jsonl.gz", data)] == ["a", "b"]
    assert [row.content for row in read(tmp_path, "a.jsonl", data)] == ["a", "b"]
    with pytest.raises(FormatError, match="damaged or cut short"):
        read(tmp_path, "a.jsonl.gz", data[:-9])


def test_utf16_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="UTF-16"):
        read(tmp_path, "a.txt", "x\n".encode("utf-16"))


def test_inputs_are_checked_first(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"gone\.txt: no such file"):
        check_inputs(["-", str(tmp_path / "gone.txt")])
    (tmp_path / "a.json").write_text("[]", encoding="utf-8")
    with pytest.raises(UsageError, match="txt, jsonl, csv or tsv"):
        check_inputs([str(tmp_path / "a.json")])
    with pytest.raises(UsageError, match="only once"):
        check_inputs(["-", "-"])
    with pytest.raises(UsageError, match="is a folder"):
        check_inputs([str(tmp_path)])


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/2", "1/0", "-1/2", "1/2/3", ""])
def test_bad_shards(text: str) -> None:
    with pytest.raises(UsageError):
        Shard.parse(text)


@given(count=st.integers(0, 40), shards=st.integers(1, 7))
def test_shards_are_a_partition(count: int, shards: int) -> None:
    everything = [Row(number, "") for number in range(1, count + 1)]
    parts = [list(Shard.parse(f"{index}/{shards}").select(everything)) for index in range(1, shards + 1)]
    assert sorted((row for part in parts for row in part), key=lambda row: row.number) == everything
    assert all(part == sorted(part, key=lambda row: row.number) for part in parts)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_what_is_no_json_number_is_that_rows_error(tmp_path: Path, number: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"text": "a", "x": {number}}}\n{{"text": "b"}}\n', encoding="utf-8")
    first, second = read_rows([str(path)])
    assert first.error == f"not JSON: {number} is no JSON number"
    assert second.content == "b"


@pytest.mark.parametrize("name", ["in.csv", "in.tsv"])
def test_a_table_that_is_none_is_refused_in_one_line(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The header is read like any other row: csv's own errors are said, and their remedy."""
    path = tmp_path / name
    path.write_bytes(b"prompt\ra\rb\r")
    with pytest.raises(FormatError, match=r"header.*carriage return") as caught:
        list(read_rows([str(path)]))
    assert "LF" in caught.value.hint
    path.write_bytes(b"prompt\na\rb\nc\n")
    errors = [row.error for row in read_rows([str(path)])]
    assert errors == ["not a table row: a carriage return without a line feed ends no line", None]
    monkeypatch.setattr("adapt_llm.runtime.rows.MAX_LINE_BYTES", 100)
    path.write_bytes(b"x" * 200 + b"\na\n")
    with pytest.raises(FormatError, match=r"header.*field larger"):
        list(read_rows([str(path)]))
