"""A data root, and folders that are no store: what lies in them, in a line each."""

from __future__ import annotations

import os
import re
import reprlib
from collections.abc import Callable, Sequence
from pathlib import Path

from stages.contracts.errors import LineError
from stages.glancing.contents import Contents, Shape
from stages.glancing.runs import read_object, section, whole
from stages.glancing.standing import to_do
from stages.glancing.told import Facts, Told, some

PARTS = ("prepared", "hidden_states", "merged", "logs")  # in the line's order
_TABLES = (".jsonl", ".parquet", ".arrow", ".json", ".csv")
_LOGS = (".log", ".out", ".err", ".txt")
_TROUBLE = re.compile(
    r"Traceback|out of memory|OutOfMemory|Killed|No space left|NCCL.*(error|timeout)|Segmentation", re.I
)
_TAIL = 8192
_MOST = 1000  # entries whose time is looked at


def data_root(path: Path) -> Path | None:
    """`path`, or `path`/data, when it holds folders of the line by their names."""
    for root in (path, path / "data"):
        if sum((root / name).is_dir() for name in PARTS) >= 2 or (root / "hidden_states").is_dir():
            return root
    return None


def tell_root(path: Path, root: Path, stages: Sequence[Facts], look: Callable[[Path], Told]) -> Told:
    """The state of the whole line below `root`.

    Args:
        stages: records of our own line, if its manifests stand there.
        look: a glance at one folder.
    """
    ours = any(s["state"] != "missing" for s in stages)
    told = Told(str(path), "data_root", "data root of this line" if ours else "data root")
    if ours:
        told.facts["stages"] = list(stages)
        told.facts["stale"] = [s["stage"] for s in stages if s["state"] == "stale"]
    parts: list[Facts] = []
    rows: dict[str, int] = {}
    for name in PARTS:
        if not (root / name).is_dir():
            if ours and name == "logs":  # of other scripts; this line writes none
                continue
            parts.append({"folder": name, "what": "missing", "rows": None, "bytes": None})
            continue
        part = _part(told, root / name, look)
        parts.append(
            {"folder": name, "what": part.what, "rows": part.facts.get("rows"), "bytes": part.facts.get("bytes")}
        )
        if part.facts.get("rows"):
            rows[name] = int(part.facts["rows"])
    told.facts["parts"] = parts
    if not ours:
        _order(told, root, rows)
    told.next = (
        [to_do(stages) or "nothing: the line is done"]
        if ours
        else [f"python -m stages.glance {root / 'hidden_states'}"]
    )
    return told


def _part(told: Told, folder: Path, look: Callable[[Path], Told]) -> Told:
    """One folder of the line; its faults and risks go up with its name, what to do about them is told there."""
    try:
        part = look(folder)
    except LineError as error:
        told.add("risk", f"{error.what}: {error.got}" if error.got else error.what, where=folder.name)
        return Told(str(folder), "folder", "cannot be told")
    for note in part.notes:
        if note.level in ("fault", "risk"):
            told.add(note.level, note.words, "", f"{folder.name}/{note.where}".rstrip("/"))
    return part


def _order(told: Told, root: Path, rows: Facts) -> None:
    """Without digests only times and counts tell what was made of what."""
    times = {name: newest(root / name) for name in PARTS[:3] if (root / name).is_dir()}
    for before, after in (("prepared", "hidden_states"), ("hidden_states", "merged")):
        if times.get(before) and times.get(after) and times[before] > times[after]:
            told.add(
                "risk",
                f"Stale: {before} was written after {after}",
                f"make {after} again, or show that its rows are the same",
            )
    if rows.get("hidden_states") and rows.get("merged") and rows["hidden_states"] != rows["merged"]:
        told.add("risk", f"merged has {rows['merged']} rows, hidden_states {rows['hidden_states']}", "merge again")


def newest(folder: Path) -> float:
    """Time of the newest of a folder's first entries and itself; what is deeper shows in its folder's time."""
    latest = folder.stat().st_mtime
    with os.scandir(folder) as entries:
        for _, entry in zip(range(_MOST), entries, strict=False):
            latest = max(latest, entry.stat(follow_symlinks=False).st_mtime)
    return latest


def tell_tables(folder: Path) -> Told | None:
    """A folder of rows as tables: JSON lines, Parquet, or a data set of Hugging Face in Arrow files."""
    found = _by_suffix(folder, _TABLES)
    if not {s for s in found if s not in (".json", ".csv")}:
        return None
    arrow = (folder / "dataset_info.json").is_file() or (folder / "state.json").is_file()
    told = Told(str(folder), "prepared", "rows of an Arrow data set (Hugging Face)" if arrow else "rows as tables")
    told.facts |= {
        "rows": _arrow_rows(folder) if arrow else None,
        "files": {s: n for s, (n, _) in sorted(found.items())},
    }
    told.facts["bytes"] = sum(size for _, size in found.values())
    told.next = (
        ["add it to prepare.sources in params.yaml (kind: files), then dvc repro prepare"] if ".jsonl" in found else []
    )
    return told


def _arrow_rows(folder: Path) -> int | None:
    raw = read_object(folder / "dataset_info.json")
    splits = section(raw, "splits") if isinstance(raw, dict) else {}
    counts = [whole(section(splits, name).get("num_examples")) for name in splits]
    return sum(c or 0 for c in counts) if counts else None


def _by_suffix(folder: Path, suffixes: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Files and bytes by suffix, in the folder and one below it."""
    found: dict[str, tuple[int, int]] = {}
    for path in [*folder.glob("*"), *folder.glob("*/*")]:
        if path.suffix in suffixes and path.is_file():
            count, size = found.get(path.suffix, (0, 0))
            found[path.suffix] = (count + 1, size + path.stat().st_size)
    return found


def tell_logs(folder: Path) -> Told | None:
    """A folder of logs: how many, and how the newest ends."""
    logs = [p for p in folder.iterdir() if p.is_file() and p.suffix in _LOGS]
    if not logs:
        return None
    last = max(logs, key=lambda p: p.stat().st_mtime)
    with last.open("rb") as file:
        file.seek(max(0, last.stat().st_size - _TAIL))
        lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    told = Told(str(folder), "logs", f"{len(logs)} logs, the newest {last.name}")
    told.facts |= {"files": len(logs), "bytes": sum(p.stat().st_size for p in logs), "newest": last.name}
    told.facts["ends_with"] = lines[-1].strip()[:200] if lines else None
    if trouble := next((line.strip() for line in reversed(lines) if _TROUBLE.search(line)), None):
        told.add("risk", f"The newest log speaks of trouble: {trouble[:160]}", "read it to its end", last.name)
    return told


def tell_file(path: Path, contents: Contents) -> Told:
    """One file of tensors: names, dtypes, shapes."""
    told = Told(str(path), "file", f"file of {len(contents.tensors)} named values", {"bytes": path.stat().st_size})
    if contents.fault:
        told.add("fault", f"It cannot be read: {contents.fault}", "remove it and make it again")
    told.facts["holds"] = [line for name, value in list(contents.tensors.items())[:200] for line in _named(name, value)]
    return told


def _named(name: str, value: object) -> list[Facts]:
    if isinstance(value, Shape):
        return [{"name": name, "dtype": value.dtype, "shape": list(value.dims)}]
    if isinstance(value, list) and value and all(isinstance(v, Shape) for v in value):
        return [line for i, v in enumerate(value) for line in _named(f"{name}[{i}]", v)]
    return [{"name": name, "dtype": type(value).__name__, "shape": reprlib.repr(value)[:60]}]


def tell_folder(path: Path, look: Callable[[Path], Told]) -> Told | None:
    """A folder that is nothing by itself but holds folders that are something."""
    inside: list[Facts] = []
    below = sorted(p for p in path.iterdir() if p.is_dir() and not p.is_symlink())
    for folder in below[:_MOST]:
        try:
            told = look(folder)
        except LineError:
            continue
        inside.append(
            {"folder": folder.name, "what": told.what, "rows": told.facts.get("rows"), "bytes": told.facts.get("bytes")}
        )
    if not inside:
        return None
    others = [p.name for p in below if p.name not in {i["folder"] for i in inside}]
    told = Told(str(path), "folder", f"folder of {len(inside)} that are known here", {"holds": inside})
    if others:
        told.add("note", f"Nothing says what these are: {some(others)}")
    told.next = [f"python -m stages.glance {path / str(inside[0]['folder'])}"]
    return told
