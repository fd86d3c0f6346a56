"""What makes a row unfit to learn from: answers that loop, answers too short; and what a prompt says."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from stages.corpus.grams import words_of
from stages.corpus.items import Message

_FACTOR = np.int64(0x9E3779B97F4A7C15 - 2**64)


def repeats_itself(
    ids: Sequence[int] | npt.NDArray[np.int32], *, min_loop_tokens: int = 24, min_distinct: float = 0.5
) -> bool:
    """Whether an answer loops.

    Policy: an answer is repetitive when (a) it ends with one block of tokens three times or more, over at least
    `min_loop_tokens` tokens, a last partial block allowed; or (b) of its 4-grams, if there are 40 or more, fewer than
    `min_distinct` are distinct, which catches loops with a counter in them. The first sees a loop that runs into the
    token cap, the second one that the model left again. Pass the ids without the end-of-turn token.
    """
    array = np.asarray(ids, np.int64)
    last = len(array) - 1
    # a loop of this period has the last token a period earlier too; most periods fall here
    for period in (np.flatnonzero(array[last - len(array) // 3 : last][::-1] == array[-1:]) + 1).tolist():
        matched = 0
        while matched < len(ids) - period and ids[last - matched] == ids[last - matched - period]:
            matched += 1
        looped = matched + period
        if looped >= 3 * period and looped >= min_loop_tokens:
            return True
    count = len(ids) - 3
    exact = array.tolist()
    if count < 40 or len(set(exact)) - 3 >= min_distinct * count:
        return False  # of 4-grams, at least as many are distinct as of tokens, less the last three
    folded = ((array[:-3] * _FACTOR + array[1:-2]) * _FACTOR + array[2:-1]) * _FACTOR + array[3:]
    folded.sort()
    if np.count_nonzero(folded[1:] != folded[:-1]) + 1 >= min_distinct * count:
        return False  # distinct numbers are of distinct 4-grams; the reverse is counted
    return len(set(zip(exact, exact[1:], exact[2:], exact[3:], strict=False))) < min_distinct * count


def has_supervised_pair(mask: Sequence[int]) -> bool:
    """Whether two neighbouring tokens of a mask of 0 and 1 are supervised: a draft learns from pairs (input token, next
    token) in an answer."""
    return b"\1\1" in bytes(mask)


def prompt_words(messages: Iterable[Message]) -> list[str]:
    """The words that the user says before the first answer. System text is left out: many prompts share it."""
    said: list[str] = []
    for message in messages:
        if message.get("role") == "assistant":
            break
        if message.get("role") == "user":
            said.append(str(message.get("content") or ""))
    return words_of("\n".join(said))


def later_words(messages: Iterable[Message]) -> list[list[str]]:
    """The words of each text that the user says after the first answer."""
    after = itertools.dropwhile(lambda m: m.get("role") != "assistant", messages)
    return [words_of(str(m.get("content") or "")) for m in after if m.get("role") == "user"]


def system_words(messages: Iterable[Message]) -> list[list[str]]:
    """The words of each text that tells the model how to behave."""
    return [words_of(str(m.get("content") or "")) for m in messages if m.get("role") in ("system", "developer")]
