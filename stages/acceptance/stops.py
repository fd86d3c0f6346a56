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
    """A condition for one prompt, and how the answer must end: `ids` with a token, `text` with a string (itself cut off)."""

    prompt_id: str
    token: int | None = None
    string: str = ""
    ids: tuple[int, ...] = ()
    text: str = ""
    inside_a_draft: bool = False


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
    return Stop(prompt_id, token=ids[place], ids=tuple(ids[: place + 1]), inside_a_draft=kept > 0)


def stop_at_string(prompt_id: str, text: str) -> Stop | None:
    """Some characters from within the answer that stand there for the first time; None when there are none."""
    for place in range(max(1, len(text) // 3), len(text) - _STRING + 1):
        string = text[place : place + _STRING]
        if text.find(string) == place and "\ufffd" not in text:
            return Stop(prompt_id, string=string, text=text[:place])
    return None


def count_stops(
    stops: Sequence[Stop],
    plain: Sequence[tuple[tuple[int, ...], str, str]],
    drafted: Sequence[tuple[tuple[int, ...], str, str]],
) -> tuple[StoppedAnswers, ...]:
    """How many answers ended as they must, by kind of condition; answers are (ids, text, how they finished)."""
    found: list[StoppedAnswers] = []
    for condition in ("token", "string"):
        kind = [i for i, s in enumerate(stops) if (s.token is None) == (condition == "string")]
        right = {
            i: (_right(stops[i], *plain[i]), _right(stops[i], *drafted[i]) and plain[i][0] == drafted[i][0])
            for i in kind
        }
        if kind:
            found.append(
                StoppedAnswers(
                    condition=condition,
                    requests=len(kind),
                    plain_right=sum(p for p, _ in right.values()),
                    drafted_right=sum(d for _, d in right.values()),
                    inside_a_draft=sum(stops[i].inside_a_draft for i in kind),
                    differing_prompt_ids=tuple(stops[i].prompt_id for i, (_, d) in right.items() if not d),
                )
            )
    return tuple(found)


def _right(stop: Stop, ids: tuple[int, ...], text: str, finish: str) -> bool:
    if finish != "stop":
        return False
    return ids == stop.ids if stop.token is not None else text == stop.text
