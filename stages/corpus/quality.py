"""What makes a row unfit: answers that loop, prompts seen before, training prompts that give a held-out prompt away."""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from stages.corpus.items import Message

_WORD = re.compile(r"\w+")
_WORDS = 8  # n of the word n-grams; 8 words in common are seldom chance
SHARED = 0.8  # share of a held-out prompt's n-grams within one training prompt that counts as the same text


def repeats_itself(ids: Sequence[int], *, min_loop_tokens: int = 24, min_distinct: float = 0.5) -> bool:
    """Whether an answer loops.

    Policy: an answer is repetitive when (a) it ends with one block of tokens three times or more, over at least
    `min_loop_tokens` tokens, a last partial block allowed; or (b) of its 4-grams, if there are 40 or more, fewer than
    `min_distinct` are distinct, which catches loops with a counter in them. The first sees a loop that runs into the
    token cap, the second one that the model left again. Pass the ids without the end-of-turn token.
    """
    for period in range(1, len(ids) // 3 + 1):
        matched = 0
        while matched < len(ids) - period and ids[-1 - matched] == ids[-1 - matched - period]:
            matched += 1
        looped = matched + period
        if looped >= 3 * period and looped >= min_loop_tokens:
            return True
    grams = [tuple(ids[i : i + 4]) for i in range(len(ids) - 3)]
    return len(grams) >= 40 and len(set(grams)) < min_distinct * len(grams)


def has_supervised_pair(mask: Sequence[int]) -> bool:
    """Whether two neighbouring tokens are supervised: a draft learns from pairs (input token, next token) in an answer."""
    return any(a and b for a, b in itertools.pairwise(mask))


def prompt_text(messages: Iterable[Message]) -> str:
    """What the user says before the first answer, `normalised`. System text is left out: many prompts share it."""
    said: list[str] = []
    for message in messages:
        if message.get("role") == "assistant":
            break
        if message.get("role") == "user":
            said.append(str(message.get("content") or ""))
    return normalised("\n".join(said))


def prompt_text_of_json(messages: str) -> str:
    """`prompt_text` of the `messages` column of a prepared row."""
    return prompt_text(json.loads(messages))


def normalised(text: str) -> str:
    """Words alone: case, whitespace and punctuation put aside."""
    return " ".join(_WORD.findall(text.casefold()))


@dataclass(frozen=True)
class Overlap:
    """The training prompt nearest to a held-out prompt, and the share of the held-out prompt's n-grams found in it."""

    train: str
    share: float


def prompt_overlap(held_out: Mapping[str, str], train: Mapping[str, str]) -> dict[str, Overlap]:
    """For each held-out prompt, the training prompt that shares most of its text.

    Args:
        held_out, train: texts (`prompt_text`) by any id.

    Returns:
        by held-out id; ids that share nothing are absent. The share is over word 8-grams of the held-out prompt; prompts
        of fewer than 8 words count as a whole. 1.0 for equal texts; `SHARED` and above counts as the same text.
    """
    best: dict[str, Overlap] = {}
    for train_id, held_id, share in shared_text(held_out, train):
        if held_id not in best or share > best[held_id].share:
            best[held_id] = Overlap(train_id, share)
    return best


def shared_text(held_out: Mapping[str, str], train: Mapping[str, str]) -> Iterable[tuple[str, str, float]]:
    """(training id, held-out id, share) of every pair that shares an n-gram."""
    owners: dict[str, list[str]] = defaultdict(list)
    sizes: dict[str, int] = {}
    for held_id, text in held_out.items():
        grams = _grams(text)
        sizes[held_id] = len(grams)
        for gram in grams:
            owners[gram].append(held_id)
    for train_id, text in train.items():
        found: dict[str, int] = defaultdict(int)
        for gram in _grams(text):
            for held_id in owners.get(gram, ()):
                found[held_id] += 1
        for held_id, count in found.items():
            yield train_id, held_id, count / sizes[held_id]


def _grams(text: str) -> set[str]:
    words = text.split()
    if len(words) <= _WORDS:
        return {" ".join(words)}
    return {" ".join(words[i : i + _WORDS]) for i in range(len(words) - _WORDS + 1)}
