"""extract adopts another tool's store: the line behind it runs as ever, and every wrong claim is refused in words."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stages import extract, gate, merge
from stages.bridges.stores import ForeignStore
from stages.capture.rows import Row, read_rows
from stages.capture.store import RowStore
from stages.contracts.adoption import ADOPTION, AdoptionRecord
from stages.contracts.errors import DataError, ParamsError, Refusal
from stages.contracts.manifest import (
    HIDDEN_STATES,
    MERGED_MANIFEST,
    PREPARED_MANIFEST,
    MergedManifest,
    PreparedManifest,
)
from stages.contracts.report import GateReport, report_path
from stages.targets import load_target
from tests import line, tiny
from tests.bridges import samples as make
from tests.bridges.samples import Sample

NEAREST = "of all the target's points, the nearest is the claimed one"
IDS = (0, 2, 4, 5)  # tiny.POINTS and the last, as speculators 0.3-0.4 numbers them


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A prepared tiny line, and the states of every row at points 0..n and the normed last one: bf16 [L, n+2, H]."""
    root = tmp_path_factory.mktemp("adopt")
    folder = tiny.make_target(root / "target")
    manifest = line.write_prepared(root, folder)
    line.write_gate_report(root, "extraction", manifest.digest())
    line.write_params(root, folder)
    target = load_target(folder)
    states: dict[str, Tensor] = {}
    for row in rows_of(root):
        ids = torch.from_numpy(row.input_ids).long()
        stream = target.packed(ids, [len(ids)], range(tiny.LAYERS + 1))
        normed = torch.nn.functional.rms_norm(stream.last, (tiny.HIDDEN,), target.norm, target.config.eps)
        all_of_it = [*(stream.states[p] for p in range(tiny.LAYERS + 1)), normed]
        states[row.row_id] = torch.stack(all_of_it, 1).bfloat16()
    return root, states


def rows_of(root: Path) -> list[Row]:
    manifest = PreparedManifest.read(root / PREPARED_MANIFEST)
    return [row for rows in read_rows(manifest, root / "data/prepared").values() for row in rows]


class Here:
    """A line in the current folder and the means to put a store beside it."""

    def __init__(self, root: Path, states: dict[str, Tensor]) -> None:
        self.root, self.all_states, self.rows = root, states, rows_of(root)

    def samples(self, points: Sequence[int] = (*tiny.POINTS, tiny.LAYERS)) -> list[Sample]:
        """The prepared rows, another order, as a foreign tool would hold them: ids, masks and states at `points`."""
        return [
            Sample(
                torch.from_numpy(row.input_ids).long(),
                torch.from_numpy(row.loss_mask).long(),
                self.all_states[row.row_id][:, list(points)].contiguous(),
            )
            for row in sorted(self.rows, key=lambda row: row.row_id)
        ]

    def adopt(self, store: Path, **capture: Any) -> None:
        line.write_params(self.root, self.root / "target", {"capture": {"adopt": str(store), **capture}})
        extract.main()

    def record(self) -> AdoptionRecord:
        return AdoptionRecord.read(ADOPTION)


@pytest.fixture
def here(prepared: tuple[Path, dict[str, Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Here:
    shutil.copytree(prepared[0], tmp_path / "line")
    monkeypatch.chdir(tmp_path / "line")
    return Here(tmp_path / "line", prepared[1])


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that must not be loaded by extract."""
    monkeypatch.setattr(extract, "load_target", lambda *_: pytest.fail("the target was loaded"))


def judge(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """gate-training: words of the checks that failed."""
    monkeypatch.setattr(sys, "argv", ["gate", "training"])
    try:
        gate.main()
    except Refusal as refusal:
        assert not GateReport.read(report_path("training")).success, refusal
    checks = GateReport.read(report_path("training")).checks
    return {c.assertion: "\n".join([c.actual, *c.failing]) for c in checks if not c.success}


@pytest.mark.slow
def test_a_legacy_store_is_adopted_without_the_target_and_the_line_goes_on_as_ever(
    here: Here, untouched: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = make.legacy_rows(here.root / "theirs", here.samples(), 7, IDS)
    make.legacy(store / "rows_900-902", make.make_samples(2, hidden=tiny.HIDDEN), IDS, 900)
    here.adopt(store)
    merge.main()
    assert judge(monkeypatch) == {}
    spec = MergedManifest.read(MERGED_MANIFEST).capture
    assert (spec.engine, spec.points) == ("adopted from speculators 0.3-0.4", tiny.POINTS)
    kept = RowStore()
    for folder in kept.manifest().folders:
        for i, row_id in enumerate(kept.folder(folder.name).config.row_ids):
            wanted = here.all_states[row_id][:, [*tiny.POINTS, tiny.LAYERS]]
            assert torch.equal(kept.row(folder.name, i)[0], wanted)
    record = here.record()
    assert (record.rows, record.unused_rows, record.extracted_rows, record.differing_masks) == (32, 2, 0, 0)
    assert (record.layer_ids, record.numbering, record.layer_ids_from) == (IDS, "speculators_legacy", "store")
    told = capsys.readouterr().err
    assert "32 of 32 prepared rows stand in 34 files of speculators 0.3-0.4; 2 rows of it are not prepared ones" in told
    assert "32 rows (" in told and "are taken from the store" in told


def test_a_second_run_takes_everything_from_the_work_cache_and_a_changed_store_is_read_anew(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make.legacy_rows(here.root / "theirs", here.samples(), 40, IDS)
    whole: list[str] = []
    honest = ForeignStore.rows_of

    def noted(self: ForeignStore, file: Any, *, check_bytes: bool = False) -> Iterator[Any]:
        whole.extend([file.path] * check_bytes)
        return honest(self, file, check_bytes=check_bytes)

    monkeypatch.setattr(ForeignStore, "rows_of", noted)
    here.adopt(store)
    assert len(whole) == 32
    first = (HIDDEN_STATES / "data_config.json").read_bytes()
    here.adopt(store)
    assert len(whole) == 32 and (HIDDEN_STATES / "data_config.json").read_bytes() == first
    one = make.legacy_dict(here.samples((2, 3, 5, 6))[0])  # same names, same sizes
    torch.save(one, store / "rows_0-32" / "data_0.pt")
    here.adopt(store)
    assert len(whole) == 64, "states of the store as it was are not served for the store as it is"


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ((1, 2, 4, 5), "points [2, 3, 5]: every slot is shifted by +1 layer"),
        ((-1, 0, 1, 5), "the embedding was put first and the last point dropped"),
        ((0, 1, 2, 5), "points [1, 2, 3]: slots hold [1, 2, 3]"),
    ],
)
def test_a_store_of_other_points_is_refused_before_a_state_is_read_and_they_are_named(
    here: Here, untouched: None, ids: tuple[int, ...], words: str
) -> None:
    store = make.legacy_rows(here.root / "theirs", here.samples(), 8, ids)
    with pytest.raises(Refusal, match=r"other points than capture\.points") as caught:
        here.adopt(store, points=[1, 2, 4])
    assert words in caught.value.got
    assert "points [1, 2, 4], which are ids [0, 1, 3, 5] there" in caught.value.expected
    assert not HIDDEN_STATES.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("points", "words"),
    [
        ((2, 4, 6, 6), "every slot is shifted by +1 layer"),
        ((0, 1, 3, 6), "the embedding was put first and the last point dropped"),
    ],
)
def test_a_store_whose_states_are_not_what_its_config_says_is_refused_by_value_before_training(
    here: Here, monkeypatch: pytest.MonkeyPatch, points: tuple[int, ...], words: str
) -> None:
    here.adopt(make.legacy_rows(here.root / "theirs", here.samples(points), 8, IDS))
    merge.main()
    assert words in judge(monkeypatch)[NEAREST]


@pytest.mark.slow
def test_a_normed_last_state_behind_a_config_that_hides_it_is_refused_by_value(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.adopt(make.legacy_rows(here.root / "theirs", here.samples((*tiny.POINTS, tiny.LAYERS + 1)), 8, IDS))
    merge.main()
    assert any("after the final norm" in words for words in judge(monkeypatch).values())


@pytest.mark.parametrize("write", [make.specforge, make.angelslim])
def test_a_last_state_after_the_final_norm_is_refused(here: Here, write: Any) -> None:
    store = write(here.root / "theirs", here.samples((*tiny.POINTS, tiny.LAYERS + 1)))
    with pytest.raises(Refusal, match=r"after the final norm(?s:.)*cannot be undone"):
        here.adopt(store, adopt_layer_ids=[0, 2, 4])
    with pytest.raises(ParamsError, match="contradicts the store"):
        here.adopt(store, adopt_layer_ids=[0, 2, 4], adopt_last_state="before_final_norm")


def test_three_states_and_no_last_one_are_refused(here: Here) -> None:
    store = make.legacy_rows(here.root / "theirs", here.samples(), 8, (0, 2, 4))
    with pytest.raises(
        Refusal, match=r"has no last state(?s:.)*its own reader would take the highest of them for the last"
    ):
        here.adopt(store)
    for path in store.rglob("data_*.pt"):
        sample = torch.load(path, weights_only=True)
        torch.save(sample | {"hidden_states": sample["hidden_states"][:3]}, path)
    for path in store.rglob("data_config.json"):
        path.write_text(json.dumps(make.config(IDS, tiny.HIDDEN)))
    with pytest.raises(Refusal, match=r"32 files at fault: rows_0-8/data_0\.pt: A sample has no last state"):
        here.adopt(store)


def test_a_crashed_run_without_config_is_adopted_once_its_layer_ids_are_told(here: Here) -> None:
    store = make.legacy_rows(here.root / "theirs", here.samples(), 8, IDS)
    (store / "rows_8-16" / "data_config.json").unlink()
    with pytest.raises(ParamsError, match=r"Nothing says which layers(?s:.)*rows_8-16") as caught:
        here.adopt(store)
    assert "without a setting, speculators captures points 3, 4, 6 (the last)" in caught.value.got
    with pytest.raises(ParamsError, match=r"contradicts the store(?s:.)*\[0, 2, 4, 5\], as the store's config says"):
        here.adopt(store, adopt_layer_ids=[1, 3, 4, 5])
    here.adopt(store, adopt_layer_ids=list(IDS))
    assert here.record().layer_ids_from == "params"


def damage(store: Path) -> None:
    """A cut file, an empty one, one that is gone, one of the older schema, one without its last token."""
    paths = sorted(store.rglob("data_*.pt"), key=lambda p: int(p.stem.split("_")[1]))
    paths[3].write_bytes(paths[3].read_bytes()[:-200])
    paths[5].write_bytes(b"")
    paths[9].unlink()
    sample = torch.load(paths[12], weights_only=True)
    torch.save({"input_ids": sample["input_ids"], "hidden_state": 0, "target": 0}, paths[12])
    sample = torch.load(paths[20], weights_only=True)
    short = {k: sample[k][:-1] for k in ("input_ids", "loss_mask")}
    torch.save(short | {"hidden_states": [s[:-1].clone() for s in sample["hidden_states"]]}, paths[20])


def test_rows_that_the_store_lacks_are_named_with_the_files_at_fault(here: Here, untouched: None) -> None:
    store = make.legacy_rows(here.root / "theirs", here.samples(), 8, IDS)
    damage(store)
    with pytest.raises(Refusal, match="The store lacks states of prepared rows") as caught:
        here.adopt(store)
    for words in (
        "5 lacking: ",
        "1 of them stand there without their last token",
        "3 files at fault: rows_0-8/data_3.pt: A file of torch.save is cut off or damaged",
        "rows_0-8/data_5.pt: A file of the store is empty",
        "rows_8-16/data_12.pt: A sample is of an older schema (v0, with hidden_state and target)",
    ):
        assert words in caught.value.got
    assert not HIDDEN_STATES.exists()


@pytest.mark.slow
def test_the_target_makes_the_rows_that_a_store_lacks_when_that_is_asked_for(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make.legacy_rows(here.root / "theirs", here.samples(), 8, IDS)
    damage(store)
    through: list[str] = []
    honest = extract.capture_rows

    def noted(target: Any, rows: list[Row], *rest: Any) -> Iterator[Tensor]:
        through.extend(row.row_id for row in rows)
        yield from honest(target, rows, *rest)

    monkeypatch.setattr(extract, "capture_rows", noted)
    here.adopt(store, adopt_lacking="extract")
    record = here.record()
    assert len(through) == record.extracted_rows == 5 and record.rows == 27
    assert set(record.faulty) == {"rows_0-8/data_3.pt", "rows_0-8/data_5.pt", "rows_8-16/data_12.pt"}
    merge.main()
    assert judge(monkeypatch) == {}


@pytest.mark.parametrize("at", ["data/hidden_states", "data/hidden_states/theirs", "data"])
def test_a_store_where_extract_writes_is_refused_before_anything_is_removed(here: Here, at: str) -> None:
    store = make.legacy_rows(here.root / at, here.samples()[:2], 8, IDS)
    with pytest.raises(ParamsError, match="stands where extract writes"):
        here.adopt(store)
    assert len(list(store.rglob("data_*.pt"))) == 2


def test_params_say_nothing_of_a_store_that_they_do_not_name(here: Here) -> None:
    line.write_params(here.root, here.root / "target", {"capture": {"adopt_layer_ids": [0, 2, 4, 5]}})
    with pytest.raises(ParamsError, match="adopt_layer_ids say something of a store, and adopt names none"):
        extract.main()


@pytest.mark.slow
def test_masks_given_to_other_rows_are_replaced_by_the_prepared_ones_and_counted(
    here: Here, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """speculators 0.4.0: results came in string order, masks in list order; ids and states agree."""
    wanted = here.samples()
    masks = [torch.zeros_like(s.mask) for s in wanted]
    store = make.legacy(here.root / "theirs", [s._replace(mask=m) for s, m in zip(wanted, masks, strict=True)], IDS)
    (store / "data_config.json").write_text(json.dumps(make.config(IDS, tiny.HIDDEN, "0.4.0.1")))
    here.adopt(store)
    assert here.record().differing_masks == 32
    assert "32 masks differ from the prepared ones, which were taken (speculators 0.4.0" in capsys.readouterr().err
    merge.main()
    assert judge(monkeypatch) == {}


def test_a_flipped_byte_stops_adoption_with_the_file_s_name(here: Here) -> None:
    store = make.legacy_rows(here.root / "theirs", here.samples(), 40, IDS)
    path = store / "rows_0-32" / "data_7.pt"
    data = bytearray(path.read_bytes())
    states = torch.load(path, weights_only=True)["hidden_states"][1]
    data[data.find(states.view(torch.uint8).numpy().tobytes()) + 100] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"other bytes than were written(?s:.)*") as caught:
        here.adopt(store)
    assert caught.value.where.endswith("data_7.pt")


def test_float32_rows_in_a_store_are_rounded_and_counted_and_doubled_ones_taken_once(here: Here) -> None:
    wanted = here.samples()
    wanted[4] = wanted[4]._replace(states=wanted[4].states.float())
    make.legacy(here.root / "theirs", [*wanted, wanted[2]], IDS)
    here.adopt(here.root / "theirs")
    record = here.record()
    assert record.dtypes == {"bfloat16": 31, "float32": 1} and record.doubled_rows == 1


@pytest.mark.slow
def test_other_forms_are_adopted_once_what_they_do_not_say_is_told(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    newer = make.speculators(here.root / "newer", here.samples())
    here.adopt(newer, adopt_layer_ids=[1, 3, 5, 6])
    assert (here.record().era, here.record().absent_masks) == (">=0.5", 32)
    dump = make.model_optimizer(here.root / "dump", here.samples())
    with pytest.raises(ParamsError, match="does not say whether its last state stands before or after"):
        here.adopt(dump, adopt_layer_ids=[0, 2, 4])
    here.adopt(dump, adopt_layer_ids=[0, 2, 4], adopt_last_state="before_final_norm")
    assert here.record().last_state_from == "params"
    merge.main()
    assert judge(monkeypatch) == {}
    flagged = make.model_optimizer(here.root / "flagged", here.samples(), prenorm=False)
    with pytest.raises(Refusal, match="after the final norm"):
        here.adopt(flagged, adopt_layer_ids=[0, 2, 4])


def test_soft_targets_are_no_last_state(here: Here) -> None:
    store = make.nemo_automodel(here.root / "theirs", here.samples())
    with pytest.raises(Refusal, match="A sample has no last state"):
        here.adopt(store, adopt_last_state="before_final_norm")


def test_padded_rows_are_matched_without_their_padding_even_when_they_end_in_the_pad_token() -> None:
    from stages.bridges.kinds import ForeignRow
    from stages.capture.adopted import match
    from stages.capture.rows import row_id

    def prepared(ids: list[int], mask: list[int]) -> Row:
        ids_L, mask_L = torch.tensor(ids, dtype=torch.int32).numpy(), torch.tensor(mask, dtype=torch.uint8).numpy()
        return Row(row_id(ids_L, mask_L), ids_L, mask_L)

    def padded(ids: list[int], real: int) -> ForeignRow:
        ids_L, states = torch.tensor(ids), torch.randn(len(ids), 8)
        return ForeignRow(0, "f", ids_L, (ids_L > 0).byte() * 0, (states,) * 3, states).first(real)

    stored = {"a": padded([5, 6, 7, 2, 2, 2], 3), "b": padded([8, 9, 2, 2, 2], 2)}

    class Store:
        files, strange, root = ("a", "b"), (), Path("x")

        def rows_of(self, file: str, *, check_bytes: bool = False) -> Iterator[ForeignRow]:
            yield stored[file]

    wanted = [prepared([5, 6, 7], [0, 0, 1]), prepared([8, 9, 2, 2], [0, 1, 0, 0])]
    found = match(Store(), wanted, 3, 8)  # type: ignore[arg-type]
    assert {row_id: (file, tokens) for row_id, (file, _, tokens) in found.home.items()} == {
        wanted[0].row_id: ("a", 3),
        wanted[1].row_id: ("b", 4),
    }
