"""The work cache: finished folders by content, so that a killed run resumes and a grown corpus costs only its growth.

.cache/states/<capture spec>/<rows>/ is a row folder whose name digests the capture spec and its row ids in order.
Folders are hard-linked into data/hidden_states; DVC then makes the shared file read-only, which suits a cache. A row
that stands in another finished folder is copied from there: folder boundaries may move, its bytes stay.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor

from stages.capture.rows import FolderPlan, Row
from stages.capture.store import CONFIG, ROWS, RowFolder
from stages.contracts.errors import DataError, Refusal
from stages.contracts.files import canonical, digest, whole_folder
from stages.contracts.manifest import WORK, CaptureSpec, FolderConfig

DVC_CACHE = Path(".dvc/cache")
_NAME = 24  # hex digits of a digest that name a folder


class WorkCache:
    """Finished folders of one capture spec. A folder's bytes are checked once a run, before the first use."""

    def __init__(self, capture: CaptureSpec, root: Path = WORK) -> None:
        self.capture = capture
        self.root = root / capture.key
        self._verified: dict[str, RowFolder] = {}
        self.root.mkdir(parents=True, exist_ok=True)
        _sweep(self.root)
        self._home: dict[str, tuple[str, int]] = {}
        for path in sorted(self.root.glob(f"*/{CONFIG}")):
            self._note(path.parent.name, self._read(path))

    def key(self, row_ids: Sequence[str]) -> str:
        """The folder name of these rows in this order."""
        return digest(canonical([self.capture.digest(), *row_ids])).removeprefix("sha256:")[:_NAME]

    def path(self, row_ids: Sequence[str]) -> Path:
        return self.root / self.key(row_ids)

    def has(self, row_ids: Sequence[str]) -> bool:
        """Whether these rows stand here as one finished folder."""
        return (self.path(row_ids) / CONFIG).exists()

    def missing(self, plan: FolderPlan) -> list[Row]:
        """Rows of `plan` that stand in no finished folder and have to go through the target."""
        return [] if self.has(plan.row_ids) else [row for row in plan.rows if row.row_id not in self._home]

    def states(self, plan: FolderPlan, computed: Iterator[Tensor]) -> Iterator[Tensor]:
        """States of each row of `plan`: from a finished folder where there is one, else the next of `computed`."""
        for row in plan.rows:
            if row.row_id in self._home:
                key, i = self._home[row.row_id]
                yield self.folder(key).row(i)[0]
            else:
                yield next(computed)

    def folder(self, key: str) -> RowFolder:
        """The finished folder `key`, its bytes checked.

        Raises:
            Refusal: its bytes are not those that were written; only that folder has to go.
        """
        if key not in self._verified:
            path = self.root / key
            try:
                folder = RowFolder(path)
                folder.verify()
            except DataError as error:
                raise _damaged(path, error) from error
            self._verified[key] = folder
        return self._verified[key]

    def note(self, config: FolderConfig) -> None:
        """Take in a folder just finished at `path(config.row_ids)`."""
        self._note(self.key(config.row_ids), config)

    def link(self, plan: FolderPlan, root: Path) -> FolderConfig:
        """Put the finished folder of `plan` below `root` under the plan's name: a hard link and its own config."""
        kept = self.folder(self.key(plan.row_ids))
        config = kept.config.model_copy(update={"source": plan.source, "start": plan.start, "end": plan.end})
        with whole_folder(root / plan.name) as aside:
            link_or_copy(kept.path / ROWS, aside / ROWS)
            config.write(aside / CONFIG)
        return config

    def drop_superseded(self, plans: Sequence[FolderPlan]) -> int:
        """Remove folders all of whose rows stand in the folders of `plans`, so that growth does not pile up; count them."""
        kept = {self.key(plan.row_ids) for plan in plans}
        rows = {row_id for plan in plans for row_id in plan.row_ids}
        dropped = 0
        for config in sorted(self.root.glob(f"*/{CONFIG}")):
            if config.parent.name not in kept and rows.issuperset(FolderConfig.read(config).row_ids):
                shutil.rmtree(config.parent)
                dropped += 1
        return dropped

    def _read(self, path: Path) -> FolderConfig:
        try:
            config = FolderConfig.read(path)
        except DataError as error:
            raise _damaged(path.parent, error) from error
        if config.capture != self.capture or self.key(config.row_ids) != path.parent.name:
            other = DataError("it holds other rows than its name says", where=str(path), expected=path.parent.name)
            raise _damaged(path.parent, other)
        return config

    def _note(self, key: str, config: FolderConfig) -> None:
        for i, row_id in enumerate(config.row_ids):
            self._home.setdefault(row_id, (key, i))


def _damaged(folder: Path, error: DataError) -> Refusal:
    remove = f"`rm -r {folder}`"
    rows = folder / ROWS
    if rows.exists() and rows.stat().st_nlink > 1 and DVC_CACHE.exists():
        # DVC keeps the same file under its hash and would link the damaged bytes again
        remove = f"`find {DVC_CACHE} -samefile {rows} -delete; rm -r {folder}`"
    return Refusal(
        f"A finished folder of the work cache is damaged ({error.what})",
        where=error.where,
        expected=error.expected,
        got=error.got,
        do=f"remove exactly this folder, {remove}, and run `dvc repro extract`: only its rows are computed again",
    )


def link_or_copy(source: Path, to: Path) -> None:
    """Hard-link, or copy where the file system will not (another device, no links)."""
    try:
        os.link(source, to)
    except OSError:
        shutil.copyfile(source, to)


def _sweep(root: Path) -> None:
    """Remove what cannot be finished folders: `.name.<pid>.part` of processes that are gone, folders whose rows were deleted."""
    for part in [*root.glob(".*.part"), *root.glob(".*.old")]:
        pid = part.name.split(".")[-2]
        if not (pid.isdigit() and Path(f"/proc/{pid}").exists()):
            shutil.rmtree(part, ignore_errors=True)
    for config in root.glob(f"*/{CONFIG}"):
        if not (config.parent / ROWS).exists():
            shutil.rmtree(config.parent)
