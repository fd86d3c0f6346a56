"""What the accounts of a store's folders come to: gaps, overlaps, holes, doubles, damage, and files that are no sample."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from stages.glancing.folders import Folder
from stages.glancing.runs import CONFIG, LENGTHS
from stages.glancing.samples import Kind
from stages.glancing.spans import Span, between, in_words, overlaps, size_of, union
from stages.glancing.told import Level, Told, many, some

_NAMED = 4  # folders that a check names one by one


def tell_folders(
    told: Told,
    kind: Kind,
    folders: Sequence[Folder],
    lengths: dict[str, dict[str, int] | str | None],
    bad: Sequence[tuple[str, str]],
) -> None:
    for where, why in bad:
        told.add(
            "fault",
            f"This config cannot be read: {why}",
            "a run writes it last: extract again, or copy a sound one",
            where,
        )
    for name, value in lengths.items():
        if isinstance(value, str):
            told.add("fault", f"{LENGTHS} cannot be read: {value}", where=f"{name}/{LENGTHS}".lstrip("/"))
    _tell_ranges(told, folders, [(f.name, f.span) for f in folders if f.span])
    if kind.era == "0.3-0.4":
        _tell_unfinished(told, folders)
    told.facts["holes"] = sum(size_of(f.holes) for f in folders)
    told.facts["rows_missing"] = sum(f.missing for f in folders)
    stay = ". A resumed run goes on after its highest number, so they stay" if kind.era == "0.3-0.4" else ""
    _tell_checks(told, folders, _Words("shard" if kind.tool == "nemo_automodel" else "row", stay))
    table = [_line(f, kind.era == "0.3-0.4") for f in folders if f.name]
    if table:
        told.facts["by_folder"] = table


def _line(f: Folder, configured: bool) -> dict[str, object]:
    return {
        "folder": f.name,
        "rows": f.rows,
        "tokens": f.tokens,
        "bytes": f.bytes,
        "config": f.run is not None if configured else None,
        "state": f.state,
        "holes": [list(h) for h in f.holes],
    }


def _tell_ranges(told: Told, folders: Sequence[Folder], ranges: Sequence[tuple[str, Span]]) -> None:
    """Gaps and overlaps of rows_{a}-{b} names, within each parent folder."""
    parents: dict[str, list[tuple[str, Span]]] = defaultdict(list)
    for name, span in ranges:
        parents[name.rpartition("/")[0]].append((name, span))
    told.facts["ranges"] = [list(s) for s in union(s for _, s in ranges)]
    told.facts["gaps"], told.facts["overlaps"] = [], []
    for named in parents.values():
        for start, end in between(s for _, s in named):
            told.facts["gaps"].append([start, end])
            told.add("fault", f"No folder has rows {start}–{end - 1}", f"extract rows_{start}-{end}")
        for one, other, (start, end) in overlaps(named):
            told.facts["overlaps"].append({"folders": [one, other], "rows": [start, end]})
            told.add(
                "fault",
                f"{one} and {other} both claim rows {start}–{end - 1}",
                "keep one of them, or rows are trained on twice",
            )
        names = [n for n, _ in sorted(named, key=lambda x: x[1])]
        if sorted(names) != names:
            at = next(i for i, (a, b) in enumerate(zip(sorted(names), names, strict=True)) if a != b)
            told.add(
                "risk",
                f"Sorted as text, {sorted(names)[at]} comes before {names[at]}: a reader that sorts names joins other rows",
                "sort by the number, as bridges do",
            )
    doubled = (
        sum(f.rows for f in folders) - size_of(union(h for f in folders for h in f.held))
        if len(parents) == 1 and len(ranges) == len(folders)
        else 0
    )
    told.facts["rows_doubled"] = doubled + sum(len(f.doubled) for f in folders)


def _tell_unfinished(told: Told, folders: Sequence[Folder]) -> None:
    """Config and lengths are written only when a run ends."""
    without = [f.name or "." for f in folders if f.run is None]
    if without:
        words = (
            f"No {CONFIG}: the run did not end, or the file was left behind"
            if len(folders) == 1
            else f"No {CONFIG} in {len(without)} of {len(folders)} folders: these runs did not end"
        )
        told.add(
            "fault",
            words,
            "layer ids, version and target are not recorded there; compare with the other folders, or probe the values",
            some(without) if without != ["."] else "",
        )
    lengths = [f.name or "." for f in folders if not f.has_lengths]
    if lengths:
        told.add(
            "note",
            f"No {LENGTHS}"
            + (f" in {len(lengths)} of {len(folders)} folders" if len(folders) > 1 else "")
            + ": tokens are estimated, and a cut-off file shows only when it is opened",
            where=some(lengths) if lengths != ["."] else "",
        )
    told.facts["without_config"] = without
    told.facts["without_lengths"] = lengths


@dataclass(frozen=True)
class _Words:
    """What a file is called, and what is known of holes."""

    noun: str
    hole: str


_EXTRACT = "extract these rows again"
_CHECKS: tuple[tuple[Level, str, Callable[[Folder, _Words], object]], ...] = (
    (
        "fault",
        _EXTRACT,
        lambda f, w: f.holes and f"{many(size_of(f.holes), 'hole')}: {in_words(f.holes)}{w.hole}",
    ),
    (
        "fault",
        "extract the rest",
        lambda f, w: (
            f.short and f.told and f"{many(f.short, w.noun)} fewer than its {f.told} says ({f.rows + f.short})"
        ),
    ),
    (
        "risk",
        "count the source's rows: their number alone tells which",
        lambda f, w: (
            f.short
            and not f.told
            and f"{many(f.short, w.noun)} fewer than its name says: a run that ended early, or fewer rows in the source"
        ),
    ),
    (
        "fault",
        "keep one of each",
        lambda f, w: f.doubled and f"{many(len(f.doubled), 'number')} with more than one file: {some(f.doubled)}",
    ),
    (
        "fault",
        "mend the folder's name, or move the files",
        lambda f, w: f.outside and f"Numbers outside the folder's range: {some(list(map(str, f.outside)))}",
    ),
    (
        "fault",
        f"remove them, and {_EXTRACT}",
        lambda f, w: f.empty and f"{many(len(f.empty), 'file')} of zero bytes: {some(f.empty)}",
    ),
    (
        "fault",
        f"remove them, and {_EXTRACT}",
        lambda f, w: (
            f.small
            and f"{many(len(f.small), 'file')} smaller than {LENGTHS} says: cut off, or of fewer states: {some(f.small)}"
        ),
    ),
    (
        "risk",
        "`--deep` opens them first",
        lambda f, w: (
            f.odd
            and f"{many(len(f.odd), 'file')} whose size fits no whole number of tokens: cut off, or of another dtype: {some(f.odd)}"
        ),
    ),
    (
        "fault",
        _EXTRACT,
        lambda f, w: f.without_file and f"{LENGTHS} has {many(f.without_file, 'row')} without a file",
    ),
    (
        "risk",
        "one of the two is of another run",
        lambda f, w: f.without_length and f"{many(f.without_length, 'file')} without an entry in {LENGTHS}",
    ),
    ("note", "", lambda f, w: not f.span and not f.told and f.first and f"Numbers begin at {f.first}"),
)


def _tell_checks(told: Told, folders: Sequence[Folder], words_of: _Words) -> None:
    """Each check over each folder: the first few are named, the others counted."""
    for level, do, check in _CHECKS:
        said = [(f.name, str(words)) for f in folders if (words := check(f, words_of))]
        for name, words in said[:_NAMED]:
            told.add(level, words, do, name)
        if len(said) > _NAMED:
            told.add(
                level,
                f"The same kind in {many(len(said) - _NAMED, 'more folder')}",
                do,
                some([n for n, _ in said[_NAMED:]]),
            )


def tell_strange(told: Told, root: Path, strange: Sequence[Path]) -> None:
    names = [str(p.relative_to(root)) for p in strange]
    told.facts["no_samples"] = {"count": len(names), "first": names[:5]}
    left = [n for n in names if n.endswith((".tmp", ".part", ".partial", ".incomplete"))]
    if left:
        told.add(
            "risk",
            f"{many(len(left), 'file')} of a write that did not end: {some(left)}",
            "no run is on? then remove them",
        )
    others = [n for n in names if n not in left]
    if others:
        told.add(
            "note",
            f"{many(len(others), 'file')} that {'is' if len(others) == 1 else 'are'} no sample: {some(others)}",
        )
