"""Files of rows in every format and packing: the same rows out of each, faults by their number, damage told at once."""

from __future__ import annotations

import dataclasses
import errno
import gzip
import io
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stages.contracts.errors import DataError
from stages.corpus import formats
from stages.corpus.items import Item, Reject
from stages.corpus.places import Blob, find
from stages.corpus.sources import read_files

ROWS = [{"prompt": f"Question {i}: \u00e9\U0001f600\0?", "response": f"Answer {i}."} for i in range(700)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def table() -> pa.Table:
    return pa.Table.from_pylist(ROWS)


def parquet() -> bytes:
    out = io.BytesIO()
    pq.write_table(table(), out, row_group_size=100)
    return out.getvalue()


def arrow(stream: bool) -> bytes:
    out = io.BytesIO()
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(out, table().schema) as writer:
        writer.write_table(table(), max_chunksize=300)
    return out.getvalue()


def zstd(data: bytes) -> bytes:
    return pa.compress(data, codec="zstd", asbytes=True)


def skippable(kind: int) -> bytes:
    """A frame of zstd that holds no data of the file."""
    return bytes([0x50 + kind]) + b"\x2a\x4d\x18\x04\0\0\0size"


FILES = {
    "JSON lines": LINES,
    "JSON lines, gzip": gzip.compress(LINES[:5000]) + gzip.compress(LINES[5000:]),
    "JSON lines, zstd": skippable(0) + zstd(LINES[:5000]) + skippable(15) + zstd(LINES[5000:]),
    "JSON": json.dumps(ROWS, indent=1).encode(),
    "JSON, gzip": gzip.compress(b"\xef\xbb\xbf" + json.dumps(ROWS).encode()),
    "JSON, zstd": zstd("\n".join(json.dumps(row, indent=2) for row in ROWS).encode()),
    "Parquet": parquet(),
    "Arrow": arrow(stream=True),
}


@pytest.mark.parametrize("words", FILES)
def test_each_format_is_told_by_its_bytes_and_gives_the_same_rows(tmp_path: Path, words: str) -> None:
    (tmp_path / "rows.bin").write_bytes(FILES[words])
    shapes: Counter[str] = Counter()
    items = list(read_files(str(tmp_path / "rows.bin"), shapes))
    assert [i.messages[0]["content"] for i in items if isinstance(i, Item)] == [r["prompt"] for r in ROWS]
    assert shapes == {f"prompt_response in {words}": 700}
    if not words.startswith("JSON lines"):
        assert [i.item for i in items] == [f"rows.bin:{n}" for n in range(1, 701)]


def test_an_arrow_file_and_a_wrapped_list_are_read_too(tmp_path: Path) -> None:
    (tmp_path / "a.arrow").write_bytes(arrow(stream=False))
    (tmp_path / "b.json").write_text(json.dumps({"version": 1, "data": ROWS[:3]}, indent=1))
    (tmp_path / "c.json").write_text(json.dumps(ROWS[0]))
    assert len(list(read_files(str(tmp_path)))) == 704


def test_an_object_gives_its_list_only_where_it_stands_alone_and_is_no_row(tmp_path: Path) -> None:
    """Objects one after the other were once replaced by a list that each had beside its turns."""
    rows = [{**row, "items": [], "examples": ["a"]} for row in ROWS[:3]]
    for indent in (1, None):
        laid = [json.dumps(row, indent=indent) for row in rows]
        (tmp_path / "x.json").write_text("\n".join(laid))
        read = list(read_files(str(tmp_path / "x.json")))
        assert [type(r) for r in read] == [Item] * 3
        (tmp_path / "x.json").write_text(laid[0])
        assert list(read_files(str(tmp_path / "x.json"))) == read[:1]
        wrapped = json.dumps({"data": ROWS[:3]}, indent=indent)
        (tmp_path / "x.json").write_text(wrapped)
        assert [i.item for i in read_files(str(tmp_path / "x.json"))] == ["x.json:1", "x.json:2", "x.json:3"]
        (tmp_path / "x.json").write_text(wrapped + "\n" + laid[0])
        strange, good = read_files(str(tmp_path / "x.json"))
        assert isinstance(strange, Reject) and strange.reason == "unknown layout" and isinstance(good, Item)


def test_a_folder_saved_by_datasets_gives_its_rows_alone_and_one_of_splits_asks_which(tmp_path: Path) -> None:
    split = tmp_path / "all" / "train"
    split.mkdir(parents=True)
    for i in range(2):
        (split / f"data-0000{i}-of-00002.arrow").write_bytes(arrow(stream=True))
    (split / "state.json").write_text('{"_data_files": []}')
    (split / "dataset_info.json").write_text("{}")
    items = list(read_files(str(split)))
    assert len(items) == 1400 and items[700].item == "data-00001-of-00002.arrow:1"
    (tmp_path / "all" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    with pytest.raises(DataError, match=r"several splits[\s\S]*all/train"):
        find(str(tmp_path / "all"))


def test_files_of_equal_names_below_a_glob_are_told_apart(tmp_path: Path) -> None:
    for day in ("1", "2"):
        (tmp_path / day).mkdir()
        (tmp_path / day / "x.jsonl").write_text('{"prompt": "hi"}\n')
    assert [i.item for i in read_files(f"{tmp_path}/**/*.jsonl")] == ["1/x.jsonl:1", "2/x.jsonl:1"]


@pytest.mark.parametrize(
    "row",
    [
        {"input_ids": [1, 2, 3, 0], "loss_mask": [0, 1, 1, 0], "attention_mask": [1, 1, 1, 0]},
        {"input_ids": [1, 2, 3, 0], "labels": [-100, 2, 3, -100]},
        {
            "instruction": "Say.",
            "input": "this",
            "context": "so",
            "output": "this",
            "history": [["a", "b"]],
            "system": "s",
        },
        {"question": "Why?", "answer": "So."},
        {"text": "<q>why<a>so", "spans": [[9, 11]]},
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes", "weight": 0}]},
        {
            "conversations": [{"from": "human", "value": "hi"}],
            "functions": json.dumps([{"name": "f", "parameters": {}}]),
        },
    ],
)
def test_a_column_file_gives_what_json_lines_of_the_same_row_give(tmp_path: Path, row: dict[str, Any]) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps(row))
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "x.parquet")
    (plain,), (column,) = (read_files(str(tmp_path / name)) for name in ("x.jsonl", "x.parquet"))
    assert isinstance(plain, Item) and isinstance(column, Item)
    assert dataclasses.replace(column, item=plain.item) == plain


def test_column_files_do_not_fill_absent_keys_with_nulls(tmp_path: Path) -> None:
    calls = [{"function": {"name": "f", "arguments": json.dumps({"a": None})}}]
    rows: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": calls}]},
        {"messages": [{"role": "user", "content": "hi", "name": "Ann"}], "extra": 3},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    first, second = read_files(str(tmp_path / "x.parquet"))
    assert isinstance(first, Item) and isinstance(second, Item)
    assert first.messages[0] == {"role": "user", "content": "hi"} and "tool_calls" not in second.messages[0]
    assert first.messages[1]["content"] == "" and first.messages[1]["tool_calls"][0]["function"]["arguments"] == {
        "a": None
    }


def column_file(path: Path, table: pa.Table) -> str:
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    return str(path)


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow"])
def test_times_beside_and_within_turns_cost_no_row(tmp_path: Path, name: str) -> None:
    """Turns of WildChat hold their time; and Python has no year 30,000."""
    zoned, far = pa.timestamp("us", "Mars/Base"), 9 * 10**17
    turn = pa.struct([("role", pa.string()), ("content", pa.string()), ("timestamp", zoned)])
    said = [{"role": r, "content": "hi", "timestamp": t} for r, t in (("user", 0), ("assistant", None))]
    columns: dict[str, Any] = {
        "messages": pa.array([said], pa.list_(turn)),
        "at": pa.array([far], zoned),
        "took": pa.array([far], pa.duration("s")),
        "day": pa.array([2**30], pa.int32()).cast(pa.date32()),
        "who": pa.StructArray.from_arrays([pa.array(["a"])] * 2, names=["n", "n"]),
    }
    (item,) = read_files(column_file(tmp_path / name, pa.table(columns)))
    assert isinstance(item, Item)
    assert item.messages[0] == {"role": "user", "content": "hi", "timestamp": "1970-01-01 00:00:00.000000"}
    assert item.messages[1] == {"role": "assistant", "content": "hi"}
    (reject,) = read_files(column_file(tmp_path / name, pa.table(columns).drop(["messages"])))
    assert isinstance(reject, Reject) and "keys ['at', 'day', 'took', 'who']" in reject.detail


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow"])
def test_a_column_file_with_two_fields_of_one_name_is_told_which(tmp_path: Path, name: str) -> None:
    turns = pa.StructArray.from_arrays([pa.array(["a"])] * 3, names=["role", "content", "content"])
    listed = pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), turns)
    for arrays, names, told in (
        ([listed], ["messages"], r"messages\.\w+\.content"),
        ([pa.array(["a"])] * 2, ["text", "text"], "text"),
    ):
        path = column_file(tmp_path / name, pa.Table.from_arrays(arrays, names=names))
        with pytest.raises(DataError, match=rf"two fields of one name[\s\S]*twice `{told}`"):
            list(read_files(path))


@pytest.mark.parametrize("words", ["JSON lines, gzip", "JSON lines, zstd", "JSON, gzip", "Parquet", "Arrow"])
def test_a_packed_or_column_file_cut_off_stops_and_is_named(tmp_path: Path, words: str) -> None:
    (tmp_path / "x").write_bytes(FILES[words][: len(FILES[words]) // 2])
    with pytest.raises(DataError, match="damaged or cut off") as error:
        list(read_files(str(tmp_path / "x")))
    assert error.value.where == str(tmp_path / "x") and "checksum" in error.value.do


def test_a_file_that_cannot_be_read_at_its_start_is_named() -> None:
    class Failing(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(DataError, match=r"damaged or cut off\s*where: shelf/x[\s\S]*Input/output error"):
        formats.open_rows(Blob("x", "shelf/x", Failing))


PACKED = ["JSON lines, gzip", "JSON lines, zstd", "JSON, gzip", "JSON, zstd", "Parquet", "Arrow"]


@pytest.mark.parametrize("words", PACKED)
def test_the_last_bytes_of_a_packed_or_column_file_are_missed(tmp_path: Path, words: str) -> None:
    for cut in (1, 4, 8, 12):
        (tmp_path / "x").write_bytes(FILES[words][:-cut])
        with pytest.raises(DataError, match="damaged or cut off"):
            list(read_files(str(tmp_path / "x")))


def test_flipped_bits_of_an_arrow_file_are_told_and_end_no_process(tmp_path: Path) -> None:
    told = 0
    for at in range(100, len(FILES["Arrow"]), 1117):
        whole = bytearray(FILES["Arrow"])
        whole[at] ^= 0x10
        (tmp_path / "x").write_bytes(whole)
        try:
            assert len(list(read_files(str(tmp_path / "x")))) == 700  # a letter of the text: the format has no checksum
        except DataError:
            told += 1
    assert told > 3


def test_json_cut_off_within_a_row_rejects_that_row_and_keeps_those_before(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps(ROWS[:3])[:-30])
    *good, cut = read_files(str(tmp_path / "x.json"))
    assert len(good) == 2 and isinstance(cut, Reject) and (cut.item, cut.reason) == ("x.json:3", "row cut off")
    (tmp_path / "x.json").write_text(json.dumps(ROWS[:3], indent=1).removesuffix("]"))
    assert [getattr(i, "reason", "") for i in read_files(str(tmp_path / "x.json"))] == ["", "", "", "row cut off"]
    (tmp_path / "x.json").write_text(json.dumps(ROWS[:3]) + "]")
    with pytest.raises(DataError, match=r"no sound JSON[\s\S]*after the end"):
        list(read_files(str(tmp_path / "x.json")))


def test_faults_within_a_json_array_are_told_as_those_of_lines_are(tmp_path: Path) -> None:
    text = b'\xef\xbb\xbf[{"prompt": "a\xff"},\r\n {"prompt": "\\ud83d"}, 3, {"prompt": "fine \\ud83d\\ude00"}]'
    (tmp_path / "x.json").write_bytes(text)
    items = list(read_files(str(tmp_path / "x.json")))
    assert [getattr(i, "reason", "") for i in items] == ["not UTF-8", "lone surrogate", "not an object", ""]


def test_what_is_no_utf8_within_a_fault_or_a_file_name_is_written_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"caf\xe9.jsonl")
    part, role = (
        '{"role": "user", "content": [{"type": "\\ud800"}]}',
        '{"role": "\\udc80", "content": [{"type": "image"}]}',
    )
    path.write_text(f'{{"messages": [{part}]}}\n{{"messages": [{role}]}}\n{json.dumps(ROWS[0])}\n')
    first, second, good = read_files(str(path))
    assert isinstance(first, Reject) and first.detail == "user: a part of type \\ud800"
    assert isinstance(second, Reject) and second.detail == "\\udc80: a part of type image"
    assert isinstance(good, Item) and good.item == "caf\\udce9.jsonl:3"
    (tmp_path / "x.json").write_bytes(b'[{"messages": [{"role": "a\xff", "content": [{"type": "image"}]}]}]')
    (bad,) = read_files(str(tmp_path / "x.json"))
    assert isinstance(bad, Reject) and bad.detail == "a\\udcff: a part of type image"


def test_a_value_that_is_no_json_number_costs_its_row_and_none_behind_it(tmp_path: Path) -> None:
    """One NaN once took every row behind it along, without a word."""
    good = json.dumps(ROWS[0])
    (tmp_path / "x.json").write_text(f'[{good},\n{{"a": NaN}},\n{{"a": {"9" * 5000}}},\n{good}]')
    read = list(read_files(str(tmp_path / "x.json")))
    assert [type(r) for r in read] == [Item, Reject, Reject, Item]
    assert all("not JSON" in r.reason for r in read if isinstance(r, Reject))


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "9" * 5000])
def test_such_a_value_may_begin_a_row_longer_than_what_is_read_at_once(tmp_path: Path, number: str) -> None:
    good, long = json.dumps(ROWS[0]), f'{{"a": {number}, "prompt": "{"y" * 200_000}"}}'
    (tmp_path / "x.json").write_text(f"[{good},\n{long},\n{good}]")
    assert [getattr(r, "reason", "") for r in read_files(str(tmp_path / "x.json"))] == ["", "not JSON", ""]
    (tmp_path / "x.json").write_text(f"[{good},\n{long[:-20]}")
    assert [getattr(r, "reason", "") for r in read_files(str(tmp_path / "x.json"))] == ["", "row cut off"]


def test_a_fault_of_syntax_with_rows_behind_it_stops_instead_of_hiding_them(tmp_path: Path) -> None:
    good = json.dumps(ROWS[0])
    (tmp_path / "x.json").write_text(f'[{good},\n{{"a" 1}},\n{good}]')
    with pytest.raises(DataError, match="no sound JSON"):
        list(read_files(str(tmp_path / "x.json")))


def test_packed_parquet_is_refused_with_the_command_that_unpacks_it(tmp_path: Path) -> None:
    (tmp_path / "x.parquet.gz").write_bytes(gzip.compress(parquet()))
    with pytest.raises(DataError, match=r"no format that can be read[\s\S]*gzip -dk"):
        list(read_files(str(tmp_path)))


def test_a_long_line_and_a_long_element_do_not_enter_memory_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "MAX_LINE_BYTES", 1 << 17)
    (tmp_path / "x.jsonl").write_text(json.dumps({"prompt": "y" * (1 << 20)}) + "\n" + json.dumps(ROWS[0]) + "\n")
    long, good = read_files(str(tmp_path / "x.jsonl"))
    assert isinstance(long, Reject) and long.reason == "line too long" and isinstance(good, Item)
    (tmp_path / "y.json").write_text(json.dumps([{"prompt": "y" * (1 << 20)}]))
    with pytest.raises(DataError, match=r"no sound JSON[\s\S]*JSON lines"):
        list(read_files(str(tmp_path / "y.json")))


_PEAK = """
import resource, sys
from stages.corpus.sources import read_files
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
count = sum(1 for _ in read_files(sys.argv[1]))
print(count, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jsonl", "json", "gz", "parquet"])
def test_a_large_file_is_read_in_bounded_memory(tmp_path: Path, kind: str) -> None:
    """120 MB of rows and a line of 20 MB: what reading adds to the process stays below 100 MiB."""
    row = {"prompt": "word " * 200, "response": "more " * 200}
    path = tmp_path / f"x.{kind}"
    if kind == "parquet":
        with pq.ParquetWriter(
            path, pa.Table.from_pylist([row]).schema, compression="none", use_dictionary=False
        ) as writer:
            for _ in range(12):
                writer.write_table(pa.Table.from_pylist([row] * 5000))
    else:
        with gzip.open(path, "wt", compresslevel=1) if kind == "gz" else path.open("w") as file:
            file.write("[" if kind == "json" else json.dumps({"prompt": "y" * (20 << 20)}) + "\n")
            for i in range(60_000):
                file.write(("," if kind == "json" and i else "") + json.dumps(row) + ("" if kind == "json" else "\n"))
            file.write("]" if kind == "json" else "")
    told = subprocess.run(
        [sys.executable, "-c", _PEAK, str(path)], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    count, added = map(int, told.stdout.split())
    assert count == 60_000 + (kind in ("jsonl", "gz")) and added < 100
