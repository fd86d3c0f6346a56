"""What an inert module answers when it is asked for a function: one that says, when it is called, that it is not there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def answer_for(module: str) -> Callable[[str], Callable[..., Any]]:
    """A module's `__getattr__`: imports succeed, calls do not."""

    def look_up(name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def absent(*args: Any, **how: Any) -> Any:
            raise NotImplementedError(f"{module}.{name}: images are not part of SGLang on this CPU")

        return absent

    return look_up
