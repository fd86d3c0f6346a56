"""Speculative decoding replayed on stored rows: no target pass, the same counts as the server.

A greedy server's output is the stored answer whatever is drafted, so a walk over it needs only the draft's proposals.
Those are computed for all roots at once, fed the row's true tokens; a chain in the server is fed its own, which are the
same as long as all before were accepted, and what comes after a rejection is thrown away.

    prompt … t[P-1] | t[P] from prefill | t[P+1] …        first root P-1, whose input token is t[P]
    a verification from root r with a tokens accepted emits a + 1 tokens and moves to root r + a + 1
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from stages.acceptance.lengths import Answer


def answer_of(input_ids: Sequence[int], loss_mask: Sequence[int], prompt_tokens: int) -> list[int]:
    """The row's first answer: the supervised run that starts behind the prompt (its end-of-turn token included)."""
    end = prompt_tokens
    while end < len(loss_mask) and loss_mask[end]:
        end += 1
    return list(input_ids[prompt_tokens:end])


def replay(answer: Sequence[int], drafted: Sequence[Sequence[int]], max_new_tokens: int | None = None) -> Answer:
    """Walk `answer` as the server would.

    Args:
        answer: the row's answer tokens t[P], t[P+1], …
        drafted: row j has the target ids drafted from root P-1+j, that is after answer[j] was fed: proposals for
            answer[j+1], answer[j+2], …; at least len(answer)-1 rows, any ids where the answer has ended.
        max_new_tokens: cut the answer there first, as the server's own limit does.

    Returns:
        Tokens emitted and, of every verification, the drafted tokens kept: those in front of the first that differs,
        none behind the answer's end.
    """
    end = len(answer) if max_new_tokens is None else min(len(answer), max_new_tokens)
    emitted, accepted = min(1, end), []
    while emitted < end:
        kept = 0
        for i, token in enumerate(drafted[emitted - 1]):
            if emitted + i >= end or token != answer[emitted + i]:
                break
            kept += 1
        accepted.append(kept)
        emitted = min(end, emitted + kept + 1)
    return Answer(end, tuple(accepted))


def replay_rows(
    input_ids: Sequence[int],
    loss_mask: Sequence[int],
    lengths: Sequence[int],
    prompt_tokens: Sequence[int],
    roots: Sequence[int],
    drafted: Sequence[Sequence[int]],
    max_new_tokens: int | None = None,
) -> list[Answer]:
    """Replay the first answer of every row of a packed batch.

    Args:
        input_ids, loss_mask: of all rows, laid end to end; `lengths` says where each ends.
        prompt_tokens: of every row.
        roots: places in the batch from which tokens were drafted, ascending: at least all p with p+1 and p+2 supervised.
        drafted: target ids drafted from each root.
    """
    answers, start = [], 0
    for length, prompt in zip(lengths, prompt_tokens, strict=True):
        part = slice(start, start + length)
        answer = answer_of(input_ids[part], loss_mask[part], prompt)
        first = bisect.bisect_left(roots, start + prompt - 1)
        answers.append(replay(answer, drafted[first : first + max(0, len(answer) - 1)], max_new_tokens))
        start += length
    return answers
