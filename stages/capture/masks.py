"""Loss masks from nothing but tokens: what stands between the assistant's header and its end-of-turn token.

    <|im_start|> user \\n 2 + 2 <|im_end|> \\n <|im_start|> assistant \\n 4 <|im_end|> \\n
    0            0    0  0 0 0 0          0  0            0         0  1 (1)        0

Tools differ in whether the end-of-turn token is supervised, hence one rule for each way; `choose_rule` takes the one that
the stored masks follow. Text that a user wrote can only be taken for a header when it was tokenised as control tokens, and
then the model itself reads it as one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stages.capture.findings import RowLike
from stages.contracts.errors import DataError

Masks = Callable[[Tensor], Tensor]
Message = dict[str, str]


@dataclass(frozen=True)
class MaskRule:
    """opening: ids of the assistant's header; closing: ids that end a turn; kept: how many of these are supervised."""

    opening: tuple[int, ...]
    closing: tuple[int, ...]
    kept: int

    def __call__(self, ids: Tensor) -> Tensor:
        """The loss mask u8 [L] of token ids [L]; an answer that was cut off is supervised to its last token."""
        tokens = ids.tolist()
        mask = torch.zeros(len(tokens), dtype=torch.uint8)
        at = _find(tokens, self.opening, 0)
        while at is not None:
            start = at + len(self.opening)
            end = _find(tokens, self.closing, start)
            mask[start : len(tokens) if end is None else end + self.kept] = 1
            at = None if end is None else _find(tokens, self.opening, end)
        return mask


def _find(tokens: list[int], wanted: tuple[int, ...], start: int) -> int | None:
    width = len(wanted)
    return next((i for i in range(start, len(tokens) - width + 1) if tuple(tokens[i : i + width]) == wanted), None)


def rules_of(render: Callable[[Sequence[Message], bool], Sequence[int]]) -> tuple[MaskRule, ...]:
    """The rules that a chat template allows: end-of-turn token supervised, not supervised.

    Args:
        render: ids of messages, with the generation prompt behind them when its second argument is true.

    Raises:
        DataError: the template does not show where an answer begins and ends. There is no guess in its place.
    """
    user = {"role": "user", "content": "a"}
    before = list(render([user], False))
    told, other = (list(render([user, {"role": "assistant", "content": c}], False)) for c in ("b", "c"))
    head = _common(told, other)
    tail = _common(told[::-1], other[::-1])
    opening, closing = told[len(before) : head], told[len(told) - tail :]
    if told[: len(before)] != before or not opening or not closing or head + tail >= len(told):
        raise DataError(
            "The loss mask cannot be recomputed from this chat template",
            where="the target's chat template",
            expected="an assistant's turn that adds a header, the answer and an end to what stood before",
            got=f"ids {told[len(before) :]} behind {before[-4:]}",
            do="compare masks with those of the tool that made the rows; none is made up",
        )
    return tuple(MaskRule(tuple(opening), (closing[0],), kept) for kept in (1, 0))


def _common(one: list[int], other: list[int]) -> int:
    """How many leading entries two lists share."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def template_rules(folder: Path) -> tuple[MaskRule, ...]:
    """`rules_of` the chat template in a target's folder.

    Raises:
        DataError: no template, or one that does not show where an answer begins and ends.
    """
    from transformers import PreTrainedTokenizerFast

    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    if not tokenizer.chat_template:
        raise DataError(
            "The target has no chat template, so no loss mask can be recomputed",
            where=str(folder),
            expected="chat_template in tokenizer_config.json, or chat_template.jinja",
            do="fetch the target again",
        )
    return rules_of(lambda m, prompt: tokenizer.apply_chat_template(m, add_generation_prompt=prompt, return_dict=False))


def choose_rule(rows: Iterable[RowLike], rules: Sequence[MaskRule]) -> MaskRule:
    """The rule whose masks are found most often among the stored ones, in whichever row they stand: they may be permuted."""
    looked = [(row.input_ids, row.loss_mask) for row in rows if row.loss_mask is not None]
    stored = {tuple(mask.tolist()) for _, mask in looked}
    return max(rules, key=lambda rule: sum(tuple(rule(ids).tolist()) in stored for ids, _ in looked))
