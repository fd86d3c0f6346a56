"""gate-training: stored states and the draft vocabulary, before a training run is spent on them.

Width and dtype are the same at every layer, so shape proves nothing about *which* layer a slot holds: the slots table
compares stored values with the target run again, and the last table does the same for the final norm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from stages.contracts.manifest import HIDDEN_STATES, MERGED, WORK, CaptureSpec, MergedManifest, renewal
from stages.contracts.params import Params
from stages.contracts.points import name_points
from stages.gates._judge import Expectation, Table, among, at_most, between, same, unique

if TYPE_CHECKING:
    from pandas import DataFrame

EXTRACT = "run `dvc repro extract`; whole folders come from the work cache, only what changed is computed"
MERGE = "run `dvc repro merge`"
# Nats a token of a row. On SmolLM2 bfloat16 storage moves it by 6e-5 over many tokens and one token of random text by up
# to 0.036; a second norm moves it by 196.
_MAX_LIKELIHOOD_GAP = 0.05
_FAR = 1e6  # a margin over a distance of zero; any number above every threshold


@dataclass(frozen=True)
class Evidence:
    """What the gate looks at, as plain values.

    Args:
        manifest: data/merged/manifest.json.
        folders: folder, source, start, end, recorded_digest, found_digest, recorded_config, found_config,
            capture (digest of the folder's capture spec), rows_stored, tokens, tokens_stored, slots, width, dtype,
            fault (`none`, or why the folder cannot be opened).
        rows: row_id, times_prepared, times_captured, times_indexed, ids_equal, mask_equal, tokens, stored_tokens,
            not_finite, zero_states, constant_slots, index_finds_it, split_equal.
        slots: folder, slot, claimed_point, nearest_point, claimed_distance, next_best_distance, tokens; for each folder
            the auxiliary slots first, in order, then the last state with claimed point n.
        unprobed: folders of which no row was compared.
        last: distance_folder with before_distance and after_distance, likelihood_folder with before_nll, after_nll and
            target_nll: of the rows that disagree most; argmax_agreement and tokens over all rows.
        target_ids: target id of each draft id.
        in_t2d: ids for which t2d is true.
        always: name and target id of tokens that the draft has to be able to say.
        coverage: set, recorded, found, least.
        chain: item, expected, found.
    """

    manifest: MergedManifest
    folders: DataFrame
    rows: DataFrame
    slots: DataFrame
    unprobed: int
    last: dict[str, Any]
    target_ids: tuple[int, ...]
    in_t2d: frozenset[int]
    always: dict[str, int]
    coverage: DataFrame
    chain: DataFrame


def capture_anew(capture: CaptureSpec) -> str:
    """What makes states anew: the work cache would serve the same ones for as long as they stand there."""
    return f"`rm -r {WORK / capture.key} {HIDDEN_STATES}`, and run `dvc repro extract`"


def tables(evidence: Evidence, params: Params) -> list[Table]:
    """Tables identity, folders, rows, slots, last state, vocabulary, special tokens, coverage."""
    return [
        _chain(evidence.chain),
        _folders(evidence, params),
        Table("rows", evidence.rows, "row_id", _row_expectations()),
        _slots(evidence, params),
        _last(evidence, params),
        _vocabulary(evidence, params),
        _sizes(evidence, params),
        _always(evidence),
        Table("coverage", evidence.coverage, "set", _coverage_expectations()),
    ]


def _chain(chain: DataFrame) -> Table:
    check = same(
        "found",
        "expected",
        says="rows, states and vocabulary belong together and to this target",
        why="states of other weights or of rows since changed pair a token with another token's state",
        do="run `dvc repro merge`; it brings prepare, extract and merge into step. For a file of data/merged: "
        + renewal(MERGED / "FILE", "merge"),
    )
    return Table("identity", chain, "item", (check,))


def _folders(evidence: Evidence, params: Params) -> Table:
    rows = evidence.folders.copy()
    spec = evidence.manifest.capture
    rows["capture_of_the_set"] = spec.digest()
    rows["rows"] = rows["end"] - rows["start"]
    rows["end_of_the_folder_before"] = rows["end"].shift(1, fill_value=0)
    slots = len(params.capture.points) + 1
    return Table("folders", rows, "folder", _folder_expectations(slots, params.target.hidden_size, spec.stored_dtype))


def _folder_expectations(slots: int, width: int, dtype: str) -> tuple[Expectation, ...]:
    return (
        unique("folder", says="no folder twice", why="its rows would be trained on twice", do=MERGE),
        among(
            "fault",
            ["none"],
            says="the folder opens as its config says",
            why="a file cut short or replaced has no rows that anyone could train on",
            do="remove the folder, then " + EXTRACT,
        ),
        same(
            "found_digest",
            "recorded_digest",
            says="rows.safetensors holds the bytes that were written",
            why="one flipped bit in a state is a wrong value that no shape check sees",
            do="remove the folder, then " + EXTRACT,
        ),
        same(
            "found_config",
            "recorded_config",
            says="data_config.json of the folder is the one that was written",
            why="it says which points and weights the states are of",
            do="remove the folder, then " + EXTRACT,
        ),
        same(
            "start",
            "end_of_the_folder_before",
            says="folders follow one another without gap or overlap",
            why="a gap is rows never trained on, an overlap rows trained on twice",
            do=EXTRACT,
        ),
        same(
            "rows_stored",
            "rows",
            says="a folder holds as many rows as its name says",
            why="rows behind a short one would be read at the wrong place",
            do="remove the folder, then " + EXTRACT,
        ),
        same(
            "tokens_stored",
            "tokens",
            says="a folder holds as many tokens as recorded",
            why="rows behind a short one would be read at the wrong place",
            do="remove the folder, then " + EXTRACT,
        ),
        same(
            "capture",
            "capture_of_the_set",
            says="every folder was captured at the same points, from the same weights",
            why="a draft fed two meanings of one slot learns neither",
            do="remove the folder, then " + EXTRACT,
        ),
        among(
            "slots",
            [slots],
            says="each token has its auxiliary states and the last one",
            why="a slot less, and `last` silently reads an auxiliary state",
            do="check capture.points, then " + EXTRACT,
        ),
        among(
            "width",
            [width],
            says="a state is as wide as the target's hidden size",
            why="another width is another model",
            do="check target.hidden_size, then " + EXTRACT,
        ),
        among(
            "dtype",
            [dtype],
            says="states are stored in bfloat16",
            why="another dtype in one folder breaks training at a random late step",
            do="remove the folder, then " + EXTRACT,
        ),
    )


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
            "zero_states",
            [0],
            says="no token has a state of zeros",
            why="zeros are memory that nothing was written to",
            do="remove the row's folder, then " + EXTRACT,
        ),
    )


def _slots(evidence: Evidence, params: Params) -> Table:
    rows, layers = evidence.slots.copy(), params.target.layers
    together = {str(name): _together(part, layers) for name, part in rows.groupby("folder", sort=False)}
    asked = [*params.capture.points, layers]
    rows["claimed_by_params"] = [asked[i] if i < len(asked) else -1 for i in rows.groupby("folder").cumcount()]
    rows["margin"] = [_margin(n, c) for n, c in zip(rows["next_best_distance"], rows["claimed_distance"], strict=True)]
    words: list[str] = []
    for row in rows.to_dict("records"):
        near = f"claims point {row['claimed_point']}, nearest is point {row['nearest_point']}"
        words.append(near if row["claimed_point"] == layers else f"{near} ({together[row['folder']]})")
    rows["words"] = words
    checks = _slot_expectations(evidence, params)
    if evidence.unprobed:  # said whether the check passes or not
        total = len(evidence.manifest.folders)
        told = f"; {evidence.unprobed} of {total} folders, chosen by a hash, went unprobed"
        checks = tuple(replace(c, expected=c.expected + told) if c.tell else c for c in checks)
    return Table("slots", rows, "slot", checks)


def _together(slots: DataFrame, layers: int) -> str:
    """How the points that a folder's auxiliary slots hold relate to those claimed."""
    aux = slots[slots["claimed_point"] < layers]
    found, claimed = (tuple(int(p) for p in aux[c]) for c in ("nearest_point", "claimed_point"))
    return name_points(found, claimed, layers)


def _margin(next_best: float, claimed: float) -> float:
    """How many times nearer the claimed point is than any other; none for a state that is not finite."""
    if math.isinf(claimed):
        return 0.0
    return min(next_best / claimed, _FAR) if claimed > 0 else _FAR


def _slot_expectations(evidence: Evidence, params: Params) -> tuple[Expectation, ...]:
    gate, fresh = params.gates.training, capture_anew(evidence.manifest.capture)
    again = "compare capture.points with the ids that the capturing engine was given, then " + fresh
    return (
        same(
            "claimed_point",
            "claimed_by_params",
            says="the points claimed are capture.points and the last state",
            why="points that were changed after capture are not the points that were captured",
            do=again,
        ),
        same(
            "nearest_point",
            "claimed_point",
            says="of all the target's points, the nearest is the claimed one",
            why="a draft fed another layer than it was trained on keeps its shape and loses its acceptance",
            do=again,
            tell="words",
        ),
        between(
            "claimed_distance",
            high=gate.max_state_distance,
            says="states agree with the target run again at the claimed point",
            why="bfloat16 storage alone measures 0.0016; more is other weights, another precision or another row",
            do="check that the target and its dtype are those of the capture, then " + again,
        ),
        between(
            "margin",
            gate.min_margin,
            says="the claimed point is nearer than every other by a margin",
            why="without a margin, nearest is chance",
            do=again,
        ),
    )


def _last(evidence: Evidence, params: Params) -> Table:
    import pandas as pd

    line: dict[str, Any] = {"state": "last state", **evidence.last}
    line["norm_words"] = f"{line['distance_folder']}: " + (
        "before the final norm"
        if line["before_distance"] < line["after_distance"]
        else "after the final norm: normed states are stored where the stream before the norm belongs"
    )
    line["likelihood_gap"] = abs(line["before_nll"] - line["target_nll"])
    line["likelihood_words"] = (
        f"{line['likelihood_folder']}: {line['before_nll']:.3f} nats a token from the stored state, {line['target_nll']:.3f} from the target run again; "
        f"{line['after_nll']:.3f} when it is taken for already normed"
    )
    fresh = capture_anew(evidence.manifest.capture)
    checks = (
        at_most(
            "before_distance",
            "after_distance",
            says="the last state was taken before the final norm",
            why="a norm applied twice keeps the argmax and makes the soft targets far too sharp or too flat",
            do="capture the stream before the norm, then " + fresh,
            tell="norm_words",
        ),
        between(
            "argmax_agreement",
            params.gates.training.min_argmax_agreement,
            says="the last state says the tokens that the target said",
            why="soft targets are computed from it; when its argmax is another token, so is what the draft is taught",
            do="check that rows and states are of one target, then " + fresh,
        ),
        between(
            "likelihood_gap",
            high=_MAX_LIKELIHOOD_GAP,
            says="the stored tokens are as likely by the stored state as by the target",
            why="argmax survives a wrong scale; likelihood, and with it every soft target, does not",
            do="capture the stream before the norm, then " + fresh,
            tell="likelihood_words",
        ),
    )
    return Table("last state", pd.DataFrame([line]), "state", checks)


def _vocabulary(evidence: Evidence, params: Params) -> Table:
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


def _sizes(evidence: Evidence, params: Params) -> Table:
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


def _always(evidence: Evidence) -> Table:
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
