"""Where in a text's tokens an opening part of it ends, told by the added tokens in both: no offsets are needed.

Added tokens (`<|im_start|>`) cut text before anything else of a tokenizer sees it, so the n-th of them in the text is the
n-th among the ids, and between two of them byte-level ids spell their bytes: ids that open as those of a text's opening
part do, spell that part. Where a tokenizer trims, changes or normalises text this does not hold, and Encoded's offsets are
asked instead.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]


class AddedTokens:
    """The added tokens of a tokenizer: `ids` by text, and a `pattern` that finds them. `exact` tells whether ids can be placed
    by them alone."""

    def __init__(self, backend: Any, added: Mapping[int, Any]) -> None:
        self.ids = {str(token): number for number, token in added.items()}
        bare = not any(t.lstrip or t.rstrip or t.single_word or t.normalized for t in added.values())
        self.exact = bool(self.ids) and bare and _is_byte_level(backend)
        self.pattern = pattern_of(self.ids)
        self._known = np.zeros(max(self.ids.values(), default=-1) + 2, bool)  # the last slot stands for all higher ids
        self._known[list(self.ids.values())] = True

    def placed(self, text: str, ids: Ids) -> Placed | None:
        """The added tokens of `text` and of its `ids`, i32 [tokens]; None when the two are not the same, one by one."""
        found = [(m.end(), self.ids[m.group()]) for m in self.pattern.finditer(text)]
        at = np.flatnonzero(self._known[np.minimum(ids, len(self._known) - 1)])
        if ids[at].tolist() != [number for _, number in found]:
            return None
        return Placed(ids, [end for end, _ in found], at.tolist())


class Placed:
    """The ids of a text, where its added tokens end in the text and where they stand among the ids."""

    def __init__(self, ids: Ids, ends: list[int], at: list[int]) -> None:
        self._ids, self._ends, self._at = ids, ends, at

    def boundary(self, before: str, ids_after: Callable[[int, str], Sequence[int]]) -> int | None:
        """How many ids are those of `before`, which the text opens with; None when the ids there are not its own alone.

        Args:
            ids_after: an added token's id and a text behind it, to that text's ids.
        """
        count = bisect_right(self._ends, len(before))
        if not count:
            return None
        start = self._at[count - 1]
        alone = ids_after(int(self._ids[start]), before[self._ends[count - 1] :])
        stop = start + 1 + len(alone)
        return stop if self._ids[start + 1 : stop].tolist() == list(alone) else None

    def behind(self, end: int) -> int | None:
        """How many ids stand before character `end` where an added token ends there; None where none does."""
        count = bisect_right(self._ends, end)
        return self._at[count - 1] + 1 if count and self._ends[count - 1] == end else None


def pattern_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Finds the longest of some texts."""
    longest = sorted(texts, key=len, reverse=True)
    common = _opening(longest)  # the search for a plain prefix is many times as fast as one for a choice
    rests = "|".join(re.escape(t[len(common) :]) for t in longest)
    return re.compile(f"{re.escape(common)}(?:{rests})")


def _opening(texts: Sequence[str]) -> str:
    """What all texts open with."""
    first, last = min(texts, default=""), max(texts, default="")
    return first[
        : next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    ]


def _is_byte_level(backend: Any) -> bool:
    """Whether a tokenizer's tokens spell the bytes of the text, all of them and no others."""
    told = json.loads(backend.to_str())
    cut = told.get("pre_tokenizer") or {}
    parts = cut.get("pretokenizers", [cut])
    levels = [p for p in parts if p.get("type") == "ByteLevel"]
    kept = all(
        p.get("type") in ("ByteLevel", "Digits") or (p.get("type") == "Split" and p.get("behavior") != "Removed")
        for p in parts
    )
    prefixed = any(p.get("add_prefix_space") for p in levels)
    return told.get("normalizer") is None and bool(levels) and kept and not prefixed
