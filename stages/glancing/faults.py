"""Faults that a tool's version is known for, and whether this data can have them.

From the tools' own sources and issue trackers; each is ruled out only by what the data says of itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from stages.contracts.adoption import MENDED_MASKS
from stages.glancing.runs import Run
from stages.glancing.told import Note

_DEFAULT_BATCH = 8  # speculators 0.3-0.4, scripts/data_generation_offline.py --batch-size
_PASS_TOKENS = 8192  # what one pass of its vLLM generator took before it cut a prefill in pieces
_VERSION = 40  # characters of one that are read: a config may say anything
_INDEX = re.compile(r"[0-9]{1,18}")
_STRING_ORDER = 10  # up to "9", text and number sort alike
_PROBE = "`--deep` compares masks with tokens; with the target at hand it also recomputes sampled rows"


def numbers_of(version: str) -> tuple[int, ...]:
    """0.4.0.1 -> (0, 4, 0, 1); what follows a letter is left out."""
    return tuple(int(n) for n in re.match(r"[\d.]*", version[:_VERSION])[0].split(".") if n)  # type: ignore[index]


def known_faults(tool: str, era: str, runs: Sequence[Run], lengths: Mapping[str, Mapping[str, int]]) -> list[Note]:
    """Notes on what is known of this tool's versions. lengths: of each folder that has them, by index, in tokens."""
    if tool == "speculators" and era == "0.3-0.4":
        return _legacy(runs, lengths)
    said: dict[str, list[Note]] = {"specforge": _SPECFORGE, "angelslim": _ANGELSLIM, "nemo_automodel": _AUTOMODEL}
    said["speculators"] = _SPECULATORS
    return said.get(tool, [])


def _legacy(runs: Sequence[Run], lengths: Mapping[str, Mapping[str, int]]) -> list[Note]:
    if not runs:
        words = "No version is recorded, so neither the paired states of 0.3.0 nor the permuted masks of 0.4.0–0.4.0.1 are ruled out"
        return [Note("risk", words, _PROBE)]
    notes: list[Note] = []
    for run in runs:
        of_run = lengths.get(run.folder, {})
        notes += [*_paired(run, of_run), *_permuted(run), *_truncated(run, of_run)]
    return merge_alike(notes)


def _paired(run: Run, lengths: Mapping[str, int]) -> list[Note]:
    """0.3.0 gave a row another request's states when vLLM re-ordered the batch or cut a prefill in pieces."""
    version = run.version or ""
    if not (numbers_of(version) < (0, 3, 1) or "dev" in version):
        return []
    batch = run.batch_size or _DEFAULT_BATCH
    longest = max(lengths.values(), default=0)
    if batch == 1 and 0 < longest <= _PASS_TOKENS:
        return [Note("fine", f"{version} paired rows with other states only in batches; this run had one row a batch")]
    words = f"speculators {version} could pair a row with another request's states (batch of {batch} re-ordered, or its prefill cut in pieces)"
    if cut := _batches_above(lengths, batch):
        words += f"; {cut[0]} of {cut[1]} batches pass {_PASS_TOKENS} tokens, so theirs was"
    return [Note("risk", words, f"{_PROBE}; extract again what it names", run.folder)]


def _batches_above(lengths: Mapping[str, int], batch: int) -> tuple[int, int] | None:
    if not lengths or not all(map(_INDEX.fullmatch, lengths)):
        return None
    ordered = [n for _, n in sorted(lengths.items(), key=lambda item: int(item[0]))]
    sums = [sum(ordered[i : i + batch]) for i in range(0, len(ordered), batch)]
    above = sum(s > _PASS_TOKENS for s in sums)
    return (above, len(sums)) if above else None


def displaced(batch: int) -> int:
    """Rows of a batch that stand elsewhere when its numbers are sorted as text: 0 up to 10, 14 of 16."""
    return sum(int(name) != i for i, name in enumerate(sorted(map(str, range(batch)))))


def permuted(run: Run) -> bool:
    """Whether the version and the batch that a run names have put masks beside other rows' tokens for certain."""
    return any(n.level == "fault" for n in _permuted(run))


def _permuted(run: Run) -> list[Note]:
    """0.4.0 and 0.4.0.1 gave ids and states in text order ("10" before "2"), masks in list order."""
    version = run.version or ""
    if not (0, 4, 0) <= numbers_of(version) <= (0, 4, 0, 1):
        return []
    if run.batch_size is None and not run.mended:
        words = f"speculators {version} permuted masks in batches above {_STRING_ORDER}; the command is not recorded, so the batch is not known"
        return [Note("risk", words, "`--deep` recomputes masks from tokens", run.folder)]
    if run.mended:
        words = (
            f"The masks that speculators {version} put beside other rows' tokens were mended: {MENDED_MASKS} says which"
        )
        return [Note("fine", words, where=run.folder)]
    batch = run.batch_size or _DEFAULT_BATCH
    told = f"batches of {batch}" + ("" if run.batch_size else ", its default")
    if batch <= _STRING_ORDER:
        words = f"The permuted masks of speculators {version} are ruled out: it ran {told}, and up to {_STRING_ORDER} text and number sort alike"
        return [Note("fine", words, where=run.folder)]
    words = f"speculators {version} in {told}: {displaced(batch)} of every {batch} rows carry another row's loss mask (ids and states agree)"
    do = "keep the states: mend_masks puts the masks back, and adopted (capture.adopt) rows take the prepared ones"
    return [Note("fault", words, do, run.folder)]


def mend_command(root: str) -> str:
    """What puts the masks of the store at `root` in order."""
    return f"python -m stages.mend_masks {root} {root.rstrip('/')}-mended"


def _truncated(run: Run, lengths: Mapping[str, int]) -> list[Note]:
    """Rows are cut to max_model_len - 1 tokens, without a word."""
    if not run.max_model_len or not lengths:
        return []
    limit = run.max_model_len - 1
    cut = sum(n >= limit for n in lengths.values())
    if not cut:
        return [
            Note("fine", f"No row reaches the model's limit of {limit} tokens, so none was cut there", where=run.folder)
        ]
    words = f"{cut} rows are {limit} tokens long, the model's limit: cut there, and without their last token"
    return [Note("risk", words, "leave them out, or extract them again with a larger --max-model-len", run.folder)]


def merge_alike(notes: Sequence[Note]) -> list[Note]:
    """Equal words of several folders as one note that names them."""
    places: dict[tuple[str, str, str], list[str]] = {}
    for n in notes:
        places.setdefault((n.level, n.words, n.do), []).append(n.where)
    merged: list[Note] = []
    for (level, words, do), where in places.items():
        named = [w for w in where if w]
        more = f" and {len(named) - 3} more" if len(named) > 3 else ""
        merged.append(Note(level, words, do, ", ".join(named[:3]) + more))  # type: ignore[arg-type]
    return merged


_SPECFORGE = [
    Note("note", "SpecForge pads rows to the longest of their batch and drops the last, partial batch"),
    Note(
        "note", "Files are not written whole: a killed run leaves cut-off ones", "`--deep` opens a sample of the files"
    ),
]
_ANGELSLIM = [
    Note(
        "note", "Files are not written whole: a killed run leaves cut-off ones", "`--deep` opens a sample of the files"
    )
]
_AUTOMODEL = [
    Note(
        "note",
        "Its manifest has no digest, tokenizer, template, norm state or model revision: only a recomputed row tells whose states these are",
        "`--deep` with the target at hand",
    ),
    Note(
        "note", "Soft targets instead of a last state: its draft vocabulary cannot be changed without extracting again"
    ),
]
_SPECULATORS = [
    Note(
        "risk",
        "No loss masks here: they live in the Arrow data set that the run was given, joined by row number",
        "keep that data set with this folder; adopted (capture.adopt), rows take the masks of the prepared ones",
    )
]
