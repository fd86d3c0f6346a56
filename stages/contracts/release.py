"""A release: a draft that passed, and where it stands. The ledger alone has times."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from stages.contracts.files import Fact

RELEASES = Path("releases")


class ReleaseRecord(Fact):
    """releases/<release digest>/release.json: names everything a deployment has to match."""

    version: Literal[1] = 1
    draft_digest: str
    merged_digest: str
    gate_reports: dict[str, str]
    policy_digest: str
    engine: str
    engine_version: str
    accept_length: float
    accept_length_by_domain: dict[str, float]
    dvc_lock_digest: str
