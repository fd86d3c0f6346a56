"""What a source gives: a conversation, or a reason why one cannot be read. Nothing is skipped in silence."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

Message = dict[str, Any]


@dataclass(frozen=True)
class Item:
    """One conversation. `item` is the source's own id or line; `tools` are function schemas, where the source has them."""

    item: str
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()

    def asked(self) -> Item:
        """The conversation without the answer that ends it, whose place a regenerated one takes; all of it where a question
        or a tool's result waits for an answer."""
        ends = bool(self.messages) and self.messages[-1]["role"] == "assistant"
        return replace(self, messages=self.messages[:-1]) if ends else self


@dataclass(frozen=True)
class Reject:
    """One thing read and not kept. `reason` is one of a few phrases that are counted; `detail` is for a person."""

    item: str
    reason: str
    detail: str = ""
    prompt_id: str = ""


class RowFault(Exception):
    """Raised inside corpus for a fault of one row; the caller turns it into a Reject."""

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason, self.detail = reason, detail
        super().__init__(f"{reason}: {detail}")

    def __reduce__(self) -> tuple[type[RowFault], tuple[str, str]]:
        return type(self), (self.reason, self.detail)


def seeded_order(seed: int, content: str) -> bytes:
    """Sort key of a seeded shuffle by content: an added item moves no other, so that a limit takes a stable subset."""
    return hashlib.sha256(f"{seed}\0{content}".encode()).digest()
