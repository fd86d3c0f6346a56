"""Resume points: whole folders that carry everything a run needs to go on as if it had never stopped.

step_000060/ holds tensors.safetensors and resume.json; the JSON has the tensors' sha256, and the folder appears by
rename, so that one that is there is complete. A damaged one is refused by name: going on with fresh optimizer state
would look like success. So is one of another run: it says itself which data, vocabulary, start and settings it belongs to.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from stages.contracts.errors import DataError, Refusal
from stages.contracts.files import Fact, discard, file_digest, whole_folder

_TENSORS, _STATE = "tensors.safetensors", "resume.json"


class ResumeState(Fact):
    """resume.json. `of`: all that decides the run, by name; `progress` is the loop's own: curves so far, the best so far."""

    version: int = 2
    step: int
    tensors_digest: str
    of: dict[str, Any]
    progress: dict[str, Any]


class ResumePoints:
    """The resume points of one run, below a folder that is named after all that decides the run.

    Args:
        of: what decides it, by name: settings, and digests of data, vocabulary and start.
    """

    def __init__(self, root: Path, of: Mapping[str, Any] | None = None) -> None:
        self.root, self.of = root, dict(of or {})

    def save(self, step: int, tensors: dict[str, Tensor], progress: dict[str, Any]) -> None:
        """Write the point after `step` steps. Older ones stay until `settle` is told that it is sound.

        Raises:
            DataError: the tensors cannot be written; the older point stays.
        """
        folder = self.root / f"step_{step:06d}"
        with whole_folder(folder) as aside:
            _save(tensors, aside / _TENSORS)
            digest = file_digest(aside / _TENSORS)
            ResumeState(step=step, tensors_digest=digest, of=self.of, progress=progress).write(aside / _STATE)

    def settle(self, *, sound: bool) -> None:
        """The last point is sound, and older ones go; or it is not, and goes itself."""
        folders = self._folders()
        for folder in folders[:-1] if sound else folders[-1:]:
            discard(folder)

    def load(self) -> tuple[int, dict[str, Tensor], dict[str, Any]] | None:
        """The last complete point: step, tensors, progress; None when there is none.

        Raises:
            DataError: it is damaged, and the words tell how to remove it alone.
            Refusal: it is of another run; what differs is named.
        """
        folders = self._folders()
        if not folders:
            return None
        folder = folders[-1]
        try:
            state = ResumeState.read(folder / _STATE)
            got = file_digest(folder / _TENSORS)
        except DataError as error:
            raise _damaged(folder, error.where, error.expected or "a whole file", error.got or error.what) from error
        if got != state.tensors_digest:
            raise _damaged(folder, str(folder / _TENSORS), state.tensors_digest, got)
        if told := differences(state.of, self.of):
            raise Refusal(
                "This resume point is of another run",
                where=str(folder),
                expected="the data, vocabulary, start and settings of this one",
                got="; ".join(told),
                do=f"put back what differs, or `rm -r {folder}` to train from the start",
            )
        return state.step, load_file(folder / _TENSORS), state.progress

    def others(self) -> list[tuple[Path, list[str]]]:
        """Unfinished runs beside this one: the last whole point of each, and in what it differs."""
        found: list[tuple[Path, list[str]]] = []
        for root in sorted(self.root.parent.glob("[!.]*")):
            folders = ResumePoints(root)._folders() if root != self.root else []
            with contextlib.suppress(DataError):  # a damaged one is told by the run that it belongs to
                found += [(f, differences(ResumeState.read(f / _STATE).of, self.of)) for f in folders[-1:]]
        return found

    def clear(self) -> None:
        """Remove all points: the run is over."""
        if self.root.parent.exists():
            discard(self.root)

    def _folders(self) -> list[Path]:
        """The points there are, oldest first; what a person laid beside them is none."""
        named = [p for p in self.root.glob("step_*") if re.fullmatch(r"step_\d{6,}", p.name)]
        return sorted(named, key=lambda p: int(p.name.removeprefix("step_")))


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """What decides two runs and is not the same, a few words each."""
    names = sorted(n for n in there.keys() | here.keys() if there.get(n) != here.get(n))
    return [f"{n} was {there.get(n)}, is {here.get(n)}" for n in names]


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:  # its own type, for a full disk too
        raise DataError(
            "A resume point cannot be written",
            where=str(path.parent.parent),
            expected="room for the draft's weights and its optimizer state",
            got=str(error),
            do="free some space (`df -h`), then `dvc repro train`: it goes on from the last whole point",
        ) from error


def _damaged(folder: Path, where: str, expected: str, got: str) -> DataError:
    return DataError(
        "A resume point is damaged; training does not go on with fresh optimizer state in its place",
        where=where,
        expected=expected,
        got=got,
        do=f"`rm -r {folder}`, then `dvc repro train`: it goes on from the point before, or else from the start",
    )
