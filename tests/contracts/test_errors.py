"""What an entry point says and how it exits when the machine, not the data, is at fault."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from stages.contracts.errors import Refusal, run
from stages.contracts.files import write_whole


def fails_with(error: BaseException) -> None:
    def main() -> None:
        raise error

    run(main)


@pytest.mark.parametrize(
    ("number", "what", "do"),
    [
        (errno.ENOSPC, "The disk is full", "df -h"),
        (errno.EDQUOT, "The disk quota is used up", "quota -s"),
        (errno.EACCES, "This user may not read or write here", "ls -ld"),
        (errno.EPERM, "This user may not do this here", "ls -ld"),
        (errno.EROFS, "This file system is read-only", "remount,rw"),
        (errno.EIO, "The disk failed to read or write", "dmesg"),
    ],
)
def test_a_full_forbidden_or_failing_disk_is_told_in_words_with_exit_code_2(
    number: int, what: str, do: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        fails_with(OSError(number, os.strerror(number), "data/prepared"))
    told = capsys.readouterr().err
    assert left.value.code == 2 and told.startswith(f"error: {what}\n  where: data/prepared\n  got: ")
    assert errno.errorcode[number] in told and os.strerror(number) in told and do in told


def test_a_disk_that_fills_up_in_a_write_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SystemExit):
        run(lambda: write_whole(tmp_path / "prepared.json", b"{}"))
    assert f"where: {tmp_path}/prepared.json\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error", [ConnectionResetError(errno.ECONNRESET, "reset"), OSError("no number"), KeyError("x")]
)
def test_any_other_error_keeps_its_traceback(error: Exception) -> None:
    with pytest.raises(type(error)):
        fails_with(error)


def test_a_refusal_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        fails_with(Refusal("Not this draft", do="retrain"))
    assert left.value.code == 1 and capsys.readouterr().err == "refused: Not this draft\n  what to do: retrain\n"
