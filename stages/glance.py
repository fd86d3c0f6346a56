"""glance: how the line stands, or what a path is. `python -m stages.glance [PATH] [--deep | --verify] [--json]`; of prepared
rows, one as the model sees it: `python -m stages.glance data/prepared ROW [--html]`

Reads listings, config files, headers and one sample's shapes, so it answers in seconds, whatever the size. `--deep` opens a
sample of the rows and checks their values, `--verify` takes the digests of our own files again. Exit codes: 0 looked,
1 `--deep` or `--verify` found faults, 2 the path is unknown.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from stages._glance_checks import deepen, demand_sound, verify
from stages.bridges.kinds import StoreKind, list_files, recognise
from stages.capture.dialects import alternatives, by_points, family_of, layer_ids, points_of
from stages.contracts.draft import DraftRecord
from stages.contracts.errors import LineError, ParamsError, run
from stages.contracts.params import load_params
from stages.contracts.repository import demand_repository
from stages.glance_row import show_row
from stages.glancing.changed import changed_params
from stages.glancing.contents import contents_of
from stages.glancing.draft import is_draft, tell_draft, verifier_of
from stages.glancing.folders import range_of
from stages.glancing.ours import our_manifest, tell_ours, tell_row_folders
from stages.glancing.places import Depth
from stages.glancing.roots import data_root, tell_file, tell_folder, tell_logs, tell_root, tell_tables
from stages.glancing.standing import stand, still_to_do, to_do
from stages.glancing.states import Reader, survey
from stages.glancing.target import depth_of, is_target, tell_target
from stages.glancing.told import Told
from stages.glancing.weights import read_config, read_weights
from stages.reporting.facts import read_line
from stages.reporting.page import PAGE
from stages.targets import families

_TENSOR_FILES = (".safetensors", ".pt", ".ckpt", ".gz", ".bin")
_TELLING = (
    ".json",
    ".jsonl",
    ".parquet",
    ".arrow",
    ".csv",
    ".log",
    ".out",
    ".err",
    ".txt",
)  # files that stand for their folder


def look(path: Path, inside: bool = True) -> Told:
    """What stands at `path`. inside: whether a folder that is nothing by itself is told by what it holds.

    Raises:
        LineError: no such path, or nothing there says what it is.
        DataError: a manifest of ours cannot be read.
    """
    if path.is_file() and path.suffix in _TENSOR_FILES:
        return tell_file(path, contents_of(path))
    is_file = path.is_file()
    folder = path.parent if is_file else path
    if folder.is_dir() and path.exists() and (not is_file or path.suffix in _TELLING):
        told = _ours(folder) or _checkpoint(folder) or (None if is_file else _root(folder)) or _store(folder)
        told = told or tell_tables(folder) or tell_logs(folder)
        if told is None and inside:
            told = _ours(folder.parent)
        if told is None and inside and not is_file:
            told = tell_folder(folder, lambda below: look(below, inside=False))
        if told is not None:
            return told
    raise LineError(
        "Nothing here says what it is",
        where=str(path),
        expected="hidden states of any tool, a draft, a target, rows, logs, or a folder that holds such",
        got=_seen(path),
        do="run `python -m stages.glance` without a path to see what there is",
    )


def _seen(path: Path) -> str:
    if not path.exists():
        return "a link that leads nowhere" if path.is_symlink() else "no such path"
    names = sorted(p.name for p in path.iterdir())[:6] if path.is_dir() else [path.name]
    return ", ".join(names) if names else "an empty folder"


def _ours(folder: Path) -> Told | None:
    found = our_manifest(folder)
    if found is None:
        return None
    kind, path = found
    if kind is not DraftRecord:
        return tell_ours(folder, kind, path)
    config = read_config(folder)
    record = DraftRecord.read(path)
    return tell_draft(folder, config if isinstance(config, dict) else {}, read_weights(folder), record, None, points_of)


def _checkpoint(folder: Path) -> Told | None:
    """A draft or a target by its config.json."""
    config = read_config(folder)
    if not isinstance(config, dict):
        return None
    if is_draft(config):
        depth = _depth_of(verifier_of(config), None)
        return tell_draft(folder, config, read_weights(folder), None, depth, points_of)
    if is_target(config):
        return tell_target(folder, config, read_weights(folder), family_of(config), families(), layer_ids)
    return None


def _root(folder: Path) -> Told | None:
    root = data_root(folder)
    if root is None:
        return None
    line = read_line(root.parent) if root.name == "data" else None
    stages = stand(line, changed_params(root.parent)) if line else []
    return tell_root(folder, root, stages, lambda part: look(part, inside=False))


def _store(folder: Path) -> Told | None:
    kind = recognise(folder)
    if kind is None:
        return None
    files, strange = list_files(folder, kind)
    if _mixed(folder, kind, {f.folder.partition("/")[0] for f in files}):
        return None
    if kind.tool == "draftline":
        return tell_row_folders(folder, [f.folder for f in files])
    return survey(folder, kind, files, strange, Reader(points_of, _readings, _depth_of))


def _mixed(folder: Path, kind: StoreKind, below: set[str]) -> bool:
    """Whether the samples lie in folders beside which other things of this trade lie: then it is no one store."""
    if "" in below or any(range_of(name) for name in below) or kind.tool == "draftline":
        return False
    others = [p for p in folder.iterdir() if p.is_dir() and not p.name.startswith(".")]
    return any(recognise(p) != kind for p in others)


def _readings(ids: Sequence[int], layers: int | None) -> list[tuple[str, tuple[int, ...]]]:
    """The ids in every tool's words, tools that agree named together."""
    found = by_points(alternatives(ids, layers or max(ids, default=0) + 2))
    return [(", ".join(names), points) for points, names in found.items()]


def _depth_of(target: str | None, hidden_size: int | None) -> Depth | None:
    """Layers of the target a run names, if its folder is here; else of params.yaml's, if that is as wide."""
    config = read_config(Path(os.path.expanduser(target))) if target else None
    if isinstance(config, dict) and (layers := depth_of(config)):
        return Depth(layers, "its target's config.json", family_of(config))
    try:
        ours = load_params().target
    except ParamsError:
        return None
    if hidden_size is None or ours.hidden_size != hidden_size:
        return None
    return Depth(ours.layers, f"params.yaml: {ours.name} is {hidden_size} wide too")


def show_line(as_json: bool) -> None:
    """The line in this repository."""
    line = read_line()
    records = stand(line, changed_params())
    step = to_do(records)
    if as_json:
        told = {"stages": records, "unreadable": line.unreadable, "page": str(PAGE), "next": step}
        print(json.dumps(told, indent=1))
        return
    from stages.glancing.rendering import console, show_stages

    show_stages(records, line.unreadable, PAGE, step, console())


def show_path(told: Told, as_json: bool) -> None:
    """What is told of a path."""
    if as_json:
        print(json.dumps(told.as_json(), indent=1))
        return
    from stages.glancing.rendering import console, show

    show(told, console())


def _line_around(path: Path) -> Path | None:
    """The repository of ours whose data/ or models/ holds `path`."""
    for folder in path.resolve().parents:
        if folder.name in ("data", "models") and (folder.parent / "dvc.yaml").is_file():
            return folder.parent
    return None


def main() -> None:
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
        return
    if show_row(sys.argv[1:]):
        return
    options = [a for a in sys.argv[1:] if a.startswith("-")]
    paths = [a for a in sys.argv[1:] if not a.startswith("-")]
    checks = [o for o in options if o in ("--deep", "--verify")]
    if len(paths) > 1 or set(options) - {"--json", "--deep", "--verify"} or (checks and not paths):
        raise LineError(
            "Glance at what?",
            where="command line",
            expected="at most one path, --json, and with a path --deep or --verify",
            got=" ".join(sys.argv[1:]),
        )
    as_json = "--json" in options
    if not paths:
        demand_repository()
        show_line(as_json)
        return
    path = Path(paths[0])
    told = look(path)
    if root := _line_around(path):
        told.next = still_to_do(told.next, stand(read_line(root), changed_params(root)))
    if checks:
        told.next = [step for step in told.next if not step.endswith(tuple(checks))]
        if "--deep" in checks:
            deepen(told, path)
        if "--verify" in checks:
            verify(told, path)
    show_path(told, as_json)
    if checks:
        demand_sound(told)


if __name__ == "__main__":
    run(main)
