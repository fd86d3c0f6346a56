"""What a release is made of, once it is known to have passed: exactly this draft, exactly these figures."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from flows.model_card import CARD, model_card
from stages.contracts.beside import BESIDE, BesideProduction
from stages.contracts.canary import CANARY, Canary
from stages.contracts.draft import DRAFT, DRAFT_RECORD, DraftRecord
from stages.contracts.errors import DataError, Refusal
from stages.contracts.evidence import (
    BENCHMARK_EVIDENCE,
    POLICY,
    SERVE_EVIDENCE,
    BenchmarkEvidence,
    ServeEvidence,
    ServingPolicy,
)
from stages.contracts.files import digest, file_digest
from stages.contracts.provenance import KEPT_PREPARED, kept_files
from stages.contracts.release import ReleaseRecord
from stages.contracts.report import EVIDENCE, GATE_REPORTS, GateReport, demand, evidence_digests
from stages.contracts.serving import SERVING, serving_files

_GATES = ("extraction", "training", "deployment")
_PAGE = Path("reports/index.html")


@dataclass(frozen=True)
class Contents:
    """A release's files by their path in it: files of the line, and text made here."""

    files: dict[str, Path]
    texts: dict[str, bytes]

    def described(self) -> dict[str, str]:
        found = {name: file_digest(path) for name, path in self.files.items()}
        return found | {name: digest(text) for name, text in self.texts.items()}

    def write(self, folder: Path) -> None:
        for name, source in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, folder / name)
        for name, text in self.texts.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(text)


def contents(root: Path) -> Contents:
    """The files of the line that a release carries.

    Raises:
        DataError: a fact that the release carries is missing or damaged.
    """
    draft = DraftRecord.read(root / DRAFT / DRAFT_RECORD)
    files = {f"draft/{p.relative_to(root / DRAFT)}": p for p in sorted((root / DRAFT).rglob("*")) if p.is_file()}
    files |= {f"gates/{gate}.json": root / GATE_REPORTS / f"{gate}.json" for gate in _GATES}
    files |= {path.name if path == POLICY else f"evidence/{path.name}": root / path for path in EVIDENCE}
    if (root / _PAGE).exists():
        files["index.html"] = root / _PAGE
    kept = kept_files(root, draft)
    if (root / BESIDE).exists() and BesideProduction.read(root / BESIDE).draft_digest == draft.digest():
        files[f"evidence/{BESIDE.name}"] = root / BESIDE
    if (root / CANARY).exists() and Canary.read(root / CANARY).draft_digest == draft.digest():
        files[f"evidence/{CANARY.name}"] = root / CANARY
    serving = {
        f"{SERVING.name}/{name}": text for name, text in serving_files(ServingPolicy.read(root / POLICY)).items()
    }
    return Contents(files | kept, {CARD: model_card(root, kept.get(KEPT_PREPARED)), **serving})


def demand_passed(root: Path) -> None:
    """gate-deployment passed exactly what stands in models/draft, with exactly the figures in reports/.

    Raises:
        Refusal: it did not.
        DataError: a file is missing or its bytes are not what the draft's record says.
    """
    draft = DraftRecord.read(root / DRAFT / DRAFT_RECORD)
    name = draft.digest()
    report = demand("deployment", name, root)
    told = (
        (SERVE_EVIDENCE, ServeEvidence.read(root / SERVE_EVIDENCE)),
        (BENCHMARK_EVIDENCE, BenchmarkEvidence.read(root / BENCHMARK_EVIDENCE)),
        (POLICY, ServingPolicy.read(root / POLICY)),
    )
    for path, figures in told:
        if figures.draft_digest != name:
            raise Refusal(
                "These figures are of another draft",
                where=str(path),
                expected=name,
                got=figures.draft_digest,
                do="`dvc repro`",
            )
    _demand_judged(report, root)
    _check_draft(root / DRAFT, draft)


def record_of(root: Path, made: Contents) -> ReleaseRecord:
    """The record of what stands in models/draft and reports/."""
    draft, served = DraftRecord.read(root / DRAFT / DRAFT_RECORD), ServeEvidence.read(root / SERVE_EVIDENCE)
    return ReleaseRecord(
        draft_digest=draft.digest(),
        merged_digest=draft.merged_digest,
        gate_reports={gate: GateReport.read(root / GATE_REPORTS / f"{gate}.json").digest() for gate in _GATES},
        policy_digest=ServingPolicy.read(root / POLICY).digest(),
        engine=served.engine,
        engine_version=served.engine_version,
        accept_length=served.served.accept_length,
        accept_length_by_domain={k: v.accept_length for k, v in served.served_by_domain.items()},
        dvc_lock_digest=file_digest(root / "dvc.lock"),
        files=made.described(),
    )


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


def _check_draft(folder: Path, record: DraftRecord) -> None:
    """Raises: DataError: the weights or the config are not those that the draft's record names."""
    for file, expected in (("model.safetensors", record.weights_digest), ("config.json", record.config_digest)):
        found = file_digest(folder / file)
        if found != expected:
            raise DataError(
                "A file of the draft is not what its record says",
                where=str(folder / file),
                expected=expected,
                got=found,
                do="`dvc repro train`",
            )
