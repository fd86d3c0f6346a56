"""What a chat template writes around the contents of plain messages, so that a conversation is rendered once.

Without this, a mask costs two renderings an assistant turn, each of all turns before it. A skeleton is the template's own
rendering of a sequence of roles with a mark in each content's place. It stands for the template only where that is seen
to hold: the conversation is also rendered as it is, and must be what its skeleton gives; and its contents hold none of the
strings that the template compares, searches or splits with, so that no opening part of it is treated otherwise than the
whole. Anything else is rendered turn by turn.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache

from stages.corpus.items import Message, RowFault

Text = Callable[[Sequence[Message], bool], str]
_MARK = re.compile("\ue000(\\d+)\ue001")
_PLAIN = {"role", "content"}


class Skeletons:
    """Skeletons of one template, made as roles come up."""

    def __init__(self, source: str, text: Text) -> None:
        """`source`: of the template. `text`: messages, and whether a generation prompt follows, to the rendered text."""
        self._text = text
        self._asked = _asked_of_texts(source)
        self._pieces = lru_cache(maxsize=4096)(self._rendered)

    def fit(self, messages: Sequence[Message]) -> bool:
        """Whether skeletons give of `messages`, and so of every opening part of them, what the template writes."""
        if self._asked is None or not all(m.keys() == _PLAIN and self._is_plain(m["content"]) for m in messages):
            return False
        return self.opening(messages, len(messages), generation=False) == self._text(messages, False)

    def opening(self, messages: Sequence[Message], count: int, *, generation: bool) -> str | None:
        """The first `count` messages as rendered; None when the template does not write each content once, in order."""
        pieces = self._pieces(tuple(m["role"] for m in messages[:count]), generation)
        if pieces is None:
            return None
        parts = [pieces[0]]
        for message, piece in zip(messages[:count], pieces[1:], strict=True):
            parts += (message["content"], piece)
        return "".join(parts)

    def _is_plain(self, content: str) -> bool:
        assert self._asked is not None
        return (
            content != "" and not content[0].isspace() and not content[-1].isspace() and not self._asked.search(content)
        )

    def _rendered(self, roles: tuple[str, ...], generation: bool) -> tuple[str, ...] | None:
        marked = [{"role": role, "content": f"\ue000{i}\ue001"} for i, role in enumerate(roles)]
        try:
            parts = _MARK.split(self._text(marked, generation))
        except RowFault:
            return None
        return tuple(parts[::2]) if parts[1::2] == [str(i) for i in range(len(roles))] else None


def _asked_of_texts(source: str) -> re.Pattern[str] | None:
    """A pattern of the strings that a template compares, searches, splits or tests with, or hands to a filter or function;
    None when it cannot be read."""
    from jinja2 import Environment, TemplateSyntaxError, nodes

    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_without_markers(source))
    except TemplateSyntaxError:
        return None
    asking = (nodes.Compare, nodes.Call, nodes.Filter, nodes.Test, nodes.Getitem)
    found = {c.value for n in tree.find_all(asking) for c in n.find_all(nodes.Const) if isinstance(c.value, str)}
    found -= {"", "role", "content", *(c for c in found if c.isspace())}
    # white space is trimmed or split off at ends, where plain contents have none; the marks are this file's own
    return re.compile("|".join(re.escape(s) for s in sorted({*found, "\ue000", "\ue001"}, key=len, reverse=True)))


def _without_markers(source: str) -> str:
    """The template without `generation` blocks' tags, which plain Jinja does not know."""
    return re.sub(r"\{%-?\s*(?:end)?generation\s*-?%\}", "", source)
