"""Rows in the layouts people keep them: one conversation, whatever the layout; what cannot be used is rejected by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stages.corpus.items import RowFault
from stages.corpus.shapes import Ready, read_row

U, A = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
S = {"role": "system", "content": "be kind"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}
NAMELESS = ({}, {"function": "f", "arguments": "{}"}, {"function": {"name": ""}}, {"function": {"name": 1}})


@pytest.mark.parametrize(
    ("row", "shape", "messages"),
    [
        ({"messages": [S, U, A]}, "openai", (S, U, A)),
        ({"messages": json.dumps([U, A])}, "openai", (U, A)),
        ({"conversations": [U, A]}, "openai", (U, A)),
        ({"system": "be kind", "messages": [U, A]}, "openai", (S, U, A)),
        ({"system": "be kind", "messages": [S, U, A]}, "openai", (S, U, A)),
        ({"messages": [{"role": "developer", "content": "d"}, U]}, "openai", ({"role": "developer", "content": "d"}, U)),
        ({"system": "be kind", "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]}, "sharegpt", (S, U, A)),
        ({"instruction": "hi", "input": "", "output": "yes", "history": [["a", "b"]]}, "alpaca", ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, U, A)),
        ({"instruction": "Add.", "input": "1, 2"}, "alpaca", ({"role": "user", "content": "Add.\n\n1, 2"},)),
        ({"system": "be kind", "messages": [U, A, {"role": "developer", "content": "d"}]}, "openai", (S, U, A, {"role": "developer", "content": "d"})),
        ({"instruction": "Add.", "context": "1, 2", "response": "yes"}, "alpaca", ({"role": "user", "content": "Add.\n\n1, 2"}, A)),
        ({"prompt": "Add: 1, 2", "context": "1, 2", "response": "yes"}, "prompt_response", ({"role": "user", "content": "Add: 1, 2"}, A)),
        ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes", "weight": 0}]}, "sharegpt", (U, {**A, "weight": 0})),
        ({"question": "hi", "answer": "yes"}, "prompt_response", (U, A)),
        ({"prompt": [S, U], "completion": [A]}, "prompt_response", (S, U, A)),
    ],
    ids=lambda v: v if isinstance(v, str) else None,
)  # fmt: skip
def test_each_layout_is_told_and_gives_the_same_messages(row: dict, shape: str, messages: tuple) -> None:
    told, item = read_row("x:1", row)
    assert (told, item.messages) == (shape, messages)


def test_text_parts_are_joined_as_the_server_joins_them_and_pictures_are_rejected() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "input_text", "text": "two"}, "three"]
    (message,) = read_row("x:1", {"messages": [{"role": "user", "content": parts}]})[1].messages
    assert message["content"] == "one two three"
    with pytest.raises(RowFault, match="content is not text: user: a part of type image_url"):
        read_row("x:1", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]})


def answer(turn: dict[str, Any]) -> dict[str, Any]:
    return read_row("x:1", {"messages": [U, turn]})[1].messages[1]


def test_reasoning_goes_under_one_name_and_an_answer_of_reasoning_alone_is_empty() -> None:
    for turn in (
        {"reasoning_content": "so", "content": "yes"},
        {"reasoning": "so", "content": "yes"},
        {"reasoning": "so", "reasoning_content": "so", "content": "yes"},
        {"reasoning_content": [{"type": "text", "text": "so"}], "content": "yes"},
        {"content": [{"type": "thinking", "thinking": "so"}, {"type": "text", "text": "yes"}]},
    ):
        assert answer({"role": "assistant", **turn}) == {**A, "reasoning_content": "so"}
    assert answer({"role": "assistant", "content": None, "reasoning_content": "so"})["content"] == ""
    assert "reasoning_content" not in answer({**A, "reasoning_content": None})


def test_old_function_calls_and_sharegpt_calls_are_tool_calls_with_objects_for_arguments() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    expected = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert (
        answer({"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}})
        == expected
    )
    turns = [
        {"from": "human", "value": "hi"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'},
    ]
    shape, item = read_row("x:1", {"conversations": turns, "tools": json.dumps([TOOL])})
    assert shape == "sharegpt" and item.messages[1] == expected and item.tools == (TOOL,)
    assert "tool_calls" not in answer({**A, "tool_calls": []})
    old = {"name": "f", "arguments": '{"a": 1}'}
    assert answer({"role": "assistant", "content": None, "function_call": old, "tool_calls": [call]}) == expected
    with pytest.raises(RowFault, match="`function_call` beside other `tool_calls`"):
        answer({"role": "assistant", "function_call": {**old, "name": "g"}, "tool_calls": [call]})
    assert read_row("x:1", {"messages": [U, {"role": "function", "content": "2"}]})[1].messages[1]["role"] == "tool"


def test_schemas_with_other_keys_and_odd_fields_load_and_keys_that_are_absent_stay_so() -> None:
    tools = [{"name": "f", "parameters": {"properties": {"a": {"type": "int"}}}}, {"name": "g", "strict": True}]
    _, item = read_row("x:1", {"messages": [{**U, "weight": 3}, A], "tools": tools, "extra": {"n": 1}})
    assert list(item.tools) == tools and "weight" not in item.messages[1]
    for none in (None, "", []):
        assert read_row("x:1", {"messages": [U, A], "tools": none, "functions": tools})[1].tools == tuple(tools)
    with pytest.raises(RowFault, match="`tools` is not a list of function schemas"):
        read_row("x:1", {"messages": [U, A], "tools": [{"name": "f", "parameters": [1]}]})


@pytest.mark.parametrize(
    ("row", "mask"),
    [
        ({"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}, (0, 1, 1)),
        ({"input_ids": [[5, 6, 7]], "labels": [[-100, 6, 7]]}, (0, 1, 1)),
        ({"input_ids": [5, 6, 7], "assistant_masks": [0, 0, 1], "attention_mask": [1, 1, 1]}, (0, 0, 1)),
        ({"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1]}, None),
        ({"input_ids": [0, 5, 6, 7, 0], "attention_mask": [0, 1, 1, 1, 0]}, None),
        ({"input_ids": [0, 5, 6, 7, 0], "loss_mask": [1, 0, 1, 1, 1], "attention_mask": [0, 1, 1, 1, 0]}, (0, 1, 1)),
        ({"input_ids": [[5, 6, 7, 2]], "labels": [[-100, 6, 7, -100]], "attention_mask": [[1, 1, 1, 0]]}, (0, 1, 1)),
    ],
)
def test_ready_tokens_keep_their_mask_by_any_of_its_names(row: dict, mask: tuple | None) -> None:
    shape, item = read_row("x:1", row)
    assert shape == "tokens" and isinstance(item, Ready) and item.ids == (5, 6, 7) and item.mask == mask


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"input_ids": [5, 6], "loss_mask": [1]}, "mask of another length"),
        ({"input_ids": [5, 6], "loss_mask": [0, 1], "attention_mask": [1]}, "mask of another length"),
        ({"input_ids": [5, 6], "attention_mask": [1, 2]}, "mask holds other than 0 and 1"),
        ({"input_ids": [5, 6], "labels": [-100, 9]}, "labels are not the ids"),
        ({"input_ids": [5, 6], "labels": [6, -100]}, "labels are not the ids"),
        ({"input_ids": [5, 6], "loss_mask": [0, 2]}, "mask holds other than 0 and 1"),
        ({"input_ids": [5, "6"]}, "unknown layout"),
        ({"text": "abc", "spans": [[1, 9]]}, "unknown layout"),
        ({"messages": ["hi"]}, "unknown layout"),
        ({"messages": {"role": "user"}}, "unknown layout"),
        ({"said": "hi"}, "unknown layout"),
        ({"system": "other", "messages": [S, U, A]}, "two system prompts"),
        ({"system": ["be kind"], "messages": [U, A]}, "unknown layout"),
        ({"instruction": "Add.", "input": [1, 2], "output": "yes"}, "unknown layout"),
        ({"prompt": [U], "context": "1, 2", "completion": [A]}, "unknown layout"),
        ({"messages": [U, {**A, "reasoning": {"text": "so"}}]}, "reasoning is not text"),
        ({"messages": [U, {**A, "reasoning_content": [{"type": "image"}]}]}, "reasoning is not text"),
        ({"messages": [U, {**A, "reasoning_content": "so", "thinking": "no"}]}, "two reasonings"),
        ({"messages": [{"role": "\ud800", "content": [{"type": "\udfff"}]}]}, "content is not text"),
        ({"\ud800": 1}, "unknown layout"),
        *(({"messages": [U, {"role": "assistant", "tool_calls": [call]}]}, "unknown layout") for call in NAMELESS),
        ({"conversations": [{"from": "function_call", "value": "{}"}]}, "unknown layout"),
        (["hi"], "not an object"),
        ({"conversations": [{"from": "function_call", "value": "{f"}]}, "tool arguments are not JSON"),
    ],
)
def test_what_has_no_layout_is_rejected_for_its_own_reason(row: Any, reason: str) -> None:
    with pytest.raises(RowFault) as fault:
        read_row("x:1", row)
    assert fault.value.reason == reason and fault.value.detail


def test_a_row_with_its_turns_under_two_names_is_read_when_both_say_the_same() -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    told = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    assert read_row("i", {"conversations": told, "messages": messages})[1].messages == tuple(messages)
    assert read_row("i", {"messages": [], "conversations": told})[1].messages == tuple(messages)
    with pytest.raises(RowFault, match="two conversations: `messages` and `conversations` say different things"):
        read_row("i", {"messages": messages, "conversations": told[:1]})
