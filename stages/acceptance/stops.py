"""Stop conditions set where speculation has most to get wrong: on a drafted token, with accepted ones behind it.

answer      t0 | t1 t2 t3 | t4 | t5 t6      bars between passes of the target: t1 t2 were drafted and accepted
stop at t1: the pass that brings it brings t2 and t3 too, which must not be in the answer
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stages.contracts.evidence import StoppedAnswers

_STRING = 4  # characters of a stop string


@dataclass(frozen=True)
class Stop:
    """A condition for one prompt, and how the answer must end: `ids` with a token, `text` with a string (itself cut off).

    `accepted` are the passes of the answer without a condition, of which a stopped answer has the first ones.
    """

    prompt_id: str
    token: int | None = None
    string: str = ""
    ids: tuple[int, ...] = ()
    text: str = ""
    inside_a_draft: bool = False
    accepted: tuple[int, ...] = ()


@dataclass(frozen=True)
class Ended:
    """An answer, as far as its end goes."""

    ids: tuple[int, ...]
    text: str
    finish: str
    accepted: tuple[int, ...]


def stop_at_token(prompt_id: str, ids: Sequence[int], accepted: Sequence[int]) -> Stop | None:
    """A token of the answer that comes there for the first time, if possible the first of the longest accepted draft.

    Args:
        ids: the answer without a condition; accepted: of each pass, the drafted tokens kept. None for an answer of one token.
    """
    starts, at = [], 1
    for kept in accepted:
        starts.append((kept, at))
        at += kept + 1
    drafted = [(kept, place) for kept, place in starts if kept and place < len(ids)]
    fresh = [(kept, place) for kept, place in drafted if ids[place] not in ids[:place]]
    others = [(0, place) for place in range(1, len(ids)) if ids[place] not in ids[:place]]
    if not fresh and not others:
        return None
    kept, place = max(fresh, key=lambda pair: pair[0]) if fresh else others[len(others) // 2]
    passes = tuple(accepted)
    return Stop(prompt_id, token=ids[place], ids=tuple(ids[: place + 1]), inside_a_draft=kept > 0, accepted=passes)


def stop_at_string(prompt_id: str, text: str, accepted: Sequence[int]) -> Stop | None:
    """Some characters from within the answer that stand there for the first time; None when there are none."""
    for place in range(max(1, len(text) // 3), len(text) - _STRING + 1):
        string = text[place : place + _STRING]
        if text.find(string) == place and "\ufffd" not in text:
            return Stop(prompt_id, string=string, text=text[:place], accepted=tuple(accepted))
    return None


def accepted_until(accepted: Sequence[int], tokens: int) -> tuple[int, ...]:
    """Of the passes of a longer answer, those of its first `tokens` tokens; what the last accepted behind them does not count."""
    found: list[int] = []
    left = tokens - 1  # the first comes from the prompt's pass
    for kept in accepted:
        if left <= 0:
            break
        found.append(min(kept, left))
        left -= kept + 1
    return tuple(found)


def count_stops(stops: Sequence[Stop], plain: Sequence[Ended], drafted: Sequence[Ended]) -> tuple[StoppedAnswers, ...]:
    """How many answers ended as they must, by kind of condition; a drafted one must also be counted right."""
    found: list[StoppedAnswers] = []
    for condition in ("token", "string"):
        kind = [i for i, s in enumerate(stops) if (s.token is None) == (condition == "string")]
        wrong = [i for i in kind if not _right(stops[i], drafted[i]) or not _same(stops[i], plain[i], drafted[i])]
        if kind:
            found.append(
                StoppedAnswers(
                    condition=condition,
                    requests=len(kind),
                    plain_right=sum(_right(stops[i], plain[i]) for i in kind),
                    drafted_right=len(kind) - len(wrong),
                    inside_a_draft=sum(stops[i].inside_a_draft for i in kind),
                    differing_prompt_ids=tuple(stops[i].prompt_id for i in wrong),
                )
            )
    return tuple(found)


def _right(stop: Stop, end: Ended) -> bool:
    if end.finish != "stop":
        return False
    return end.ids == stop.ids if stop.token is not None else end.text == stop.text


def _same(stop: Stop, plain: Ended, drafted: Ended) -> bool:
    """Equal tokens, and passes that are the first ones of the answer without a condition (a server's events may lose their order)."""
    counted = accepted_until(stop.accepted, len(drafted.ids))
    return plain.ids == drafted.ids and sorted(drafted.accepted) == sorted(counted)
