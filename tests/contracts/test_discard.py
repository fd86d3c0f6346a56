"""A folder that goes: never half of it under its own name."""

from __future__ import annotations

from pathlib import Path

import pytest

from stages.contracts import _aside
from stages.contracts.files import discard, whole_folder


def _make(folder: Path) -> Path:
    folder.mkdir()
    (folder / "one").write_text("1")
    return folder


def test_what_is_killed_in_the_midst_stands_under_no_whole_name_and_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _make(tmp_path / "step")

    def die(path: Path) -> None:
        raise KeyboardInterrupt(str(path))

    with monkeypatch.context() as patch:
        patch.setattr(_aside, "remove", die)
        with pytest.raises(KeyboardInterrupt):
            discard(folder)
    assert not folder.exists() and len(list(tmp_path.iterdir())) == 1
    with whole_folder(folder) as aside:
        (aside / "two").write_text("2")
    assert [p.name for p in tmp_path.iterdir()] == ["step"] and [p.name for p in folder.iterdir()] == ["two"]


def test_what_is_not_there_is_no_fault(tmp_path: Path) -> None:
    discard(tmp_path / "step")
    discard(_make(tmp_path / "step"))
    assert list(tmp_path.iterdir()) == []
