"""What gate-training looks at, and what makes it anew."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stages.contracts.manifest import HIDDEN_STATES, WORK, CaptureSpec, MergedManifest

if TYPE_CHECKING:
    from pandas import DataFrame

EXTRACT = "run `dvc repro extract`; whole folders come from the work cache, only what changed is computed"
MERGE = "run `dvc repro merge`"


@dataclass(frozen=True)
class Evidence:
    """What the gate looks at, as plain values.

    Args:
        manifest: data/merged/manifest.json.
        folders: folder, source, start, end, recorded_digest, found_digest, recorded_config, found_config,
            capture (digest of the folder's capture spec), rows_stored, tokens, tokens_stored, slots, width, dtype,
            fault (`none`, or why the folder cannot be opened).
        rows: row_id, times_prepared, times_captured, times_indexed, ids_equal, mask_equal, tokens, stored_tokens,
            not_finite, zero_states, constant_slots, equal_slots, copy_of (another row's id, or `none`), index_finds_it,
            split_equal.
        slots: folder, slot, claimed_point, nearest_point, claimed_distance, claimed_p99_distance, p99_limit (what precision
            explains), cause (whose states they are, or empty), next_best_distance, tokens; for each folder
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
