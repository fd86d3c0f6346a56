"""What `--deep` and `--verify` of a glance do: values of a sample of rows, a draft's tensors, digests of our own files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from stages._template_rule import rule_of, target_at_hand
from stages.contracts.draft import DRAFT, DraftRecord
from stages.contracts.errors import DataError, EngineError, LineError, Refusal
from stages.contracts.integrity import verify_draft, verify_merged
from stages.contracts.manifest import MERGED, CaptureManifest, FolderConfig, MergedManifest, PreparedManifest
from stages.contracts.progress import progress
from stages.glancing.deep import choose, neighbours, tell_findings
from stages.glancing.faults import mend_command
from stages.glancing.ours import our_manifest
from stages.glancing.told import Told
from stages.glancing.verifying import digests_of, tell_damages, tell_digests
from stages.targets import load_target

if TYPE_CHECKING:
    from stages.bridges.kinds import ForeignRow, StoreFile
    from stages.bridges.stores import ForeignStore
    from stages.capture.masks import MaskRule
    from stages.targets._decoder import Decoder

_STAGE_OF = {PreparedManifest: "prepare", MergedManifest: "merge", DraftRecord: "train"}


def deepen(told: Told, path: Path) -> None:
    """Look at values: a sample of a store's rows, or every tensor of a draft.

    Raises:
        LineError: of this kind of thing no values are looked at.
    """
    if told.kind == "draft":
        _audit_draft(told, path)
    elif told.kind == "hidden_states" and told.facts["tool"] != "draftline":
        _look_at_rows(told, path)
    else:
        raise LineError(
            "There are no values here that a glance looks at",
            where=str(path),
            expected="hidden states of another tool, or a draft",
            got=told.what,
            do="`--verify` takes the digests of our own files; gate-training judges our own states by value",
        )


def _audit_draft(told: Told, path: Path) -> None:
    """Names, shapes, finiteness and the vocabulary, as before serving."""
    from stages.drafts.eagle3 import read_draft

    try:
        read_draft(path)
    except (DataError, EngineError) as error:
        told.add("fault", f"{error.what}: {error.got}", error.do, error.where)
        return
    told.add("fine", "Every tensor has its name and shape, all are finite, and d2t and t2d describe one vocabulary")


def _look_at_rows(told: Told, path: Path) -> None:
    import torch

    from stages.bridges.stores import open_store
    from stages.capture.values import check_values, read_all

    store = open_store(path)
    chosen = choose(store.files)
    others = neighbours(store.files, chosen)
    target, rule = _target_of(told, store, chosen)
    with progress(len(chosen) + len(others), "looking at values", "files") as advance, torch.inference_mode():

        def read(file: StoreFile) -> Iterator[ForeignRow]:
            advance(1)
            yield from store.rows_of(file, check_bytes=True, uneven=True)

        def glimpse(file: StoreFile) -> Iterator[ForeignRow]:
            advance(1)
            yield from store.rows_of(file, uneven=True)

        findings = check_values(
            read_all(read, chosen),
            target=target,
            points=told.facts.get("points"),
            last_state=told.facts["last_state"],
            masks_of=rule,
            others=read_all(glimpse, others),
        )
    tell_findings(told, findings, len(chosen), len(store.files))
    mend = mend_command(told.path)
    if "mask_order" in told.facts["deep"]["kinds"] and mend not in told.next:
        told.next.insert(0, mend)


def _target_of(told: Told, store: ForeignStore, chosen: list[StoreFile]) -> tuple[Decoder | None, MaskRule | None]:
    """The target that the rows came from, if it is at hand and runs here, and how its template makes masks."""
    folder = target_at_hand(told.facts.get("target"), told.facts.get("hidden_size"))
    if folder is None:
        told.add(
            "note",
            "No target at hand (one that the run names by its folder, or params.yaml's if it is as wide): layers, norm and masks were not recomputed",
            "set target.origin in params.yaml, and glance from the repository's root",
        )
        return None, None
    rule = None
    try:
        rule = rule_of(folder, store, chosen)
    except DataError as error:
        told.add("note", f"{error.what}: {error.got}", error.do)
    try:
        target = load_target(folder)
    except (EngineError, DataError) as error:
        told.add(
            "note", f"The target cannot be run here, so layers and norm were not recomputed: {error.what}", error.do
        )
        return None, rule
    told.facts["recomputed_with"] = str(folder)
    return target, rule


def verify(told: Told, path: Path) -> None:
    """Read every byte of a folder of ours and take its digests again.

    Raises:
        LineError: nothing here has digests.
    """
    folder = path if path.is_dir() else path.parent
    found = our_manifest(folder)
    if found is None:
        raise LineError(
            "Nothing here has digests",
            where=str(path),
            expected="a folder of this line: data/prepared, data/hidden_states, data/merged, models/draft",
            got=told.what,
            do="`--deep` opens a sample of the rows of other tools' stores",
        )
    kind, manifest = found
    if kind in (CaptureManifest, FolderConfig):
        _verify_rows(told, folder, kind is CaptureManifest)
        return
    root = folder.resolve().parents[1]
    whole = {MergedManifest: (MERGED, verify_merged), DraftRecord: (DRAFT, verify_draft)}
    own, damages_of = whole.get(kind, (None, None))
    if own is not None and damages_of is not None and folder.resolve() == root / own:
        tell_damages(told, damages_of(root), 1)  # in its line: against the reports and manifests beside it, too
        return
    fact = kind.read(manifest)
    digests = digests_of(fact)
    size = sum((folder / n).stat().st_size for n in digests if (folder / n).is_file())
    with progress(size, "verifying", "bytes") as advance:
        tell_digests(told, folder, digests, _STAGE_OF.get(kind, "train"), advance)


def _verify_rows(told: Told, root: Path, every: bool) -> None:
    """Digests of row folders, group by group: of one, or of all below `root` and its manifest."""
    from stages.capture.store import verify_store

    names = sorted(p.name for p in root.glob("rows_*") if p.is_dir()) if every else [root.name]
    above = root if every else root.parent
    size = sum(
        (above / name / "rows.safetensors").stat().st_size
        for name in names
        if (above / name / "rows.safetensors").is_file()
    )
    with progress(size, "verifying", "bytes") as advance:
        damages = verify_store(above, None if every else names, advance)
    tell_damages(told, damages, len(names))


def demand_sound(told: Told) -> None:
    """Raises Refusal when a look at values or digests found faults."""
    if faults := told.faults:
        raise Refusal(
            f"{len(faults)} fault{'s' if len(faults) > 1 else ''} found",
            where=told.path,
            got="; ".join(f.words for f in faults[:3]) + (" …" if len(faults) > 3 else ""),
            do="do what is said of each above",
        )
