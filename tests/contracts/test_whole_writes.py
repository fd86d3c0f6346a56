"""Writes that are whole or absent, though the writer be killed at any moment."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stages.contracts import _aside
from stages.contracts.files import whole_folder, write_whole

SLEEPS = "print('here', flush=True); import time; time.sleep(60)"


def kill_in(code: str, repo_root: Path) -> int:
    """Run `code` until it says that it is `here`, kill it there, return its process id."""
    child = subprocess.Popen([sys.executable, "-c", code], cwd=repo_root, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "here\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    return child.pid


def write(folder: Path, text: str) -> None:
    with whole_folder(folder) as aside:
        (aside / "rows").write_text(text)


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


@pytest.fixture(params=["exchanged", "renamed"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to replace a folder: Linux's exchange, and two renames where it is not to be had."""
    if request.param == "renamed":
        monkeypatch.setattr(_aside, "exchange", lambda one, other: False)


def test_linux_exchanges_two_folders_in_one_step(tmp_path: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("renameat2 is Linux's")
    for name in ("one", "other"):
        write(tmp_path / name, name)
    assert _aside.exchange(tmp_path / "one", tmp_path / "other")
    assert (tmp_path / "one/rows").read_text() == "other" and (tmp_path / "other/rows").read_text() == "one"
    assert not _aside.exchange(tmp_path / "one", tmp_path / "nowhere") and (tmp_path / "one").exists()


@pytest.mark.usefixtures("either_way")
def test_a_folder_is_replaced_whole_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    write(tmp_path / "data", "first")
    write(tmp_path / "data", "second")
    assert (tmp_path / "data/rows").read_text() == "second" and names(tmp_path) == ["data"]
    with pytest.raises(KeyboardInterrupt), whole_folder(tmp_path / "data") as aside:
        (aside / "rows").write_text("third")
        raise KeyboardInterrupt
    assert (tmp_path / "data/rows").read_text() == "second" and names(tmp_path) == ["data"]


@pytest.mark.usefixtures("either_way")
def test_after_a_kill_in_the_middle_the_next_write_leaves_one_whole_folder_and_no_strays(
    tmp_path: Path, repo_root: Path
) -> None:
    folder = tmp_path / "data"
    write(folder, "first")
    code = (
        "from pathlib import Path; from stages.contracts.files import whole_folder\n"
        f"with whole_folder(Path({str(folder)!r})) as aside:\n  (aside / 'rows').write_text('half'); {SLEEPS}"
    )
    pid = kill_in(code, repo_root)
    assert names(tmp_path) == [f".data.{pid}.part", "data"] and (folder / "rows").read_text() == "first"
    write(folder, "second")
    assert names(tmp_path) == ["data"] and (folder / "rows").read_text() == "second"


def test_a_kill_between_the_two_renames_loses_nothing(tmp_path: Path, repo_root: Path) -> None:
    folder = tmp_path / "data"
    write(folder, "first")
    code = f"""
from pathlib import Path
from stages.contracts import _aside
from stages.contracts.files import whole_folder
def rename(self, to, whole=Path.rename):
    if self.suffix == ".part":
        {SLEEPS}
    return whole(self, to)
_aside.exchange = lambda one, other: False
Path.rename = rename
with whole_folder(Path({str(folder)!r})) as aside:
    (aside / "rows").write_text("second")
"""
    pid = kill_in(code, repo_root)
    assert names(tmp_path) == [f".data.{pid}.old", f".data.{pid}.part"]
    with pytest.raises(KeyboardInterrupt), whole_folder(folder):
        assert (folder / "rows").read_text() == "first"
        raise KeyboardInterrupt
    assert names(tmp_path) == ["data"] and (folder / "rows").read_text() == "first"


def test_a_file_killed_half_written_is_swept_and_a_living_writers_is_not(tmp_path: Path, repo_root: Path) -> None:
    path = tmp_path / "fact.json"
    code = (
        "import os; from pathlib import Path; from stages.contracts.files import write_whole\n"
        f"def fsync(handle):\n  {SLEEPS}\n"
        f"os.fsync = fsync\nwrite_whole(Path({str(path)!r}), b'half')"
    )
    pid = kill_in(code, repo_root)
    assert names(tmp_path) == [f".fact.json.{pid}.part"]
    living, other = tmp_path / f".fact.json.{os.getppid()}.part", tmp_path / ".other.json.999999999.part"
    living.write_bytes(b"")
    other.write_bytes(b"")
    write_whole(path, b"whole")
    assert path.read_bytes() == b"whole" and names(tmp_path) == sorted([living.name, other.name, path.name])


def test_a_write_that_fails_leaves_the_old_bytes_and_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_whole(tmp_path / "fact.json", b"old")

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*/fact\.json'"):
        write_whole(tmp_path / "fact.json", b"new")
    with pytest.raises(OSError, match=r"No space left on device: '.*/data'"):
        write(tmp_path / "data", "new")
    assert names(tmp_path) == ["fact.json"] and (tmp_path / "fact.json").read_bytes() == b"old"
