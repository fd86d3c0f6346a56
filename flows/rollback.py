"""Rollback as a flow, so that it can be ordered from Prefect and stands in its history."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger, task
from prefect.artifacts import create_markdown_artifact
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from flows import release, serving
from flows.promote import retried
from stages.contracts.errors import LineError
from stages.contracts.params import load_promotion


@task(**retried("go back"))
def go_back(root: Path, why: str) -> release.Release:
    """The release before production becomes production again."""
    return release.rollback(root, why)


@flow(name="rollback")
def rollback(why: str = "") -> State[Any]:
    """Make the release before the current one current again, and let the server take it.

    Args:
        why: for the ledger.
    """
    try:
        root = Path.cwd()
        back = go_back(root, why)
        served = serving.switch(root, back.record, load_promotion(root / "params.yaml"), get_run_logger().info)
    except LineError as error:
        return Failed(message=error.text())
    create_markdown_artifact(key="release", markdown=release.release_markdown(back))
    return Completed(message=f"Back to release {back.name}: accept length {back.record.accept_length:.2f}; {served}")


if __name__ == "__main__":
    rollback()
