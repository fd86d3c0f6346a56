"""Smaller forms of a stored row: what is kept comes back, what is not is zero, and nothing else notices."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from stages.capture.forms import as_stored, decode, encode, kept, quantise
from stages.capture.norm_probe import probe_norm
from stages.capture.probe import ProbeRow, probe_rows
from stages.capture.row_faults import row_faults
from stages.capture.rows import FolderPlan, Row, row_id
from stages.capture.spill import capture_rows
from stages.capture.store import ROWS, RowFolder, folder_bytes, write_folder
from stages.capture.work import WorkCache
from stages.contracts.errors import DataError
from stages.contracts.manifest import CaptureSpec, StoredForm
from stages.targets._decoder import Decoder
from tests.capture.conftest import SPEC

FORMS = [
    StoredForm(tokens="to_last_supervised"),
    StoredForm(last="before_supervised"),
    StoredForm(aux_dtype="float8_e4m3"),
    StoredForm(tokens="to_last_supervised", last="before_supervised", aux_dtype="float8_e4m3"),
]


def talk(seed: int, *runs: int) -> Row:
    """A row of runs of tokens, unsupervised and supervised in turn."""
    rng = np.random.default_rng(seed)
    mask = np.concatenate([np.full(n, i % 2, np.uint8) for i, n in enumerate(runs)])
    ids = rng.integers(0, 259, len(mask)).astype(np.int32)
    return Row(row_id(ids, mask), ids, mask)


PLAN = FolderPlan("code", 0, (talk(1, 9, 6, 8), talk(2, 4, 7), talk(3, 5, 3, 6, 4, 9), talk(4, 12)))


def spec_of(form: StoredForm) -> CaptureSpec:
    return SPEC.model_copy(update={"form": form})


@pytest.fixture
def states(target: Decoder) -> list[torch.Tensor]:
    return list(capture_rows(target, PLAN.rows, SPEC.points, 64))


def test_what_is_kept_follows_from_the_mask() -> None:
    mask = np.array([0, 0, 1, 1, 0, 1, 0, 0], np.uint8)
    aux, last = kept(mask, StoredForm(tokens="to_last_supervised", last="before_supervised"))
    assert aux.tolist() == [True] * 6 + [False] * 2
    assert last.tolist() == [False, True, True, False, True, False, False, False]
    aux, last = kept(np.zeros(4, np.uint8), StoredForm(tokens="to_last_supervised"))
    assert not aux.any() and not last.any()


@pytest.mark.parametrize("form", [StoredForm(), *FORMS], ids=str)
def test_rows_come_back_whole_with_zeros_for_what_was_not_kept(
    form: StoredForm, states: list[torch.Tensor], tmp_path: Path
) -> None:
    write_folder(tmp_path / PLAN.name, PLAN, spec_of(form), iter(states))
    folder = RowFolder(tmp_path / PLAN.name)
    assert (tmp_path / PLAN.name / ROWS).stat().st_size == folder_bytes(spec_of(form), PLAN.rows)
    for i, row in enumerate(PLAN.rows):
        found, ids, mask = folder.row(i)
        assert found.shape == states[i].shape and found.dtype == torch.bfloat16
        assert np.array_equal(ids.numpy(), row.input_ids) and np.array_equal(mask.numpy(), row.loss_mask)
        there = folder.kept(i)
        assert not found[~there].any()
        if form.aux_dtype == "bfloat16":
            assert torch.equal(found[there], states[i][there])
        else:
            assert torch.equal(found[:, -1][there[:, -1]], states[i][:, -1][there[:, -1]])
            aux = there[:, :-1]
            apart = (found[:, :-1][aux].float() - states[i][:, :-1][aux].float()).norm(dim=-1)
            assert bool((apart <= 0.04 * states[i][:, :-1][aux].float().norm(dim=-1)).all())


def test_each_form_is_smaller_than_the_default() -> None:
    rows, spec = PLAN.rows, SPEC.model_copy(update={"hidden_size": 576})  # a header weighs something on the tiny one
    sizes = [folder_bytes(spec.model_copy(update={"form": f}), rows) for f in (StoredForm(), *FORMS)]
    assert min(sizes) == sizes[-1] < 0.5 * sizes[0] and all(size < sizes[0] for size in sizes[1:])


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_form_is_written_the_same_from_the_target_and_from_the_store(
    form: StoredForm, states: list[torch.Tensor], tmp_path: Path
) -> None:
    cache = WorkCache(spec_of(form), tmp_path)
    cache.note(write_folder(cache.path(PLAN.row_ids), PLAN, spec_of(form), iter(states)))
    part = FolderPlan("code", 0, PLAN.rows[1:3])
    write_folder(tmp_path / "moved", part, spec_of(form), cache.states(part, iter(())))
    write_folder(tmp_path / "fresh", part, spec_of(form), iter(states[1:3]))
    assert (tmp_path / "moved" / ROWS).read_bytes() == (tmp_path / "fresh" / ROWS).read_bytes()


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_one_flipped_byte_of_a_smaller_form_is_found_and_its_rows_named(
    form: StoredForm, states: list[torch.Tensor], tmp_path: Path
) -> None:
    groups = [list(PLAN.rows[:2]), list(PLAN.rows[2:])]
    write_folder(tmp_path / PLAN.name, PLAN, spec_of(form), iter(states), groups)
    file = tmp_path / PLAN.name / ROWS
    data = file.read_bytes()
    for at in np.random.default_rng(5).integers(0, len(data), 12).tolist():
        file.write_bytes(data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :])
        (damage,) = find(tmp_path / PLAN.name)
        assert damage.rows in (None, (0, 2), (2, 4))
        if damage.rows:
            with pytest.raises(DataError) as error:
                RowFolder(file.parent).row(damage.rows[0])
            assert f"rows {damage.rows[0]} to" in error.value.where
            RowFolder(file.parent).row(2 - damage.rows[0])


def find(folder: Path):  # type: ignore[no-untyped-def]
    from stages.capture.verify import find_damage, read_config

    config, _ = read_config(folder)
    assert config is not None
    return find_damage(folder, config)


def test_any_safetensors_reader_reads_a_smaller_form(states: list[torch.Tensor], tmp_path: Path) -> None:
    form = FORMS[-1]
    write_folder(tmp_path / PLAN.name, PLAN, spec_of(form), iter(states))
    with safe_open(tmp_path / PLAN.name / ROWS, "pt") as file:
        aux, scales = file.get_tensor("aux"), file.get_tensor("scales")
        starts = file.get_tensor("aux_offsets")
    told = encode(states[2], PLAN.rows[2].loss_mask, form)
    part = slice(int(starts[2]), int(starts[3]))
    assert aux.dtype == torch.float8_e4m3fn and torch.equal(scales[part], told["scales"])
    assert torch.equal(aux[part].view(torch.uint8), told["aux"].view(torch.uint8))


def test_float8_loses_a_fortieth_and_never_hides_what_is_not_finite() -> None:
    x = torch.randn(64, 3, 576, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    x[0, :, 7] = 900.0  # an attention sink's channel
    x[1] = 0
    back = decode(encode(x.repeat(1, 2, 1)[:, :4], np.ones(64, np.uint8), FORMS[2]), np.ones(64, np.uint8), FORMS[2])
    lost = (back[2:, :3].float() - x[2:].float()).norm(dim=-1) / x[2:].float().norm(dim=-1)
    assert 0.02 < float(lost.mean()) < 0.03 and not back[1, :3].any()
    for bad in (torch.nan, torch.inf):
        x[5, 1, 3] = bad
        assert bool(as_stored(x, FORMS[2])[5, 1].isnan().any())
    assert quantise(x)[0].dtype == torch.float8_e4m3fn


def test_the_default_form_leaves_digests_as_they_were_and_others_have_their_own() -> None:
    assert "form" not in json.loads(SPEC.canonical()) and CaptureSpec.model_validate_json(SPEC.canonical()) == SPEC
    digests = {spec_of(form).digest() for form in (StoredForm(), *FORMS)}
    assert len(digests) == 1 + len(FORMS)
    assert all(CaptureSpec.model_validate_json(spec_of(f).canonical()).form == f for f in FORMS)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_probe_finds_the_layers_of_a_smaller_form(
    form: StoredForm, states: list[torch.Tensor], target: Decoder, tmp_path: Path
) -> None:
    write_folder(tmp_path / PLAN.name, PLAN, spec_of(form), iter(states))
    folder = RowFolder(tmp_path / PLAN.name)
    members = [ProbeRow(r, *(folder.row(i)[n] for n in (1, 2, 0)), folder.kept(i)) for i, r in enumerate(PLAN.row_ids)]
    probes = probe_rows(target, members, SPEC.points, stored=lambda s: as_stored(s, form))
    assert all(p.nearest_point == p.claimed_point and p.claimed_distance < 0.01 for p in probes)
    norm = probe_norm(target, members)
    assert norm.before_distance < 0.01 and abs(norm.before_nll - norm.target_nll) < 0.05
    wanted = {
        r: (torch.from_numpy(row.input_ids), torch.from_numpy(row.loss_mask))
        for r, row in zip(PLAN.row_ids, PLAN.rows, strict=True)
    }
    faults = row_faults(PLAN.name, members, wanted)
    assert all(not (f.zero_states or f.constant_slots or f.nan) and f.ids_equal for f in faults)


def test_the_probe_still_sees_another_layer_through_float8(target: Decoder, tmp_path: Path) -> None:
    form = FORMS[2]
    write_folder(tmp_path / PLAN.name, PLAN, spec_of(form), capture_rows(target, PLAN.rows, (2, 4, 6), 64))
    folder = RowFolder(tmp_path / PLAN.name)
    members = [ProbeRow(r, *(folder.row(i)[n] for n in (1, 2, 0)), folder.kept(i)) for i, r in enumerate(PLAN.row_ids)]
    probes = probe_rows(target, members, SPEC.points, stored=lambda s: as_stored(s, form))
    assert [p.nearest_point for p in probes[:-1]] == [2, 4, 6]
