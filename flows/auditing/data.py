"""The data under a draft: merged set, hidden states, prepared rows, sources and licences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeVar

from flows.auditing.facts import fact_of
from flows.auditing.model import Copy, RowFolder, Thing
from flows.auditing.places import Places
from flows.auditing.rows import row_faults
from stages.contracts.draft import DRAFT, DraftRecord
from stages.contracts.files import Fact, digest
from stages.contracts.manifest import (
    CAPTURE_MANIFEST,
    HIDDEN_STATES,
    MERGED,
    MERGED_MANIFEST,
    PREPARED,
    PREPARED_MANIFEST,
    CaptureManifest,
    FolderConfig,
    MergedManifest,
    PreparedManifest,
    PreparedSource,
)
from stages.contracts.provenance import (
    FOLDER_CONFIG,
    KEPT_CAPTURE,
    KEPT_MERGED,
    KEPT_PREPARED,
    kept_folder,
)

if TYPE_CHECKING:
    from flows.auditing.walk import Walk

FactT = TypeVar("FactT", bound=Fact)
_ROWS = "rows.safetensors"
_MEND = (
    "restore it with `dvc fetch` or from a backup, then `dvc checkout`; `python -m stages.glance --verify` tells more"
)


class Data:
    """The part of a walk below the draft."""

    def __init__(self, walk: Walk, places: Places) -> None:
        self.walk, self.audit, self.places = walk, walk.audit, places
        self.checked: set[str] = set()

    def run(self, draft: DraftRecord) -> PreparedManifest | None:
        merged = self._manifest(
            MergedManifest,
            Thing("merged", "merged", "merged set", draft.merged_digest),
            KEPT_MERGED,
            MERGED_MANIFEST,
            "draft",
        )
        self._draft_in_workspace(draft)
        if merged is None:
            return None
        files = (("index.parquet", merged.index_digest), ("vocabulary.safetensors", merged.vocabulary_digest))
        for name, expected in files:
            self._file(Thing(f"merged/{name}", "file", f"{MERGED}/{name}", expected), MERGED / name, "merged")
        self.audit.things["merged"].facts |= {
            "rows": f"{merged.rows} ({merged.train_rows} trained on, {merged.held_out_rows} held out)",
            "tokens": f"{merged.tokens} ({merged.supervised_tokens} supervised)",
            "draft vocabulary": str(merged.draft_vocab_size),
        }
        capture = self._manifest(
            CaptureManifest,
            Thing("capture", "states", "hidden states", merged.capture_digest),
            KEPT_CAPTURE,
            CAPTURE_MANIFEST,
            "merged",
        )
        prepared = self._manifest(
            PreparedManifest,
            Thing("prepared", "prepared", "prepared rows", merged.prepared_digest),
            KEPT_PREPARED,
            PREPARED_MANIFEST,
            "merged",
        )
        self._agree(draft, merged, capture, prepared)
        if prepared is not None:
            self._prepared(prepared)
        self._folders(merged)
        if self.walk.hash_all:
            for out in (PREPARED, HIDDEN_STATES, MERGED, DRAFT):
                self._others(out)
        return prepared

    def _manifest(self, kind: type[FactT], thing: Thing, kept: str, path: Path, above: str) -> FactT | None:
        """A manifest from the release's own copy or from wherever the line's copy lies."""
        thing = self.audit.add(thing, above, "names")
        found = self._kept(kind, thing, kept)
        far, copies = self.places.read(str(path), partial(_accept, kind, thing.digest))
        self._take(thing, copies, str(path))
        if not thing.copies:
            self.audit.blame("missing", f"The manifest of the {thing.title} is nowhere", str(path), expected=thing.digest,
                             do="`dvc fetch` with this release's dvc.lock, or restore a backup; what lies below it cannot be told")  # fmt: skip
        return found if found is not None else far

    def _kept(self, kind: type[FactT], thing: Thing, file: str) -> FactT | None:
        data = self.walk.read(file)
        if data is None:
            return None
        self.walk.checked.add(file)
        good = digest(data) == thing.digest
        copy = Copy("release", self.walk.where(file), good, "" if good else digest(data))
        self._take(thing, [copy], file)
        return fact_of(kind, data) if good else None

    def _take(self, thing: Thing, copies: list[Copy], path: str) -> None:
        """Note copies; blame those that are other bytes."""
        self.checked.add(path)
        thing.copies += copies
        for copy in copies:
            if not copy.good:
                self.audit.blame("altered", f"{thing.title[0].upper()}{thing.title[1:]}: other bytes than those recorded",
                                 f"{copy.where} ({copy.place})", expected=thing.digest, got=copy.got, do=_MEND)  # fmt: skip

    def _file(self, thing: Thing, path: Path, above: str, label: str = "is") -> Thing:
        thing = self.audit.add(thing, above, label)
        if self.walk.hash_all:
            self._take(thing, self.places.copies(str(path), thing.digest), str(path))
        return thing

    def _draft_in_workspace(self, draft: DraftRecord) -> None:
        """The same draft in models/ and DVC's cache, while they hold it."""
        pairs = (("model.safetensors", draft.weights_digest), ("config.json", draft.config_digest))
        for name, expected in (*pairs, ("draft_record.json", self.walk.audit.draft)):
            thing = self.audit.things.get("draft" if name == "draft_record.json" else f"draft/{name}")
            if thing is not None and self.walk.hash_all:
                self._take(thing, self.places.copies(str(DRAFT / name), expected), str(DRAFT / name))

    def _agree(
        self,
        draft: DraftRecord,
        merged: MergedManifest,
        capture: CaptureManifest | None,
        prepared: PreparedManifest | None,
    ) -> None:
        """What several manifests say of one thing."""
        told = [("target", draft.target, merged.target), ("capture", draft.capture, merged.capture)]
        if capture is not None:
            told.append(("capture", merged.capture, capture.capture))
            pairs = ((capture.prepared_digest, merged.prepared_digest, "prepared rows"),)
        else:
            pairs = ()
        if prepared is not None:
            told.append(("target", merged.target, prepared.target))
        wrong = [(what, one.digest(), other.digest()) for what, one, other in told if one != other]
        wrong += [(what, one, other) for one, other, what in pairs if one != other]
        for what, expected, got in wrong:
            self.audit.blame("altered", f"Two manifests name another {what}", f"the chain of {self.walk.name}",
                             expected=expected, got=got, do="find out which was changed; do not serve this draft until then")  # fmt: skip

    def _prepared(self, prepared: PreparedManifest) -> None:
        thing = self.audit.things["prepared"]
        thing.facts |= {"answered by": prepared.answered_by, "temperature": f"{prepared.temperature:g}"}
        rest = (
            ("out_of_distribution.parquet", prepared.out_of_distribution_digest),
            ("rejects.parquet", prepared.rejects_digest),
        )
        for name, expected in rest:
            self._file(Thing(f"prepared/{name}", "file", f"{PREPARED}/{name}", expected), PREPARED / name, "prepared")
        for source in prepared.sources:
            self._source(source)

    def _source(self, source: PreparedSource) -> None:
        key, path = f"source:{source.name}", PREPARED / source.name / "rows.parquet"
        thing = self._file(Thing(key, "source", f"source {source.name}", source.rows_digest), path, "prepared", "holds")
        thing.facts |= {
            "rows": f"{source.rows} ({source.train_rows} trained on, {source.held_out_rows} held out)",
            "tokens": str(source.tokens),
            "domain": source.domain,
            "licence": source.licence,
            "kind": source.kind,
            "answers": source.answers,
            "origin": source.origin_digest,
        }
        known = [c for c in self.audit.things["prepared"].copies if c.good]
        self.audit.add(Thing(f"licence:{source.licence}", "licence", source.licence, copies=known), key, "is under")
        if self.walk.hash_all and not thing.copies:
            self.audit.blame("unreproducible", f"The prepared rows of {source.name} are nowhere", str(path), expected=source.rows_digest,
                             do="`dvc fetch` with this release's dvc.lock, or restore a backup: nothing else has these bytes")  # fmt: skip

    def _folders(self, merged: MergedManifest) -> None:
        for told in merged.folders:
            name = told.name
            thing = Thing(f"rows:{name}", "folder", f"row folder {name}", told.config_digest)
            path = HIDDEN_STATES / name / FOLDER_CONFIG
            thing = self.audit.add(thing, "capture", "holds")
            self.audit.add(thing, "merged", "joins")
            config = self._kept(FolderConfig, thing, kept_folder(name))
            far, copies = self.places.read(str(path), partial(_accept, FolderConfig, told.config_digest))
            self._take(thing, copies, str(path))
            config = config or far
            thing.facts |= {
                "source": told.source,
                "tokens": str(told.tokens),
                "rows": f"{told.start} to {told.end - 1}",
            }
            source = self.audit.things.get(f"source:{told.source}")
            if source is not None:
                self.audit.add(source, thing.key, "was captured from")
            if config is None:
                self.audit.blame("missing", f"The config of {name} is nowhere, so its rows have no names", str(path),
                                 expected=told.config_digest, do="`dvc fetch` with this release's dvc.lock")  # fmt: skip
                continue
            self.audit.folders.append(RowFolder(name, told.source, told.start, config.row_ids))
            self._states(thing, config)

    def _states(self, thing: Thing, config: FolderConfig) -> None:
        """The states themselves: large, and made again from rows, target and code when they are nowhere."""
        path = str(HIDDEN_STATES / config.name / _ROWS)
        states = Thing(f"states:{config.name}", "states of rows", f"states of {config.name}", config.rows_digest)
        states = self.audit.add(states, thing.key, "is")
        self.checked.add(path)
        if self.walk.hash_all:
            look: Callable[[BinaryIO], list[str]] = partial(_look, config)
            self._take(states, self.places.looked(path, config.digest(), look), path)

    def _others(self, out: Path) -> None:
        """Files of a folder that only DVC's lock names, and files that not even it does."""
        told = self.places.lock.outs.get(str(out)) if self.places.lock else None
        if told is None:
            return
        listed = {str(out / name) for name in self.places.listing(told)}
        rest = sorted(listed - self.checked)
        if rest:
            key = f"others:{out}"
            thing = self.audit.add(Thing(key, "file", f"other files of {out}", told.md5), "dvc.lock", "names")
            for path in rest:
                self._take(thing, self.places.copies_by_md5(path), path)
        for path in sorted(self._here(told.path, told.md5) - listed if listed else ()):
            self.audit.blame("altered", "A file lies in the line's folder that no record names", path,
                             do="move it away, or run `dvc repro`")  # fmt: skip

    def _here(self, path: str, md5: str) -> set[str]:
        """Files of the workspace's folder, while it holds this run's."""
        here = self.places.here.outs.get(path) if self.places.here else None
        if here is None or here.md5 != md5:
            return set()
        return set(self._walked(self.places.root / path))

    def _walked(self, folder: Path) -> Iterator[str]:
        for file in folder.rglob("*"):
            if file.is_file() and not file.name.startswith("."):
                yield str(file.relative_to(self.places.root))


def _accept(kind: type[FactT], expected: str, data: bytes) -> FactT | None:
    return fact_of(kind, data) if digest(data) == expected else None


def _look(config: FolderConfig, file: BinaryIO) -> list[str]:
    return row_faults(file, config)


def walk_data(walk: Walk, places: Places, draft: DraftRecord) -> PreparedManifest | None:
    """Everything below the draft's record; gives the prepared rows' manifest, if it was found."""
    return Data(walk, places).run(draft)
