"""Rows in and out: every encoding oddity is a row or a row's error, and a cut output continues to the same bytes."""

import gzip
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapt_llm.cli import rows as rows_module
from adapt_llm.cli.rows import Row, Shard, check_inputs, read_rows
from adapt_llm.cli.rows_out import JsonLines, form_of, match, open_output, output_form
from adapt_llm.errors import FormatError, UsageError

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


def test_jsonl_content_keys(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    line = json.dumps({"text": "t", "prompt": "p", "messages": messages, "review": "r"}).encode()
    assert read(tmp_path, "a.jsonl", line)[0].content == messages
    assert read(tmp_path, "a.jsonl", line, "review")[0].content == "r"
    assert read(tmp_path, "a.jsonl", line, "body")[0].error == "no key 'body'"
    assert read(tmp_path, "a.jsonl", b'{"messages": [{"role": "user"}]}')[0].error
    assert read(tmp_path, "a.jsonl", b'{"text": "\\ud800"}')[0].error == "'text' is not Unicode text (lone surrogate)"
    assert read(tmp_path, "a.jsonl", b"[" * 100_000)[0].error


def test_csv_quotes_and_line_breaks(tmp_path: Path) -> None:
    data = b'id,text\r\n1,"two\nlines, and ""quotes"""\r\n2,short,extra\r\n3\r\n\r\n4,end'
    parsed = read(tmp_path, "a.csv", data)
    assert [row.content for row in parsed] == ['two\nlines, and "quotes"', None, None, "end"]
    assert parsed[1].error == "3 cells where the header has 2"


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


# --- output


def answer(row: Row) -> dict[str, object]:
    """Stand in for a model: a function of the row alone."""
    if row.error:
        return {"error": row.error}
    return {"text": f"<{row.content}>\r\n\t\"'{SEPARATORS}", "tokens": row.number, "mean_depth": None}


def write(path: Path, rows: Iterator[Row], name: str, *, skip: bool = False, resume: bool = False) -> None:
    form = output_form(name, ("text", "tokens", "mean_depth"), lambda _text: None)
    end = match(path, form, rows, skipping=skip).end if resume else 0
    with open_output(path, keep=end) as stream:
        for row in rows:
            if not (row.error and skip):
                stream.write(form.encode(row, answer(row)))


values = st.one_of(
    st.text(max_size=8), st.integers(), st.none(), st.booleans(), st.lists(st.text(max_size=3), max_size=2)
)
objects = st.fixed_dictionaries(
    {}, optional={"text": st.text(max_size=12), "id": values, "error": values, "줄": values}
)


@settings(deadline=None, max_examples=150)
@given(
    data=st.lists(objects, max_size=6),
    name=st.sampled_from(["jsonl", "csv", "tsv", "text"]),
    cut=st.integers(0, 2000),
    skip=st.booleans(),
    shard=st.sampled_from([Shard(), Shard(1, 2), Shard(2, 3)]),
)
def test_resume_after_a_cut_anywhere_gives_the_same_file(
    tmp_path_factory: pytest.TempPathFactory,
    data: list[dict[str, object]],
    name: str,
    cut: int,
    skip: bool,
    shard: Shard,
) -> None:
    skip = skip and name != "text"
    folder = tmp_path_factory.mktemp("resume")
    source, whole, torn = folder / "in.jsonl", folder / "whole", folder / "torn"
    source.write_text("".join(json.dumps(item) + "\n" for item in data), encoding="utf-8")
    write(whole, shard.select(read_rows([str(source)])), name, skip=skip)
    torn.write_bytes(whole.read_bytes()[:cut])
    write(torn, shard.select(read_rows([str(source)])), name, skip=skip, resume=True)
    assert torn.read_bytes() == whole.read_bytes()


def jsonl(tmp_path: Path, texts: list[str]) -> list[str]:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return [str(path)]


@pytest.mark.parametrize("name", ["jsonl", "csv", "tsv"])
def test_resume_refuses_another_input(tmp_path: Path, name: str) -> None:
    out = tmp_path / "out"
    write(out, read_rows(jsonl(tmp_path, ["a", "b", "c"])), name)
    before = out.read_bytes()
    with pytest.raises(FormatError, match="output row 2 does not come from the input rows"):
        write(out, read_rows(jsonl(tmp_path, ["a", "B", "c"])), name, resume=True)
    with pytest.raises(FormatError, match="output row 3 does not come"):
        write(out, read_rows(jsonl(tmp_path, ["a", "b"])), name, resume=True)
    with pytest.raises(FormatError, match="output row 2 does not come"):
        write(out, read_rows(jsonl(tmp_path, ["a", "x", "b", "c"])), name, skip=True, resume=True)
    assert out.read_bytes() == before


def test_resume_refuses_a_foreign_file(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text('{"id": 1}\n', encoding="utf-8")
    with pytest.raises(FormatError, match="output row 1 does not come"):
        write(out, read_rows(jsonl(tmp_path, ["a"])), "jsonl", resume=True)


def test_duplicate_rows_and_ids_are_kept_apart(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"id": 7, "text": "same"}\n' * 3, encoding="utf-8")
    out = tmp_path / "out.jsonl"
    write(out, read_rows([str(source)]), "jsonl")
    assert [json.loads(line)["row"] for line in out.read_text("utf-8").split("\n")[:-1]] == [1, 2, 3]
    out.write_bytes(out.read_bytes()[: len(out.read_bytes()) // 2])
    write(out, read_rows([str(source)]), "jsonl", resume=True)
    assert [json.loads(line)["id"] for line in out.read_text("utf-8").split("\n")[:-1]] == [7, 7, 7]


def test_failed_rows_are_counted_when_resuming(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "a", "error": "the user\'s own"}\n{}\n{"text": "b"}\n', encoding="utf-8")
    for name in ("jsonl", "csv", "tsv", "text"):
        out = tmp_path / name
        write(out, read_rows([str(source)]), name)
        done = match(out, output_form(name, (), print), read_rows([str(source)]), skipping=False)
        assert (done.rows, done.failed, done.end) == (3, 1, out.stat().st_size)


def encoded(name: str, fields: Mapping[str, object], result: Mapping[str, object]) -> str:
    warnings: list[str] = []
    form = output_form(name, ("text", "tokens"), warnings.append)
    return form.encode(Row(3, "0123456789ab", fields), result).decode()


def test_forms_exactly() -> None:
    fields, result = {"id": "x", "n": [1, "가"]}, {"text": 'say "hi",\nbye', "tokens": 2}
    assert encoded("jsonl", fields, result) == (
        '{"id": "x", "n": [1, "가"], "row": 3, "row_hash": "0123456789ab",'
        ' "text": "say \\"hi\\",\\nbye", "tokens": 2}\n'
    )
    assert encoded("csv", fields, result) == (
        'id,n,row,row_hash,text,tokens,error\nx,"[1, ""가""]",3,0123456789ab,"say ""hi"",\nbye",2,\n'
    )
    assert encoded("tsv", fields, result) == (
        'id\tn\trow\trow_hash\ttext\ttokens\terror\nx\t[1, "가"]\t3\t0123456789ab\tsay "hi",\\nbye\t2\t\n'
    )
    assert encoded("text", fields, result) == 'say "hi",\\nbye\n'
    assert encoded("text", fields, {"error": "bad"}) == "\n"


def test_lone_surrogates_are_written_as_escapes() -> None:
    assert JsonLines().encode(Row(1, "d", {"id": "\ud800"}), {"text": "a"}).isascii()
    assert "?" in encoded("csv", {"id": "\ud800"}, {"text": "a"})


def test_a_late_key_is_said_once() -> None:
    warnings: list[str] = []
    form = output_form("csv", ("text",), warnings.append)
    form.encode(Row(1, "d", {"id": 1}), {"text": "a"})
    form.encode(Row(2, "d", {"id": 1, "extra": 2}), {"text": "a"})
    form.encode(Row(3, "d", {"id": 1, "extra": 2}), {"text": "a"})
    assert warnings == ["row 2 has keys that the header lacks (extra); jsonl keeps them"]


def test_forms_by_name() -> None:
    assert [form_of(Path(name)) for name in ("a.jsonl", "a.CSV", "a.tsv", "a.txt")] == ["jsonl", "csv", "tsv", "text"]
    for name in ("a.jsonl.gz", "a.parquet", "a"):
        with pytest.raises(UsageError):
            form_of(Path(name))


def test_marks_read_streams_without_a_name() -> None:
    assert [mark.end for mark in JsonLines().marks(io.BytesIO(b'{"row": 1}\n{"row'))] == [11]
