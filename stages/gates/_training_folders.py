"""gate-training's table folders: whole, in order, of one capture."""

from __future__ import annotations

from stages.contracts.params import Params
from stages.gates._judge import Expectation, Table, among, same, unique
from stages.gates._training_evidence import EXTRACT, MERGE, Evidence


def folders(evidence: Evidence, params: Params) -> Table:
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
