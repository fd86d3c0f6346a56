"""Conversations to token ids with the target's own chat template, and loss masks over what the target itself would say.

The template writes the special tokens and the tokenizer adds none, so a row has exactly one BOS. A mask is never found by
searching text: the conversation is rendered twice for every assistant turn, once up to the generation prompt and once with
the turn, and what the second has beyond the first is the answer.

    render(messages[:k], generation prompt)   <|im_start|>user … <|im_start|>assistant\\n
    render(messages[:k+1])                    <|im_start|>user … <|im_start|>assistant\\n 4 2 <|im_end|> \\n
    mask                                      0 …                                         1 1 1
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.contracts.errors import DataError
from stages.corpus.items import Message, RowFault
from stages.corpus.tools import calls_text, tools_message


@dataclass(frozen=True)
class Rendered:
    """Token ids of a conversation and its loss mask, equally long."""

    ids: tuple[int, ...]
    mask: tuple[int, ...]

    @property
    def prompt_tokens(self) -> int:
        """Tokens before the first supervised one."""
        return self.mask.index(1) if 1 in self.mask else len(self.mask)


class Renderer:
    """The tokenizer and chat template of a target's folder."""

    def __init__(self, folder: Path) -> None:
        """Load tokenizer.json, tokenizer_config.json and, where there is one, chat_template.jinja.

        Raises:
            DataError: no chat template.
        """
        from transformers import PreTrainedTokenizerFast

        self._tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
        template = self._tokenizer.chat_template
        if not template:
            raise DataError(
                "The target has no chat template",
                where=str(folder),
                expected="chat_template in tokenizer_config.json, or chat_template.jinja",
                do="fetch the target again; a template guessed here would differ from the server's",
            )
        self._knows_tools = "tool" in str(template)
        self.end_ids = _end_ids(folder, self._tokenizer)
        self._control = [token for token in self._tokenizer.all_special_tokens if token]

    def check_text(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> None:
        """Look for the text of special tokens in what users, systems and tools say: as ids it would end a turn or open one.

        Raises:
            RowFault: with the token found.
        """
        said = [m["content"] for m in messages if m["role"] != "assistant"]
        said.append(json.dumps(list(tools), ensure_ascii=False))
        for token in self._control:
            if any(token in text for text in said):
                raise RowFault("holds control tokens", token)

    def prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> tuple[int, ...]:
        """Ids of a conversation that ends with the generation prompt.

        Raises:
            RowFault: the template refuses the conversation.
        """
        return self._ids(self._plain(messages, tools), tools, generation=True)

    def given(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> Rendered:
        """Ids up to the last assistant turn's end, and a mask over every assistant turn, its end-of-turn token included.

        Raises:
            RowFault: the template refuses the conversation, or an answer's first characters melt into the header's token.
            DataError: the template rewrites what came before, so that a mask cannot be derived.
        """
        plain = self._plain(messages, tools)
        spans: list[tuple[int, int]] = []
        ids: tuple[int, ...] = ()
        for k, message in enumerate(plain):
            if message["role"] != "assistant":
                continue
            before = self._ids(plain[:k], tools, generation=True)
            after = self._ids(plain[: k + 1], tools, generation=False)
            if after[: len(before)] != before or before[: len(ids)] != ids:
                self._tell_why(plain, k, tools)
            ids = after[: self._end_of_answer(after, len(before))]
            spans.append((len(before), len(ids)))
        mask = [0] * len(ids)
        for start, end in spans:
            mask[start:end] = [1] * (end - start)
        return Rendered(ids, tuple(mask))

    def text(self, ids: Sequence[int]) -> str:
        """Decoded text without special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def _plain(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[Message]:
        """Tools and tool calls as text where the template has no word for them: they must not vanish."""
        if self._knows_tools:
            return list(messages)
        plain: list[Message] = []
        for message in messages:
            calls = message.get("tool_calls")
            parts = [message["content"], calls_text(calls)] if calls else [message["content"]]
            plain.append({"role": message["role"], "content": "\n".join(p for p in parts if p)})
        if tools and plain and plain[0]["role"] == "system":
            plain[0] = {"role": "system", "content": f"{plain[0]['content']}\n{tools_message(tools)}"}
        elif tools:
            plain.insert(0, {"role": "system", "content": tools_message(tools)})
        return plain

    def _apply(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], **how: Any) -> Any:
        from jinja2.exceptions import TemplateError

        offered = list(tools) if tools and self._knows_tools else None
        try:
            return self._tokenizer.apply_chat_template(list(messages), tools=offered, return_dict=False, **how)
        except (TemplateError, TypeError) as error:
            raise RowFault("template refuses", str(error)) from error

    def _ids(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, generation: bool
    ) -> tuple[int, ...]:
        ids = tuple(self._apply(messages, tools, tokenize=True, add_generation_prompt=generation))
        bos = self._tokenizer.bos_token_id
        if bos is not None and ids[:2] == (bos, bos):
            raise DataError(
                "A rendered conversation starts with two BOS tokens",
                where="the target's chat template",
                expected="one: the template writes it, the tokenizer adds none",
                got=f"ids {list(ids[:4])}",
                do="mend the template of the target",
            )
        return ids

    def _end_of_answer(self, ids: tuple[int, ...], start: int) -> int:
        """End of the answer that starts at `start`: after its end-of-turn token. What the template writes behind it
        (a newline in ChatML) no model generates."""
        last = max((i for i in range(start, len(ids)) if ids[i] in self.end_ids), default=len(ids) - 1)
        return last + 1

    def _tell_why(self, messages: list[Message], k: int, tools: Sequence[dict[str, Any]]) -> None:
        before = self._apply(messages[:k], tools, tokenize=False, add_generation_prompt=True)
        after = self._apply(messages[: k + 1], tools, tokenize=False, add_generation_prompt=False)
        if after.startswith(before):
            raise RowFault("answer melts into its header", f"turn {k}: {messages[k]['content'][:20]!r}")
        raise DataError(
            "The loss mask cannot be derived from this chat template",
            where=f"assistant turn {k}",
            expected="the rendered conversation up to this turn is a prefix of the one with it",
            got=f"{after[:80]!r} against {before[:80]!r}",
            do="regenerate these answers (`answers: regenerate`): their tokens are known without the template",
        )


def _end_ids(folder: Path, tokenizer: Any) -> frozenset[int]:
    """Ids that end a turn: the tokenizer's EOS and what config.json and generation_config.json name."""
    ids = {tokenizer.eos_token_id}
    for name in ("config.json", "generation_config.json"):
        if (folder / name).exists():
            named = json.loads((folder / name).read_text()).get("eos_token_id")
            ids.update(named if isinstance(named, list) else [named])
    return frozenset(i for i in ids if i is not None)
