"""Survey of a hidden-state store that another tool wrote: what is there, what is missing, what may be wrong with it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stages.glancing.contents import Contents, contents_of
from stages.glancing.faults import known_faults, mend_command, numbers_of, permuted
from stages.glancing.folders import File, Folder, Frame, account, frame_of, range_of
from stages.glancing.judging import tell_folders, tell_strange
from stages.glancing.places import Depth, PointsOf, Readings, Slots, tell_points
from stages.glancing.runs import LENGTHS, Run, read_lengths, read_runs
from stages.glancing.samples import TOOLS, Kind, row_of, tell_sample
from stages.glancing.told import Told, some


@dataclass(frozen=True)
class Reader:
    """How ids are read: from stages/capture/dialects.py. depth_of: layers of the target a run names, or of one of this
    hidden size, where that is known here."""

    points_of: PointsOf
    readings: Readings
    depth_of: Callable[[str | None, int | None], Depth | None]


def survey(root: Path, kind: Kind, files: Sequence[File], strange: Sequence[Path], reader: Reader) -> Told:
    """All there is to say of the store below `root` without opening more than one sample."""
    names = list(dict.fromkeys(f.folder for f in files))
    runs, bad = read_runs(root, names, kind.tool)
    lengths = {name: read_lengths(root, name) for name in names} if kind.tool == "speculators" else {}
    sample = next((f for f in files if f.bytes), None)
    contents = (
        contents_of(root / sample.folder / sample.name)
        if sample
        else Contents({}, "every file has zero bytes" if files else "there is none")
    )
    told = Told(str(root), "hidden_states", "")
    told.facts |= {"tool": kind.tool, "era": kind.era, "layout": kind.pattern}
    said = _tell_runs(told, runs)
    shape = row_of(kind.tool, contents)
    frame = None
    packed = any(f.name.endswith(".gz") for f in files)
    if sample and shape and kind.tool != "nemo_automodel" and not packed:
        frame = frame_of(contents, sample.bytes, shape.tokens)
    folders = _account(root, kind, files, runs, lengths, frame)
    _tell_rows(told, kind, folders, runs)
    tell_sample(told, kind, contents, shape, said.hidden_size, sample)
    slots = Slots(shape.aux, shape.last) if shape else None
    depth = reader.depth_of(said.target, told.facts.get("hidden_size"))
    _doubt(told, kind, runs)
    tell_points(
        told,
        said.layer_ids,
        kind.dialect or kind.numbering,
        depth,
        slots,
        reader.points_of,
        reader.readings,
        _tool(kind),
    )
    tell_folders(told, kind, folders, lengths, bad)
    tell_strange(told, root, strange)
    told.notes += known_faults(kind.tool, kind.era, runs, {n: v for n, v in lengths.items() if isinstance(v, dict)})
    if told.facts["last_state"] == "after_final_norm":
        told.add(
            "note",
            "extract cannot adopt this store: the final norm drops the scale of the last state",
            "only the target gives it back",
        )
    told.what = _what(kind, runs)
    told.next = _next(told, folders, runs)
    return told


def _account(
    root: Path,
    kind: Kind,
    files: Sequence[File],
    runs: Sequence[Run],
    lengths: dict[str, dict[str, int] | str | None],
    frame: Frame | None,
) -> list[Folder]:
    by_name: dict[str, list[File]] = defaultdict(list)
    for file in files:
        by_name[file.folder].append(file)
    run_of = {run.folder: run for run in runs}
    if kind.tool == "nemo_automodel":  # its files are shards: those are counted here
        run_of = {run.folder: replace(run, rows=_shards(run)) for run in runs}
    folders: list[Folder] = []
    for name, inside in by_name.items():
        length = lengths.get(name)
        known = length if isinstance(length, dict) else None
        folders.append(account(name, range_of(name or root.name), inside, run_of.get(name), known, frame))
    return folders


@dataclass(frozen=True)
class _Said:
    layer_ids: tuple[int, ...] | None
    hidden_size: int | None
    target: str | None


def _tell_runs(told: Told, runs: Sequence[Run]) -> _Said:
    """What the runs say of themselves, and where they differ in what has to be equal."""
    told.facts["versions"] = sorted({r.version for r in runs if r.version})
    told.facts["target"] = runs[0].target if runs else None
    told.facts["source"] = runs[0].source if runs else None
    for name in ("layer_ids", "hidden_size", "target"):
        values = {getattr(r, name): r.folder for r in runs if getattr(r, name) is not None}
        if len(values) > 1:
            each = "; ".join(
                f"{v if not isinstance(v, tuple) else list(v)} in {f or 'the root'}"
                for v, f in list(values.items())[:3]
            )
            told.add(
                "fault", f"Runs differ in {name.replace('_', ' ')}: {each}", "these are two stores: keep them apart"
            )
    first = runs[0] if runs else Run("")
    return _Said(next((r.layer_ids for r in runs if r.layer_ids is not None), None), first.hidden_size, first.target)


def _doubt(told: Told, kind: Kind, runs: Sequence[Run]) -> None:
    """Whether it is clear in whose words the ids are written: only a version that fits the format settles that."""
    versions = [r.version for r in runs if r.version]
    fits = {"0.3-0.4": lambda v: numbers_of(v)[:2] in ((0, 3), (0, 4)), ">=0.5": lambda v: numbers_of(v) >= (0, 5)}
    fit = fits.get(kind.era, lambda v: True)
    told.facts["ambiguous"] = not versions or not all(fit(v) for v in versions)
    if strange := [v for v in versions if not fit(v)]:
        words = f"The files are laid out as speculators {kind.era} writes them, the config says {strange[0]}: its ids may be in other words"
        told.add("risk", words, "the value probe tells which: `--deep` with the target at hand")


def _tell_rows(told: Told, kind: Kind, folders: Sequence[Folder], runs: Sequence[Run]) -> None:
    rows = sum(f.rows for f in folders)
    if kind.tool == "nemo_automodel":
        rows = _rows_of_shards(told, folders, runs)
    told.facts["rows"] = rows
    told.facts["folders"] = len([f for f in folders if f.name])
    told.facts["files"] = sum(f.files for f in folders)
    tokens = [f.tokens for f in folders]
    told.facts["tokens"] = sum(t or 0 for t in tokens) if folders and all(t is not None for t in tokens) else None
    told.facts["tokens_are"] = None
    if told.facts["tokens"] is not None:
        told.facts["tokens_are"] = "estimated from file sizes" if any(f.estimated for f in folders) else f"by {LENGTHS}"
    told.facts["bytes"] = sum(f.bytes for f in folders)


def _shards(run: Run) -> int | None:
    """Shards that a run's rows fill."""
    return -(-run.rows // run.rows_per_shard) if run.rows and run.rows_per_shard else None


def _rows_of_shards(told: Told, folders: Sequence[Folder], runs: Sequence[Run]) -> int:
    """Rows in the shards that are there: all but the last hold as many as the manifest says."""
    held = [i for f in folders for a, b in f.held for i in range(a, b)]
    told.facts["shards"] = len(held)
    each, all_rows = (runs[0].rows_per_shard, runs[0].rows) if runs else (None, None)
    if not each or not all_rows:
        return 0
    return sum(max(0, min(each, all_rows - i * each)) for i in held)


def _tool(kind: Kind) -> str:
    """A tool's name for people, with its era."""
    eras = {"0.3-0.4": " 0.3–0.4", ">=0.5": " ≥ 0.5"}
    return f"{TOOLS.get(kind.tool, kind.tool)}{eras.get(kind.era, '')}"


def _what(kind: Kind, runs: Sequence[Run]) -> str:
    versions = ", ".join(sorted({r.version for r in runs if r.version}))
    if versions:
        return f"hidden states of {TOOLS.get(kind.tool, kind.tool)} {versions}"
    return f"hidden states of {_tool(kind)}, version not recorded"


def _next(told: Told, folders: Sequence[Folder], runs: Sequence[Run]) -> list[str]:
    """What to do now: the missing rows, the values, and where the store can go."""
    again = [f"rows_{a}-{b}" for a, b in told.facts["gaps"]]
    again += [f.name for f in folders if f.holes or f.empty or f.small or (f.short and f.run)]
    named = some([name for name in again if name]) or "the rows above"
    steps = [f"extract again what is missing: {named}"] if again else []
    if any(permuted(run) for run in runs):
        steps.append(mend_command(told.path))
    steps.append(f"python -m stages.glance {told.path} --deep")
    if told.facts["states_in_a_row"] == 4 and told.facts["last_state"] != "after_final_norm":
        more = "" if told.facts["layer_ids"] else ", capture.adopt_layer_ids"
        more += ", capture.adopt_last_state" if told.facts["last_state"] == "unknown" else ""
        more += ", capture.adopt_lacking: extract" if again else ""
        steps.append(f"in params.yaml capture.adopt: {told.path}{more}; then dvc repro extract")
    return steps
