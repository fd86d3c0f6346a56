"""Rows in the layouts people keep them, as one: messages with `role` and `content`, tools, and rows that stand ready.

    openai           messages (or conversations) of role and content, tool_calls, tool results, reasoning_content;
                     an answer of weight 0 is not learnt
    sharegpt         conversations of from and value
    alpaca           instruction, input or context, output (and history)
    prompt_response  prompt and response, question and answer, as text or as messages
    text             text that the chat template already wrote; `spans` tells where the answers stand
    tokens           input_ids, with loss_mask, labels (-100: not supervised) or assistant_masks; attention_mask 0: padding

The shape is told row by row, from the row's keys. Keys that a row lacks stay absent.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from typing import Any, Literal

from stages.corpus.items import Item, Message, RowFault
from stages.corpus.json_values import no_number

Shape = Literal["openai", "sharegpt", "alpaca", "prompt_response", "text", "tokens"]

_TURNS = ("messages", "conversations", "conversation")
_PROMPT_KEYS, _ANSWER_KEYS = ("prompt", "instruction", "question"), ("response", "answer", "output", "completion")
_MASKS = ("loss_mask", "assistant_masks", "assistant_mask", "labels")
ROW_KEYS = frozenset((*_TURNS, *_PROMPT_KEYS, "text", "input_ids"))  # by one of these a row's shape is told
_FURTHER = ("spans", "system", "input", "context", "history", "tools", "functions", "attention_mask")
KEYS = ROW_KEYS.union(_ANSWER_KEYS, _MASKS, _FURTHER)  # all that is read of a row
_ROLES_OF = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
    "bing": "assistant", "bard": "assistant", "model": "assistant", "system": "system", "tool": "tool",
    "function_response": "tool", "observation": "tool",
}  # fmt: skip
_TEXT_PARTS, _THOUGHT_PARTS = ("text", "input_text", "output_text"), ("thinking", "reasoning")
_REASONING = ("reasoning_content", "reasoning", "thinking")
_UNSUPERVISED = -100


@dataclass(frozen=True)
class Ready(Item):
    """A row past its rendering: text of the template, with character spans of the answers, or token ids with a mask.
    `mask` and `spans` are None where the row does not tell which of it is to be learnt."""

    text: str | None = None
    spans: tuple[tuple[int, int], ...] | None = None
    ids: tuple[int, ...] = ()
    mask: tuple[int, ...] | None = None


def read_row(item: str, row: Any) -> tuple[Shape, Item]:
    """The shape of a row and its conversation. A row with keys of several shapes is of the first of them: tokens,
    conversations, pairs, text. Of empty lists of turns beside one that is not, that one counts.

    Raises:
        RowFault: the row has none of the shapes, or something in it cannot be used.
    """
    if not isinstance(row, dict):
        raise RowFault("not an object", type(row).__name__)
    if isinstance(row.get("input_ids"), list):
        return "tokens", _tokens(item, row)
    turns = {key: listed for key in _TURNS if (listed := _listed(row.get(key))) is not None}
    if turns:
        return _the_one(item, row, {key: listed for key, listed in turns.items() if listed} or turns)
    if any(isinstance(row.get(k), str | list) for k in _PROMPT_KEYS):
        return _pair(item, row)
    if isinstance(row.get("text"), str):
        return "text", _text(item, row)
    raise RowFault(
        "unknown layout", f"keys {sorted(map(str, row))[:8]}: no messages, conversations, prompt or input_ids"
    )


def _listed(value: Any) -> list[Any] | None:
    """A list, or one that a column file keeps as JSON text."""
    if isinstance(value, str) and value.lstrip()[:1] == "[":
        try:
            value = json.loads(value, parse_constant=no_number)
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, list) else None


def _the_one(item: str, row: dict[str, Any], turns: dict[str, list[Any]]) -> tuple[Shape, Item]:
    """The conversation of a row, which may have it under several names.

    Raises:
        RowFault: they are not the same.
    """
    read = {key: _conversation(item, row, listed) for key, listed in turns.items()}
    (first, found), *others = read.items()
    for other, (_, told) in others:
        if told.messages != found[1].messages:
            raise RowFault("two conversations", f"`{first}` and `{other}` say different things: drop one of them")
    return found


def _conversation(item: str, row: dict[str, Any], turns: list[Any]) -> tuple[Shape, Item]:
    foreign = bool(turns) and isinstance(turns[0], dict) and "from" in turns[0] and "role" not in turns[0]
    messages = [_message(turn) for turn in turns]
    if system := _text_of(row, "system"):
        _lead_with(messages, system)
    return "sharegpt" if foreign else "openai", Item(item, tuple(messages), _tools(row))


def _lead_with(messages: list[Message], system: str) -> None:
    """Put the system prompt that a row holds beside its messages in front of them."""
    own = [m.get("content") for m in messages if m.get("role") == "system"]
    if own and system not in own:
        raise RowFault("two system prompts", "`system` says something else than the system message: drop one of them")
    if not own:
        messages.insert(0, {"role": "system", "content": system})


def _pair(item: str, row: dict[str, Any]) -> tuple[Shape, Item]:
    shape: Shape = "alpaca" if "instruction" in row else "prompt_response"
    asked = next(row[k] for k in _PROMPT_KEYS if isinstance(row.get(k), str | list))
    answer = next((row[k] for k in _ANSWER_KEYS if isinstance(row.get(k), str | list)), None)
    messages: list[Message] = []
    history = row.get("history") or []
    for turn in history if isinstance(history, list) else [history]:
        if not (isinstance(turn, list) and len(turn) == 2):
            raise RowFault("unknown layout", "`history` is not a list of [question, answer]")
        messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    given, context = _text_of(row, "input"), _text_of(row, "context")
    if not isinstance(asked, list):
        context = "" if context in asked else context
        messages.append({"role": "user", "content": "\n\n".join([asked, *filter(None, (given, context))])})
    elif given or context:
        raise RowFault("unknown layout", "`input` or `context` beside a prompt of messages")
    else:
        messages += [_message(turn) for turn in asked]
    if isinstance(answer, list):
        messages += [_message(turn) for turn in answer]
    elif answer is not None:
        messages.append({"role": "assistant", "content": answer})
    if system := _text_of(row, "system"):
        _lead_with(messages, system)
    return shape, Item(item, tuple(messages), _tools(row))


def _text_of(row: dict[str, Any], key: str) -> str:
    value = row.get(key) or ""
    if not isinstance(value, str):
        raise RowFault("unknown layout", f"`{key}` is a {type(value).__name__}, not text")
    return value


def _message(turn: Any) -> Message:
    """One message; arguments of tool calls become objects, text parts one text, reasoning goes under reasoning_content."""
    if not isinstance(turn, dict):
        raise RowFault("unknown layout", f"a turn is a {type(turn).__name__}")
    if "from" in turn and "role" not in turn:
        return _sharegpt(turn)
    message = dict(turn)
    if message.get("role") == "function":
        message["role"] = "tool"
    for empty in ("tool_calls", "function_call", *_REASONING):
        if empty in message and not message[empty]:
            del message[empty]
    if "function_call" in message:
        _old_call(message)
    if not message.keys().isdisjoint(_REASONING):
        _name_reasoning(message)
    if isinstance(message.get("content"), list):
        _join_parts(message)
    if "tool_calls" in message:
        if not isinstance(message["tool_calls"], list):
            raise RowFault("unknown layout", "`tool_calls` is not a list")
        message["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    if message.get("content") is None and ("tool_calls" in message or "reasoning_content" in message):
        message["content"] = ""
    return message


def _old_call(message: Message) -> None:
    """`function_call` as a tool call, which it may stand beside once more.

    Raises:
        RowFault: it is another call than that.
    """
    old = _call(message.pop("function_call"))
    calls = message.setdefault("tool_calls", [old])
    if not isinstance(calls, list) or [_call(c)["function"] for c in calls] != [old["function"]]:
        raise RowFault("unknown layout", "`function_call` beside other `tool_calls`")


def _name_reasoning(message: Message) -> None:
    """Put reasoning under `reasoning_content`, parts of text as one.

    Raises:
        RowFault: it is no text, or says one thing under one name and another under the next.
    """
    for name in _REASONING:
        if isinstance(message.get(name), list | dict):
            texts = [_part(p)[1] for p in message[name]] if isinstance(message[name], list) else [None]
            if None in texts:
                raise RowFault("reasoning is not text", f"`{name}` is a {type(message[name]).__name__}")
            message[name] = "\n".join(t for t in texts if t is not None)
    told = {message[name] for name in _REASONING if isinstance(message.get(name), str)}
    if len(told) > 1:
        raise RowFault("two reasonings", f"{', '.join(n for n in _REASONING if n in message)} differ")
    if isinstance(message.get("reasoning"), str):
        message["reasoning_content"] = message.pop("reasoning")


def _sharegpt(turn: dict[str, Any]) -> Message:
    said, value = str(turn["from"]), turn.get("value")
    if said == "function_call":
        try:
            calls = json.loads(value, parse_constant=no_number) if isinstance(value, str) else value
        except (ValueError, RecursionError) as error:
            raise RowFault("tool arguments are not JSON", str(error)) from error
        calls = calls if isinstance(calls, list) else [calls]
        return {"role": "assistant", "content": "", "tool_calls": [_call(call) for call in calls]}
    message = {"role": _ROLES_OF.get(said, said), "content": value}
    return {**message, "weight": 0} if turn.get("weight") == 0 else message


def _join_parts(message: Message) -> None:
    """Text parts become one text, a space between two, as SGLang joins them for templates that know no parts."""
    texts, thoughts = [], []
    for part in message["content"]:
        kind, text = _part(part)
        if text is None:
            raise RowFault("content is not text", f"{message.get('role')}: a part of type {kind}"[:80])
        (thoughts if kind in _THOUGHT_PARTS else texts).append(text)
    message["content"] = " ".join(texts)
    if thoughts and message.setdefault("reasoning_content", thought := "\n".join(thoughts)) != thought:
        raise RowFault("two reasonings", "`reasoning_content` and the parts of `content` differ")


def _part(part: Any) -> tuple[Any, str | None]:
    """The type of a part and its text; None where it is no text."""
    kind = part.get("type", "text") if isinstance(part, dict) else "text" if isinstance(part, str) else "unknown"
    known = kind in (*_TEXT_PARTS, *_THOUGHT_PARTS)
    text = part if isinstance(part, str) else part.get("text", part.get(kind)) if known else None
    return kind, text if isinstance(text, str) else None


def _call(call: Any) -> dict[str, Any]:
    """A tool call with its arguments as an object: templates iterate them, and a string would be encoded twice."""
    if not isinstance(call, dict):
        raise RowFault("unknown layout", f"a tool call is a {type(call).__name__}")
    inner = call.get("function")
    function: dict[str, Any] = inner if isinstance(inner, dict) else call
    if not isinstance(name := function.get("name"), str) or not name.strip():
        raise RowFault("unknown layout", "a tool call names no function")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}", parse_constant=no_number)
        except (ValueError, RecursionError) as error:
            raise RowFault("tool arguments are not JSON", str(error)) from error
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else {"type": "function", "function": function}


def _tools(row: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    tools = next((row[k] for k in ("tools", "functions") if row.get(k) not in (None, "", "[]", [])), None)
    if tools is None:
        return ()
    listed = _listed(tools)
    if listed is None or not all(_is_schema(t) for t in listed):
        raise RowFault("unknown layout", "`tools` is not a list of function schemas")
    return tuple(listed)


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


def _text(item: str, row: dict[str, Any]) -> Ready:
    spans = row.get("spans")
    if spans is None:
        return Ready(item, (), text=row["text"])
    good = isinstance(spans, list) and all(
        isinstance(s, list) and len(s) == 2 and all(type(i) is int for i in s) and 0 <= s[0] < s[1] <= len(row["text"])
        for s in spans
    )
    if not good:
        raise RowFault("unknown layout", "`spans` is not a list of [start, end) within the text")
    return Ready(item, (), text=row["text"], spans=tuple((s[0], s[1]) for s in spans))


def _tokens(item: str, row: dict[str, Any]) -> Ready:
    ids, attended = _whole_numbers(row["input_ids"], "input_ids"), _attended(row)
    if attended is not None and len(attended) != len(ids):
        raise RowFault("mask of another length", f"{len(attended)} of `attention_mask` for {len(ids)} ids")
    key = next((k for k in _MASKS if isinstance(row.get(k), list)), None)
    if key is None:
        return Ready(item, (), ids=_kept(ids, attended))
    mask = _whole_numbers(row[key], key)
    if len(mask) != len(ids):
        raise RowFault("mask of another length", f"{len(mask)} of `{key}` for {len(ids)} ids")
    if key == "labels":
        wrong = next((i for i, (a, b) in enumerate(zip(ids, mask, strict=True)) if b not in (a, _UNSUPERVISED)), None)
        if wrong is not None:
            raise RowFault(
                "labels are not the ids", f"position {wrong}: {mask[wrong]} for {ids[wrong]}; unshifted is expected"
            )
        mask = tuple(int(b != _UNSUPERVISED) for b in mask)
    if any(m not in (0, 1) for m in mask):
        raise RowFault("mask holds other than 0 and 1", f"`{key}`")
    return Ready(item, (), ids=_kept(ids, attended), mask=_kept(mask, attended))


def _attended(row: dict[str, Any]) -> tuple[int, ...] | None:
    """A row's attention mask: 0 where it is padding."""
    if not isinstance(row.get("attention_mask"), list):
        return None
    attended = _whole_numbers(row["attention_mask"], "attention_mask")
    if any(a not in (0, 1) for a in attended):
        raise RowFault("mask holds other than 0 and 1", "`attention_mask`")
    return attended


def _kept(values: tuple[int, ...], attended: tuple[int, ...] | None) -> tuple[int, ...]:
    """Those that are no padding."""
    return values if attended is None or 0 not in attended else tuple(itertools.compress(values, attended))


def _whole_numbers(values: list[Any], key: str) -> tuple[int, ...]:
    if values and isinstance(values[0], list) and len(values) == 1:
        values = values[0]  # a batch of one
    if not all(type(v) is int for v in values):
        raise RowFault("unknown layout", f"`{key}` holds other than whole numbers")
    return tuple(values)
