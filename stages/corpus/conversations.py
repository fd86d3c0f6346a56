"""Conversations from JSON lines, in the layouts people keep them: OpenAI messages, ShareGPT, prompt and response.

Lines are streamed; a line that cannot be read becomes a Reject with its number, and the lines around it pass.
"""

from __future__ import annotations

import glob
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stages.contracts.errors import DataError
from stages.contracts.files import canonical
from stages.corpus.items import Item, Message, Reject, RowFault

MAX_LINE_BYTES = 16 << 20  # one line is held in memory, not the file
_BOM = b"\xef\xbb\xbf"
_SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
    "bing": "assistant", "bard": "assistant", "model": "assistant", "system": "system", "tool": "tool",
    "function_response": "tool", "observation": "tool",
}  # fmt: skip
_PROMPT_KEYS, _ANSWER_KEYS = ("prompt", "instruction", "question"), ("response", "answer", "output", "completion")
_ROLES = {"system", "developer", "user", "assistant", "tool"}
_FOREIGN = (
    (b"\x1f\x8b", "gzip", "`gzip -dk FILE`, and name the unpacked file in `path`"),
    (b"PAR1", "parquet", "write its rows as JSON lines (pandas: `to_json(path, orient='records', lines=True)`)"),
    (b"\xff\xfe", "UTF-16 text", "`iconv -f UTF-16 -t UTF-8 FILE > NEW`, and name the new file in `path`"),
    (b"\xfe\xff", "UTF-16 text", "`iconv -f UTF-16 -t UTF-8 FILE > NEW`, and name the new file in `path`"),
    (b"[", "one JSON array", "`jq -c '.[]' FILE > NEW`, and name the new file in `path`"),
)  # fmt: skip


def json_lines(pattern: str) -> Iterator[Item | Reject]:
    """Items of the files that `pattern` names, files in name order, lines in file order.

    Raises:
        DataError: no file matches, or one is no text of JSON lines at all.
    """
    paths = sorted(path for path in glob.glob(pattern, recursive=True) if Path(path).is_file())
    if not paths:
        raise DataError(
            "A source has no file",
            where=pattern,
            expected="at least one file of JSON lines",
            do="put it there, or mend `path` of this source in params.yaml",
        )
    for path in paths:
        _sniff(Path(path))
        for number, raw in _lines(Path(path)):
            item = f"{Path(path).name}:{number}"
            try:
                yield _item(item, raw)
            except RowFault as fault:
                yield Reject(item, fault.reason, fault.detail)


def _sniff(path: Path) -> None:
    """Raises DataError when a file's first bytes are those of another format: each of its lines would be a reject."""
    with path.open("rb") as file:
        head = file.read(4096).removeprefix(_BOM)
    for magic, kind, do in _FOREIGN:
        if (head.lstrip() if magic == b"[" else head).startswith(magic):
            raise DataError(
                "A source's file is not JSON lines",
                where=str(path),
                expected="UTF-8 text, one JSON object on each line",
                got=kind,
                do=do.replace("FILE", str(path)).replace("NEW", str(path.with_suffix(".lines.jsonl"))),
            )


def _lines(path: Path) -> Iterator[tuple[int, bytes | None]]:
    """(line number, bytes) of the lines that are not blank; None for a line over MAX_LINE_BYTES, which is passed over."""
    with path.open("rb") as file:
        number = 0
        while raw := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(raw) > MAX_LINE_BYTES:
                while raw and not raw.endswith(b"\n"):
                    raw = file.readline(MAX_LINE_BYTES)
                yield number, None
                continue
            if number == 1:
                raw = raw.removeprefix(_BOM)
            if raw.strip():
                yield number, raw


def _item(item: str, raw: bytes | None) -> Item:
    if raw is None:
        raise RowFault("line too long", f"over {MAX_LINE_BYTES} bytes")
    try:
        row = json.loads(raw.decode("utf-8"), parse_constant=_no_number)
    except UnicodeDecodeError as error:
        raise RowFault("not UTF-8", str(error)) from error
    except (ValueError, RecursionError) as error:
        reason = "not JSON" if raw.endswith(b"\n") else "line cut off"
        raise RowFault(reason, str(error)) from error
    if not isinstance(row, dict):
        raise RowFault("not an object", type(row).__name__)
    tools = row.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(_is_schema(t) for t in tools)):
        raise RowFault("unknown layout", "`tools` is not a list of function schemas")
    return _writable(Item(item, tuple(_messages(row)), tuple(tools or ())))


def _is_schema(tool: Any) -> bool:
    """Whether a tool is an object, and its parameters, properties and required names, where it has them, have their shape."""
    if not isinstance(tool, dict):
        return False
    inner = tool.get("function")
    function: dict[str, Any] = inner if isinstance(inner, dict) else tool
    parameters = function.get("parameters") or {}
    if not isinstance(parameters, dict):
        return False
    return isinstance(parameters.get("properties") or {}, dict) and isinstance(parameters.get("required") or [], list)


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _writable(item: Item) -> Item:
    """The item, when it can be written as JSON again. Tool arguments were JSON within JSON: what they hold is seen here."""
    try:
        canonical([item.messages, item.tools])
    except UnicodeEncodeError as error:
        raise RowFault(
            "lone surrogate", f"{error.object[error.start : error.end]!a} cannot be written as UTF-8"
        ) from error
    except ValueError as error:
        raise RowFault("number out of range", "a number beyond what a float can hold") from error
    except RecursionError as error:
        raise RowFault("nested too deeply", str(error)) from error
    return item


def _messages(row: dict[str, Any]) -> list[Message]:
    for key in ("messages", "conversations", "conversation"):
        turns = row.get(key)
        if isinstance(turns, list):
            return [_message(turn) for turn in turns]
    asked = [row[k] for k in _PROMPT_KEYS if isinstance(row.get(k), str)][:1]
    asked += [row["input"]] if isinstance(row.get("input"), str) and row["input"] else []
    if not asked:
        raise RowFault("unknown layout", f"keys {sorted(row)[:8]}: no messages, conversations or prompt")
    system = (
        [{"role": "system", "content": row["system"]}] if isinstance(row.get("system"), str) and row["system"] else []
    )
    answer = next((row[k] for k in _ANSWER_KEYS if isinstance(row.get(k), str)), None)
    answered = [] if answer is None else [{"role": "assistant", "content": answer}]
    return [*system, {"role": "user", "content": "\n\n".join(asked)}, *answered]


def _message(turn: Any) -> Message:
    """One message; keys that the source does not have stay absent. Arguments of tool calls become objects."""
    if not isinstance(turn, dict):
        raise RowFault("unknown layout", f"a turn is a {type(turn).__name__}")
    if "from" in turn and "role" not in turn:
        role = _SHAREGPT_ROLES.get(str(turn["from"]), str(turn["from"]))
        return {"role": role, "content": turn.get("value")}
    message = dict(turn)
    if message.get("tool_calls"):
        if not isinstance(message["tool_calls"], list):
            raise RowFault("unknown layout", "`tool_calls` is not a list")
        message["tool_calls"] = [_call(call) for call in message["tool_calls"]]
        message["content"] = message.get("content") or ""
    return message


def _call(call: Any) -> dict[str, Any]:
    """A tool call with its arguments as an object: templates iterate them, and a string would be encoded twice."""
    if not isinstance(call, dict):
        raise RowFault("unknown layout", f"a tool call is a {type(call).__name__}")
    inner = call.get("function")
    function: dict[str, Any] = inner if isinstance(inner, dict) else call
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}", parse_constant=_no_number)
        except (ValueError, RecursionError) as error:
            raise RowFault("tool arguments are not JSON", str(error)) from error
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else {"type": "function", "function": function}


def check_turns(messages: tuple[Message, ...], *, answered: bool) -> None:
    """Look at the order and content of a conversation's turns.

    Args:
        answered: the row needs an assistant turn to learn from; else only a prompt.

    Raises:
        RowFault: with a reason for each kind of fault.
    """
    turns = [m for m in messages if m.get("role") not in ("system", "developer")]
    for message in messages:
        role = message.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise RowFault("unknown role", repr(role)[:80])
        if not isinstance(message.get("content"), str):
            raise RowFault("content is not text", f"{message['role']}: {type(message.get('content')).__name__}")
    if not turns:
        raise RowFault("no user turn")
    if turns[0]["role"] != "user":
        raise RowFault(f"starts with {turns[0]['role']}")
    if answered and not any(m["role"] == "assistant" for m in turns):
        raise RowFault("no assistant turn")
    for before, message in itertools.pairwise(turns):
        if before["role"] == message["role"] != "tool":
            raise RowFault(f"{message['role']} after {before['role']}")
        if message["role"] == "assistant" and not message.get("tool_calls"):
            if message["content"] == "":
                raise RowFault("empty assistant turn")
            if not message["content"].strip():
                raise RowFault("blank assistant turn")


def prompt_of(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The conversation up to its last assistant turn, whose place a regenerated answer takes; all of it without one."""
    last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=len(messages))
    return messages[:last]
