"""Promotion and rollback in a local release folder. `python -m flows.release promote | rollback | list`

    releases/<12 hex digits of the record's digest>/  release.json, draft/, policy.json, evidence/, gates/, index.html
    releases/current.json                             {"release": "<that name>"}; what a server loads
    releases/ledger.jsonl                             who became current when (flows/ledger.py)

A release is named by its record, not by its draft alone: the same draft measured again may carry another policy. Its
files are copies: the draft in models/ shares its bytes with DVC's cache, and a release must not share their fate.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flows.ledger import append as _append
from flows.ledger import entries as ledger
from flows.ledger import promoted, rolled_back
from stages.contracts.draft import DRAFT, DRAFT_RECORD, DraftRecord
from stages.contracts.errors import DataError, LineError, Refusal, run
from stages.contracts.evidence import POLICY, SERVE_EVIDENCE, ServeEvidence, ServingPolicy
from stages.contracts.files import canonical, file_digest, whole_folder, write_whole
from stages.contracts.provenance import kept_files
from stages.contracts.release import POINTER, RELEASES, ReleaseRecord, current, current_record
from stages.contracts.report import EVIDENCE, GATE_REPORTS, GateReport, demand, evidence_digests
from stages.contracts.repository import demand_repository

_GATES = ("extraction", "training", "deployment")
_PAGE = Path("reports/index.html")
_NAME_DIGITS = 12
_LOCK_WAIT_S = 60.0


@dataclass(frozen=True)
class Release:
    """A folder in releases/ and its record."""

    name: str
    record: ReleaseRecord


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[None]:
    """One writer of the release folder on this machine; the kernel frees the lock of a killed one.

    Raises:
        Refusal: another process holds it for too long.
    """
    path = root / RELEASES / ".lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + _LOCK_WAIT_S
    with path.open("a") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise Refusal(
                        "Another promotion or rollback is under way",
                        where=str(path),
                        expected=f"free within {_LOCK_WAIT_S:g} s",
                        do="wait for it to end, then do this again",
                    ) from None
                time.sleep(0.1)
        yield


def record_of(root: Path = Path()) -> ReleaseRecord:
    """The record of what stands in models/draft and reports/, once it is known to have passed.

    Raises:
        Refusal: gate-deployment has not passed exactly this draft with exactly these figures.
        DataError: a file is missing or its bytes are not what the draft's record says.
    """
    draft = DraftRecord.read(root / DRAFT / DRAFT_RECORD)
    name = draft.digest()
    report = demand("deployment", name, root)
    served, policy = ServeEvidence.read(root / SERVE_EVIDENCE), ServingPolicy.read(root / POLICY)
    for path, told in ((SERVE_EVIDENCE, served.draft_digest), (POLICY, policy.draft_digest)):
        if told != name:
            raise Refusal(
                "These figures are of another draft", where=str(path), expected=name, got=told, do="`dvc repro`"
            )
    _demand_judged(report, root)
    _check_draft(root / DRAFT)
    return ReleaseRecord(
        draft_digest=name,
        merged_digest=draft.merged_digest,
        gate_reports={gate: GateReport.read(root / GATE_REPORTS / f"{gate}.json").digest() for gate in _GATES},
        policy_digest=policy.digest(),
        engine=served.engine,
        engine_version=served.engine_version,
        accept_length=served.served.accept_length,
        accept_length_by_domain={k: v.accept_length for k, v in served.served_by_domain.items()},
        dvc_lock_digest=file_digest(root / "dvc.lock"),
        files={name: file_digest(path) for name, path in contents(root, draft).items()},
    )


def contents(root: Path, draft: DraftRecord) -> dict[str, Path]:
    """Every file of a release beside its record: name in the release, and the file it is a copy of."""
    found = {f"draft/{p.relative_to(root / DRAFT)}": p for p in sorted((root / DRAFT).rglob("*")) if p.is_file()}
    found |= {f"gates/{gate}.json": root / GATE_REPORTS / f"{gate}.json" for gate in _GATES}
    found |= {path.name if path == POLICY else f"evidence/{path.name}": root / path for path in EVIDENCE}
    if (root / _PAGE).exists():
        found["index.html"] = root / _PAGE
    return found | kept_files(root, draft)


def _demand_judged(report: GateReport, root: Path) -> None:
    """Raises Refusal when a measurement is not the one that gate-deployment judged: a policy edited since is unproved."""
    for file, found in evidence_digests(root).items():
        judged = report.evidence.get(file, "nothing of this file")
        if found != judged:
            raise Refusal(
                "These figures are not those that gate-deployment judged",
                where=file,
                expected=judged,
                got=found,
                do="run `dvc repro gate-deployment`",
            )


def _check_draft(folder: Path) -> None:
    """Raises: DataError: the weights or the config are not those that the draft's record names."""
    record = DraftRecord.read(folder / DRAFT_RECORD)
    for file, expected in (("model.safetensors", record.weights_digest), ("config.json", record.config_digest)):
        found = file_digest(folder / file)
        if found != expected:
            raise DataError(
                "A file of the draft is not what its record says",
                where=str(folder / file),
                expected=expected,
                got=found,
                do="`dvc repro train` for models/draft; for a release, `python -m flows.release rollback`",
            )


def promote(root: Path = Path(), even_if_rolled_back: bool = False) -> Release:
    """Make the draft that passed gate-deployment the current release; doing it again changes nothing.

    Raises:
        Refusal: see `record_of`; another promotion under way; or this draft was rolled back, and a weekly run that finds
            nothing new must not bring it back (`even_if_rolled_back` does).
    """
    with _locked(root):
        record = record_of(root)
        if not even_if_rolled_back and record.draft_digest in rolled_back(root):
            raise Refusal(
                "This draft was rolled back",
                where=str(root / RELEASES / "ledger.jsonl"),
                expected="another draft than the one taken out of service",
                got=record.draft_digest,
                do="retrain on new rows or parameters; `python -m flows.release promote` brings this one back on purpose",
            )
        release = Release(record.digest().removeprefix("sha256:")[:_NAME_DIGITS], record)
        folder = root / RELEASES / release.name
        if not folder.exists():
            with whole_folder(folder) as aside:
                _fill(aside, root, record)
        _check_draft(folder / "draft")
        _move(root, release.name, "promote")
    return release


def _fill(folder: Path, root: Path, record: ReleaseRecord) -> None:
    for name, path in contents(root, DraftRecord.read(root / DRAFT / DRAFT_RECORD)).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / name)
    record.write(folder / "release.json")


def rollback(root: Path = Path()) -> Release:
    """Make the release before the current one current again.

    Raises:
        Refusal: there is none before it.
        DataError: its folder is missing or damaged, or the ledger contradicts itself; the pointer stays.
    """
    with _locked(root):
        _settle(root)
        past = promoted(root)
        if len(past) < 2:
            raise Refusal(
                "There is no release to roll back to",
                where=str(root / RELEASES / "ledger.jsonl"),
                got=f"{len(past)} promoted",
                do="`python -m flows.release list` names what there is",
            )
        release = Release(past[-2], ReleaseRecord.read(root / RELEASES / past[-2] / "release.json"))
        _check_draft(root / RELEASES / release.name / "draft")
        _move(root, release.name, "rollback")
    return release


def _move(root: Path, name: str, action: str) -> None:
    """Pointer first, ledger second: a crash between them is told by the next writer (`_settle`)."""
    _settle(root)
    before = current(root)
    if before == name:
        return
    write_whole(root / POINTER, canonical({"release": name}))
    _append(root, {"action": action, "release": name, "before": before, "draft": _draft(root)})


def _settle(root: Path) -> None:
    """Write down a pointer that moved without an entry: its writer was killed between the two."""
    name, entries = current(root), ledger(root)
    if name is not None and (not entries or entries[-1]["release"] != name):
        past = promoted(root)
        action = "rollback" if len(past) > 1 and past[-2] == name else "promote"
        _append(
            root,
            {
                "action": action,
                "release": name,
                "before": past[-1] if past else None,
                "draft": _draft(root),
                "settled": True,
            },
        )


def _draft(root: Path) -> str:
    """Digest of the current release's draft."""
    record = current_record(root)
    assert record is not None, "asked once the pointer stands"
    return record.draft_digest


def release_markdown(release: Release) -> str:
    """A release for a person: its name, what it stands on, how well it does."""
    record = release.record
    rows = "\n".join(f"| {name} | {value:.2f} |" for name, value in sorted(record.accept_length_by_domain.items()))
    return (
        f"# Release {release.name}\n\nDraft `{record.draft_digest}`, {record.engine} {record.engine_version}\n\n"
        f"| accept length | tokens |\n|---|---|\n| all | {record.accept_length:.2f} |\n{rows}\n"
    )


def list_releases(root: Path = Path()) -> str:
    """The ledger for a person, the current release marked."""
    now = current(root)
    lines = [
        f"{'*' if entry['release'] == now else ' '} {entry['at']}  {entry['action']:8}  {entry['release']}"
        for entry in ledger(root)
    ]
    return "\n".join(lines) or "No release yet: `make retrain`, then `python -m flows.release promote`."


def main() -> None:
    """Promote, roll back or list, from the repository root."""
    action = sys.argv[1] if len(sys.argv) == 2 else ""
    demand_repository()
    if action == "list":
        print(list_releases())
    elif action in ("promote", "rollback"):
        release = promote(even_if_rolled_back=True) if action == "promote" else rollback()
        print(f"current: releases/{release.name}, accept length {release.record.accept_length:.2f}")
    else:
        raise LineError(
            "No such action",
            expected="promote, rollback or list",
            got=action or "nothing",
            do="python -m flows.release list",
        )


if __name__ == "__main__":
    run(main)
