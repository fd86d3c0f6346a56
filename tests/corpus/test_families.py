"""The formats in the field: ids as a server builds them at each turn, masks over what the target says, nothing lost."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from stages.contracts.errors import DataError, ParamsError
from stages.contracts.params import Source
from stages.corpus.items import Item, RowFault
from stages.corpus.rendering import Rendered, Renderer
from stages.corpus.sources import Reading
from tests.corpus.families import (
    CHATML,
    DEEPSEEK_R1,
    FAMILIES,
    GEMMA,
    HARMONY,
    KIMI_K2_5,
    LLAMA_3,
    QWEN_3,
    Family,
    policy,
    renderer_of,
    write_family,
)

Message = dict[str, Any]
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "Adds.", "parameters": {"type": "object", "properties": {"a": {}}}},
}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def said(text: str, thought: str = "") -> Message:
    return {"role": "assistant", "content": text, **({"reasoning_content": thought} if thought else {})}


def called(arguments: Any, thought: str = "", content: str | None = "") -> Message:
    call = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {**said("", thought), "content": content, "tool_calls": [call]}


RESULT = {"role": "tool", "content": "2", "tool_call_id": "functions.f:0", "name": "f"}
SYSTEM = {"role": "system", "content": "Be brief, the user is in a hurry."}
PLAIN = [SYSTEM, user("Hi, the rain?"), said("Yes, in the evening.\n\nTake a coat."), user("And then?"), said("Sun.")]
THOUGHT = [user("hi"), said("yes", "because"), user("and the other?"), said("no", "hm, on\ntwo lines")]
LOOP = [user("add"), called({"a": 1}, "call it"), RESULT, said("done", "it is 2"), user("ok"), said("bye", "greet")]


class Server:
    """What a server does with a chat request: transformers' apply_chat_template, then tokens without added specials."""

    def __init__(self, folder: Path, family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
        if family.date:
            day = datetime.date.fromisoformat(family.date)
            clock = type("Clock", (), {"now": staticmethod(lambda: day)})
            monkeypatch.setattr(chat_template_utils, "datetime", clock)
        self._tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(str(folder))
        self._arguments = family.arguments

    def prompt(self, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> tuple[int, ...]:
        how = {"add_generation_prompt": True, "return_dict": False, **self._arguments}
        return tuple(self._tokenizer.apply_chat_template(messages, tools=tools, **how))


def runs(row: Rendered) -> list[tuple[int, int]]:
    """Start and end of each supervised run."""
    edges = [i for i, (a, b) in enumerate(zip((0, *row.mask), (*row.mask, 0), strict=True)) if a != b]
    return list(zip(edges[::2], edges[1::2], strict=True))


def decoded(renderer: Renderer, row: Rendered) -> list[str]:
    tokenizer = renderer._template.tokenizer
    return [tokenizer.decode(row.ids[a:b]) for a, b in runs(row)]


def prompts_of(messages: list[Message]) -> list[list[Message]]:
    return [messages[:k] for k, m in enumerate(messages) if m["role"] == "assistant"]


@pytest.mark.parametrize("family", [f for f in FAMILIES if f is not DEEPSEEK_R1], ids=lambda f: f.name)
def test_at_each_turn_the_row_has_the_ids_that_the_server_builds(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renderer = renderer_of(tmp_path, family, empty_reasoning="keep")
    server = Server(tmp_path, family, monkeypatch)
    reasons, calls = renderer._template.knows.reasoning, renderer._template.knows.calls
    for chat in [PLAIN, *([THOUGHT] if reasons else []), *([LOOP] if calls and reasons else [])]:
        rows = renderer.given(chat)
        at_turns = [row.ids[:start] for row in rows for start, _ in runs(row)]
        assert at_turns == [server.prompt(p) for p in prompts_of(chat)]
        assert [renderer.prompt(p) for p in prompts_of(chat)] == at_turns
        assert all(row.ids[end - 1] in renderer.end_ids for row in rows for _, end in runs(row))
        assert rows[-1].messages == len(chat)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_no_conversation_opens_with_two_bos_and_the_tokenizer_adds_none(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renderer = renderer_of(tmp_path, family)
    ids = renderer.prompt(PLAIN[:2])
    assert ids == Server(tmp_path, family, monkeypatch).prompt(PLAIN[:2])
    writes = family.bos is not None and family.bos in (renderer._template.text(PLAIN[:2], (), generation=True)[:30])
    assert (ids[0] == renderer.bos_id) == writes and ids[1] != renderer.bos_id
    assert ids[: len(renderer.opening())] == renderer.opening()


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_arguments_of_a_call_as_text_and_as_object_give_the_same_ids_and_nothing_is_dropped(
    family: Family, tmp_path: Path
) -> None:
    renderer = renderer_of(tmp_path, family, empty_reasoning="keep")
    lines = [[user("add"), called(a, content=None), RESULT, said("done")] for a in ('{"a": 1}', {"a": 1})]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": m}) + "\n" for m in lines))
    told = {"name": "s", "kind": "jsonl", "domain": "d", "licence": "l", "answers": "given", "limit": 9}
    source = Source.model_validate({**told, "path": str(tmp_path / "chats.jsonl")})
    as_text, as_object = (item for item in Reading(source, 7, 99).items() if isinstance(item, Item))
    if family is GEMMA:  # its template takes no results at all
        with pytest.raises(RowFault, match="template refuses: Conversation roles must alternate"):
            renderer.given(as_text.messages)
        return
    if family is DEEPSEEK_R1:  # no mask; the prompts that regenerated answers follow
        assert renderer.prompt(as_text.messages[:3]) == renderer.prompt(as_object.messages[:3])
        return
    rows = renderer.given(as_text.messages)
    assert rows == renderer.given(as_object.messages)
    (call, answer) = (text for row in rows for text in decoded(renderer, row))
    assert (
        ("f(a=1)" if family is CHATML else '"a": 1') in call
        and "done" in answer
        and "2" not in (call + answer).replace("to=", "")
    )


def test_qwen_drops_the_reasoning_of_earlier_turns_so_each_answer_has_its_own_row(tmp_path: Path) -> None:
    renderer = renderer_of(tmp_path, QWEN_3)
    rows = renderer.given(THOUGHT)
    assert [decoded(renderer, row) for row in rows] == [
        ["<think>\nbecause\n</think>\n\nyes<|im_end|>"],
        ["<think>\nhm, on\ntwo lines\n</think>\n\nno<|im_end|>"],
    ]
    assert [row.messages for row in rows] == [2, 4]
    assert "because" not in renderer.text(rows[1].ids)
    (loop, bye) = renderer.given(LOOP)
    assert len(decoded(renderer, loop)) == 2 and len(decoded(renderer, bye)) == 1


def test_what_becomes_of_a_rewritten_history_is_policy(tmp_path: Path) -> None:
    (last,) = renderer_of(tmp_path, QWEN_3, rewritten_history="last").given(THOUGHT)
    assert last.messages == 4
    with pytest.raises(RowFault, match="template rewrites history: 2 turns would take 2 rows"):
        renderer_of(tmp_path, QWEN_3, rewritten_history="reject").given(THOUGHT)
    (packed,) = renderer_of(tmp_path, CHATML, rewritten_history="reject").given(PLAIN)
    assert len(runs(packed)) == 2


def test_thinking_off_puts_the_empty_block_into_the_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    off = Family(**{**vars(QWEN_3), "arguments": {"enable_thinking": False}})
    renderer, chat = renderer_of(tmp_path, off), [user("hi"), said("yes"), user("and?"), said("no")]
    rows = renderer.given(chat)
    assert [decoded(renderer, row) for row in rows] == [["yes<|im_end|>"], ["no<|im_end|>"]]
    server = Server(tmp_path, off, monkeypatch)
    assert [row.ids[: row.prompt_tokens] for row in rows] == [server.prompt(p) for p in prompts_of(chat)]
    with pytest.raises(
        RowFault, match="template drops the answer's reasoning: turn 1: the server's prompt leaves no room"
    ):
        renderer.given(THOUGHT)


def test_an_answer_without_reasoning_is_not_supervised_where_the_template_gives_it_an_empty_block(
    tmp_path: Path,
) -> None:
    renderer = renderer_of(tmp_path, QWEN_3)
    with pytest.raises(RowFault, match="no reasoning"):
        renderer.given([user("hi"), said("yes")])
    (row,) = renderer.given([user("hi"), said("yes"), user("and?"), said("no", "hm")])
    assert decoded(renderer, row) == ["<think>\nhm\n</think>\n\nno<|im_end|>"]
    (kept,) = renderer_of(tmp_path, QWEN_3, empty_reasoning="keep").given([user("hi"), said("yes")])
    assert decoded(renderer, kept) == ["<think>\n\n</think>\n\nyes<|im_end|>"]


@pytest.mark.parametrize("family", [QWEN_3, KIMI_K2_5], ids=lambda f: f.name)
def test_a_completion_with_the_closing_tag_alone_gets_no_empty_block_and_no_orphan(
    family: Family, tmp_path: Path
) -> None:
    renderer = renderer_of(tmp_path, family)
    (stored,) = renderer.given([user("hi"), said("because\n</think>\n\nyes")])
    (whole,) = renderer.given([user("hi"), said("<think>\nbecause\n</think>\n\nyes")])
    (apart,) = renderer.given([user("hi"), said("yes", "because")])
    assert stored.ids == whole.ids == apart.ids
    (answer,) = decoded(renderer, stored)
    assert answer.count("</think>") == 1 and answer.count("because") == 1


@pytest.mark.parametrize("name", ["reasoning", "thinking"])
def test_older_names_of_reasoning_are_the_same_reasoning(tmp_path: Path, name: str) -> None:
    for family in (QWEN_3, KIMI_K2_5, HARMONY):
        renderer = renderer_of(tmp_path / family.name, family)
        other = [{name if key == "reasoning_content" else key: value for key, value in m.items()} for m in THOUGHT]
        assert renderer.given(other) == renderer.given(THOUGHT)


def test_an_orphaned_tag_is_rejected_where_the_template_knows_no_reasoning(tmp_path: Path) -> None:
    with pytest.raises(RowFault, match="orphaned think tag: 1 closing, 0 opening"):
        renderer_of(tmp_path, CHATML).given([user("hi"), said("because</think>yes")])
    with pytest.raises(RowFault, match="orphaned think tag"):
        renderer_of(tmp_path, KIMI_K2_5, think_tags="as_is").given([user("hi"), said("because</think>yes")])


def test_kimi_drops_an_answers_own_reasoning_which_is_put_back_or_rejected(tmp_path: Path) -> None:
    renderer = renderer_of(tmp_path, KIMI_K2_5)
    first, second = renderer.given(THOUGHT)
    assert decoded(renderer, first) == ["because</think>yes<|im_end|>"]
    tokenizer = renderer._template.tokenizer
    assert tokenizer.decode(first.ids[: first.prompt_tokens]).endswith("<|im_assistant|>assistant<|im_middle|><think>")
    assert "<think></think>yes<|im_end|>" in tokenizer.decode(second.ids)
    with pytest.raises(RowFault, match="template drops the answer's reasoning: turn 1: 'because'"):
        renderer_of(tmp_path, KIMI_K2_5, dropped_reasoning="reject").given(THOUGHT)


def test_kimi_keeps_the_reasoning_of_calls_until_the_answer_and_the_answer_follows_that_history(tmp_path: Path) -> None:
    renderer = renderer_of(tmp_path, KIMI_K2_5)
    loop, bye = renderer.given(LOOP)
    call, answer = decoded(renderer, loop)
    assert call.startswith("call it</think><|tool_calls_section_begin|>") and answer == "it is 2</think>done<|im_end|>"
    assert decoded(renderer, bye) == ["greet</think>bye<|im_end|>"]
    assert "call it" not in renderer.text(bye.ids)


def test_harmony_answers_end_with_return_and_reason_in_their_channel(tmp_path: Path) -> None:
    renderer = renderer_of(tmp_path, HARMONY)
    first, second = renderer.given(THOUGHT)
    assert decoded(renderer, first) == [
        "<|channel|>analysis<|message|>because<|end|><|start|>assistant<|channel|>final<|message|>yes<|return|>"
    ]
    text = renderer._template.tokenizer.decode(second.ids)
    assert "<|channel|>final<|message|>yes<|end|>" in text and "because" not in text and "2026-01-31" in text
    call = decoded(renderer, renderer.given(LOOP)[0])[0]
    assert call.endswith('to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>')


def test_deepseek_writes_no_answer_behind_its_prompt_so_given_answers_stop_and_regenerated_ones_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renderer = renderer_of(tmp_path, DEEPSEEK_R1)
    for chat in (PLAIN, [user("hi"), said("<think>\nwhy\n</think>\n\nyes")]):
        with pytest.raises(DataError, match=r"loss mask cannot be derived[\s\S]*<think>[\s\S]*answers: regenerate"):
            renderer.given(chat)
        assert renderer.prompt(chat[:-1]) == Server(tmp_path, DEEPSEEK_R1, monkeypatch).prompt(chat[:-1])


def test_a_generation_marker_gives_the_mask_where_prefixes_do_not(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<|im_start|>assistant\\n' }}"
        "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
        "{% else %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<go>' }}{% endif %}"
    )
    marked = Family(**{**vars(CHATML), "template": template, "added": ("<go>",)})
    renderer = renderer_of(tmp_path, marked)
    rows = renderer.given([user("say yes<|im_end|>"), said("yes"), user("and?"), said("no")])
    assert [decoded(renderer, row) for row in rows] == [["yes<|im_end|>"], ["no<|im_end|>"]]
    assert all(renderer._template.tokenizer.decode(r.ids[: r.prompt_tokens]).endswith("assistant\n<go>") for r in rows)
    unmarked = Family(
        **{**vars(marked), "template": template.replace("{% generation %}", "").replace("{% endgeneration %}", "")}
    )
    with pytest.raises(DataError, match="The loss mask cannot be derived"):
        renderer_of(tmp_path / "u", unmarked).given([user("hi"), said("yes")])


def test_schemas_reach_the_template_in_openais_wrapping_with_their_keys_as_they_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for family in (LLAMA_3, QWEN_3, KIMI_K2_5, HARMONY):
        renderer = renderer_of(tmp_path / family.name, family)
        server = Server(tmp_path / family.name, family, monkeypatch)
        assert renderer.prompt([user("hi")], [TOOL]) == server.prompt([user("hi")], [TOOL])
        assert renderer.prompt([user("hi")], [TOOL["function"]]) == server.prompt([user("hi")], [TOOL])


def test_tools_that_the_template_has_no_word_for_become_text_or_a_reject(tmp_path: Path) -> None:
    for family in (CHATML, GEMMA):
        renderer = renderer_of(tmp_path / family.name, family)
        assert "- f(" in renderer.text(renderer.prompt([user("hi")], [TOOL]))
        with pytest.raises(RowFault, match="template knows no tools"):
            renderer_of(tmp_path / family.name, family, unknown_tools="reject").prompt([user("hi")], [TOOL])


def test_a_message_that_the_template_drops_in_silence_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    developer = {"role": "developer", "content": "Be brief."}
    with pytest.raises(RowFault, match="template drops developer messages"):
        renderer_of(tmp_path / "q", QWEN_3).prompt([developer, user("hi")])
    renderer = renderer_of(tmp_path / "h", HARMONY)
    assert renderer.prompt([developer, user("hi")]) == Server(tmp_path / "h", HARMONY, monkeypatch).prompt(
        [developer, user("hi")]
    )


def test_a_late_system_message_that_the_template_drops_is_rejected(tmp_path: Path) -> None:
    late = [user("q"), said("yes"), SYSTEM, user("r"), said("no")]
    with pytest.raises(RowFault, match="template drops late system messages"):
        renderer_of(tmp_path / "h", HARMONY).given(late)
    with pytest.raises(RowFault, match="template drops late developer messages"):
        renderer_of(tmp_path / "h", HARMONY).prompt([SYSTEM, {"role": "developer", "content": "French."}, user("hi")])
    (row,) = renderer_of(tmp_path / "c", CHATML).given(late)
    assert len(runs(row)) == 2
    with pytest.raises(RowFault, match="template refuses"):
        renderer_of(tmp_path / "g", GEMMA).given(late)


def test_text_beside_calls_and_further_calls_that_the_template_drops_are_rejected(tmp_path: Path) -> None:
    call = called({"a": 1})["tool_calls"][0]
    other = {**call, "id": "functions.g:1", "function": {"name": "g", "arguments": {"a": 2}}}
    two, spoken = {**said(""), "tool_calls": [call, other]}, called({"a": 1}, content="Let me look.")
    rest = [RESULT, said("done", "hm")]
    harmony = renderer_of(tmp_path / "h", HARMONY)
    for turn, reason in ((two, "calls: turn 1: 'g', call 2"), (spoken, "text: turn 1: 'Let me look.'")):
        with pytest.raises(RowFault, match=f"template drops the answer's {reason}"):
            harmony.given([user("add"), turn, *rest])
        qwen = renderer_of(tmp_path / "q", QWEN_3, empty_reasoning="keep")
        answer = decoded(qwen, qwen.given([user("add"), turn, *rest])[0])[0]
        assert (turn["content"] or '"name": "g"') in answer
    assert harmony.given([user("add"), called({"a": 1}, content=" "), *rest])


def test_a_template_that_writes_the_date_needs_one_and_writes_that(tmp_path: Path) -> None:
    folder = write_family(tmp_path, LLAMA_3)
    with pytest.raises(ParamsError, match=r"writes today's date[\s\S]*prepare.rendering.date"):
        Renderer(folder, policy())
    assert "Today Date: 29 Feb 2028" in renderer_of(tmp_path, LLAMA_3, date="2028-02-29").text(
        Renderer(folder, policy(date="2028-02-29")).prompt([user("hi")])
    )


def test_the_systems_default_is_the_templates(tmp_path: Path) -> None:
    renderer = renderer_of(tmp_path, CHATML)
    assert "Be kind." in renderer.text(renderer.prompt([user("hi")]))
    assert "Be kind." not in renderer.text(renderer.prompt([SYSTEM, user("hi")]))


def test_an_answer_that_only_reasons_is_seen_in_every_format(tmp_path: Path) -> None:
    cases = {
        QWEN_3: ("<think>\nhm\n</think>\n\n<|im_end|>", "<think>\nhm\n</think>\n\nyes<|im_end|>"),
        KIMI_K2_5: ("hm</think><|im_end|>", "hm</think>yes<|im_end|>"),
        DEEPSEEK_R1: ("hm, and no end<｜end▁of▁sentence｜>", "hm\n</think>\n\nyes<｜end▁of▁sentence｜>"),
        HARMONY: (
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|return|>",
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>yes<|return|>",
        ),
        CHATML: ("hm</think>\n<|im_end|>", "yes<|im_end|>"),
    }
    for family, (empty, answered) in cases.items():
        renderer = renderer_of(tmp_path / family.name, family)
        prompt = renderer.prompt([user("hi")])
        assert renderer.only_reasons(prompt, renderer.encode(empty)), family.name
        assert not renderer.only_reasons(prompt, renderer.encode(answered)), family.name
    assert not renderer.only_reasons(prompt, renderer.encode("<|im_end|>"))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_text_of_any_special_token_is_rejected_in_what_users_say(family: Family, tmp_path: Path) -> None:
    renderer = renderer_of(tmp_path, family)
    for token in family.special:
        with pytest.raises(RowFault, match="holds control tokens"):
            renderer.check_text([user(f"say {token} now")])
    renderer.check_text([user("a < b, <|x|>, <think> aloud"), said("<|im_end|>")])


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_an_answer_that_ends_its_turn_or_opens_another_is_rejected_and_tags_and_calls_are_its_own(
    family: Family, tmp_path: Path
) -> None:
    renderer = renderer_of(tmp_path, family, empty_reasoning="keep")
    edges = renderer._template.turn_tokens(renderer.end_ids)
    assert set(family.end) <= edges and len(edges) > len(family.end)
    for token in sorted(edges):
        for turn in (said(f"yes{token}fake"), said("yes", f"so{token}"), called({"a": [{"b": token}]})):
            with pytest.raises(RowFault, match=r"holds control tokens: .* in the answer of turn 1"):
                renderer.prompt([user("hi"), turn, user("ok")])
    own = {*family.special, "<think>", "</think>"} - edges
    assert not any("tool" in token for token in edges - {"<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"})
    renderer.prompt([user("hi"), said(" ".join(["yes", *sorted(own)])), user("ok")])


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_a_conversation_rendered_once_gives_the_rows_that_turn_by_turn_gives(family: Family, tmp_path: Path) -> None:
    renderer = renderer_of(tmp_path, family, empty_reasoning="keep")
    odd = ["so  be it", "a\n\nb", "<b>x</b> | 'q' \"r\"", "ü 日本 \U0001f600", "1", "assistant", "1. x\n- y\n\tz"]
    talks = [[m for k in range(n) for m in (user(f"{odd[k % 7]} {n}"), said(odd[(k + n) % 7]))] for n in range(1, 8)]
    skeletons = renderer._template.skeletons
    fits = sum(skeletons.whole(t) is not None for t in talks)
    if family is DEEPSEEK_R1:  # it opens a think block that no answer here fills: no mask
        with pytest.raises(DataError, match="cannot be derived"):
            renderer.given(talks[0])
        return
    once = renderer.given_many([(t, ()) for t in talks])
    skeletons.whole = lambda messages: None  # type: ignore[method-assign]
    renderer._template.added.exact = False
    turns = renderer.given_many([(t, ()) for t in talks])
    assert [plain(r) for r in once] == [plain(r) for r in turns]
    assert fits >= 2  # of the rest, a template compares or splits with something that they hold


def plain(rows: Any) -> Any:
    return str(rows) if isinstance(rows, RowFault) else [(r.ids.tolist(), r.mask, r.messages) for r in rows]


def test_contents_that_the_template_could_treat_otherwise_are_rendered_turn_by_turn(tmp_path: Path) -> None:
    skeletons = renderer_of(tmp_path, QWEN_3)._template.skeletons
    assert skeletons.whole([user("plain"), said("words")])
    for told in ("a </think> b", " spaced", "ends\n", "", "\ue0001\ue001"):
        assert not skeletons.whole([user("plain"), said(told)])
    assert not skeletons.whole([user("plain"), {**said("words"), "reasoning_content": "hm"}])
