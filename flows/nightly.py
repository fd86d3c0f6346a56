"""The audit as a flow: every release, every night, with what it found as artifacts; the page goes to logs/audit.html."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from flows import line
from flows.audit import audit as audit_releases
from flows.auditing.model import Audit, Finding
from flows.auditing.page import write_page
from flows.auditing.releases import FolderReleases
from flows.auditing.standing import registry_faults
from stages.contracts.errors import LineError

PAGE = Path("logs/audit.html")
_STATES = ("verified", "unreachable", "altered")


def findings_markdown(faults: list[tuple[str, Finding]]) -> str:
    """What is wrong, a section each; the head says how much."""
    if not faults:
        return "# Sound\n\nEverything that this machine can read is what it was."
    parts = [f"# {len(faults)} finding{'s' * (len(faults) != 1)}"]
    for release, found in faults:
        lines = [f"## {found.fault}: {found.what}", f"release: {release}", f"where: `{found.where}`"]
        told = (("expected", found.expected), ("got", found.got), ("what to do", found.do))
        parts += ["\n".join([*lines, *(f"{name}: {value}" for name, value in told if value)]).replace("\n", "  \n")]
    return "\n\n".join(parts)


def rows_of(audits: list[Audit]) -> list[dict[str, Any]]:
    """A row a release."""
    return [
        {"release": a.release, "draft": a.draft, "findings": len(a.findings), **{s: a.count(s) for s in _STATES}}
        for a in audits
    ]


@flow(name="audit")
def audit(lock_wait_s: float = 900) -> State[Any]:
    """Walk every release down to its sources and hash all that can be read again; anything wrong fails the run by name.

    Args:
        lock_wait_s: seconds to wait for a run of DVC in this clone, whose files are half old and half new.
    """
    root = Path.cwd()
    store = FolderReleases(root)
    try:
        line.wait_until_free(root, lock_wait_s, get_run_logger().info)
        audits = audit_releases(store, store.names(), root)
        faults = [("the registry", f) for f in registry_faults(store)]
    except LineError as error:
        return Failed(message=error.text())
    faults += [(a.release, f) for a in audits for f in a.findings]
    write_page(root / PAGE, audits, [f for name, f in faults if name == "the registry"])
    create_table_artifact(key="audit", table=rows_of(audits), description="things by state, a row a release")
    create_markdown_artifact(key="audit-findings", markdown=findings_markdown(faults))
    if faults:
        first = faults[0][1]
        return Failed(message=f"{len(faults)} findings; the first: {first.fault}: {first.what}, {first.where}")
    return Completed(message=f"{len(audits)} releases are sound")


if __name__ == "__main__":
    audit()
