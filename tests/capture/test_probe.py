"""The layer probe: the right point is named by value, and so is each way of getting it wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stages.capture.norm_probe import probe_norm
from stages.capture.probe import ProbeRow, nearest_points, probe_rows
from stages.capture.row_faults import row_faults
from stages.capture.spill import capture_rows
from stages.contracts.errors import DataError, ParamsError
from stages.contracts.points import check_points, default_points, name_points
from stages.targets._decoder import Decoder, Stream
from tests import line, tiny
from tests.capture.conftest import make_row

N = tiny.LAYERS
POINTS = tiny.POINTS


def stored(target: Decoder, points: tuple[int, ...] = POINTS, rows: int = 3) -> list[ProbeRow]:
    """Rows as extraction stores them, captured at `points`, 30 tokens each."""
    made = [make_row(i, 30) for i in range(rows)]
    states = capture_rows(target, made, [p for p in points if p], 64)
    found = []
    for row, row_states in zip(made, states, strict=True):
        ids = torch.from_numpy(row.input_ids)
        if 0 in points:  # what an engine feeds when it starts at the embedding
            row_states = torch.cat([F.embedding(ids.long(), target.embedding)[:, None].bfloat16(), row_states], 1)
        found.append(ProbeRow(row.row_id, ids, torch.from_numpy(row.loss_mask), row_states))
    return found


def test_states_stored_right_are_nearest_to_the_claimed_points_by_a_margin(target: Decoder) -> None:
    probes = probe_rows(target, stored(target), POINTS)
    assert [p.nearest_point for p in probes] == [p.claimed_point for p in probes] == [*POINTS, N]
    assert all(p.claimed_distance < 3e-3 and p.next_best_distance > 5 * p.claimed_distance for p in probes)
    assert {(p.rows, p.tokens) for p in probes} == {(3, 3 * 29)}


@pytest.mark.parametrize(
    ("fed", "claimed", "words"),
    [
        ((2, 4, 5), (1, 3, 4), "every slot is shifted by +1 layer"),
        ((1, 3, 4), (2, 4, 5), "every slot is shifted by -1 layer"),
        ((0, 1, 3), (1, 3, 5), "the embedding was put first and the last point dropped"),
    ],
)
def test_a_shift_and_the_embedding_in_front_are_named(
    target: Decoder, fed: tuple[int, ...], claimed: tuple[int, ...], words: str
) -> None:
    probes = probe_rows(target, stored(target, fed), claimed)[:3]
    found = tuple(p.nearest_point for p in probes)
    assert found == fed and words in name_points(found, claimed, N)
    assert all(p.claimed_distance > 0.1 for p in probes)
    assert all(p.next_best_distance == p.nearest_distance < 3e-3 for p in probes)


def test_swapped_slots_are_named(target: Decoder) -> None:
    rows = [r._replace(states=r.states[:, [2, 1, 0, 3]]) for r in stored(target)]
    found = tuple(p.nearest_point for p in probe_rows(target, rows, POINTS)[:3])
    assert found == (5, 3, 1) and "swapped" in name_points(found, POINTS, N)


def test_one_row_of_many_with_other_layers_speaks_for_all(target: Decoder) -> None:
    right = stored(target)
    assert tuple(p.nearest_point for p in probe_rows(target, right, POINTS)[:3]) == POINTS
    mixed = probe_rows(target, [right[0], stored(target, (2, 4, 5))[1], right[2]], POINTS)[:3]
    assert [p.nearest_point for p in mixed] == [2, 4, 5] and [p.rows for p in mixed] == [3] * 3


def test_a_minority_of_positions_that_are_another_rows_shows_beside_the_median(target: Decoder) -> None:
    right = probe_rows(target, stored(target), POINTS)
    assert all(p.claimed_distance <= p.claimed_p99_distance < 8e-3 for p in right)
    rows = stored(target)
    rows[1].states[25:] = rows[0].states[5:10]
    torn = probe_rows(target, rows, POINTS)
    assert [p.nearest_point for p in torn] == [*POINTS, N] and all(p.claimed_distance < 3e-3 for p in torn)
    assert all(p.claimed_p99_distance > 0.1 for p in torn)


def test_points_are_told_apart_at_other_depths(tmp_path: Path) -> None:
    """D14: eight and five layers."""
    for layers in (8, 5):
        target = _load(tmp_path / str(layers), layers)
        points = (2, layers // 2 + 1, layers - 1)
        probes = probe_rows(target, stored(target, points), points)
        assert [p.nearest_point for p in probes] == [*points, layers]


class ConstantLayers:
    """A stand-in for a target: the state after k layers is k everywhere."""

    def __init__(self, layers: int) -> None:
        self.layers, self.device = layers, torch.device("cpu")

    def packed(self, ids: Tensor, lengths: list[int], points: list[int]) -> Stream:
        states = {k: torch.full((len(ids), 16), float(k)) for k in range(self.layers + 1)}
        return Stream(states[self.layers], {p: states[p] for p in points})


@pytest.mark.parametrize(("layers", "points"), [(8, default_points(8)), (5, (1, 2, 4))])
def test_captured_constants_are_those_of_the_points_and_the_width_is_three_hidden_sizes(
    layers: int, points: tuple[int, int, int]
) -> None:
    states = next(capture_rows(ConstantLayers(layers), [make_row(0, 7)], check_points(points, layers), 64))  # type: ignore[arg-type]
    assert states[:, :, 0].unique(dim=0).tolist() == [[*points, layers]]
    assert states[:, :3].flatten(1).shape == (7, 3 * 16)


def test_a_target_of_three_layers_is_refused_with_a_hint() -> None:
    with pytest.raises(ParamsError, match="too shallow for three distinct points"):
        check_points(default_points(3), 3)


def test_a_state_after_the_final_norm_is_no_point(target: Decoder) -> None:
    """D14: the final norm doubled; a post-norm state fed as an auxiliary state is far from every point."""
    loud = Decoder(target.config, target.embedding, target.layers, target.norm * 2, target.head_weight)
    rows = [r._replace(states=_after_norm(loud, r.states)) for r in stored(loud)]
    probe = probe_rows(loud, rows, POINTS)[3]
    assert probe.after_norm_distance < 0.01 and probe.nearest_distance > 0.2 and probe.claimed_distance > 0.2
    assert probe_norm(loud, rows).reading == "after_final_norm"


def test_the_norm_of_the_last_state_is_told_by_distance_likelihood_and_argmax(tmp_path: Path) -> None:
    folder = tiny.make_target(tmp_path / "target")
    target = _load(tmp_path / "target", N)
    answered = line.make_rows(target, folder, line.TinySource("code", "coding", 4))
    rows = [
        ProbeRow(
            r["row_id"],
            torch.tensor(r["input_ids"]),
            torch.tensor(r["loss_mask"]),
            _states(target, torch.tensor(r["input_ids"])),
        )
        for r in answered
    ]
    right = probe_norm(target, rows)
    assert right.reading == "before_final_norm" and right.before_distance < 3e-3 < 0.2 < right.after_distance
    assert right.before_agreement > 0.97 and right.before_nll == pytest.approx(right.target_nll, abs=0.02)
    assert abs(right.after_nll - right.target_nll) > 0.2
    assert right.tokens == sum(sum(r["loss_mask"]) for r in answered)
    wrong = probe_norm(target, [r._replace(states=_after_norm(target, r.states)) for r in rows])
    assert wrong.reading == "after_final_norm" and wrong.after_agreement > 0.97
    assert wrong.after_nll == pytest.approx(right.target_nll, abs=0.02)


def test_states_that_an_engine_feeds_are_probed_the_same_way(target: Decoder) -> None:
    rows = stored(target)
    fed = [r.states[:, :3].float() for r in rows]
    probes = nearest_points(target, [r.input_ids for r in rows], fed, POINTS)
    assert [p.nearest_point for p in probes] == list(POINTS)


def test_long_rows_are_cut_and_the_verdict_stays(target: Decoder) -> None:
    probes = probe_rows(target, stored(target), POINTS, max_tokens=12)
    assert [p.nearest_point for p in probes] == [*POINTS, N] and {p.tokens for p in probes} == {3 * 11}


def test_an_outlier_at_the_first_position_does_not_matter(target: Decoder) -> None:
    rows = stored(target)
    for row in rows:
        row.states[0] = 1040.0
    assert all(p.claimed_distance < 3e-3 for p in probe_rows(target, rows, POINTS))


def test_a_slot_of_nan_is_infinitely_far(target: Decoder) -> None:
    rows = stored(target)
    for row in rows:
        row.states[:, 1] = torch.nan
    probes = probe_rows(target, rows, POINTS)
    assert probes[1].claimed_distance == torch.inf and probes[0].claimed_distance < 3e-3


def test_nothing_to_probe_is_an_error(target: Decoder) -> None:
    with pytest.raises(DataError, match="No row to probe"):
        nearest_points(target, [torch.tensor([1])], [torch.zeros(1, 3, tiny.HIDDEN)], POINTS)


def _nan(row: ProbeRow) -> ProbeRow:
    row.states[4, 2, 7] = torch.nan
    return row


def _inf(row: ProbeRow) -> ProbeRow:
    row.states[3, 1, 9] = float(torch.tensor(70_000.0).half())  # overflows fp16
    return row


def _zero(row: ProbeRow) -> ProbeRow:
    row.states[:] = 0
    return row


def _constant(row: ProbeRow) -> ProbeRow:
    row.states[:, 2] = 3.0
    return row


FAULTS: list[tuple[Callable[[ProbeRow], ProbeRow], dict[str, object]]] = [
    (lambda row: row, {}),
    (_nan, {"nan": 1}),
    (_inf, {"inf": 1}),
    (_zero, {"zero_states": 30 * 4, "constant_slots": 4, "equal_slots": 3}),
    (lambda row: row._replace(states=row.states[:, [0, 1, 1, 3]]), {"equal_slots": 1}),
    (_constant, {"constant_slots": 1}),
    (lambda row: row._replace(states=row.states.float()), {"dtype": "float32"}),
    (lambda row: row._replace(input_ids=row.input_ids.roll(1)), {"ids_equal": False}),
    (lambda row: row._replace(loss_mask=row.loss_mask[:-1]), {"mask_equal": False}),
    (lambda row: row._replace(row_id="unknown"), {"row_id": "unknown", "ids_equal": False, "mask_equal": False}),
]


@pytest.mark.parametrize(("damage", "changes"), FAULTS)
def test_each_fault_of_a_row_shows_in_its_own_column(
    target: Decoder, damage: Callable[[ProbeRow], ProbeRow], changes: dict[str, object]
) -> None:
    row = stored(target, rows=1)[0]
    prepared = {row.row_id: (row.input_ids.clone(), row.loss_mask.clone())}
    good = {
        "row_id": row.row_id,
        "folder": "rows_0-1",
        "tokens": 30,
        "dtype": "bfloat16",
        "nan": 0,
        "inf": 0,
        "zero_states": 0,
        "constant_slots": 0,
        "equal_slots": 0,
        "copy_of": "none",
        "ids_equal": True,
        "mask_equal": True,
    }
    assert vars(row_faults("rows_0-1", [damage(row)], prepared)[0]) == good | changes


def _load(folder: Path, layers: int) -> Decoder:
    from stages.targets import load_target

    return load_target(tiny.make_target(folder, num_hidden_layers=layers))


def _states(target: Decoder, ids: Tensor) -> Tensor:
    stream = target.packed(ids, [len(ids)], POINTS)
    return torch.stack([*(stream.states[p] for p in POINTS), stream.last], 1).bfloat16()


def _after_norm(target: Decoder, states: Tensor) -> Tensor:
    """The same states with the last slot as after the final norm."""
    after = F.rms_norm(states[:, 3].float(), (states.shape[-1],), target.norm, target.config.eps)
    return torch.cat([states[:, :3], after[:, None].bfloat16()], 1)
