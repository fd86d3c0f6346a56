"""gate-training's tables of the draft vocabulary: ids, size, special tokens, coverage."""

from __future__ import annotations

from stages.contracts.params import Params
from stages.gates._judge import Expectation, Table, among, at_most, between, same, unique
from stages.gates._training_evidence import MERGE, Evidence


def vocabulary(evidence: Evidence, params: Params) -> Table:
    import pandas as pd

    ids = evidence.target_ids
    rows = pd.DataFrame({"draft_id": range(len(ids)), "target_id": ids, "in_t2d": [i in evidence.in_t2d for i in ids]})
    return Table("vocabulary", rows, "draft_id", _vocabulary_expectations(params))


def _vocabulary_expectations(params: Params) -> tuple[Expectation, ...]:
    return (
        between(
            "target_id",
            0,
            params.target.vocab_size - 1,
            says="every draft id leads to a target id",
            why="d2t holds offsets: target id = draft id + d2t[draft id]; read as ids it leads out of the vocabulary",
            do=MERGE,
        ),
        unique(
            "target_id",
            says="no two draft ids mean the same token",
            why="its probability would be split between them",
            do=MERGE,
        ),
        among(
            "in_t2d",
            [True],
            says="t2d marks every token that d2t leads to",
            why="training looks at t2d and serving at d2t; where they differ the draft says another token",
            do=MERGE,
        ),
    )


def sizes(evidence: Evidence, params: Params) -> Table:
    import pandas as pd

    asked = params.merge.draft_vocab_size
    rows = pd.DataFrame(
        [
            {"item": "draft ids", "expected": asked, "found": len(evidence.target_ids)},
            {"item": "ids marked in t2d", "expected": asked, "found": len(evidence.in_t2d)},
            {
                "item": "draft_vocab_size in the manifest",
                "expected": asked,
                "found": evidence.manifest.draft_vocab_size,
            },
        ]
    )
    check = same(
        "found",
        "expected",
        says="the draft vocabulary has merge.draft_vocab_size tokens",
        why="the head's rows are counted by it",
        do=MERGE,
    )
    return Table("vocabulary size", rows, "item", (check,))


def always(evidence: Evidence) -> Table:
    import pandas as pd

    there = frozenset(evidence.target_ids)
    rows = pd.DataFrame(
        [{"token": f"{name} ({i})", "in_draft_vocabulary": i in there} for name, i in sorted(evidence.always.items())],
        columns=["token", "in_draft_vocabulary"],
    )
    check = among(
        "in_draft_vocabulary",
        [True],
        says="the draft can say the end of a turn and every special token",
        why="without them each answer's end is a rejected guess, in every answer",
        do=MERGE + "; special tokens are always in",
    )
    return Table("special tokens", rows, "token", (check,))


def coverage(evidence: Evidence) -> Table:
    return Table("coverage", evidence.coverage, "set", _coverage_expectations())


def _coverage_expectations() -> tuple[Expectation, ...]:
    return (
        at_most(
            "least",
            "found",
            says="the draft vocabulary covers what the target says",
            why="a token outside it can never be guessed; uncovered tokens bound accept length",
            do="raise merge.draft_vocab_size, then " + MERGE,
            tell="words",
        ),
        same(
            "recorded",
            "found",
            says="coverage is what the manifest says",
            why="the manifest's figure is what people compare runs by",
            do=MERGE,
        ),
    )
