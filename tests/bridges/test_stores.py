"""Every foreign form is recognised, listed in numeric order and read back value by value, without unpickling or padding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from stages.bridges.kinds import all_formats, list_files, recognise
from stages.bridges.stores import open_store
from stages.capture.dialects import DIALECTS
from stages.contracts.errors import DataError
from tests.bridges import samples as make
from tests.bridges.samples import Sample

Maker = Callable[[Path, list[Sample]], Path]
# name: maker, tool, era, where the last state stands, whether it has masks
FORMS: dict[str, tuple[Maker, str, str, str, bool]] = {
    "legacy, flat": (lambda r, s: make.legacy(r, s), "speculators", "0.3-0.4", "before_final_norm", True),
    "legacy, rows": (lambda r, s: make.legacy_rows(r, s, 2), "speculators", "0.3-0.4", "before_final_norm", True),
    "specforge": (lambda r, s: make.specforge(r, s), "specforge", "any", "after_final_norm", True),
    "specforge, padded": (lambda r, s: make.specforge(r, s, pad_to=20), "specforge", "any", "after_final_norm", True),
    "specforge, gz": (lambda r, s: make.specforge(r, s, packed=True), "specforge", "any", "after_final_norm", True),
    "angelslim": (make.angelslim, "angelslim", "any", "after_final_norm", True),
    "model_optimizer": (lambda r, s: make.model_optimizer(r, s), "model_optimizer", "any", "unknown", True),
    "speculators": (make.speculators, "speculators", ">=0.5", "before_final_norm", False),
    "nemo_automodel": (lambda r, s: make.nemo_automodel(r, s), "nemo_automodel", "any", "unknown", True),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_store_is_recognised_and_its_rows_come_back_as_they_were(form: str, tmp_path: Path) -> None:
    write, tool, era, last_state, masked = FORMS[form]
    wanted = make.make_samples()
    store = open_store(write(tmp_path / "store", wanted))
    assert (store.kind.tool, store.kind.era, store.kind.last_state) == (tool, era, last_state)
    assert not store.strange and store.hidden_size == make.HIDDEN
    rows = list(store.rows())
    assert len(rows) == len(wanted)
    for row, sample in zip(rows, wanted, strict=True):
        assert torch.equal(row.input_ids, sample.ids), form
        assert all(torch.equal(a, s) for a, s in zip(row.aux, sample.states.unbind(1)[:3], strict=True))
        assert row.last is None if tool == "nemo_automodel" else torch.equal(row.last, sample.states[:, 3])  # type: ignore[arg-type]
        assert (row.loss_mask is not None) == masked
        assert row.loss_mask is None or torch.equal(row.loss_mask.long(), sample.mask)


def test_every_format_says_how_it_numbers_layers_in_a_dialect_there_is(tmp_path: Path) -> None:
    for name, (write, *_) in FORMS.items():
        kind = recognise(write(tmp_path / name.replace(" ", ""), make.make_samples(2)))
        assert kind is not None and kind.numbering in DIALECTS, name
        assert kind.dialect in (None, kind.numbering)
    assert len(all_formats()) == 7


def test_folders_and_files_come_in_numeric_order_and_what_is_no_sample_is_told(tmp_path: Path) -> None:
    for a, b in ((0, 2), (10000, 10002), (2000, 2002)):
        make.legacy(tmp_path / f"rows_{a}-{b}", make.make_samples(2), start=a)
    (tmp_path / "rows_0-2" / "data_1.pt.tmp").write_bytes(b"x")
    (tmp_path / "notes.txt").write_text("mine")
    kind = recognise(tmp_path)
    assert kind is not None
    files, strange = list_files(tmp_path, kind)
    assert [f.path for f in files] == [f"rows_{a}-{a + 2}/data_{i}.pt" for a in (0, 2000, 10000) for i in (a, a + 1)]
    assert {p.name for p in strange} == {"data_1.pt.tmp", "notes.txt"}
    assert [f.index for f in files] == [0, 1, 2000, 2001, 10000, 10001]


def test_a_store_below_folders_of_sources_is_found_too(tmp_path: Path) -> None:
    for source in ("B1_glaive", "B2_opencode"):
        make.legacy_rows(tmp_path / source, make.make_samples(2), 1)
    assert [f.folder for f in open_store(tmp_path).files] == [
        f"{s}/rows_{i}-{i + 1}" for s in ("B1_glaive", "B2_opencode") for i in range(2)
    ]


def test_a_crashed_run_has_data_and_no_config_and_says_so(tmp_path: Path) -> None:
    make.legacy(tmp_path / "rows_0-2", make.make_samples(2))
    make.legacy(tmp_path / "rows_2-4", make.make_samples(2, seed=1), None, start=2)
    store = open_store(tmp_path)
    assert store.layer_ids == (0, 2, 4, 5) and store.without_config == ("rows_2-4",)
    assert store.kind.dialect == "speculators_legacy" and store.versions == ("0.3.0",)


def test_folders_captured_at_two_sets_of_layers_are_refused_by_name(tmp_path: Path) -> None:
    make.legacy(tmp_path / "rows_0-2", make.make_samples(2))
    make.legacy(tmp_path / "rows_2-4", make.make_samples(2, seed=1), (1, 2, 4, 5), start=2)
    with pytest.raises(
        DataError, match=r"captured at different layers(?s:.)*rows_0-2: \[0, 2, 4, 5\]; rows_2-4: \[1, 2, 4, 5\]"
    ):
        _ = open_store(tmp_path).layer_ids


def test_a_three_entry_list_has_no_last_state(tmp_path: Path) -> None:
    make.legacy(tmp_path, make.make_samples(1), (0, 2, 4))
    sample = make.legacy_dict(make.make_samples(1)[0])
    torch.save(sample | {"hidden_states": sample["hidden_states"][:3]}, tmp_path / "data_0.pt")
    (row,) = open_store(tmp_path).rows()
    assert len(row.aux) == 3 and row.last is None


def test_a_dump_that_says_where_its_last_state_stands_is_believed(tmp_path: Path) -> None:
    for told, where in ((True, "before_final_norm"), (False, "after_final_norm")):
        store = open_store(make.model_optimizer(tmp_path / where, make.make_samples(2), told))
        assert store.kind.last_state == where


def test_padding_is_left_out_and_can_be_taken_back(tmp_path: Path) -> None:
    wanted = make.make_samples(1)[0]
    (row,) = open_store(make.specforge(tmp_path, [wanted], pad_to=12)).rows()
    assert (len(row.input_ids), row.padding) == (len(wanted.ids), 12 - len(wanted.ids))
    longer = row.first(len(wanted.ids) + 1)
    assert len(longer.aux[0]) == len(wanted.ids) + 1 and int(longer.input_ids[-1]) == 2


def test_mapped_files_are_not_read_into_memory(tmp_path: Path) -> None:
    """100 MB of states cost less than 10 MB of memory to open: Linux counts mapped pages only once they are touched."""
    import resource

    big = Sample(
        torch.arange(50_000) % 90, torch.ones(50_000).long(), torch.zeros(50_000, 4, 256, dtype=torch.bfloat16)
    )
    for write in (make.legacy, make.speculators):
        store = open_store(write(tmp_path / write.__name__, [big]))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        row = store.row(store.files[0])
        assert row.aux[0].shape == (50_000, 256)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 10_000


def test_what_is_no_store_is_refused_with_what_stands_there(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(DataError, match=r"no store of hidden states that is known here(?s:.)*a\.txt"):
        open_store(tmp_path)
    with pytest.raises(DataError, match="no such path"):
        open_store(tmp_path / "none")
