"""Conversations to token ids with the target's own chat template, and loss masks over what the target itself would say.

The template writes the special tokens and the tokenizer adds none, so a row has exactly one BOS. A mask is never found by
searching text: for every assistant turn the conversation is rendered twice, once up to the generation prompt, as the
server would, and once with the turn; what the second has beyond the first is the answer.

    render(messages[:k], generation prompt)   <|im_start|>user … <|im_start|>assistant\\n
    render(messages[:k+1])                    <|im_start|>user … <|im_start|>assistant\\n 4 2 <|im_end|> \\n
    mask                                      0 …                                         1 1 1

Turns whose prompt goes on from the row so far share that row. Where the template renders earlier turns otherwise later
on (it drops their reasoning), the server's prompt is another one, and so is the row.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import re
from array import array as array_of
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from stages.contracts.errors import DataError
from stages.corpus.items import Message, RowFault
from stages.corpus.reasoning import (
    CLOSE,
    beyond_thought,
    demand_whole_thoughts,
    opens_thought,
    says_nothing_first,
    split_thought,
    thought_of,
    with_one_name,
    without_thought,
)
from stages.corpus.template import Encoded, Template
from stages.corpus.tools import calls_text, tools_message

if TYPE_CHECKING:
    from stages.contracts.params import Rendering


@dataclass(frozen=True)
class Rendered:
    """Token ids of a conversation's first `messages` messages and their loss mask, equally long."""

    ids: tuple[int, ...]
    mask: tuple[int, ...]
    messages: int

    @property
    def prompt_tokens(self) -> int:
        """Tokens before the first supervised one."""
        return self.mask.index(1) if 1 in self.mask else len(self.mask)


@dataclass(frozen=True, eq=False)
class GivenRow:
    """The same as arrays: ids i32 [T] and mask bytes [T]."""

    ids: npt.NDArray[np.int32]
    mask: bytes
    messages: int

    @property
    def prompt_tokens(self) -> int:
        """Tokens before the first supervised one."""
        return self.mask.index(1) if 1 in self.mask else len(self.mask)


@dataclass(frozen=True)
class _Turn:
    """An assistant turn as text: `before` is the server's prompt, `whole` is that and the turn."""

    index: int
    before: str
    whole: str


@dataclass(frozen=True)
class _Plan:
    """Assistant turns, those together that share a row; and how many messages stand before the conversation's own."""

    runs: list[list[_Turn]]
    added: int


class Renderer:
    """Renders for one target, by the policies of prepare.rendering."""

    def __init__(self, folder: Path, rendering: Rendering) -> None:
        """Load the target's tokenizer and template.

        Raises:
            DataError: no chat template.
            ParamsError: the template writes today's date and prepare.rendering.date is not set.
        """
        date = datetime.date.fromisoformat(rendering.date) if rendering.date else None
        self._template = Template(folder, rendering.template_arguments, date)
        self._policy = rendering
        tokenizer = self._template.tokenizer
        self.end_ids = _end_ids(folder, tokenizer)
        self.bos_id: int | None = tokenizer.bos_token_id
        self._control = self._template.special
        self._suspect = re.compile("|".join(sorted({re.escape(token[:2]) for token in self._control})) or r"(?!)")

    def check_text(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> None:
        """Look for the text of special tokens in what users, systems and tools say: as ids it would end a turn or open one.

        Raises:
            RowFault: with the token found.
        """
        said = [m["content"] for m in messages if m["role"] != "assistant"]
        if tools:
            said.append(json.dumps(list(tools), ensure_ascii=False))
        suspects = [text for text in said if self._suspect.search(text)]
        for token in self._control if suspects else ():
            if any(token in text for text in suspects):
                raise RowFault("holds control tokens", token)

    def opening(self) -> tuple[int, ...]:
        """The ids that every conversation opens with, whatever it says."""
        user, system = {"role": "user", "content": "a"}, {"role": "system", "content": "Zero."}
        openings: list[list[int]] = []
        for messages in ([user], [{"role": "user", "content": "Why?"}], [system, user]):
            try:
                openings.append(self._template.encode(self._template.text(messages, (), generation=False)).ids)
            except RowFault:  # a template without a system role says so in this way
                continue
        common = 0
        while all(len(o) > common for o in openings) and len({o[common] for o in openings}) == 1:
            common += 1
        return tuple(openings[0][:common])

    @property
    def end_id(self) -> int:
        """The id with which the template ends an answer, or the tokenizer's EOS."""
        with contextlib.suppress(RowFault):
            turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
            ids = self._template.encode(self._template.text(turns, (), generation=False)).ids
            if ends := [i for i in ids if i in self.end_ids]:
                return ends[-1]
        return int(self._template.tokenizer.eos_token_id)

    def probes(self) -> list[tuple[list[Message], tuple[int, ...]]]:
        """Conversations of a few kinds that the template takes, and their ids: what a server has to make of them too."""
        user, more = {"role": "user", "content": "What is 2+2?"}, {"role": "user", "content": "And 3+3?"}
        system, answer = {"role": "system", "content": "Be brief."}, {"role": "assistant", "content": "4"}
        taken: list[tuple[list[Message], tuple[int, ...]]] = []
        for messages in ([user], [system, user], [user, answer, more]):
            with contextlib.suppress(RowFault):
                taken.append((messages, self.prompt(messages)))
        return taken

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of an answer's text."""
        return tuple(self._template.encode(text).ids)

    def prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> tuple[int, ...]:
        """Ids of a conversation that ends with the generation prompt, as the server builds them.

        Raises:
            RowFault: the template refuses the conversation, or drops part of it.
        """
        plain, offered = self._as_requested(messages, tools)
        return tuple(self._template.encode(self._template.text(plain, offered, generation=True)).ids)

    def given(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> tuple[Rendered, ...]:
        """Rows of a conversation up to its last assistant turn's end. The masks cover every assistant turn, each with the
        history that the server would have had, its end-of-turn token included.

        Raises:
            RowFault: the template refuses the conversation or drops part of it, or an answer's first characters melt into
                the header's token.
            DataError: a mask cannot be derived from the template.
        """
        row = next(iter(self.given_many([(messages, tools)])))
        if isinstance(row, RowFault):
            raise row
        return tuple(Rendered(tuple(r.ids.tolist()), tuple(r.mask), r.messages) for r in row)

    def given_many(
        self, conversations: Sequence[tuple[Sequence[Message], Sequence[dict[str, Any]]]]
    ) -> list[list[GivenRow] | RowFault]:
        """What `given` gives or raises of each, tokenised together.

        Raises:
            DataError: a mask cannot be derived from the template.
        """
        planned = [self._runs(messages, tools) for messages, tools in conversations]
        texts = [run[-1].whole for plan in planned if isinstance(plan, _Plan) for run in plan.runs]
        ids = iter(self._template.encode_many(texts))
        made: list[list[GivenRow] | RowFault] = []
        for plan in planned:
            if isinstance(plan, RowFault):
                made.append(plan)
                continue
            own = [next(ids) for _ in plan.runs]
            try:
                made.append([self._row(run, i, plan.added) for run, i in zip(plan.runs, own, strict=True)])
            except RowFault as fault:
                made.append(fault)
        return made

    def prompt_many(
        self, conversations: Sequence[tuple[Sequence[Message], Sequence[dict[str, Any]]]]
    ) -> list[list[int] | RowFault]:
        """What `prompt` gives or raises of each, tokenised together."""
        texts: list[str | RowFault] = []
        for messages, tools in conversations:
            try:
                plain, offered = self._as_requested(messages, tools)
                texts.append(self._template.text(plain, offered, generation=True))
            except RowFault as fault:
                texts.append(fault)
        ids = iter(self._template.encode_many([t for t in texts if isinstance(t, str)]))
        return [next(ids) if isinstance(t, str) else t for t in texts]

    def _runs(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> _Plan | RowFault:
        """The rows of a conversation, as text; or why it gives none."""
        try:
            plain, offered = self._as_requested(messages, tools)
            turns = self._turns(plain, offered)
        except RowFault as fault:
            return fault
        if not turns:
            return RowFault("no reasoning", "the template writes an empty think block in front of every answer")
        runs: list[list[_Turn]] = []
        for turn in turns:
            if runs and turn.before.startswith(runs[-1][-1].whole.rstrip()):
                runs[-1].append(turn)
            else:
                runs.append([turn])
        if len(runs) > 1 and self._policy.rewritten_history == "reject":
            return RowFault("template rewrites history", f"{len(turns)} turns would take {len(runs)} rows")
        kept = runs[-1:] if self._policy.rewritten_history == "last" else runs
        return _Plan(kept, len(plain) - len(messages))

    def _turns(self, plain: list[Message], tools: list[dict[str, Any]]) -> list[_Turn]:
        asked = [k for k, message in enumerate(plain) if message["role"] == "assistant"]
        turns = self._plain_turns(plain, asked) if asked and not tools else None
        if turns is None:
            turns = [turn for k in asked if (turn := self._turn(plain, k, tools)) is not None]
        return turns

    def _plain_turns(self, plain: list[Message], asked: list[int]) -> list[_Turn] | None:
        """What `_turn` gives of each, with the whole rendered once; None where that would not be sure (skeleton.py)."""
        skeletons = self._template.skeletons
        if (rendered := skeletons.whole(plain[: asked[-1] + 1])) is None:
            return None
        turns: list[_Turn] = []
        for k in asked:
            before = skeletons.opening(plain, k, generation=True)
            whole = rendered if k == asked[-1] else skeletons.opening(plain, k + 1, generation=False)
            if before is None or whole is None or not whole.startswith(before):
                return None
            if self._is_said(before, whole[len(before) :]):
                turns.append(_Turn(k, before, whole))
        return turns

    def text(self, ids: Sequence[int]) -> str:
        """Decoded text without special tokens."""
        return self._template.tokenizer.decode(list(ids), skip_special_tokens=True)

    def only_reasons(self, prompt: Sequence[int], answer: Sequence[int]) -> bool:
        """Whether an answer that ended by itself holds reasoning and nothing else."""
        tokenizer = self._template.tokenizer
        before, said = (tokenizer.decode(list(ids)) for ids in (prompt[-16:], answer))
        rest = beyond_thought(before, said)
        for token in self._control if rest != said else ():
            rest = rest.replace(token, "")
        return rest != said and rest.strip() in ("", "assistant")

    def _as_requested(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> tuple[list[Message], list[dict[str, Any]]]:
        """Messages and tools as a server's request handler hands them to the template."""
        knows = self._template.knows
        strange = sorted({m["role"] for m in messages if m["content"]} - knows.roles)
        if strange:
            raise RowFault(f"template drops {strange[0]} messages")
        plain = [with_one_name(m) for m in messages]
        if self._policy.think_tags == "split" and knows.reasoning:
            plain = [split_thought(m) for m in plain]
        asks = any(m.get("tool_calls") for m in plain)
        if (tools and not knows.tools) or (asks and not knows.calls):
            if self._policy.unknown_tools == "reject":
                raise RowFault("template knows no tools")
            plain = _tools_as_text(plain, () if knows.tools else tools, knows.calls)
        return plain, [_wrapped(t) for t in tools] if knows.tools else []

    def _turn(self, plain: list[Message], k: int, tools: list[dict[str, Any]]) -> _Turn | None:
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
        return _Turn(k, before, before + answer) if self._is_said(before, answer) else None

    def _is_said(self, before: str, answer: str) -> bool:
        """Whether a target would say an answer so.

        Raises:
            RowFault: it closes a reasoning block that nobody opened.
        """
        demand_whole_thoughts(before, answer)
        return not (self._policy.empty_reasoning == "skip" and says_nothing_first(before, answer))

    def _tell_why(
        self, plain: list[Message], k: int, before: str, tools: list[dict[str, Any]], thoughtless: str | None
    ) -> NoReturn:
        """Raises RowFault when the answer could follow without its reasoning, else DataError."""
        if thoughtless is not None and thought_of(plain[k]):
            raise RowFault("template drops the answer's reasoning", f"turn {k}: the server's prompt leaves no room")
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
        if not whole.startswith(before):
            return self._marked_answer([*history, turn], tools, before, whole)
        answer, thought = whole[len(before) :], thought_of(turn)
        if not thought or self._template.text([*history, without_thought(turn)], tools, generation=False) != whole:
            return answer
        if self._policy.dropped_reasoning == "restore" and opens_thought(before) and answer.lstrip().startswith(CLOSE):
            return thought + answer  # the generation prompt opened the block, and the template closed it unfilled
        raise RowFault("template drops the answer's reasoning", f"turn {len(history)}: {thought[:40]!r}")

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

    def _row(self, run: Sequence[_Turn], ids: list[int], added: int) -> GivenRow:
        """One row: the last turn's text, with every turn of the run supervised. `ids`: of that text."""
        template, text = self._template, run[-1].whole
        array = np.frombuffer(array_of("i", ids), np.int32)
        placed = template.added.placed(text, array) if template.added.exact else None
        encoded: Encoded | None = None
        mask = bytearray(len(ids))
        end = 0
        for turn, following in zip(run, [*run[1:], None], strict=True):
            start = placed.boundary(turn.before, template.ids_after) if placed else None
            stop = len(ids) if following is None else placed.behind(len(turn.whole.rstrip())) if placed else None
            if start is None or stop is None:
                encoded = encoded or template.encode(text)
                start = template.boundary(encoded, turn.before)
                stop = len(ids) if following is None else encoded.tokens_before(len(turn.whole.rstrip()))
            if start is None:
                raise RowFault(
                    "answer melts into its header", f"turn {turn.index}: {turn.whole[len(turn.before) :][:20]!r}"
                )
            end = self._end_of_answer(ids, start, stop)
            mask[start:end] = b"\1" * (end - start)
        return GivenRow(array[:end], bytes(mask[:end]), run[-1].index + 1 - added)

    def _end_of_answer(self, ids: Sequence[int], start: int, stop: int) -> int:
        """End of the answer in start..stop: after its end-of-turn token. What the template writes behind it (a newline in
        ChatML) no model generates."""
        return next((i + 1 for i in range(stop - 1, start - 1, -1) if ids[i] in self.end_ids), stop)


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


def _end_ids(folder: Path, tokenizer: Any) -> frozenset[int]:
    """Ids that end a turn: the tokenizer's EOS and what config.json and generation_config.json name."""
    ids = {tokenizer.eos_token_id}
    for name in ("config.json", "generation_config.json"):
        if (folder / name).exists():
            named = json.loads((folder / name).read_text()).get("eos_token_id")
            ids.update(named if isinstance(named, list) else [named])
    return frozenset(i for i in ids if i is not None)
