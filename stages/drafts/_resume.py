"""Resume points: whole folders that carry everything a run needs to go on as if it had never stopped.

step_000060/ holds tensors.safetensors and resume.json; the JSON has the tensors' sha256, and the folder appears by
rename, so that one that is there is complete. A damaged one is refused by name: going on with fresh optimizer state
would look like success.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from stages.contracts.errors import DataError
from stages.contracts.files import Fact, file_digest, whole_folder

_TENSORS, _STATE = "tensors.safetensors", "resume.json"


class ResumeState(Fact):
    """resume.json. `progress` is the loop's own: curves so far, the best so far."""

    version: int = 1
    step: int
    tensors_digest: str
    progress: dict[str, Any]


class ResumePoints:
    """The resume points of one run, below a folder that is named after all that decides the run."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def save(self, step: int, tensors: dict[str, Tensor], progress: dict[str, Any]) -> None:
        """Write the point after `step` steps; older ones go once it is there."""
        folder = self.root / f"step_{step:06d}"
        older = self._folders()
        with whole_folder(folder) as aside:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, aside / _TENSORS)
            digest = file_digest(aside / _TENSORS)
            ResumeState(step=step, tensors_digest=digest, progress=progress).write(aside / _STATE)
        for old in older:
            if old != folder:
                shutil.rmtree(old)

    def load(self) -> tuple[int, dict[str, Tensor], dict[str, Any]] | None:
        """The last complete point: step, tensors, progress; None when there is none.

        Raises:
            DataError: it is damaged.
        """
        folders = self._folders()
        if not folders:
            return None
        folder = folders[-1]
        state = ResumeState.read(folder / _STATE)
        if (got := file_digest(folder / _TENSORS)) != state.tensors_digest:
            raise DataError(
                "A resume point is damaged; training does not go on with fresh optimizer state in its place",
                where=str(folder / _TENSORS),
                expected=state.tensors_digest,
                got=got,
                do=f"remove {self.root} to train from the start",
            )
        return state.step, load_file(folder / _TENSORS), state.progress

    def clear(self) -> None:
        """Remove all points: the run is over."""
        shutil.rmtree(self.root, ignore_errors=True)

    def _folders(self) -> list[Path]:
        return sorted(self.root.glob("step_*"))
