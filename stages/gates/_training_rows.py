"""gate-training's table rows: each once, its own ids and mask, and states that hold something."""

from __future__ import annotations

from stages.gates._judge import Expectation, Table, among, same
from stages.gates._training_evidence import EXTRACT, MERGE, Evidence


def rows(evidence: Evidence) -> Table:
    return Table("rows", evidence.rows, "row_id", _row_expectations())


def _row_expectations() -> tuple[Expectation, ...]:
    def once(column: str, says: str, do: str) -> Expectation:
        why = "a missing row is never learned from, a doubled one counts double"
        return among(column, [1], says=says, why=why, do=do)

    def yes(column: str, says: str, why: str, do: str) -> Expectation:
        return among(column, [True], says=says, why=why, do=do)

    return (
        once("times_prepared", "every captured row is a prepared row, once", "run `dvc repro prepare`, then extract"),
        once("times_captured", "every prepared row was captured, once", EXTRACT),
        once("times_indexed", "every prepared row is in the index, once", MERGE),
        yes(
            "index_finds_it",
            "the index leads to the row that it names",
            "an offset off by one row trains each row on its neighbour's states",
            MERGE,
        ),
        yes("split_equal", "the index keeps the row's split", "a held-out row trained on is leakage", MERGE),
        same(
            "stored_tokens",
            "tokens",
            says="a row's states are as many as its tokens",
            why="a row cut at the model's length limit loses its last token in some engines",
            do=EXTRACT,
        ),
        yes(
            "ids_equal",
            "stored token ids are the prepared ones",
            "an engine that reorders a batch hands back another request's states; the ids show it",
            EXTRACT,
        ),
        yes("mask_equal", "the stored loss mask is the prepared one", "supervision moves to other tokens", EXTRACT),
        among(
            "not_finite",
            [0],
            says="states are finite",
            why="one NaN ends in every weight; infinity is an overflow at capture",
            do="capture in float32 or bfloat16, not float16, then " + EXTRACT,
        ),
        among(
            "constant_slots",
            [0],
            says="no slot holds one state for all tokens",
            why="a buffer that was never refilled looks like states and says nothing",
            do="remove the row's folder, then " + EXTRACT,
        ),
        among(
            "equal_slots",
            [0],
            says="no slot of a row repeats another",
            why="an engine that was given a layer twice hands it back twice, and the draft sees two points instead of three",
            do="compare capture.points with the ids that the capturing engine was given, then " + EXTRACT,
        ),
        among(
            "copy_of",
            ["none"],
            says="no two rows of other tokens have the same states",
            why="states depend on every token before them; the same ones under other tokens are another request's",
            do="remove the row's folder, then " + EXTRACT,
        ),
        among(
            "zero_states",
            [0],
            says="no token has a state of zeros",
            why="zeros are memory that nothing was written to",
            do="remove the row's folder, then " + EXTRACT,
        ),
    )
