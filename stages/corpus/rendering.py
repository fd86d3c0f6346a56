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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.contracts.errors import DataError
from stages.corpus.by_word import Ids
from stages.corpus.items import Message, RowFault
from stages.corpus.reasoning import beyond_thought
from stages.corpus.template import Encoded, Template
from stages.corpus.turns import Plan, Turn, Turns, texts_of

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

    ids: Ids
    mask: bytes
    messages: int

    @property
    def prompt_tokens(self) -> int:
        """Tokens before the first supervised one."""
        return self.mask.index(1) if 1 in self.mask else len(self.mask)


class Renderer:
    """Renders for one target, by the policies of prepare.rendering."""

    def __init__(self, folder: Path, rendering: Rendering) -> None:
        """Load the target's tokenizer and template.

        Raises:
            DataError: no chat template.
            ParamsError: the template writes today's date and prepare.rendering.date is not set.
        """
        date = datetime.date.fromisoformat(rendering.date) if rendering.date else None
        self._template = Template(
            folder, rendering.template_arguments, date, words_once=rendering.tokenise == "by_word"
        )
        tokenizer = self._template.tokenizer
        self.end_ids = _end_ids(folder, tokenizer)
        self._turns = Turns(self._template, rendering, self.end_ids)
        self.bos_id: int | None = tokenizer.bos_token_id
        self._control = self._template.special
        self._suspect = re.compile("|".join(sorted({re.escape(token[:2]) for token in self._control})) or r"(?!)")

    def check_text(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> None:
        """Look for the text of special tokens in what users, systems and tools say, names and ids included: as ids it
        would end a turn or open one. What answers say is seen where they are rendered (turns.py).

        Raises:
            RowFault: with the token found; or tools are nested too deeply.
        """
        said = [text for m in messages if m["role"] != "assistant" for text in texts_of(m)]
        if tools:
            try:
                said.append(json.dumps(list(tools), ensure_ascii=False))
            except RecursionError as error:
                raise RowFault("nested too deeply", str(error)) from error
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

    @cached_property
    def header(self) -> str:
        """What the template writes in front of an answer; empty where it writes nothing that would be known for it."""
        user = [{"role": "user", "content": "hi"}]
        with contextlib.suppress(RowFault):
            asked, said = (self._template.text(user, (), generation=g) for g in (True, False))
            return asked.removeprefix(said) if asked.startswith(said) else ""
        return ""

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
        plain, offered = self._turns.as_requested(messages, tools)
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
        self,
        conversations: Sequence[tuple[Sequence[Message], Sequence[dict[str, Any]]]],
        where: Callable[[int], str] = "conversation {}".format,
    ) -> list[list[GivenRow] | RowFault]:
        """What `given` gives or raises of each, tokenised together. `where`: what an error calls a conversation.

        Raises:
            DataError: a mask cannot be derived from the template.
        """
        planned: list[Plan | RowFault] = []
        for i, (messages, tools) in enumerate(conversations):
            try:
                planned.append(self._turns.plan(messages, tools))
            except DataError as error:
                place = f"{where(i)}, {error.where}"
                raise DataError(error.what, where=place, expected=error.expected, got=error.got, do=error.do) from error
        texts = [run[-1].whole for plan in planned if isinstance(plan, Plan) for run in plan.runs]
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
    ) -> list[Ids | RowFault]:
        """What `prompt` gives or raises of each, tokenised together."""
        texts: list[str | RowFault] = []
        for messages, tools in conversations:
            try:
                plain, offered = self._turns.as_requested(messages, tools)
                texts.append(self._template.text(plain, offered, generation=True))
            except RowFault as fault:
                texts.append(fault)
        ids = iter(self._template.encode_many([t for t in texts if isinstance(t, str)]))
        return [next(ids) if isinstance(t, str) else t for t in texts]

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

    def _row(self, run: Sequence[Turn], ids: Ids, added: int) -> GivenRow:
        """One row: the last turn's text, with every turn of the run supervised. `ids`: of that text."""
        template, text = self._template, run[-1].whole
        placed = template.added.placed(text, ids) if template.added.exact else None
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
        return GivenRow(ids[:end], bytes(mask[:end]), run[-1].index + 1 - added)

    def _end_of_answer(self, ids: Ids, start: int, stop: int) -> int:
        """End of the answer in start..stop: after its end-of-turn token. What the template writes behind it (a newline in
        ChatML) no model generates."""
        return next((i + 1 for i in range(stop - 1, start - 1, -1) if ids[i] in self.end_ids), stop)


def _end_ids(folder: Path, tokenizer: Any) -> frozenset[int]:
    """Ids that end a turn: the tokenizer's EOS and what config.json and generation_config.json name."""
    ids = {tokenizer.eos_token_id}
    for name in ("config.json", "generation_config.json"):
        if (folder / name).exists():
            named = json.loads((folder / name).read_text()).get("eos_token_id")
            ids.update(named if isinstance(named, list) else [named])
    return frozenset(i for i in ids if i is not None)
