"""The chat template of a target's folder, applied as a server applies it: messages and tools to text, text to ids.

Servers (SGLang, vLLM) hand transformers' `apply_chat_template` the request's messages, its tools in OpenAI's wrapping and
the request's template arguments, and tokenise what comes out without adding special tokens. So does this file. What a
template has words for is found by rendering a probe, never by reading its source: templates that mention a thing and
do not write it, or the reverse, are common.
"""

from __future__ import annotations

import contextlib
import datetime
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from stages.contracts.errors import DataError, ParamsError
from stages.corpus.by_word import ByWord, Ids, by_word, encode_whole
from stages.corpus.items import Message, RowFault
from stages.corpus.marks import AddedTokens
from stages.corpus.reasoning import CLOSE, OPEN
from stages.corpus.skeleton import CALLED, Skeletons

_CLOCK = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1")
_PROBE = "qzxprobe"  # a word that no template writes by itself
_FEW = 512  # texts that are tokenised whole, before it is worth seeing whether words may be
_NO_DATE = "the template asks for today's date"
_USER = {"role": "user", "content": "hi"}


@dataclass(frozen=True)
class Knows:
    """What a template writes when it is given it. roles: of messages whose content it writes; only_first: those of them
    that it passes over in silence but for a conversation's first message."""

    tools: bool
    calls: bool
    reasoning: bool
    roles: frozenset[str]
    only_first: frozenset[str]


@dataclass(frozen=True)
class Encoded:
    """Token ids of a text and where they stand in it."""

    ids: list[int]
    encoding: Any

    def span(self, token: int) -> tuple[int, int]:
        """First character of a token, and the one behind its last."""
        return self.encoding.token_to_chars(token)

    def tokens_before(self, at: int) -> int:
        """How many tokens start before character `at`. Characters that no token claims (trimmed spaces) are stepped over."""
        token = self.encoding.char_to_token(at)
        if token is not None:
            return token if self.span(token)[0] >= at else token + 1
        return next((i for i, (start, _) in enumerate(self.encoding.offsets) if start >= at), len(self.ids))


class Template:
    """The tokenizer and chat template of a target's folder."""

    def __init__(
        self, folder: Path, arguments: Mapping[str, Any], date: datetime.date | None, *, words_once: bool = True
    ) -> None:
        """Load tokenizer.json, tokenizer_config.json and, where there is one, chat_template.jinja.

        Args:
            arguments: what the server's requests give the template beside messages and tools (`chat_template_kwargs`).
            date: what a template that writes today's date is to write.
            words_once: tokenise many texts word by word (by_word.py), where the tokenizer allows it.

        Raises:
            DataError: no chat template.
            ParamsError: the template writes today's date and no date is set.
        """
        from transformers import PreTrainedTokenizerFast

        self.tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
        if not self.tokenizer.chat_template:
            raise DataError(
                "The target has no chat template",
                where=str(folder),
                expected="chat_template in tokenizer_config.json, or chat_template.jinja",
                do="fetch the target again; a template guessed here would differ from the server's",
            )
        self._folder, self._arguments, self._date, self._words_once = folder, dict(arguments), date, words_once
        self._backend, self._bos = self.tokenizer.backend_tokenizer, self.tokenizer.bos_token_id
        self._encoded = 0  # texts of encode_many so far
        self._backend.no_padding()  # a server asks for neither
        self._backend.no_truncation()
        self._added = {i: str(token) for i, token in self.tokenizer.added_tokens_decoder.items()}
        self.added = AddedTokens(self._backend, self.tokenizer.added_tokens_decoder)
        special = {str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.special}
        self.special = sorted({*special, *filter(None, self.tokenizer.all_special_tokens)})
        self._dated = lru_cache(maxsize=8)(self._at_date)
        self.ids_after = lru_cache(maxsize=1024)(self._encode_after)
        self._demand_date()
        self.skeletons = Skeletons(
            self._dated(self._source(())),
            lambda messages, generation: self.text(messages, (), generation=generation),
            {**self.tokenizer.special_tokens_map, **self._arguments},
        )

    def text(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, generation: bool) -> str:
        """The rendered conversation; with `generation`, up to where the target goes on.

        Raises:
            RowFault: the template refuses the conversation.
        """
        return self._apply(messages, tools, tokenize=False, add_generation_prompt=generation)

    def marked(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> tuple[tuple[int, ...], list[int]]:
        """Ids of a conversation, and 1 for those that the template's own generation marker encloses.

        Raises:
            RowFault: the template refuses the conversation.
        """
        how = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        told = self._apply(messages, tools, **how)
        return tuple(told["input_ids"]), list(told["assistant_masks"])

    def has_marker(self, tools: Sequence[dict[str, Any]]) -> bool:
        """Whether the template has `{% generation %}` blocks."""
        return re.search(r"\{%-?\s*generation\s*-?%\}", self._source(tools)) is not None

    def encode(self, text: str) -> Encoded:
        """Rendered text as tokens; no special tokens are added.

        Raises:
            DataError: it opens with two beginning-of-sequence tokens.
        """
        encoding = self._backend.encode(text, add_special_tokens=False)
        self._demand_one_bos(encoding.ids[:2])
        return Encoded(encoding.ids, encoding)

    def encode_many(self, texts: Sequence[str]) -> list[Ids]:
        """Ids alone of many rendered texts, i32 [tokens], those that `encode` gives of each.

        Raises:
            DataError: one opens with two beginning-of-sequence tokens.
        """
        self._encoded += len(texts)
        words = self._by_word if self._encoded > _FEW else None
        made = words.encode(texts) if words else encode_whole(self._backend, texts)
        for ids in made:
            self._demand_one_bos(ids[:2].tolist())
        return made

    @cached_property
    def _by_word(self) -> ByWord | None:
        added = self.added
        return by_word(self._backend, added.ids, added.pattern) if self._words_once and added.exact else None

    def _demand_one_bos(self, opening: list[int]) -> None:
        if self._bos is not None and opening == [self._bos, self._bos]:
            raise DataError(
                "A rendered conversation starts with two BOS tokens",
                where="the target's chat template",
                expected="one: the template writes it, the tokenizer adds none",
                got=f"ids {opening}",
                do="mend the template of the target",
            )

    def boundary(self, encoded: Encoded, before: str) -> int | None:
        """How many tokens of `encoded` are those of its opening text `before` alone; None when the two part elsewhere.

        Only the text behind the last added token is tokenised again: added tokens cut text, so nothing before them can
        depend on what comes after.
        """
        ids = encoded.ids
        count = encoded.tokens_before(len(before))
        last = next((i for i in range(count - 1, -1, -1) if ids[i] in self._added), None)
        if last is None:
            alone = self._backend.encode(before, add_special_tokens=False).ids
            return count if alone == ids[:count] else None
        tail = before[encoded.span(last)[1] :]
        return count if self.ids_after(ids[last], tail) == ids[last + 1 : count] else None

    @cached_property
    def knows(self) -> Knows:
        """What the template has words for."""
        function = {"name": _PROBE, "description": "d", "parameters": {"type": "object", "properties": {}}}
        call = {
            "id": "functions.f:0",
            "type": "function",
            "function": {"name": "f", "arguments": {_PROBE: 1}},
        }
        asked = {"role": "assistant", "content": "", "tool_calls": [call]}
        thought = {"role": "assistant", "content": "yes", "reasoning_content": _PROBE}
        answered = {"role": "tool", "content": _PROBE, "tool_call_id": "functions.f:0", "name": "f"}
        plain = {**call, "function": {"name": "f", "arguments": {"a": 1}}}
        roles = {r for r in ("system", "developer") if self._writes([{"role": r, "content": _PROBE}, _USER])}
        roles |= {"user", "assistant"}
        if self._writes([_USER, {**asked, "tool_calls": [plain]}, answered]) or self._writes([_USER, answered]):
            roles.add("tool")
        return Knows(
            tools=self._writes([_USER], [{"type": "function", "function": function}]),
            calls=self._writes([_USER, asked]),
            reasoning=self._writes([_USER, thought]) or self._writes([_USER, {**thought, "tool_calls": [plain]}]),
            roles=frozenset(roles),
            only_first=frozenset(r for r in roles & {"system", "developer"} if self._passes_over_late(r)),
        )

    def turn_tokens(self, end_ids: Iterable[int]) -> frozenset[str]:
        """The special tokens that open and end turns: what the template writes around plain messages, and `end_ids`. Tags
        of reasoning are an answer's own, and so are the tokens of tool calls."""
        yes, system = {"role": "assistant", "content": "yes"}, {"role": "system", "content": "Zero."}
        result = {"role": "tool", "content": "2", "tool_call_id": "functions.f:0", "name": "f"}
        found = {self._added[i] for i in end_ids if i in self._added}
        for messages in ([_USER], [_USER, yes, _USER, yes], [system, _USER, yes], [_USER, result]):
            with contextlib.suppress(RowFault):  # a template without a role says so in this way
                text = self.text(messages, (), generation=messages[-1] is not yes)
                found.update(token for token in self.special if token in text)
        return frozenset(found - {OPEN, CLOSE})

    def _writes(self, messages: list[Message], tools: Sequence[dict[str, Any]] = ()) -> bool:
        try:
            return _PROBE in self.text(messages, tools, generation=False)
        except RowFault:
            return False

    def _passes_over_late(self, role: str) -> bool:
        late = [_USER, {"role": "assistant", "content": "yes"}, {"role": role, "content": _PROBE}, _USER]
        try:
            return _PROBE not in self.text(late, (), generation=False)
        except RowFault:  # rows that have one are rejected in the template's own words
            return False

    def _apply(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], **how: Any) -> Any:
        from jinja2.exceptions import TemplateError

        told = {"chat_template": self._dated(self._source(tools)), **self._arguments, "return_dict": False, **how}
        try:
            return self.tokenizer.apply_chat_template(list(messages), tools=list(tools) or None, **told)
        except (TemplateError, TypeError, RecursionError) as error:
            raise RowFault("template refuses", str(error)) from error
        except CALLED as error:
            raise RowFault("template refuses", f"{type(error).__name__}: {error}") from error

    def _source(self, tools: Sequence[dict[str, Any]]) -> str:
        return str(self.tokenizer.get_chat_template(None, list(tools) or None))

    def _at_date(self, source: str) -> str:
        """The template with its clock replaced by a macro that says the date set: rows must not change from day to day."""
        if "strftime_now" not in source:
            return source
        formats = sorted({match[1] for match in _CLOCK.findall(source)}) if self._date else []
        said = {f: self._date.strftime(f) for f in formats} if self._date else {}
        macro = f"{{{{ {said!r}[format] if format in {said!r} else raise_exception({_NO_DATE!r}) }}}}"
        return f"{{% macro strftime_now(format) %}}{macro}{{% endmacro +%}}{source}"

    def _demand_date(self) -> None:
        try:
            self.text([_USER], (), generation=True)
        except RowFault as fault:
            if _NO_DATE in fault.detail:
                raise ParamsError(
                    "The target's chat template writes today's date",
                    where="params.yaml: prepare.rendering.date",
                    expected="a date, so that rows are the same tomorrow",
                    got="null"
                    if self._date is None
                    else f"{self._date}, in a format that cannot be read off the template",
                    do="set it (2026-01-31), best to a day on which the draft will serve",
                ) from fault

    def _encode_after(self, added: int, tail: str) -> list[int]:
        return self._backend.encode(self._added[added] + tail, add_special_tokens=False).ids[1:]
