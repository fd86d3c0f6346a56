"""Are the bytes those that were written? Asked group by group, so that the answer names rows.

Files are read, not mapped: a disk that cannot read says so with an error instead of ending the process.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from stages.capture.layout import CONFIG, ROWS, group_slices, head_size
from stages.contracts.damage import Damage
from stages.contracts.errors import DataError
from stages.contracts.files import Fact, canonical, digest
from stages.contracts.manifest import (
    CAPTURE_MANIFEST,
    CapturedFolder,
    CaptureManifest,
    CaptureSpec,
    FolderConfig,
    RowGroup,
)

# DVC trusts a file whose time and size did not change, so the stage has to be told to run.
REPAIR = (
    "run `dvc repro -f -s extract`, then `dvc repro`: the damaged rows alone go through the target again, and the bad bytes "
    "are kept in .cache/quarantine with the reason"
)
_READ = 1 << 22


def root_digest(head_digest: str, groups: Iterable[RowGroup]) -> str:
    """A folder's digest: of the digests of its parts."""
    return digest(canonical([head_digest, *(g.bytes_digest for g in groups)]))


def slices_digest(file: int, slices: Iterable[tuple[int, int]]) -> str:
    """sha256 over (begin, end) of an open file, one behind the other; a file that ends before is digested as it is."""
    sha = hashlib.sha256()
    for begin, end in slices:
        while begin < end and (piece := os.pread(file, min(_READ, end - begin), begin)):
            sha.update(piece)
            begin += len(piece)
    return "sha256:" + sha.hexdigest()


def find_damage(path: Path, config: FolderConfig, advance: Callable[[int], object] = lambda _: None) -> list[Damage]:
    """Read a folder's rows.safetensors whole and compare it with its config.

    Args:
        advance: told the bytes of each part that was read.
    """
    file, damages = path / ROWS, _contradictions(path, config)
    if not file.is_file():
        return [*damages, _rows_lost(path, config, "The file of a folder's rows is missing", "no such file")]
    if (size := file.stat().st_size) != config.bytes:
        what = "The file of a folder's rows was cut off or replaced"
        return [*damages, _rows_lost(path, config, what, f"{size} bytes")]
    parts = [(None, config.head_digest, [(0, head_size(config))])]
    parts += [(group, group.bytes_digest, slices) for group, slices in group_slices(config)]

    def read(part: tuple[RowGroup | None, str, list[tuple[int, int]]]) -> str:
        found = slices_digest(handle, part[2])
        advance(sum(end - begin for begin, end in part[2]))
        return found

    handle = os.open(file, os.O_RDONLY)
    try:
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            found = list(pool.map(read, parts))
    finally:
        os.close(handle)
    wrong = ((part, got) for part, got in zip(parts, found, strict=True) if part[1] != got)
    return damages + [group_damage(path, config, group, got) for (group, _, _), got in wrong]


def group_damage(path: Path, config: FolderConfig, group: RowGroup | None, got: str) -> Damage:
    """What is said of a group, or of the head (None), whose bytes are others than were written."""
    expected = config.head_digest if group is None else group.bytes_digest
    first = "" if group is None else "A row group's bytes are not those that were written"
    return Damage(
        file=f"{path.name}/{ROWS}",
        folder=path.name,
        what=first or "A folder's header or offsets are not those that were written",
        expected=expected,
        got=got,
        do=REPAIR,
        rows=None if group is None else (config.start + group.start, config.start + group.end),
        row_ids=() if group is None else config.row_ids[group.start : group.end],
    )


def _rows_lost(path: Path, config: FolderConfig, what: str, got: str) -> Damage:
    return Damage(
        file=f"{path.name}/{ROWS}",
        folder=path.name,
        what=what,
        expected=f"{config.bytes} bytes",
        got=got,
        do=REPAIR,
        rows=(config.start, config.end),
        row_ids=config.row_ids,
    )


def _contradictions(path: Path, config: FolderConfig) -> list[Damage]:
    """What a folder's config says against itself."""
    root = root_digest(config.head_digest, config.groups)
    ends = [0, *(g.end for g in config.groups)]
    pairs: list[tuple[str, object, object]] = [
        ("rows_digest", root, config.rows_digest),
        ("rows", config.end - config.start, len(config.row_ids)),
        ("groups", [*(g.start for g in config.groups), len(config.row_ids)], ends),
        ("tokens", sum(g.tokens for g in config.groups), config.tokens),
    ]
    return [
        _config_damage(path, "A folder's config contradicts itself", f"{name} {expected}", str(got))
        for name, expected, got in pairs
        if expected != got
    ]


def _config_damage(path: Path, what: str, expected: str, got: str) -> Damage:
    return Damage(file=f"{path.name}/{CONFIG}", folder=path.name, what=what, expected=expected, got=got, do=REPAIR)


def found_digest(path: Path) -> str:
    """What a folder's rows_digest would be by the bytes as they are; the rows that are damaged are named behind it."""
    config, faults = read_config(path)
    if config is None:
        return "no such folder" if not path.exists() else f"no config that can be read: {faults[0].got}"
    damages = find_damage(path, config)
    if not damages:
        return root_digest(config.head_digest, config.groups)
    return "; ".join(f"{d.where}: {d.what}, {d.got}" for d in damages)


def read_config(path: Path) -> tuple[FolderConfig | None, list[Damage]]:
    """A folder's config; None and the reason where it cannot be read."""
    try:
        return FolderConfig.read(path / CONFIG), []
    except DataError as error:
        return None, [_config_damage(path, error.what, error.expected or "a config", error.got or "none")]


def captured_folder(config: FolderConfig) -> CapturedFolder:
    """A folder's line in the manifest."""
    return CapturedFolder(
        name=config.name,
        source=config.source,
        start=config.start,
        end=config.end,
        tokens=config.tokens,
        config_digest=config.digest(),
        rows_digest=config.rows_digest,
    )


def apart(expected: Fact, got: Fact) -> tuple[str, str]:
    """The fields in which two facts of one kind differ, as each has them."""
    pairs = [(name, getattr(expected, name), getattr(got, name)) for name in type(expected).model_fields]
    odd = [(name, e, g) for name, e, g in pairs if e != g]
    return ", ".join(f"{name} {e}" for name, e, _ in odd), ", ".join(f"{name} {g}" for name, _, g in odd)


def describe_store(prepared_digest: str, capture: CaptureSpec, folders: Sequence[FolderConfig]) -> CaptureManifest:
    """The manifest of these folders."""
    return CaptureManifest(
        prepared_digest=prepared_digest,
        capture=capture,
        slots=(*(f"point {p}" for p in capture.points), f"point {capture.layers}, before the final norm"),
        folders=tuple(captured_folder(f) for f in folders),
        rows=sum(len(f.row_ids) for f in folders),
        tokens=sum(f.tokens for f in folders),
    )


def verify_store(
    root: Path, folders: Sequence[str] | None = None, advance: Callable[[int], object] = lambda _: None
) -> list[Damage]:
    """Read every byte below `root` (data/hidden_states) and name each that is not as it was written.

    A group's bytes are held against its folder's config, the config against the manifest, and the manifest against the
    folders. What the manifest alone says (which prepared rows, which capture) is held by its digest in the merged set.

    Args:
        folders: names to look at, against the manifest where there is one; all of them, and the manifest, when None.
        advance: told the bytes of each part that was read.
    """
    damages: list[Damage] = []
    configs: dict[str, FolderConfig] = {}
    names = folders if folders is not None else sorted(p.name for p in root.glob("rows_*") if p.is_dir())
    for name in names:
        config, faults = read_config(root / name)
        damages += faults
        if config is not None:
            configs[name] = config
            damages += find_damage(root / name, config, advance)
    if folders is not None and not (root / CAPTURE_MANIFEST.name).exists():
        return damages  # folders that stand alone have their own configs only
    return damages + _against_manifest(root, configs, every=folders is None)


def _against_manifest(root: Path, configs: dict[str, FolderConfig], every: bool) -> list[Damage]:
    """What manifest and folders say against each other."""
    try:
        manifest = CaptureManifest.read(root / CAPTURE_MANIFEST.name)
    except DataError as error:
        return [_manifest_damage(error.what, error.expected, error.got)]
    listed = {f.name: f for f in manifest.folders}
    damages: list[Damage] = []
    for name, config in configs.items():
        line, got = listed.get(name), captured_folder(config)
        if line is None:
            damages.append(_config_damage(root / name, "A folder is not in the manifest", "a line in it", "none"))
        elif line != got:
            what = "A folder's config is not the one of the manifest"
            damages.append(_config_damage(root / name, what, *apart(line, got)))
    if not every:
        return damages
    for name in listed:
        if not (root / name).is_dir():
            damages.append(_config_damage(root / name, "A folder of the manifest is missing", name, "no such folder"))
    if not damages and list(listed) == sorted(configs, key=lambda name: configs[name].start):
        spec = next((c.capture for c in configs.values() if c.capture != manifest.capture), manifest.capture)
        fresh = describe_store(manifest.prepared_digest, spec, [configs[name] for name in listed])
        if fresh != manifest:
            damages.append(_manifest_damage("A manifest does not describe its folders", *apart(fresh, manifest)))
    elif not damages:
        damages.append(_manifest_damage("A manifest names other folders", ", ".join(configs), ", ".join(listed)))
    return damages


def _manifest_damage(what: str, expected: str, got: str) -> Damage:
    return Damage(file=CAPTURE_MANIFEST.name, what=what, expected=expected, got=got, do=REPAIR)
