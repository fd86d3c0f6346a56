"""Conversations as people keep them: what passes unchanged, and what is rejected for which reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stages.contracts.errors import DataError
from stages.corpus import formats
from stages.corpus.conversations import check_turns
from stages.corpus.items import Item, Reject, RowFault
from stages.corpus.sources import read_files

U, A = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}


def read(tmp_path: Path, *lines: bytes | object) -> list[Item | Reject]:
    raw = [x if isinstance(x, bytes) else json.dumps(x).encode() + b"\n" for x in lines]
    (tmp_path / "chats.jsonl").write_bytes(b"".join(raw))
    return list(read_files(str(tmp_path / "*.jsonl"), only_lines=True))


def said(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ([U, said("")], "empty assistant turn"),
        ([U, said("  \n")], "blank assistant turn"),
        ([A, U, A], "starts with assistant"),
        ([U, U, A], "user after user"),
        ([U], "no assistant turn"),
        ([{"role": "system", "content": "x"}], "no user turn"),
        ([U, {"role": "robot", "content": "x"}], "unknown role"),
        ([{"role": ["user"], "content": "x"}], "unknown role"),
        ([{"role": {}, "content": "x"}], "unknown role"),
        ([U, {"role": "assistant", "content": None}], "content is not text"),
    ],
)
def test_each_fault_of_turns_has_its_own_reason(turns: list[dict], reason: str) -> None:
    with pytest.raises(RowFault) as fault:
        check_turns(tuple(turns), answered=True)
    assert fault.value.reason == reason


def test_a_good_conversation_passes_and_a_prompt_needs_no_answer() -> None:
    check_turns(({"role": "system", "content": "s"}, U, A, U, A), answered=True)
    check_turns((U,), answered=False)


def test_line_faults_become_rejects_with_their_line_number_and_the_lines_around_them_pass(tmp_path: Path) -> None:
    good = {"messages": [U, A]}
    items = read(
        tmp_path,
        b"\xef\xbb\xbf" + json.dumps(good).encode() + b"\r\n",
        b'{"prompt": "a lone \\ud83d", "response": "x"}\n',
        b'{"prompt": "a pair \\ud83d\\ude00 and NUL \\u0000", "response": "x"}\r\n',
        b"\n",
        b"   \r\n",
        b'{"prompt": "\xff", "response": "x"}\n',
        b"[1, 2]\n",
        good,
        b'{"messages": [{"role": "us',
    )
    assert [(i.item, i.reason) for i in items if isinstance(i, Reject)] == [
        ("chats.jsonl:2", "lone surrogate"),
        ("chats.jsonl:6", "not UTF-8"),
        ("chats.jsonl:7", "not an object"),
        ("chats.jsonl:9", "line cut off"),
    ]
    kept = [i for i in items if isinstance(i, Item)]
    assert [i.item for i in kept] == ["chats.jsonl:1", "chats.jsonl:3", "chats.jsonl:8"]
    assert kept[1].messages[0]["content"] == "a pair \U0001f600 and NUL \0"
    assert kept[0].messages == kept[2].messages == (U, A)


def test_a_line_beyond_the_limit_is_passed_over_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "MAX_LINE_BYTES", 100)
    items = read(tmp_path, {"prompt": "x" * 1000}, {"prompt": "short"})
    assert isinstance(items[0], Reject) and items[0].reason == "line too long"
    assert isinstance(items[1], Item) and items[1].item == "chats.jsonl:2"


def test_a_line_that_is_not_json_but_ends_is_told_from_one_cut_off(tmp_path: Path) -> None:
    (reject, _) = read(tmp_path, b"{not json}\n", {"prompt": "x"})
    assert isinstance(reject, Reject) and reject.reason == "not JSON"


def test_three_layouts_give_the_same_messages(tmp_path: Path) -> None:
    items = read(
        tmp_path,
        {"messages": [U, A], "extra": 3},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]},
        {"prompt": "hi", "response": "yes"},
        {"instruction": "hi", "output": "yes", "score": "4"},
        {"prompt": "hi", "response": "yes", "score": 4},
    )
    assert [i.messages for i in items if isinstance(i, Item)] == [(U, A)] * 5
    (longer,) = read(tmp_path, {"instruction": "Add.", "input": "1 and 2", "response": "3"})
    assert isinstance(longer, Item) and longer.messages[0]["content"] == "Add.\n\n1 and 2"
    (unknown,) = read(tmp_path, {"said": "hi"})
    assert isinstance(unknown, Reject) and unknown.reason == "unknown layout" and "['said']" in unknown.detail


def test_tool_arguments_as_text_and_as_object_are_the_same_and_null_content_is_kept(tmp_path: Path) -> None:
    def chat(arguments: object) -> dict:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        answer = {"role": "assistant", "content": None, "tool_calls": [call]}
        return {"messages": [U, answer, {"role": "tool", "content": "2"}, said("done")]}

    as_text, as_object = read(tmp_path, chat('{"a":1}'), chat({"a": 1}))
    assert isinstance(as_text, Item) and isinstance(as_object, Item)
    assert as_text.messages == as_object.messages and len(as_text.messages) == 4
    check_turns(as_text.messages, answered=True)
    (bad,) = read(tmp_path, chat("{a"))
    assert isinstance(bad, Reject) and bad.reason == "tool arguments are not JSON"


def test_keys_that_a_row_lacks_stay_absent(tmp_path: Path) -> None:
    tools = [{"name": "f", "parameters": {"properties": {"a": {"type": "int"}}}}, {"name": "g", "strict": True}]
    first, second = read(tmp_path, {"messages": [U, A], "tools": tools}, {"messages": [{**U, "name": "Ann"}, A]})
    assert isinstance(first, Item) and list(first.tools) == tools
    assert isinstance(second, Item) and second.tools == () and "name" not in second.messages[1]


def test_the_prompt_to_regenerate_ends_before_the_last_answer() -> None:
    assert Item("i", (U, A, U, A)).asked().messages == (U, A, U)
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    for waiting in ((U,), (U, A, U), (U, call, {"role": "tool", "content": "4"})):
        assert Item("i", waiting).asked().messages == waiting


def test_a_source_without_a_file_stops(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="A source has no file"):
        list(read_files(str(tmp_path / "*.jsonl"), only_lines=True))
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(DataError, match="A source has no file"):
        list(read_files(str(tmp_path / "*.jsonl"), only_lines=True))


def test_what_json_cannot_hold_is_rejected_wherever_it_stands(tmp_path: Path) -> None:
    call = {"function": {"name": "f", "arguments": '{"a": NaN}'}}
    surrogate = {"function": {"name": "f", "arguments": '{"a": "\\ud83d"}'}}
    deep = "[" * 100_000
    items = read(
        tmp_path,
        b'{"prompt": "x", "score": NaN}\n',
        b'{"messages": [{"role": "user", "content": "x", "weight": -Infinity}]}\n',
        b'{"messages": [{"role": "user", "content": "x", "weight": 1e999}]}\n',
        {"messages": [U, {"role": "assistant", "tool_calls": [call]}]},
        {"messages": [U, {"role": "assistant", "tool_calls": [surrogate]}]},
        ('{"messages": [{"role": "user", "content": "x", "extra": ' + deep + "}]}\n").encode(),
        {"messages": [U, A], "tools": [{"name": "f", "parameters": [1]}]},
        {"messages": [U, A], "tools": [{"function": {"name": "f", "parameters": {"required": 5}}}]},
    )
    assert [i.reason for i in items if isinstance(i, Reject)] == [
        "not JSON",
        "not JSON",
        "number out of range",
        "tool arguments are not JSON",
        "lone surrogate",
        "not JSON",
        "unknown layout",
        "unknown layout",
    ]


@pytest.mark.parametrize(
    ("data", "kind", "do"),
    [
        (b"PK\x03\x04rest", "a zip archive", "unpack it"),
        ('{"prompt": "x"}'.encode("utf-16"), "UTF-16 text", "iconv -f UTF-16"),
        (b'\xfe\xff\x00{\x00"', "UTF-16 text", "iconv -f UTF-16"),
    ],
    ids=["zip", "utf-16", "utf-16-be"],
)
def test_a_file_of_another_format_is_named_once(tmp_path: Path, data: bytes, kind: str, do: str) -> None:
    (tmp_path / "chats.jsonl").write_bytes(data)
    with pytest.raises(DataError, match="file is of no format that can be read") as error:
        list(read_files(str(tmp_path / "*.jsonl")))
    assert error.value.where == str(tmp_path / "chats.jsonl")
    assert error.value.got == kind and do in error.value.do


def test_a_source_of_json_lines_alone_refuses_other_files_and_says_how_to_read_them(tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_bytes(b'\xef\xbb\xbf\n [{"prompt": "x"}]')
    with pytest.raises(DataError, match=r"file is not JSON lines[\s\S]*got: *JSON\n[\s\S]*kind: files"):
        list(read_files(str(tmp_path / "*.jsonl"), only_lines=True))
    (read_so,) = read_files(str(tmp_path / "*.jsonl"))
    assert isinstance(read_so, Item) and read_so.item == "chats.jsonl:1"
