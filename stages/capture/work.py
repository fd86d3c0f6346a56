"""The work cache: finished folders by content, so that a killed run resumes and a grown corpus costs only its growth.

.cache/states/<capture spec>/<rows>/ is a row folder whose name digests the capture spec and its row ids in order.
Folders are hard-linked into data/hidden_states; DVC then makes the shared file read-only, which suits a cache. A row
that stands in another finished folder is copied from there: folder boundaries may move, its bytes stay.

Before anything is used its bytes are checked (`heal`). Of a damaged folder the sound row groups are still used; the folder
is kept in quarantine as it was found, and replaced once the damaged rows have gone through the target again.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from torch import Tensor

from stages.capture.layout import CONFIG, ROWS
from stages.capture.quarantine import inode, link_or_copy, quarantine
from stages.capture.rows import FolderPlan, Row
from stages.capture.spill import batches
from stages.capture.store import RowFolder
from stages.capture.verify import REPAIR, find_damage, read_config
from stages.contracts.damage import Damage
from stages.contracts.errors import DataError
from stages.contracts.files import canonical, digest, whole_folder
from stages.contracts.manifest import QUARANTINE, WORK, CaptureSpec, FolderConfig

_NAME = 24  # hex digits of a digest that name a folder


class WorkCache:
    """Finished folders of one capture spec.

    Attributes: damages, everything found damaged so far; quarantine, where it is kept.
    """

    def __init__(self, capture: CaptureSpec, root: Path = WORK) -> None:
        self.capture = capture
        self.root = root / capture.key
        self.quarantine = root.parent / QUARANTINE.name
        self.damages: list[Damage] = []
        self._finished: dict[str, FolderConfig] = {}
        self._hurt: dict[str, FolderConfig] = {}
        self._open: dict[str, RowFolder] = {}  # their bytes were checked
        self._home: dict[str, tuple[str, int]] = {}
        self._kept: set[tuple[int, int]] = set()  # files in quarantine, as device and inode
        self.root.mkdir(parents=True, exist_ok=True)
        _sweep(self.root)
        for path in sorted(self.root.glob(f"*/{CONFIG}")):
            self._take(path.parent)

    def key(self, row_ids: Sequence[str]) -> str:
        """The folder name of these rows in this order."""
        return digest(canonical([self.capture.digest(), *row_ids])).removeprefix("sha256:")[:_NAME]

    def path(self, row_ids: Sequence[str]) -> Path:
        return self.root / self.key(row_ids)

    def has(self, row_ids: Sequence[str]) -> bool:
        """Whether these rows stand here as one finished folder that is not known to be damaged."""
        return self.key(row_ids) in self._finished

    def missing(self, plan: FolderPlan) -> list[Row]:
        """Rows of `plan` that stand in no finished folder and have to go through the target."""
        return [] if self.has(plan.row_ids) else [row for row in plan.rows if row.row_id not in self._home]

    def cut(self, plan: FolderPlan, tokens_per_batch: int) -> list[list[Row]]:
        """The rows of `plan` as they go, or went, through the target together: one row group each.

        A damaged folder keeps its groups, so that a group computed again is the batch that it was.
        """
        hurt = self._hurt.get(self.key(plan.row_ids))
        if hurt is None:
            return list(batches(plan.rows, tokens_per_batch))
        return [list(plan.rows[g.start : g.end]) for g in hurt.groups]

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
            DataError: they are not those that were written; `heal` finds that before.
        """
        if key not in self._open:
            folder = RowFolder(self.root / key)
            folder.verify()
            self._open[key] = folder
        return self._open[key]

    def note(self, config: FolderConfig) -> bool:
        """Take in a folder just finished at `path(config.row_ids)`; False when it was computed again to other bytes."""
        key = self.key(config.row_ids)
        was = self._hurt.pop(key, None)
        self._finished[key] = config
        self._open[key] = RowFolder(self.root / key)
        self._open[key].trust(range(len(config.groups)))  # written a moment ago; gate-training reads them back
        for i, row_id in enumerate(config.row_ids):
            self._home[row_id] = (key, i)
        return was is None or was.rows_digest == config.rows_digest

    def take_in(self, output: Path) -> int:
        """Link folders of this capture that stand below `output` and not here (a cache that was removed, data that was
        pulled); count them. Their bytes are checked like all others."""
        taken = 0
        for place in sorted(p.parent for p in output.glob(f"*/{CONFIG}")):
            config, _ = read_config(place)
            if config is None or config.capture != self.capture or not (place / ROWS).is_file():
                continue
            key = self.key(config.row_ids)
            if key not in self._finished:
                with whole_folder(self.root / key) as aside:
                    link_or_copy(place / ROWS, aside / ROWS)
                    config.write(aside / CONFIG)
                self._take(self.root / key)
                taken += 1
        return taken

    def heal(self, plans: Sequence[FolderPlan], advance: Callable[[int], object] = lambda _: None) -> list[Damage]:
        """Check every folder that `plans` need, and part with what is damaged: into quarantine, and out of `missing`'s sight.

        Args:
            advance: told the bytes that were read.

        Returns:
            what was found, here and when the cache was opened.
        """
        rows = {self.key(plan.row_ids): plan.rows for plan in plans}
        while unchecked := [key for key in self._needed(plans) if key not in self._open]:
            for key in unchecked:
                self._check(key, rows.get(key), advance)
            self._home = {}
            for key, config in self._finished.items():
                self._settle(key, range(len(config.row_ids)))
            for key in self._hurt:
                self._settle(key, self._sound_rows(key))
        return self.damages

    def bytes_to_check(self, plans: Sequence[FolderPlan]) -> int:
        return sum(self._finished[key].bytes for key in self._needed(plans) if key not in self._open)

    def link(self, plan: FolderPlan, root: Path) -> FolderConfig:
        """Put the finished folder of `plan` below `root` under the plan's name: a hard link and its own config.

        A link that stands there already stays; a damaged folder goes into quarantine before it is replaced.
        """
        kept, place = self.folder(self.key(plan.row_ids)), root / plan.name
        config = kept.config.model_copy(update={"source": plan.source, "start": plan.start, "end": plan.end})
        if place.is_dir() and self._stands(place, config, kept.path / ROWS):
            return config
        with whole_folder(place) as aside:
            link_or_copy(kept.path / ROWS, aside / ROWS)
            config.write(aside / CONFIG)
        return config

    def drop_superseded(self, plans: Sequence[FolderPlan]) -> int:
        """Remove folders all of whose rows stand in the folders of `plans`, so that growth does not pile up, and damaged
        ones that nothing replaced; count them."""
        kept = {self.key(plan.row_ids) for plan in plans}
        rows = {row_id for plan in plans for row_id in plan.row_ids}
        old = [k for k, c in self._finished.items() if k not in kept and rows.issuperset(c.row_ids)]
        for key in (*old, *self._hurt):
            shutil.rmtree(self.root / key)
            self._finished.pop(key, None)
        return len(old) + len(self._hurt)

    def _take(self, path: Path) -> None:
        """Note the finished folder `path`; one whose config is no use goes into quarantine at once."""
        config, faults = read_config(path)
        if config is not None and (config.capture != self.capture or self.key(config.row_ids) != path.name):
            what = "A folder of the work cache holds other rows than its name says"
            faults = [_fault(path, what, path.name, self.key(config.row_ids))]
        if config is None or faults:
            self._set_aside(path, faults)
            shutil.rmtree(path)
            return
        self._finished[path.name] = config
        self._settle(path.name, range(len(config.row_ids)))

    def _settle(self, key: str, rows: Sequence[int]) -> None:
        row_ids = (self._finished.get(key) or self._hurt[key]).row_ids
        for i in rows:
            self._home.setdefault(row_ids[i], (key, i))

    def _needed(self, plans: Sequence[FolderPlan]) -> list[str]:
        keys: dict[str, None] = {}
        for plan in plans:
            if self.has(plan.row_ids):
                keys[self.key(plan.row_ids)] = None
            else:
                keys |= dict.fromkeys(self._home[r][0] for r in plan.row_ids if r in self._home)
        return list(keys)

    def _check(self, key: str, rows: Sequence[Row] | None, advance: Callable[[int], object]) -> None:
        path, config = self.root / key, self._finished[key]
        damages = find_damage(path, config, advance)
        bad = {row_id for damage in damages for row_id in damage.row_ids}
        if damages:
            self._set_aside(path, damages)
            self._hurt[key] = self._finished.pop(key)
        try:
            folder = RowFolder(path, rows if damages else None)
        except DataError:  # cut off, or a config that says nothing that can be relied on
            return
        folder.trust(n for n, g in enumerate(config.groups) if not bad.intersection(config.row_ids[g.start : g.end]))
        self._open[key] = folder

    def _sound_rows(self, key: str) -> list[int]:
        folder = self._open.get(key)
        return [] if folder is None else [i for i in range(len(folder)) if folder.is_trusted(i)]

    def _stands(self, place: Path, config: FolderConfig, rows: Path) -> bool:
        """Whether `place` is the folder of `config` already; if it should be and is damaged, that is told and kept."""
        found, faults = read_config(place)
        if found is not None and (found.capture, found.row_ids) != (config.capture, config.row_ids):
            return False  # other rows had this name
        if found is not None and found != config:
            faults = [_fault(place, "A folder's config is not that of its rows", config.digest(), found.digest())]
        if not faults and inode(place / ROWS) == inode(rows):
            return True
        if inode(place / ROWS) in self._kept:  # the work cache's own file, found damaged there
            return False
        faults += find_damage(place, config)
        if {f.got for f in faults} - {
            d.got for d in self.damages
        }:  # DVC makes a copy of an output before it is written
            self._set_aside(place, faults)
        return not faults and inode(place / ROWS)[0] != inode(rows)[0]  # on one device, links instead of copies

    def _set_aside(self, path: Path, damages: Sequence[Damage]) -> None:
        quarantine(path, damages, self.quarantine)
        self._kept.add(inode(path / ROWS))
        self.damages += damages


def _fault(path: Path, what: str, expected: str, got: str) -> Damage:
    return Damage(file=f"{path.name}/{CONFIG}", folder=path.name, what=what, expected=expected, got=got, do=REPAIR)


def _sweep(root: Path) -> None:
    """Remove what cannot be finished folders: `.name.<pid>.part` of processes that are gone, folders whose rows were deleted."""
    for part in [*root.glob(".*.part"), *root.glob(".*.old")]:
        pid = part.name.split(".")[-2]
        if not (pid.isdigit() and Path(f"/proc/{pid}").exists()):
            shutil.rmtree(part, ignore_errors=True) if part.is_dir() else part.unlink(missing_ok=True)
    for config in root.glob(f"*/{CONFIG}"):
        if not (config.parent / ROWS).exists():
            shutil.rmtree(config.parent)
