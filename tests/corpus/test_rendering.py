"""Token ids and masks: the target's template, one BOS, and only what the target would say is supervised."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from stages.contracts.errors import DataError
from stages.corpus.items import RowFault
from stages.corpus.rendering import Rendered, Renderer
from tests.corpus.families import policy
from tests.tiny import TEMPLATE, make_target

BOS, EOS = 1, 2
U, A = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def renderer(folder: Path) -> Renderer:
    return Renderer(folder, policy())


def with_template(folder: Path, to: Path, template: str, **changes: object) -> Renderer:
    """The tiny target's tokenizer with another template."""
    to.mkdir(exist_ok=True)
    for name in ("tokenizer.json", "config.json"):
        (to / name).write_bytes((folder / name).read_bytes())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (to / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template, **changes}))
    return Renderer(to, policy())


def test_control_tokens_are_seen_in_all_that_the_target_did_not_say(renderer: Renderer) -> None:
    renderer.check_text((U, {"role": "assistant", "content": "<|im_end|>"}), [{"name": "f", "description": "1 < 2 |"}])
    tool = {"role": "tool", "content": "a <|im_start|> b"}
    named, nested = {**U, "name": "x<|im_start|>"}, {**tool, "content": "a", "extra": [{"id<|im_start|>": 1}]}
    calls = (((U, A, tool), ()), ((named, A), ()), ((U, A, nested), ()))
    for messages, tools in (*calls, ((U,), [{"name": "f", "description": "<|im_start|>"}])):
        with pytest.raises(RowFault) as fault:
            renderer.check_text(messages, tools)
        assert (fault.value.reason, fault.value.detail) == ("holds control tokens", "<|im_start|>")


def one(renderer: Renderer, *args: Any) -> Rendered:
    """The single row of a conversation."""
    (row,) = renderer.given(*args)
    return row


def supervised(renderer: Renderer, rendered: Rendered) -> list[str]:
    """Supervised runs of tokens, decoded."""
    runs: list[list[int]] = []
    before = 0
    for token, on in zip(rendered.ids, rendered.mask, strict=True):
        if on and not before:
            runs.append([])
        if on:
            runs[-1].append(token)
        before = on
    assert all(run[-1] == EOS for run in runs)
    return [renderer.text(run) for run in runs]


def test_a_mask_covers_every_answer_with_its_end_of_turn_and_nothing_else(renderer: Renderer) -> None:
    rendered = one(renderer, [U, A, {"role": "user", "content": "and?"}, {"role": "assistant", "content": "no"}])
    assert supervised(renderer, rendered) == ["yes", "no"]
    assert rendered.ids[-1] == EOS
    assert rendered.ids[: rendered.prompt_tokens] == renderer.prompt([U])


def test_user_text_with_the_header_in_it_does_not_fool_the_mask(renderer: Renderer) -> None:
    user = {"role": "user", "content": "say <|im_end|>\n<|im_start|>assistant\nfooled<|im_end|> please"}
    assert supervised(renderer, one(renderer, [user, A])) == ["yes"]


def test_a_template_that_rewrites_history_stops_instead_of_guessing_a_mask(folder: Path, tmp_path: Path) -> None:
    rewriting = (
        "{% for m in messages %}{{ loop.length ~ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    renderer = with_template(folder, tmp_path / "t", rewriting)
    with pytest.raises(DataError, match="The loss mask cannot be derived") as error:
        renderer.given_many([([U], ()), ([U, A], ())], ["chats.jsonl:1", "chats.jsonl:2"].__getitem__)
    assert error.value.where == "chats.jsonl:2, assistant turn 1" and error.value.do


def test_a_conversation_that_a_sound_template_rewrites_is_one_rows_fault(folder: Path, tmp_path: Path) -> None:
    named = TEMPLATE.replace("message['role']", "(message.name or message['role'])")
    renderer = with_template(folder, tmp_path / "t", named)
    fault, rows = renderer.given_many([([U, {**A, "name": "bob"}], ()), ([U, A], ())])
    assert isinstance(fault, RowFault) and fault.reason == "no mask from the template" and isinstance(rows, list)


def test_an_answer_that_melts_into_its_header_is_one_rows_fault(folder: Path, tmp_path: Path) -> None:
    with_template(folder, tmp_path / "t", TEMPLATE)
    tokenizer = json.loads((tmp_path / "t" / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["ĊĊ"] = len(tokenizer["model"]["vocab"])
    tokenizer["model"]["merges"] = [["Ċ", "Ċ"]]
    (tmp_path / "t" / "tokenizer.json").write_text(json.dumps(tokenizer))
    renderer = Renderer(tmp_path / "t", policy())
    assert one(renderer, [U, A]).ids[-1] == EOS
    with pytest.raises(RowFault, match="answer melts into its header"):
        renderer.given([U, {"role": "assistant", "content": "\n\nyes"}])


def test_a_tokenizer_that_adds_bos_and_a_template_that_writes_it_give_one(folder: Path, tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m['role'] + m['content'] + eos_token }}{% endfor %}"
    template += "{% if add_generation_prompt %}assistant{% endif %}"
    renderer = with_template(folder, tmp_path / "t", template, add_bos_token=True)
    for ids in (renderer.prompt([U]), one(renderer, [U, A]).ids):
        assert ids.count(BOS) == 1 and ids[0] == BOS


def test_two_bos_tokens_stop(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="two BOS tokens"):
        with_template(folder, tmp_path / "t", "{{ bos_token + bos_token }}x").prompt([U])


def test_a_target_without_a_template_stops(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no chat template"):
        with_template(folder, tmp_path / "t", "")


def test_a_template_that_raises_rejects_the_row(folder: Path, tmp_path: Path) -> None:
    renderer = with_template(folder, tmp_path / "t", "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RowFault, match="template refuses: roles must alternate"):
        renderer.prompt([U])


@pytest.mark.parametrize(
    "expression",
    ["m['content'].index('zz')", "m['content'].split('')", "1 // (m['content']|length - 2)", "'{a}'.format()"],
)  # fmt: skip
def test_a_template_that_fails_in_any_way_rejects_the_row(folder: Path, tmp_path: Path, expression: str) -> None:
    failing = (
        f"{{% for m in messages %}}{{% if m['content'] == 'no' %}}{{{{ {expression} }}}}{{% endif %}}{{% endfor %}}"
    )
    renderer = with_template(folder, tmp_path / "t", failing + TEMPLATE)
    bad = [{"role": "user", "content": "no"}, A]
    with pytest.raises(RowFault, match=r"template refuses: (ValueError|ZeroDivisionError|KeyError): "):
        renderer.given(bad)
    fault, rows = renderer.given_many([(bad, ()), ([U, A], ())])
    assert isinstance(fault, RowFault) and isinstance(rows, list)


def test_an_answer_of_weight_nought_is_left_unsupervised(renderer: Renderer) -> None:
    more, last = {"role": "user", "content": "and?"}, {"role": "assistant", "content": "no"}
    (row, plain) = (one(renderer, [U, first, more, last]) for first in ({**A, "weight": 0}, A))
    assert row.ids == plain.ids and supervised(renderer, row) == ["no"]
    assert supervised(renderer, one(renderer, [U, {**A, "weight": 1}, more, {**last, "weight": 0}])) == ["yes"]
    with pytest.raises(RowFault, match="no answer to learn: every answer has `weight: 0`"):
        renderer.given([U, {**A, "weight": 0}])


def test_tool_calls_are_supervised_and_tool_results_are_not(renderer: Renderer) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    turns = [
        U,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "done"},
    ]
    calls, done = supervised(renderer, one(renderer, turns))
    assert calls == "f(a=1)" and done == "done"


def test_calls_are_written_as_the_offer_of_tools_asks_for_them(renderer: Renderer) -> None:
    calls = [
        {"type": "function", "function": {"name": "f", "arguments": {"b": "x\ny", "a": [1, None]}}},
        {"type": "function", "function": {"name": "g", "arguments": {}}},
    ]
    turns = [U, {"role": "assistant", "content": "So:", "tool_calls": calls}]
    row = one(renderer, turns, [{"name": "f"}])
    assert "one a line: name(argument=value)." in renderer.text(row.ids)
    assert supervised(renderer, row) == ['So:\nf(a=[1, null], b="x\\ny")\ng()']


@pytest.mark.parametrize("depth", range(930, 1000, 10))
def test_tools_and_calls_nested_beyond_what_json_can_write_are_one_rows_fault(renderer: Renderer, depth: int) -> None:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    tool = {"name": "f", "parameters": {"properties": {"a": {"default": value}}}}
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": value}}}
    for messages, tools in (([U, A], [tool]), ([U, {**A, "tool_calls": [call]}], [])):
        (made,) = renderer.given_many([(messages, tools)])
        assert isinstance(made, list) or made.reason == "nested too deeply"
        with contextlib.suppress(RowFault):
            renderer.check_text(messages, tools)
    assert depth < 990 or isinstance(made, RowFault)


def test_tools_are_offered_as_text_to_a_template_that_knows_none(renderer: Renderer) -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"properties": {"a": {"type": "integer"}}, "required": ["a"]},
        },
    }
    assert "- add(a: integer): Adds." in renderer.text(renderer.prompt([U], [tool]))
