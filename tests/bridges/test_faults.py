"""Damaged, foreign and hostile files: each is refused in words that name it, before anything is copied or run."""

from __future__ import annotations

import gzip
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from stages.bridges import _open
from stages.bridges.stores import open_store
from stages.contracts.errors import DataError
from tests.bridges import samples as make


def rows_of(root: Path) -> None:
    store = open_store(root)
    for file in store.files:
        list(store.rows_of(file, check_bytes=True))


def refused(root: Path, words: str, name: str) -> None:
    with pytest.raises(DataError) as caught:
        rows_of(root)
    assert words in str(caught.value), caught.value
    assert name in caught.value.where, caught.value


def cut(path: Path, share: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])


WRITERS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "pt": (lambda r: make.legacy(r, make.make_samples(2)), "data_1.pt"),
    "ckpt": (lambda r: make.specforge(r, make.make_samples(2)), "data_1.ckpt"),
    "gz": (lambda r: make.specforge(r, make.make_samples(2), packed=True), "data_1.ckpt.gz"),
    "safetensors": (lambda r: make.speculators(r, make.make_samples(2)), "hs_1.safetensors"),
    "shard": (lambda r: make.nemo_automodel(r, make.make_samples(2), 1), "shard-000001.safetensors"),
    "conversation": (lambda r: make.model_optimizer(r, make.make_samples(2)), "chat-001.pt"),
    "angelslim": (lambda r: make.angelslim(r, make.make_samples(2)), "data_1.ckpt"),
}


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("share", [0.6, 0.97, 0.01])
def test_a_file_that_is_cut_off_is_named(kind: str, share: float, tmp_path: Path) -> None:
    write, name = WRITERS[kind]
    (path,) = write(tmp_path).rglob(name)
    cut(path, share)
    with pytest.raises(DataError, match=r"cut off|no header that can be read|is empty") as caught:
        rows_of(tmp_path)
    assert caught.value.where == str(path)
    assert "the other files are untouched" in caught.value.do


@pytest.mark.parametrize("kind", WRITERS)
def test_a_file_without_a_byte_is_named(kind: str, tmp_path: Path) -> None:
    write, name = WRITERS[kind]
    (path,) = write(tmp_path).rglob(name)
    path.write_bytes(b"")
    refused(tmp_path, "A file of the store is empty", name)


def test_a_store_is_still_recognised_when_its_first_file_is_the_broken_one(tmp_path: Path) -> None:
    make.legacy(tmp_path, make.make_samples(3))
    (tmp_path / "data_0.pt").write_bytes(b"")
    assert open_store(tmp_path).kind.era == "0.3-0.4"
    refused(tmp_path, "is empty", "data_0.pt")


def test_a_link_that_leads_nowhere_is_named(tmp_path: Path) -> None:
    make.legacy(tmp_path, make.make_samples(1))
    (tmp_path / "data_1.pt").symlink_to(tmp_path / "gone.pt")
    refused(tmp_path, "a link that leads nowhere", "data_1.pt")


def test_a_row_of_the_older_schema_is_named_as_that(tmp_path: Path) -> None:
    make.legacy(tmp_path, make.make_samples(2))
    s = make.make_samples(1)[0]
    older = {
        "input_ids": s.ids,
        "loss_mask": s.mask,
        "hidden_state": s.states[:, :3].flatten(1),
        "target": s.states[:, 3],
    }
    torch.save(older, tmp_path / "data_1.pt")
    refused(tmp_path, "older schema (v0, with hidden_state and target)", "data_1.pt")


class _Runs:
    """Unpickled by a trusting reader, it writes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.mark}",)


@pytest.mark.parametrize("old_form", [False, True])
@pytest.mark.parametrize("kind", ["pt", "ckpt", "gz", "conversation"])
def test_a_pickle_that_would_run_code_is_not_run(kind: str, old_form: bool, tmp_path: Path) -> None:
    write, name = WRITERS[kind]
    (path,) = write(tmp_path / "store").rglob(name)
    mark = tmp_path / "ran"
    plain = path.with_name("plain")
    torch.save({"input_ids": torch.arange(3), "extra": _Runs(mark)}, plain, _use_new_zipfile_serialization=not old_form)
    path.write_bytes(gzip.compress(plain.read_bytes()) if kind == "gz" else plain.read_bytes())
    plain.unlink()
    refused(tmp_path / "store", "would run code, and was not opened", name)
    with pytest.raises(DataError, match=r"posix\.system"):
        rows_of(tmp_path / "store")
    assert not mark.exists()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_pickle_that_hides_what_it_imports_is_not_run_either(tmp_path: Path) -> None:
    """STACK_GLOBAL with names from the memo, behind names that look harmless."""
    make.legacy(tmp_path / "store", make.make_samples(2))
    mark = tmp_path / "ran"
    hidden = (
        b"\x80\x04\x8c\x05posix\x94\x8c\x06system\x940\x8c\x0ctorch._utils\x8c\x12_rebuild_tensor_v200"
        b"h\x00h\x01\x93\x8c" + bytes([len(f"touch {mark}")]) + f"touch {mark}".encode() + b"\x85R."
    )
    with zipfile.ZipFile(tmp_path / "store" / "data_1.pt", "w") as file:
        file.writestr("archive/data.pkl", hidden)
        file.writestr("archive/version", "3\n")
    with pytest.raises(DataError, match=r"would run code|cannot be read"):
        rows_of(tmp_path / "store")
    assert not mark.exists()


def test_a_bare_pickle_is_no_way_around(tmp_path: Path) -> None:
    make.legacy(tmp_path / "store", make.make_samples(2))
    (tmp_path / "store" / "data_1.pt").write_bytes(pickle.dumps(_Runs(tmp_path / "ran")))
    refused(tmp_path / "store", "would run code", "data_1.pt")
    assert not (tmp_path / "ran").exists()


def test_a_gz_that_unpacks_without_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_open, "_FLOOR", 1 << 20)
    make.specforge(tmp_path, make.make_samples(2), packed=True)
    path = tmp_path / "rows_0-2000" / "data_1.ckpt.gz"
    path.write_bytes(gzip.compress(bytes(8 << 20)))
    before = set(Path(_open.tempfile.gettempdir()).glob("bridge-*"))
    refused(tmp_path, "unpacks to more than states can", "data_1.ckpt.gz")
    assert set(Path(_open.tempfile.gettempdir()).glob("bridge-*")) == before, "what was unpacked is removed"


def test_an_archive_with_compressed_members_is_refused(tmp_path: Path) -> None:
    make.legacy(tmp_path, make.make_samples(2))
    path = tmp_path / "data_1.pt"
    with zipfile.ZipFile(path) as file:
        members = {i.filename: file.read(i) for i in file.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in members.items():
            file.writestr(name, data)
    refused(tmp_path, "An archive of the store is compressed", "data_1.pt")


def test_a_flipped_byte_is_found_by_the_sums_that_the_file_was_written_with(tmp_path: Path) -> None:
    make.legacy(tmp_path, make.make_samples(2, hidden=64))
    path = tmp_path / "data_1.pt"
    data = bytearray(path.read_bytes())
    at = data.find(make.make_samples(2, hidden=64)[1].states[:, 2].contiguous().view(torch.uint8).numpy().tobytes())
    data[at + 11] ^= 4
    path.write_bytes(data)
    refused(tmp_path, "other bytes than were written", "data_1.pt")


def test_a_short_and_a_long_safetensors_are_told_apart(tmp_path: Path) -> None:
    make.speculators(tmp_path, make.make_samples(2))
    path = tmp_path / "hs_1.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    refused(tmp_path, "is cut off", "hs_1.safetensors")
    path.write_bytes(whole + b"12345")
    refused(tmp_path, "longer than its header says", "hs_1.safetensors")


SAMPLE = make.legacy_dict(make.make_samples(1)[0])
STATES = SAMPLE["hidden_states"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_states": torch.zeros(5, 32)}, "no list of states"),
        ({"hidden_states": STATES[:2]}, "no list of states"),
        ({"hidden_states": [*STATES[:3], STATES[3][:-1]]}, "different lengths"),
        ({"hidden_states": [*STATES[:3], STATES[3][:, :-1]]}, "different widths"),
        ({"hidden_states": [*STATES[:3], STATES[3].long()]}, "dtype that no states have"),
        ({"hidden_states": [*STATES[:3], STATES[3].to_sparse()]}, "something else than plain tensors"),
        ({"hidden_states": [*STATES[:3], torch.zeros(1, 1).expand(1 << 20, 1 << 20)]}, "claims more values than"),
        ({"loss_mask": SAMPLE["loss_mask"] * 2}, "something else than 0 and 1"),
        ({"input_ids": SAMPLE["input_ids"].float()}, "no whole numbers"),
        ({"input_ids": SAMPLE["input_ids"][:0]}, "no tokens"),
        ({"input_ids": "ids"}, "no plain tensor"),
    ],
)
def test_parts_that_do_not_fit_are_told(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    make.legacy(tmp_path, make.make_samples(2))
    torch.save(SAMPLE | change, tmp_path / "data_1.pt")
    refused(tmp_path, words, "data_1.pt")


@pytest.mark.parametrize(
    ("value", "words"), [([1, 2], "holds no sample"), ({"loss_mask": torch.zeros(2)}, "lacks a part")]
)
def test_what_is_no_sample_is_told(value: Any, words: str, tmp_path: Path) -> None:
    make.legacy(tmp_path, make.make_samples(2))
    torch.save(value, tmp_path / "data_1.pt")
    refused(tmp_path, words, "data_1.pt")


def test_a_safetensors_header_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    make.speculators(tmp_path, make.make_samples(1))
    path = tmp_path / "hs_1.safetensors"
    save_file({"hidden_states": torch.zeros(5, 4, 8), "token_ids": torch.arange(5)}, path)
    path.write_bytes(path.read_bytes().replace(b"[5,4,8]", b"[5,4,9]"))
    refused(tmp_path, "contradicts itself", "hs_1.safetensors")


def test_a_mask_of_another_length_leaves_the_states_readable_and_uneven_states_can_be_looked_at(tmp_path: Path) -> None:
    make.legacy(tmp_path, make.make_samples(2))
    torch.save(SAMPLE | {"loss_mask": SAMPLE["loss_mask"][:-1]}, tmp_path / "data_0.pt")
    torch.save(SAMPLE | {"hidden_states": [s[:-1] for s in STATES]}, tmp_path / "data_1.pt")
    store = open_store(tmp_path)
    mask = store.row(store.files[0]).loss_mask
    assert mask is not None and len(mask) == len(SAMPLE["input_ids"]) - 1
    with pytest.raises(DataError, match="different lengths"):
        store.row(store.files[1])
    (uneven,) = store.rows_of(store.files[1], uneven=True)
    assert len(uneven.aux[0]) == len(uneven.input_ids) - 1
