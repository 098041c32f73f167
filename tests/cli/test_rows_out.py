"""Rows out: a cut output continues to the same bytes."""

import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapt_llm.cli import run_record
from adapt_llm.cli.rows_out import JsonLines, form_of, match, open_output, output_form
from adapt_llm.errors import FormatError, UsageError
from adapt_llm.runtime.rows import Row, Shard, read_rows

SEPARATORS = "\u2028\u2029\x85\x0b\x0c\x1c"


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


@pytest.mark.parametrize("line", ['{"id": 1}', "{", "[" * 200_000], ids=["other", "cut", "deep"])
def test_resume_refuses_a_foreign_file(tmp_path: Path, line: str) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text(f"{line}\n", encoding="utf-8")
    with pytest.raises(FormatError, match="output row 1 does not come"):
        write(out, read_rows(jsonl(tmp_path, ["a"])), "jsonl", resume=True)


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 200_000], ids=["empty", "cut", "list", "deep"])
def test_damaged_settings_of_a_run_are_as_none(tmp_path: Path, text: str) -> None:
    out = tmp_path / "out.jsonl"
    run_record.begin(out, {"seed": 1})
    with pytest.raises(UsageError, match="begun with seed 1, not 2"):
        run_record.check(out, {"seed": 2})
    run_record.place(out).write_text(text, encoding="utf-8")
    run_record.check(out, {"seed": 2})


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
