"""What a chat template writes around the contents of plain messages, so that a conversation is rendered once.

Without this, a mask costs two renderings an assistant turn, each of all turns before it. A skeleton is the template's own
rendering of a sequence of roles with a mark in each content's place. It stands for the template only where that is seen
to hold: the conversation is also rendered as it is, and must be what its skeleton gives; and its contents hold none of the
strings that the template compares, searches or splits with, so that no opening part of it is treated otherwise than the
whole. Anything else is rendered turn by turn.

A skeleton comes from the whole way through transformers, which copies messages and costs as much again as the template;
conversations are held against it by the template alone, in a sandbox of its own, after that gave the same skeleton.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from stages.corpus.items import Message, RowFault

Text = Callable[[Sequence[Message], bool], str]
_MARK = re.compile("\ue000(\\d+)\ue001")
_PLAIN = {"role", "content"}
# What a template may end in besides jinja's own: the errors of whatever it calls on a text.
CALLED = (ArithmeticError, AttributeError, LookupError, RuntimeError, StopIteration, TypeError, ValueError)


class Skeletons:
    """Skeletons of one template, made as roles come up."""

    def __init__(self, source: str, text: Text, variables: Mapping[str, Any]) -> None:
        """`source`: of the template. `text`: messages, and whether a generation prompt follows, to the text that servers
        give. `variables`: what the template sees beside them."""
        self._text, self._variables = text, {"tools": None, "documents": None, **variables}
        self._alone, self._asked = _compiled(source)
        self._pieces = lru_cache(maxsize=4096)(self._rendered)

    def whole(self, messages: Sequence[Message]) -> str | None:
        """`messages` as rendered, where skeletons give of them, and so of every opening part, what the template writes."""
        if self._asked is None or not all(m.keys() == _PLAIN and self._is_plain(m["content"]) for m in messages):
            return None
        whole = self.opening(messages, len(messages), generation=False)
        return None if whole is None or whole != self._own_text(messages, False) else whole

    def _own_text(self, messages: Sequence[Message], generation: bool) -> str | None:
        from jinja2.exceptions import TemplateError

        assert self._alone is not None
        try:
            return self._alone.render(messages=messages, add_generation_prompt=generation, **self._variables)
        except (TemplateError, *CALLED):  # the rendering turn by turn tells it
            return None

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
            text = self._text(marked, generation)
        except RowFault:
            return None
        if text != self._own_text(marked, generation):
            return None
        parts = _MARK.split(text)
        return tuple(parts[::2]) if parts[1::2] == [str(i) for i in range(len(roles))] else None


def _compiled(source: str) -> tuple[Any, re.Pattern[str] | None]:
    """A template to render, and a pattern of the strings that it compares, searches, splits or tests with, or hands to a
    filter or function; None for both when it cannot be read."""
    from jinja2 import TemplateSyntaxError, nodes
    from jinja2.exceptions import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    room = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    room.globals["raise_exception"] = raise_exception
    try:
        tree = room.parse(_without_markers(source))
        alone = room.from_string(_without_markers(source))
        alone.globals = dict(alone.globals)  # each rendering copies it, a plain dict faster than a ChainMap
    except TemplateSyntaxError:
        return None, None
    asking = (nodes.Compare, nodes.Call, nodes.Filter, nodes.Test, nodes.Getitem)
    found = {c.value for n in tree.find_all(asking) for c in n.find_all(nodes.Const) if isinstance(c.value, str)}
    found -= {"", "role", "content", *(c for c in found if c.isspace())}
    # white space is trimmed or split off at ends, where plain contents have none; the marks are this file's own
    words = sorted({*found, "\ue000", "\ue001"}, key=len, reverse=True)
    return alone, re.compile("|".join(re.escape(s) for s in words))


def _without_markers(source: str) -> str:
    """The template without `generation` blocks' tags, which plain Jinja does not know."""
    return re.sub(r"\{%-?\s*(?:end)?generation\s*-?%\}", "", source)
