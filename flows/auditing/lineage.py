"""The chain as OpenLineage run events, one a stage and release, for Marquez, DataHub or whatever takes such events.

Dataset versions are this line's digests. A run's id follows from release and stage, and its time is that of the promotion, so
that sending the same release twice changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from openlineage.client.event_v2 import InputDataset, Job, OutputDataset, Run, RunEvent, RunState, set_producer
from openlineage.client.facet_v2 import (
    data_quality_assertions_dataset,
    dataset_version_dataset,
    documentation_dataset,
    job_type_job,
    source_code_location_job,
)
from openlineage.client.serde import Serde
from openlineage.client.uuid import generate_static_uuid

from flows.auditing.facts import fact_of
from flows.auditing.model import Audit, Thing
from flows.auditing.releases import Releases
from stages.contracts.files import write_whole
from stages.contracts.report import GateReport

NAMESPACE = "draftline"
PRODUCER = "urn:draftline:audit"
_LOCATION = "urn:git:"
# Stage: kinds or keys of things that it reads, and those that it writes.
_STAGES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "prepare": (("target",), ("prepared", "source:")),
    "extract": (("prepared", "source:", "target"), ("capture",)),
    "merge": (("prepared", "capture"), ("merged",)),
    "train": (("merged", "capture", "target"), ("draft",)),
    "serve-validate": (("draft", "target"), ("evidence/serve_validate.json",)),
    "benchmark": (("draft", "target"), ("evidence/benchmark.json", "policy.json")),
    "promote": (("draft", "policy.json", "gate-"), ("release",)),
}
_GATES = {"gate-extraction": "prepared", "gate-training": "merged", "gate-deployment": "draft"}


def events(audits: Iterable[Audit], store: Releases) -> list[dict[str, Any]]:
    """All events, in the order of the line."""
    set_producer(PRODUCER)
    times = _times(store)
    found: list[dict[str, Any]] = []
    for audit in audits:
        at = times.get(audit.release, datetime.fromtimestamp(0, UTC))
        for stage, (reads, writes) in _STAGES.items():
            found += _run(audit, stage, at, _inputs(audit, reads), _outputs(audit, writes))
        for gate, judged in _GATES.items():
            found += _run(audit, gate, at, _judged(audit, gate, judged, store), _outputs(audit, (gate,)))
    return found


def write_events(path: Path, audits: Sequence[Audit], store: Releases) -> None:
    """One event a line."""
    lines = [json.dumps(event, sort_keys=True) for event in events(audits, store)]
    write_whole(path, ("\n".join(lines) + "\n").encode())


def _times(store: Releases) -> dict[str, datetime]:
    """When each release was first promoted, as the ledger tells."""
    found: dict[str, datetime] = {}
    for entry in store.history():
        found.setdefault(str(entry["release"]), datetime.fromisoformat(str(entry["at"])))
    return found


def _run(
    audit: Audit, stage: str, at: datetime, inputs: list[InputDataset], outputs: list[OutputDataset]
) -> list[dict[str, Any]]:
    """The two events that the specification asks of a run."""
    run = Run(str(generate_static_uuid(at, f"{audit.release} {stage}".encode())))
    facets: dict[str, Any] = {"jobType": job_type_job.JobTypeJobFacet("BATCH", "DRAFTLINE", "STAGE")}
    code = audit.things.get("code")
    if code is not None and code.digest:
        facets["sourceCodeLocation"] = source_code_location_job.SourceCodeLocationJobFacet(
            "git", _LOCATION + code.digest, version=code.digest
        )
    job, time = Job(NAMESPACE, stage, facets=facets), at.isoformat()
    both = (
        RunEvent(eventType=RunState.START, eventTime=time, run=run, job=job, inputs=inputs),
        RunEvent(eventType=RunState.COMPLETE, eventTime=time, run=run, job=job, inputs=inputs, outputs=outputs),
    )
    return [json.loads(Serde.to_json(event)) for event in both]


def _named(audit: Audit, keys: Sequence[str]) -> list[Thing]:
    return [
        t for k, t in audit.things.items() if any(k == key or (key[-1] in ":-" and k.startswith(key)) for key in keys)
    ]


def _name(thing: Thing) -> str:
    return thing.key.replace("source:", "prepared/")


def _facets(thing: Thing) -> dict[str, Any]:
    words = "; ".join(f"{k}: {v}" for k, v in thing.facts.items())
    found: dict[str, Any] = {
        "documentation": documentation_dataset.DocumentationDatasetFacet(
            f"{thing.title} ({thing.state}){'. ' + words if words else ''}"
        )
    }
    if thing.digest:
        found["version"] = dataset_version_dataset.DatasetVersionDatasetFacet(thing.digest)
    return found


def _inputs(audit: Audit, keys: Sequence[str]) -> list[InputDataset]:
    return [InputDataset(NAMESPACE, _name(t), facets=_facets(t)) for t in _named(audit, keys)]


def _outputs(audit: Audit, keys: Sequence[str]) -> list[OutputDataset]:
    return [OutputDataset(NAMESPACE, _name(t), facets=_facets(t)) for t in _named(audit, keys)]


def _judged(audit: Audit, gate: str, judged: str, store: Releases) -> list[InputDataset]:
    """What a gate judged, with its checks under OpenLineage's own names for them."""
    try:
        with store.open(audit.release, f"gates/{gate.removeprefix('gate-')}.json") as file:
            report = fact_of(GateReport, file.read())
    except FileNotFoundError:
        report = None
    found = _inputs(audit, (judged,))
    if report is None:
        return found
    checks = [
        data_quality_assertions_dataset.Assertion(
            assertion=c.assertion, success=c.success, column=c.column or None, severity=c.severity,
            expected=c.expected, actual=c.actual, name=c.table,
        )
        for c in report.checks
    ]  # fmt: skip
    for dataset in found:
        facet = data_quality_assertions_dataset.DataQualityAssertionsDatasetFacet(checks)
        dataset.inputFacets = {"dataQualityAssertions": facet}
    return found
