"""The row store: what goes in comes out, and whatever is damaged is named before it is used."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from stages.capture.rows import FolderPlan
from stages.capture.spill import batches, capture_rows
from stages.capture.store import CONFIG, ROWS, RowFolder, RowStore, folder_bytes, write_folder
from stages.capture.verify import found_digest
from stages.contracts.errors import DataError
from stages.contracts.files import canonical
from stages.targets._decoder import Decoder
from tests import tiny
from tests.capture.conftest import SPEC, make_plan, make_row


@pytest.fixture
def folder(tmp_path: Path, target: Decoder) -> Path:
    plan = make_plan(range(6))
    write_folder(tmp_path / plan.name, plan, SPEC, capture_rows(target, plan.rows, SPEC.points, 64))
    return tmp_path / plan.name


def test_a_row_comes_back_as_it_went_in(folder: Path, target: Decoder) -> None:
    plan, opened = make_plan(range(6)), RowFolder(folder)
    opened.verify()
    for i, row in enumerate(plan.rows):
        states, ids, mask = opened.row(i)
        stream = target.packed(torch.from_numpy(row.input_ids).long(), [len(row)], SPEC.points)
        wanted = torch.stack([*(stream.states[p] for p in SPEC.points), stream.last], 1)
        assert states.shape == (len(row), 4, tiny.HIDDEN) and states.dtype == torch.bfloat16
        assert torch.allclose(states.float(), wanted, rtol=8e-3, atol=1e-3)
        assert np.array_equal(ids.numpy(), row.input_ids) and np.array_equal(mask.numpy(), row.loss_mask)


def test_the_last_slot_is_before_the_final_norm(folder: Path, target: Decoder) -> None:
    row = make_plan(range(6)).rows[0]
    last = RowFolder(folder).row(0)[0][:, 3].float()
    stream = target.packed(torch.from_numpy(row.input_ids).long(), [len(row)])
    assert (last - stream.last).norm() < 0.01 * stream.last.norm()


def test_any_safetensors_reader_reads_the_file(folder: Path) -> None:
    config = RowFolder(folder).config
    with safe_open(folder / ROWS, "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        offsets = file.get_tensor("offsets")
        assert torch.equal(file.get_tensor("states"), RowFolder(folder).states)
    T = config.tokens
    assert shapes == {"offsets": (7,), "states": (T, 4, tiny.HIDDEN), "input_ids": (T,), "loss_mask": (T,)}
    assert offsets.tolist() == [0, *np.cumsum([len(r) for r in make_plan(range(6)).rows])]


def test_a_row_is_a_view_of_the_mapped_file(folder: Path) -> None:
    opened = RowFolder(folder)
    assert opened.row(2)[0].untyped_storage().data_ptr() == opened.states.untyped_storage().data_ptr()


def test_digest_and_size_are_those_of_the_file(folder: Path) -> None:
    config = RowFolder(folder).config
    assert config.rows_digest == found_digest(folder)
    assert config.bytes == (folder / ROWS).stat().st_size == folder_bytes(SPEC, make_plan(range(6)).rows)


def test_a_token_costs_no_more_than_two_hundredths_above_its_states() -> None:
    for hidden, tokens in ((576, 150), (7168, 64)):
        rows, spec = [make_row(i, tokens) for i in range(64)], SPEC.model_copy(update={"hidden_size": hidden})
        assert folder_bytes(spec, rows) / (64 * tokens) <= 1.02 * 8 * hidden


def test_equal_rows_give_equal_bytes(folder: Path, tmp_path: Path, target: Decoder) -> None:
    plan = make_plan(range(6))
    write_folder(tmp_path / "again", plan, SPEC, capture_rows(target, plan.rows, SPEC.points, 64))
    assert all((tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes() for name in (ROWS, CONFIG))


def test_the_store_opens_a_folder_once_and_reads_by_name(folder: Path) -> None:
    store = RowStore(folder.parent)
    assert store.folder(folder.name) is store.folder(folder.name)
    assert torch.equal(store.row(folder.name, 3)[0], RowFolder(folder).row(3)[0])


def test_a_failure_while_writing_leaves_no_folder(tmp_path: Path, target: Decoder) -> None:
    plan = make_plan(range(6))
    states = list(capture_rows(target, plan.rows, SPEC.points, 64))
    with pytest.raises(ValueError, match="shorter"):
        write_folder(tmp_path / plan.name, plan, SPEC, iter(states[:3]))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("states", "got"),
    [
        (torch.zeros(9, 4, tiny.HIDDEN), "float32 [9, 4, 64]"),
        (torch.zeros(9, 3, tiny.HIDDEN, dtype=torch.bfloat16), "bfloat16 [9, 3, 64]"),
        (torch.zeros(8, 4, tiny.HIDDEN, dtype=torch.bfloat16), "bfloat16 [8, 4, 64]"),
        (torch.zeros(9, 4, 32, dtype=torch.bfloat16), "bfloat16 [9, 4, 32]"),
    ],
)
def test_states_that_do_not_fit_their_row_are_not_stored(tmp_path: Path, states: torch.Tensor, got: str) -> None:
    plan = FolderPlan("code", 0, (make_row(1, 9),))
    with pytest.raises(DataError, match="States do not fit their row") as error:
        write_folder(tmp_path / "rows_0-1", plan, SPEC, iter([states]))
    assert plan.rows[0].row_id in error.value.where and error.value.got == got
    assert "bfloat16 [9, 4, 64]" in error.value.expected


def _cut(folder: Path) -> None:
    data = (folder / ROWS).read_bytes()
    (folder / ROWS).write_bytes(data[: len(data) * 6 // 10])


def _empty(folder: Path) -> None:
    (folder / ROWS).write_bytes(b"")


def _header_of_noise(folder: Path) -> None:
    data = (folder / ROWS).read_bytes()
    (folder / ROWS).write_bytes(data[:8] + b"\xff" * 40 + data[48:])


def _header_too_long(folder: Path) -> None:
    data = (folder / ROWS).read_bytes()
    (folder / ROWS).write_bytes(struct.pack("<Q", 1 << 40) + data[8:])


def _other_shape(folder: Path) -> None:
    data = (folder / ROWS).read_bytes()
    (folder / ROWS).write_bytes(data.replace(b',4,64],"data', b',2,99],"data', 1))


def _offsets_that_fall(folder: Path) -> None:
    data = bytearray((folder / ROWS).read_bytes())
    start = 8 + struct.unpack("<Q", data[:8])[0]
    data[start + 8 : start + 24] = data[start + 16 : start + 24] + data[start + 8 : start + 16]
    (folder / ROWS).write_bytes(bytes(data))


def _other_config(folder: Path) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_bytes(canonical(config | {"capture": config["capture"] | {"hidden_size": 128}}))


def _a_row_less(folder: Path) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_bytes(canonical(config | {"row_ids": config["row_ids"][:-1]}))


def _older_schema(folder: Path) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_bytes(canonical(config | {"version": "2.0"}))


FAULTS: list[tuple[Callable[[Path], object], str]] = [
    (lambda f: (f / ROWS).unlink(), "no such file"),
    (lambda f: (f / CONFIG).unlink(), "No FolderConfig here"),
    (_cut, "cut off or replaced"),
    (_empty, "0 bytes"),
    (_header_of_noise, "bytes that is none"),
    (_header_too_long, "a header of 1099511627784 bytes that is none"),
    (_other_shape, ", 2, 99]"),
    (_offsets_that_fall, "offsets that ascend from 0"),
    (_other_config, "128]"),
    (_a_row_less, "as many row_ids as rows"),
    (_older_schema, "version"),
]


@pytest.mark.parametrize(("damage", "words"), FAULTS)
def test_damage_is_named_before_a_row_is_read_and_other_folders_stand(
    folder: Path, target: Decoder, damage: Callable[[Path], object], words: str
) -> None:
    other = make_plan(range(6, 9), start=6)
    write_folder(folder.parent / other.name, other, SPEC, capture_rows(target, other.rows, SPEC.points, 64))
    damage(folder)
    store = RowStore(folder.parent)
    with pytest.raises(DataError) as error:
        store.row(folder.name, 0)
    assert folder.name in str(error.value) and words in str(error.value)
    store.verify(other.name)


@pytest.mark.parametrize("seed", range(8))
def test_one_flipped_byte_anywhere_is_found(folder: Path, seed: int) -> None:
    data = bytearray((folder / ROWS).read_bytes())
    at = int(np.random.default_rng(seed).integers(0, len(data)))
    data[at] ^= 1 << seed
    (folder / ROWS).write_bytes(bytes(data))
    with pytest.raises(DataError) as error:
        RowFolder(folder).verify()
    assert folder.name in error.value.where


def test_a_folder_captured_another_way_is_named(folder: Path) -> None:
    with pytest.raises(DataError, match="captured another way"):
        RowStore(folder.parent).check_spec([folder.name], SPEC.model_copy(update={"points": (2, 3, 4)}))


def test_batches_keep_order_and_limit_and_give_a_long_row_its_own() -> None:
    rows = [make_row(i, n) for i, n in enumerate((10, 20, 40, 90, 5, 5))]
    cut = list(batches(rows, 50))
    assert [[len(r) for r in batch] for batch in cut] == [[10, 20], [40], [90], [5, 5]]
    assert [r for batch in cut for r in batch] == rows
