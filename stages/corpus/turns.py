"""A conversation's assistant turns as text, each behind the server's prompt for it, and which of them share a row.

For every assistant turn the conversation is rendered twice, once up to the generation prompt, as the server would, and once
with the turn; what the second has beyond the first is the answer (skeleton.py does the same of plain conversations with
less). Turns whose prompt goes on from the row so far share that row.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

from stages.contracts.errors import DataError
from stages.corpus.items import Message, RowFault
from stages.corpus.marks import pattern_of
from stages.corpus.reasoning import (
    CLOSE,
    demand_whole_thoughts,
    opens_thought,
    says_nothing_first,
    split_thought,
    thought_of,
    with_one_name,
    without_thought,
)
from stages.corpus.template import Template
from stages.corpus.tools import calls_text, tools_message

if TYPE_CHECKING:
    from stages.contracts.params import Rendering


@dataclass(frozen=True)
class Turn:
    """An assistant turn as text: `before` is the server's prompt, `whole` is that and the turn."""

    index: int
    before: str
    whole: str


@dataclass(frozen=True)
class Plan:
    """Assistant turns, those together that share a row; and how many messages stand before the conversation's own."""

    runs: list[list[Turn]]
    added: int


class Turns:
    """Finds them by one template and the policies of prepare.rendering."""

    def __init__(self, template: Template, policy: Rendering, end_ids: frozenset[int]) -> None:
        self._template, self._policy, self._end_ids = template, policy, end_ids

    def plan(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Plan | RowFault:
        """The rows of a conversation, as text; or why it gives none."""
        try:
            plain, offered = self.as_requested(messages, tools)
            turns = self._turns(plain, offered)
        except RowFault as fault:
            return fault
        if not turns and all(_is_left_out(m) for m in messages if m["role"] == "assistant"):
            return RowFault("no answer to learn", "every answer has `weight: 0`")
        if not turns:
            return RowFault("no reasoning", "the template writes an empty think block in front of every answer")
        runs: list[list[Turn]] = []
        for turn in turns:
            if runs and turn.before.startswith(runs[-1][-1].whole.rstrip()):
                runs[-1].append(turn)
            else:
                runs.append([turn])
        if len(runs) > 1 and self._policy.rewritten_history == "reject":
            return RowFault("template rewrites history", f"{len(turns)} turns would take {len(runs)} rows")
        kept = runs[-1:] if self._policy.rewritten_history == "last" else runs
        return Plan(kept, len(plain) - len(messages))

    def _turns(self, plain: list[Message], tools: list[dict[str, Any]]) -> list[Turn]:
        asked = [k for k, m in enumerate(plain) if m["role"] == "assistant" and not _is_left_out(m)]
        turns = self._plain_turns(plain, asked) if asked and not tools else None
        if turns is None:
            turns = [turn for k in asked if (turn := self._turn(plain, k, tools)) is not None]
        return turns

    def _plain_turns(self, plain: list[Message], asked: list[int]) -> list[Turn] | None:
        """What `_turn` gives of each, with the whole rendered once; None where that would not be sure (skeleton.py)."""
        skeletons = self._template.skeletons
        if (rendered := skeletons.whole(plain[: asked[-1] + 1])) is None:
            return None
        turns: list[Turn] = []
        for k in asked:
            before = skeletons.opening(plain, k, generation=True)
            whole = rendered if k == asked[-1] else skeletons.opening(plain, k + 1, generation=False)
            if before is None or whole is None or not whole.startswith(before):
                return None
            if self._is_said(before, whole[len(before) :]):
                turns.append(Turn(k, before, whole))
        return turns

    @cached_property
    def _edge(self) -> re.Pattern[str] | None:
        tokens = self._template.turn_tokens(self._end_ids)
        return pattern_of(tokens) if tokens else None

    def _demand_own_words(self, messages: Sequence[Message]) -> None:
        """Raises RowFault when an answer holds a token that ends a turn or opens one: no target says more behind it."""
        if self._edge is None:
            return
        for k, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            for text in texts_of(message):
                if found := self._edge.search(text):
                    raise RowFault("holds control tokens", f"{found.group()} in the answer of turn {k}")

    def as_requested(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> tuple[list[Message], list[dict[str, Any]]]:
        """Messages and tools as a server's request handler hands them to the template."""
        self._demand_own_words(messages)
        knows = self._template.knows
        strange = sorted({m["role"] for m in messages if m["content"]} - knows.roles)
        if strange:
            raise RowFault(f"template drops {strange[0]} messages")
        late = sorted({m["role"] for m in messages[1:] if m["content"]} & knows.only_first) if knows.only_first else []
        if late:
            raise RowFault(f"template drops late {late[0]} messages")
        plain = [with_one_name(m) for m in messages]
        if self._policy.think_tags == "split" and knows.reasoning:
            plain = [split_thought(m) for m in plain]
        asks = any(m.get("tool_calls") for m in plain)
        if (tools and not knows.tools) or (asks and not knows.calls):
            if self._policy.unknown_tools == "reject":
                raise RowFault("template knows no tools")
            try:
                plain = _tools_as_text(plain, () if knows.tools else tools, knows.calls)
            except RecursionError as error:
                raise RowFault("nested too deeply", str(error)) from error
        return plain, [_wrapped(t) for t in tools] if knows.tools else []

    def _turn(self, plain: list[Message], k: int, tools: list[dict[str, Any]]) -> Turn | None:
        """The server's prompt and the answer behind it, or None when no target would say it so.

        An answer may make the template write what came before otherwise (its last tool calls lose their reasoning); then
        the answer is rendered behind a history without reasoning.
        """
        before = self._template.text(plain[:k], tools, generation=True)
        answer = self._answer(plain[:k], before, plain[k], tools)
        if answer is None:
            bare = [without_thought(m) for m in plain[:k]]
            lean = self._template.text(bare, tools, generation=True)
            answer = self._answer(bare, lean, plain[k], tools)
            if answer is None:
                self._tell_why(plain, k, before, tools, self._answer(bare, lean, without_thought(plain[k]), tools))
        return Turn(k, before, before + answer) if self._is_said(before, answer) else None

    def _is_said(self, before: str, answer: str) -> bool:
        """Whether a target would say an answer so.

        Raises:
            RowFault: it closes a reasoning block that nobody opened.
        """
        demand_whole_thoughts(before, answer)
        return not (self._policy.empty_reasoning == "skip" and says_nothing_first(before, answer))

    @cached_property
    def _masks_plain(self) -> bool:
        """Whether a mask can be derived for the plainest conversation."""
        user, answer = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
        try:
            return self._answer([user], self._template.text([user], (), generation=True), answer, []) is not None
        except RowFault:
            return False

    def _tell_why(
        self, plain: list[Message], k: int, before: str, tools: list[dict[str, Any]], thoughtless: str | None
    ) -> NoReturn:
        """Raises RowFault when the answer could follow without its reasoning, or when it is this conversation that the
        template writes so, else DataError."""
        if thoughtless is not None and thought_of(plain[k]):
            raise RowFault("template drops the answer's reasoning", f"turn {k}: the server's prompt leaves no room")
        if self._masks_plain:
            raise RowFault(
                "no mask from the template", f"turn {k}: its rendering does not go on from the server's prompt"
            )
        raise DataError(
            "The loss mask cannot be derived from this chat template",
            where=f"assistant turn {k}",
            expected="the rendered conversation up to this turn is a prefix of the one with it, or a generation marker",
            got=f"…{self._template.text(plain[: k + 1], tools, generation=False)[-80:]!r} after …{before[-80:]!r}",
            do="regenerate these answers (`answers: regenerate`): their tokens are known without the template",
        )

    def _answer(self, history: list[Message], before: str, turn: Message, tools: list[dict[str, Any]]) -> str | None:
        """What the template writes for `turn` beyond `before`, the prompt of `history`; None when the one does not go on
        from the other. Reasoning that it drops is put back, or the row is rejected."""
        whole = self._template.text([*history, turn], tools, generation=False)
        self._demand_all(history, turn, tools, whole)
        if not whole.startswith(before):
            return self._marked_answer([*history, turn], tools, before, whole)
        answer, thought = whole[len(before) :], thought_of(turn)
        if not thought or self._template.text([*history, without_thought(turn)], tools, generation=False) != whole:
            return answer
        if self._policy.dropped_reasoning == "restore" and opens_thought(before) and answer.lstrip().startswith(CLOSE):
            return thought + answer  # the generation prompt opened the block, and the template closed it unfilled
        raise RowFault("template drops the answer's reasoning", f"turn {len(history)}: {thought[:40]!r}")

    def _demand_all(self, history: list[Message], turn: Message, tools: list[dict[str, Any]], whole: str) -> None:
        """Raises RowFault when `whole` lacks the text of an answer that calls too, or one of several calls: without it the
        template writes the same."""
        calls = turn.get("tool_calls") or []
        spoken = bool(calls) and bool(turn["content"].strip())
        if not spoken and len(calls) < 2:
            return
        if spoken and self._is_written([*history, {**turn, "content": ""}], tools, whole):
            raise RowFault("template drops the answer's text", f"turn {len(history)}: {turn['content'][:40]!r}")
        for i, call in enumerate(calls if len(calls) > 1 else []):
            if self._is_written([*history, {**turn, "tool_calls": [*calls[:i], *calls[i + 1 :]]}], tools, whole):
                name = (call.get("function") or call).get("name")
                raise RowFault("template drops the answer's calls", f"turn {len(history)}: {name!r}, call {i + 1}")

    def _is_written(self, messages: list[Message], tools: list[dict[str, Any]], text: str) -> bool:
        try:
            return self._template.text(messages, tools, generation=False) == text
        except RowFault:  # the template needs what was left out
            return False

    def _marked_answer(
        self, messages: list[Message], tools: list[dict[str, Any]], before: str, whole: str
    ) -> str | None:
        """The last stretch that the template's own generation marker encloses, when all before it is the prompt's."""
        if not self._template.has_marker(tools):
            return None
        ids, marks = self._template.marked(messages, tools)
        encoded = self._template.encode(whole)
        if 1 not in marks or tuple(encoded.ids) != ids:
            return None
        end = len(marks) - marks[::-1].index(1)
        start = next((i for i in range(end, 0, -1) if not marks[i - 1]), 0)
        first, last = encoded.span(start)[0], encoded.span(end - 1)[1]
        return whole[first:last] if before.startswith(whole[:first]) else None


def _is_left_out(answer: Message) -> bool:
    """Whether an answer is not to be learnt, as OpenAI's layout for fine-tuning has it."""
    return answer.get("weight") == 0


def texts_of(message: Message) -> Sequence[str]:
    """All that a message says: its content, and whatever text is within its other values."""
    if len(message) == 2:
        return (message["content"],)
    found: list[str] = []
    values: list[Any] = [message]
    while values:
        value = values.pop()
        if isinstance(value, str):
            found.append(value)
        elif isinstance(value, dict):
            values += (*value, *value.values())
        elif isinstance(value, list):
            values += value
    return found


def _wrapped(tool: dict[str, Any]) -> dict[str, Any]:
    """A function schema in OpenAI's wrapping, the only one that a server takes; keys stay in their order."""
    return tool if "function" in tool else {"type": "function", "function": tool}


def _tools_as_text(messages: Sequence[Message], tools: Sequence[dict[str, Any]], knows_calls: bool) -> list[Message]:
    """Tools and tool calls as text where the template has no word for them: they must not vanish."""
    plain: list[Message] = []
    for message in messages:
        calls = None if knows_calls else message.get("tool_calls")
        parts = [message["content"], calls_text(calls)] if calls else [message["content"]]
        kept = message if knows_calls else {k: v for k, v in message.items() if k != "tool_calls"}
        plain.append({**kept, "content": "\n".join(p for p in parts if p)})
    if tools and plain and plain[0]["role"] == "system":
        plain[0] = {"role": "system", "content": f"{plain[0]['content']}\n{tools_message(tools)}"}
    elif tools:
        plain.insert(0, {"role": "system", "content": tools_message(tools)})
    return plain
