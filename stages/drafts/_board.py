"""The curves of a run as TensorBoard reads them, beside those that DVC plots.

The resume point holds the curves, so the events are written from them: at the start of a run, or when it goes on, the run's folder is
written anew with all that was measured up to there. What a killed run had written beyond its resume point is gone with the old file,
and no step stands in it twice.
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

from stages.contracts.errors import ParamsError
from stages.drafts._curves import Curves


def demand_tensorboard(folder: Path) -> None:
    """Raises ParamsError where the package is missing or `folder` cannot be one; asked for before any work is done."""
    if importlib.util.find_spec("tensorboard") is None:
        raise ParamsError(
            "TensorBoard is not installed",
            where="params.yaml: train.tensorboard",
            expected="false, or the package tensorboard",
            got="true, and no such package",
            do="pip install '.[tensorboard]'",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error


def _unwritable(folder: Path, error: OSError) -> ParamsError:
    return ParamsError(
        "TensorBoard's files cannot be written",
        where=str(folder),
        expected="a folder, or a place for one",
        got=f"{error.strerror}: {error.filename}",
        do="move what is there, or set train.tensorboard to false",
    )


class Board:
    """The event file of one run: scalars training/…, held_out/… and speed/…, by optimizer step.

    Args:
        folder: the run's own; what an earlier run with the same settings and data left there goes.

    Raises ParamsError where it cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter  # seconds that only who asks for it pays

        try:
            shutil.rmtree(folder, ignore_errors=True)
            self._writer = SummaryWriter(str(folder), purge_step=0)  # one that watches drops what it has read before
        except OSError as error:
            raise _unwritable(folder, error) from error
        self._shown = {"training": 0, "held_out": 0, "speed": 0}

    def show(self, curves: Curves) -> None:
        """Write what is new in the curves, to the disk."""
        for name, shown in self._shown.items():
            lines = getattr(curves, name)
            for line in lines[shown:]:
                for what, value in line.items():
                    if what != "step":
                        self._writer.add_scalar(f"{name}/{what}", value, int(line["step"]))
            if lines[shown:]:
                self._writer.flush()
            self._shown[name] = len(lines)
