"""mend_masks copies a store whose masks stand beside other rows' tokens: masks right, everything else the same bytes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from stages import glance, mend_masks
from stages.bridges.stores import open_store
from stages.contracts.adoption import MendedMasks
from stages.contracts.errors import LineError, Refusal
from tests import tiny
from tests.bridges import samples as make
from tests.bridges.samples import Sample
from tests.capture.stores import IDS
from tests.capture.test_masks import as_0_4_0, chats


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def permuted(root: Path, rows: Sequence[Sample], target: Path | None, batch: int = 16) -> Path:
    """What speculators 0.4.0 left of `rows` in two folders: the first is sound, the second has a batch out of order."""
    half = len(rows) // 2
    for start, part in ((0, list(rows[:half])), (2000, as_0_4_0(rows[half:], batch))):
        folder = make.legacy(root / f"rows_{start}-{start + half}", part, IDS, start)
        told = make.config(IDS, make.HIDDEN, "0.4.0")
        told["reproducibility"]["command"] = f"data_generation_offline.py --batch-size {8 if not start else batch}"
        told["model"]["target_model_path"] = str(target)
        (folder / "data_config.json").write_text(json.dumps(told))
    return root


def mend(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["mend_masks", *arguments])
    mend_masks.main()


def digests(root: Path) -> dict[str, str]:
    files = (p for p in sorted(root.rglob("*")) if p.is_file())
    return {str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def demand_mended(root: Path, rows: Sequence[Sample]) -> None:
    """Every row with its own mask and its own states."""
    of = {tuple(s.ids.tolist()): s for s in rows}
    found = list(open_store(root).rows())
    assert len(found) == len(rows)
    for row in found:
        right = of[tuple(row.input_ids.tolist())]
        assert row.loss_mask is not None and torch.equal(row.loss_mask.long(), right.mask)
        assert row.last is not None and torch.equal(torch.stack([*row.aux, row.last], 1), right.states)


def test_masks_go_back_to_their_rows_and_the_original_is_not_touched(
    target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = chats(target, 48)
    permuted(Path("theirs"), rows, target)
    before = digests(Path("theirs"))
    mend(monkeypatch, "theirs", "mended")
    assert digests(Path("theirs")) == before
    demand_mended(Path("mended"), rows)
    record = MendedMasks.read(MendedMasks.path(Path("mended")))
    assert (record.rows, record.mended_rows, list(record.folders)) == (48, 14, ["rows_2000-2024"])
    assert record.folders["rows_2000-2024"].batch == 16 and 0 < record.rebuilt_rows < 14, (
        "some were cut, some were whole"
    )
    after = digests(Path("mended"))
    changed = {f"rows_2000-2024/data_{n}.pt" for n in record.folders["rows_2000-2024"].rows}
    assert {name for name in before if after[name] != before[name]} == changed
    assert after.keys() - before.keys() == {"mended_masks.json"}
    sound = Path("rows_0-24/data_3.pt")
    assert os.path.samefile(Path("theirs") / sound, Path("mended") / sound), "no second copy of what is right"
    assert (
        f"14 of 48 rows have their own mask again ({record.rebuilt_rows} made from the tokens), in 1 of 2"
        in capsys.readouterr().out
    )


def test_a_glance_names_the_command_and_finds_nothing_more_behind_it(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    permuted(Path("theirs"), chats(target, 48), target)
    command = "python -m stages.mend_masks theirs theirs-mended"
    told = glance.look(Path("theirs"))
    assert command in told.next and any(
        "14 of every 16 rows carry another row's loss mask" in n.words for n in told.faults
    )
    glance.deepen(told, Path("theirs"))
    assert told.facts["deep"]["kinds"]["mask_order"] == 1 and told.next.count(command) == 1
    mend(monkeypatch, *command.split()[3:])
    told = glance.look(Path("theirs-mended"))
    assert not any("mend_masks" in step for step in told.next) and not any("mask" in n.words for n in told.faults)
    assert any("were mended: mended_masks.json says which" in n.words for n in told.notes if n.level == "fine")
    glance.deepen(told, Path("theirs-mended"))
    assert "mask_order" not in told.facts["deep"]["kinds"] and "mask" not in told.facts["deep"]["kinds"]


def test_without_a_template_a_mask_that_was_cut_is_not_guessed(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    permuted(Path("cut"), chats(target, 48), None)
    with pytest.raises(LineError, match=r"own mask is not whole(.|\n)*cut to that row's length(.|\n)*target at hand"):
        mend(monkeypatch, "cut", "out")
    assert not Path("out").exists()


def test_a_mask_that_follows_no_rule_of_the_template_is_not_made_from_it(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that supervise only the end of their answer: lengths tell the order, and the template's masks would be wrong ones."""
    rows = [s._replace(mask=(torch.arange(len(s.ids)) >= len(s.ids) - 3).long()) for s in chats(target, 48)]
    permuted(Path("theirs"), rows, target)
    with pytest.raises(LineError, match="own mask is not whole"):
        mend(monkeypatch, "theirs", "out")


def test_a_store_in_order_is_left_alone_and_so_is_one_of_another_tool(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    permuted(Path("sound"), chats(target, 48), target, batch=10)
    with pytest.raises(Refusal, match=r"No folder's masks are out of order(.|\n)*48 rows in 2 folders"):
        mend(monkeypatch, "sound", "out")
    make.specforge(Path("theirs"), make.make_samples())
    with pytest.raises(Refusal, match=r"not known to stand beside other rows' tokens(.|\n)*specforge"):
        mend(monkeypatch, "theirs", "out")
    assert not Path("out").exists()


def test_nothing_of_another_origin_is_replaced_and_neither_folder_holds_the_other(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    permuted(Path("theirs"), chats(target, 48), target)
    Path("mine").mkdir()
    Path("mine/notes.txt").write_text("mine")
    for out in ("mine", "theirs", "theirs/rows_0-24/out", "."):
        with pytest.raises(Refusal, match="The copy cannot stand there"):
            mend(monkeypatch, "theirs", out)
    for arguments in ((), ("theirs",), ("theirs", "a", "b")):
        with pytest.raises(LineError, match="Mend which store"):
            mend(monkeypatch, *arguments)
    mend(monkeypatch, "theirs", "out")
    mend(monkeypatch, "theirs", "out")
    assert Path("mine/notes.txt").read_text() == "mine" and MendedMasks.path(Path("out")).exists()


def test_a_file_that_cannot_be_read_stands_in_the_copy_as_it_was_and_is_named(
    target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = chats(target, 48)
    permuted(Path("theirs"), rows, target)
    odd = Path("theirs/rows_2000-2024/data_2005.pt")
    odd.write_bytes(odd.read_bytes()[:200])
    mend(monkeypatch, "theirs", "out")
    assert (Path("out") / odd.relative_to("theirs")).read_bytes() == odd.read_bytes()
    record = MendedMasks.read(MendedMasks.path(Path("out")))
    assert list(record.unread) == ["rows_2000-2024/data_2005.pt"] and record.rows == 47
    assert "1 files could not be read and stand there as they were" in capsys.readouterr().out


def test_a_copy_that_does_not_fit_the_disk_is_not_begun(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    permuted(Path("theirs"), chats(target, 48), target)
    usage = type("Usage", (), {"free": 1000})()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(Refusal, match="The copy does not fit on this disk"):
        mend(monkeypatch, "theirs", "out")
    assert not Path("out").exists()
