"""The order and content of a conversation's turns."""

from __future__ import annotations

import itertools

from stages.corpus.items import Message, RowFault

_ROLES = {"system", "developer", "user", "assistant", "tool"}


def check_turns(messages: tuple[Message, ...], *, answered: bool) -> None:
    """Look at the order and content of a conversation's turns.

    Args:
        answered: the row needs an assistant turn to learn from; else only a prompt.

    Raises:
        RowFault: with a reason for each kind of fault.
    """
    turns = [m for m in messages if m.get("role") not in ("system", "developer")]
    for message in messages:
        role = message.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise RowFault("unknown role", repr(role)[:80])
        if not isinstance(message.get("content"), str):
            raise RowFault("content is not text", f"{message['role']}: {type(message.get('content')).__name__}")
    if not turns:
        raise RowFault("no user turn")
    if turns[0]["role"] != "user":
        raise RowFault(f"starts with {turns[0]['role']}")
    if answered and not any(m["role"] == "assistant" for m in turns):
        raise RowFault("no assistant turn")
    for before, message in itertools.pairwise(turns):
        if before["role"] == message["role"] != "tool":
            raise RowFault(f"{message['role']} after {before['role']}")
        if message["role"] == "assistant" and not message.get("tool_calls"):
            if message["content"] == "":
                raise RowFault("empty assistant turn")
            if not message["content"].strip():
                raise RowFault("blank assistant turn")
