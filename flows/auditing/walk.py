"""From a release down to its sources: each thing found, its bytes hashed again, and what names it held against it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic import ValidationError

from flows.auditing.bytes import Hashed, hashes
from flows.auditing.code import Repository
from flows.auditing.data import walk_data
from flows.auditing.facts import fact_of, files_of
from flows.auditing.model import Audit, Copy, Thing
from flows.auditing.origins import walk_code, walk_target
from flows.auditing.places import Places
from flows.auditing.releases import RECORD, Releases
from flows.auditing.remotes import remotes
from stages.contracts.draft import DraftRecord
from stages.contracts.evidence import BENCHMARK_EVIDENCE, POLICY, SERVE_EVIDENCE, TRAIN_METRICS, ServeEvidence
from stages.contracts.files import canonical, digest
from stages.contracts.provenance import KEPT_LOCK, Lock, read_lock
from stages.contracts.release import ReleaseRecord
from stages.contracts.report import GateReport

_WEIGHTS = "draft/model.safetensors"
_AGAIN = "take it from a backup or from another copy of the registry; if there is none, promote the draft again"
_EVIDENCE = {str(p): f"evidence/{p.name}" for p in (TRAIN_METRICS, SERVE_EVIDENCE, BENCHMARK_EVIDENCE)}
_EVIDENCE[str(POLICY)] = POLICY.name
_UNLISTED = (
    "draft/",
    "gates/",
    "evidence/",
    POLICY.name,
    "index.html",
)  # what releases held before they listed their files


class Walk:
    """One release under audit; `hash_all` false leaves the large files alone, to answer what was trained on what."""

    def __init__(self, store: Releases, name: str, root: Path, hashed: Hashed, hash_all: bool = True) -> None:
        self.store, self.name, self.root, self.hash_all = store, name, root, hash_all
        self.hashed = hashed
        self.audit = Audit(name)
        self.repository = Repository(root)
        self.files = set(store.files(name))
        self.checked: set[str] = {RECORD}

    def run(self) -> Audit:
        """Walk all of it. What is missing is told as a finding, never raised."""
        audit = self.audit
        top = audit.add(Thing("release", "release", f"release {self.name}"))
        record = self._record(top)
        if record is None:
            return audit
        audit.draft = record.draft_digest
        lock = self._lock(record)
        places = Places(self.root, lock, remotes(self.root), self.hashed)
        draft = self._draft(record)
        reports = self._gates(record, draft)
        self._evidence(record, reports.get("deployment"))
        if lock is not None:
            audit.params = lock.params
            walk_code(audit, lock, self.repository)
        if draft is not None:
            self._bound(draft, record, reports)
            prepared = walk_data(self, places, draft)
            walk_target(audit, draft, prepared, lock.params if lock else {}, self.root, self.hash_all)
            self._params(draft, lock)
        self._other_files(record)
        for copy in places.faults:
            audit.blame("altered", "A folder's listing in DVC's storage is not what its name says", copy.where, got=copy.got,
                        do="`dvc fetch` after removing it, or push it again from a whole clone")  # fmt: skip
        return audit

    def _record(self, top: Thing) -> ReleaseRecord | None:
        where = self.where(RECORD)
        data = self.read(RECORD)
        if data is None:
            self.audit.blame("missing", "A release has no record", where, do=_AGAIN)
            return None
        found = digest(data)
        good = found.removeprefix("sha256:").startswith(self.name)
        top.digest = found
        top.copies.append(Copy("release", where, good, "" if good else found))
        record = fact_of(ReleaseRecord, data)
        if not good:
            self.audit.blame("altered", "A release's record is not the one it is named after", where,
                             expected=f"a record whose digest begins with {self.name}", got=found, do=_AGAIN)  # fmt: skip
        elif record is None:
            self.audit.blame("unreproducible", "A release's record is of a version that this code does not read", where,
                             do="audit it with the code that wrote it")  # fmt: skip
        if record is not None:
            top.facts |= {
                "accept length": f"{record.accept_length:.3f}",
                "engine": f"{record.engine} {record.engine_version}",
            }
            key = "engine"
            engine = Thing(key, "engine", f"{record.engine} {record.engine_version}", copies=list(top.copies))
            self.audit.add(engine, "release", "was served and measured by")
        return record if good or self.hash_all else None  # an answer follows nothing that is not as its name says

    def read(self, file: str) -> bytes | None:
        """A file of the release, or nothing."""
        try:
            with self.store.open(self.name, file) as handle:
                return handle.read()
        except FileNotFoundError:
            return None

    def kept(self, key: str, kind: str, title: str, file: str, expected: str, above: str, label: str) -> Thing:
        """A file that the release keeps, under the digest that something above it names."""
        thing = self.audit.add(Thing(key, kind, title, expected), above, label)
        where = self.where(file)
        self.checked.add(file)
        if file == _WEIGHTS and not self.hash_all:
            return thing
        try:
            with self.store.open(self.name, file) as handle:
                told = hashes(handle)
        except FileNotFoundError:
            self.audit.blame("missing", f"The release does not hold {title}", where, expected=expected, do=_AGAIN)
            return thing
        found = told.sha256
        self.hashed.advance(told.size)
        thing.copies.append(Copy("release", where, found == expected, "" if found == expected else found))
        if found != expected:
            self.audit.blame("altered", f"{title} of the release is not what {above} names", where,
                             expected=expected, got=found, do=_AGAIN)  # fmt: skip
        return thing

    def _draft(self, record: ReleaseRecord) -> DraftRecord | None:
        file = "draft/draft_record.json"
        thing = self.kept("draft", "draft", "the draft's record", file, record.draft_digest, "release", "serves")
        draft = fact_of(DraftRecord, self.read(file) or b"")
        if draft is None or (thing.state != "verified" and not self.hash_all):
            return None
        thing.title = f"draft of {draft.target.name}"
        thing.facts |= {
            "points": ", ".join(map(str, draft.points)),
            "exported for": draft.exported_for,
            "layer ids": ", ".join(map(str, draft.layer_ids)),
            "optimizer steps": str(draft.optimizer_steps),
            "supervised tokens seen": str(draft.supervised_tokens_seen),
        }
        pairs = (("model.safetensors", draft.weights_digest), ("config.json", draft.config_digest))
        for name, expected in pairs:
            self.kept(f"draft/{name}", "file", f"draft/{name}", f"draft/{name}", expected, "draft", "is")
        return draft

    def _gates(self, record: ReleaseRecord, draft: DraftRecord | None) -> dict[str, GateReport]:
        reports: dict[str, GateReport] = {}
        for gate, expected in sorted(record.gate_reports.items()):
            file = f"gates/{gate}.json"
            thing = self.kept(f"gate-{gate}", "gate", f"gate-{gate}'s report", file, expected, "release", "passed")
            report = fact_of(GateReport, self.read(file) or b"")
            if report is None:
                continue
            reports[gate] = report
            thing.facts |= {"judged": report.subject_digest, "checks": f"{len(report.checks)}, all passed"}
            if not report.success:
                thing.facts["checks"] = "refused"
                self.audit.blame("altered", f"gate-{gate} did not pass what was released", self.where(file),
                                 expected="a passing report", got="a refusal", do="`python -m flows.release rollback`")  # fmt: skip
        return reports

    def _bound(self, draft: DraftRecord, record: ReleaseRecord, reports: Mapping[str, GateReport]) -> None:
        """What two records say of the same thing."""
        pairs = [
            ("merged set", "release.json", record.merged_digest, "the draft's record", draft.merged_digest),
            ("report of gate-training", "the draft's record", draft.gate_training_digest,
             "release.json", record.gate_reports.get("training", "none")),
        ]  # fmt: skip
        subjects = {"training": draft.merged_digest, "deployment": record.draft_digest}
        pairs += [
            (f"subject of gate-{g}", "the chain", subjects[g], "its report", reports[g].subject_digest)
            for g in subjects
            if g in reports
        ]
        for what, one, expected, other, got in pairs:
            if expected != got:
                self.audit.blame("altered", f"Two records name another {what}", f"{one} and {other} of {self.name}",
                                 expected=expected, got=got, do="find out which was changed; do not serve this draft until then")  # fmt: skip

    def _evidence(self, record: ReleaseRecord, report: GateReport | None) -> None:
        for path, expected in sorted((report.evidence if report else {}).items()):
            file = _EVIDENCE.get(path, f"evidence/{Path(path).name}")
            self.kept(file, "evidence", path, file, expected, "gate-deployment", "judged")
        policy = self.read(POLICY.name)
        if policy is not None and digest(policy) != record.policy_digest:
            self.audit.blame("altered", "The serving policy is not the released one", self.where(POLICY.name),
                             expected=record.policy_digest, got=digest(policy), do=_AGAIN)  # fmt: skip
        served = fact_of(ServeEvidence, self.read(_EVIDENCE[str(SERVE_EVIDENCE)]) or b"")
        if served is not None:
            facts = self.audit.things["release"].facts
            facts["accept length, 95 %"] = f"{served.served.low:.3f} to {served.served.high:.3f}"
            facts["draft steps"] = str(served.draft_steps)

    def _other_files(self, record: ReleaseRecord) -> None:
        """Files that only the record's own list names, and files that nothing names."""
        for file, expected in sorted(files_of(record).items()):
            if file not in self.checked:
                self.kept(file, "file", file, file, expected, "release", "holds")
        named = files_of(record) or {f for f in self.files if f.startswith(_UNLISTED)}
        for file in sorted(self.files - set(named) - {RECORD}):
            self.audit.blame("altered", "A release holds a file that its record does not name",
                             self.where(file), do="move it away: nothing vouches for it")  # fmt: skip

    def where(self, file: str) -> str:
        return self.store.where(self.name, file)

    def _lock(self, record: ReleaseRecord) -> Lock | None:
        """dvc.lock of the run that made the release: its own copy, the workspace's, or one that git holds."""
        expected = record.dvc_lock_digest
        thing = self.audit.add(Thing("dvc.lock", "lock", "dvc.lock", expected), "release", "was made by the run of")
        self.checked.add(KEPT_LOCK)
        sources: list[tuple[str, str, Callable[[], bytes]]] = [
            ("release", self.where(KEPT_LOCK), lambda: self.read(KEPT_LOCK) or b""),
            ("workspace", "dvc.lock", lambda: _bytes(self.root / "dvc.lock")),
            ("git", "dvc.lock in a commit", lambda: self.repository.lock_of(expected)),
        ]
        for place, where, get in sources:
            data = get()
            if data and digest(data) == expected:
                thing.copies.append(Copy(place, where, True))
                try:
                    return read_lock(data)
                except ValueError:
                    break
            if data and place == "release":
                thing.copies.append(Copy(place, where, False, digest(data)))
                self.audit.blame("altered", "The release's dvc.lock is not the one that its record names", where,
                                 expected=expected, got=digest(data), do=_AGAIN)  # fmt: skip
        if not thing.copies:
            self.audit.blame("missing", "dvc.lock of the run that made this release is nowhere", self.where(KEPT_LOCK),
                             expected=expected, do="commit dvc.lock with each release, or promote again: releases keep it since")  # fmt: skip
        return None

    def _params(self, draft: DraftRecord, lock: Lock | None) -> None:
        """The parameters stand in dvc.lock, whose bytes are known; the draft's record digests its own section."""
        thing = self.audit.add(
            Thing("params", "params", "parameters", draft.params_digest), "draft", "was trained with"
        )
        if lock is None or "train" not in lock.params:
            return
        thing.copies = list(self.audit.things["dvc.lock"].copies)
        if not _says(lock.params["train"], draft.params_digest):
            thing.copies = [Copy("release", self.where(KEPT_LOCK), False, "other values")]
            self.audit.blame("altered", "The draft's record names other training parameters than dvc.lock", "params: train",
                             expected=draft.params_digest, got=digest(canonical(lock.params["train"])),
                             do="find out which was changed; do not serve this draft until then")  # fmt: skip


def _says(section: dict[str, object], expected: str) -> bool:
    """YAML has whole numbers where a parameter is a real one; both spellings are the same parameters."""
    if digest(canonical(section)) == expected:
        return True
    from stages.contracts.params import Train

    try:
        return digest(canonical(Train.model_validate(section).model_dump(mode="json"))) == expected
    except ValidationError:
        return False


def _bytes(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""
