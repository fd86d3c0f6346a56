"""Promotion as a flow: demands, candidate, a person's word where one is wanted, production, the server. It can be ordered on its own or
follow a retrain that was told not to promote."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.exceptions import FlowPauseTimeout
from prefect.flow_runs import pause_flow_run
from prefect.input import RunInput
from prefect.states import Completed, Failed

from flows import beside, release, serving
from flows.model_card import CARD
from flows.registry.store import StoreError
from flows.retrain import measure_beside
from stages.contracts.errors import LineError, Refusal
from stages.contracts.params import Promotion, load_promotion
from stages.contracts.release import RELEASES

RETRY_DELAYS_S = (10.0, 60.0)


class Approval(RunInput):
    """What a person answers: yes or no, who, and why."""

    approve: bool
    by: str
    words: str = ""


def worth_a_retry(task: Any, task_run: Any, state: State[Any]) -> bool:
    """Only a store that failed is: a refusal and damaged data would come out the same."""
    return isinstance(state.result(raise_on_failure=False), StoreError)


def retried(name: str) -> dict[str, Any]:
    """How a step that talks to the registry is run as a task."""
    return {
        "name": name,
        "task_run_name": name,
        "retries": len(RETRY_DELAYS_S),
        "retry_delay_seconds": list(RETRY_DELAYS_S),
        "retry_condition_fn": worth_a_retry,
        "cache_policy": NO_CACHE,
        "persist_result": False,
    }


@task(**retried("propose"))
def propose(root: Path, even_if_rolled_back: bool) -> release.Proposal:
    """The draft that passed, whole in the registry, as candidate."""
    return release.propose(root, even_if_rolled_back)


@task(**retried("accept"))
def accept(root: Path, proposal: release.Proposal, words: str) -> release.Release:
    """The candidate becomes production, unless another came first."""
    return release.accept(root, proposal, words)


@flow(name="promote")
def promote(
    approval: bool = False,
    approval_wait_s: int = 24 * 3600,
    even_if_rolled_back: bool = False,
    measure_limit_s: float = 6 * 3600,
) -> State[Any]:
    """Make the draft that passed gate-deployment production.

    Args:
        approval: pause until a person says yes in Prefect; the candidate waits in the registry.
        approval_wait_s: seconds to wait for that word; without one nothing is promoted.
        even_if_rolled_back: promote a draft that was taken out of service, on purpose.
        measure_limit_s: seconds that measuring the draft beside production's may take.
    """
    root = Path.cwd()
    try:
        if beside.is_due(root):
            measure_beside(root, measure_limit_s)
        proposal = propose(root, even_if_rolled_back)
        name = proposal.release.name
        card = (root / RELEASES / name / CARD).read_text(encoding="utf-8")
        create_markdown_artifact(key="model-card", markdown=card, description=f"Release {name}, {proposal.compared}")
        words = _approved(name, approval_wait_s) if approval and not proposal.is_production else ""
        made = accept(root, proposal, words)
        served = take_or_go_back(root, made, get_run_logger().info)
    except LineError as error:
        return Failed(message=error.text())
    create_markdown_artifact(key="release", markdown=release.release_markdown(made))
    told = "; ".join(filter(None, (proposal.compared, served)))
    return Completed(message=f"Release {made.name}: accept length {made.record.accept_length:.2f}; {told}")


def take_or_go_back(root: Path, made: release.Release, say: Callable[[str], None]) -> str:
    """Let the server take the new production; when it fails, the release before becomes production and is served again.

    Raises:
        ServerFault: the new release failed; it tells what was done about it.
    """
    promotion = load_promotion(root / "params.yaml")
    try:
        return serving.switch(root, made.record, promotion, say)
    except serving.ServerFault as fault:
        raise serving.ServerFault(
            f"Release {made.name} failed where it is served: {fault.what}",
            where=fault.where,
            expected=fault.expected,
            got=fault.got,
            do=_gone_back(root, promotion, f"by itself: {fault.what}: {fault.got}", say),
        ) from fault


def _gone_back(root: Path, promotion: Promotion, why: str, say: Callable[[str], None]) -> str:
    """Roll back and serve that again; what came of it, in words."""
    try:
        back = release.rollback(root, why)
    except LineError as error:
        return f"it could not be rolled back ({error.what}); it still is production, and the server needs a person now"
    try:
        return f"rolled back by itself to release {back.name}: {serving.switch(root, back.record, promotion, say)}"
    except serving.ServerFault as error:
        return f"rolled back by itself to release {back.name}, which the server does not serve either: {error.what}: {error.got}"


def _approved(name: str, wait_s: int) -> str:
    """Who approved, in words for the ledger.

    Raises:
        Refusal: nobody did in time, or somebody said no.
    """
    get_run_logger().info("release %s waits for approval, at most %d s", name, wait_s)
    why = f"The model card of release {name} is an artifact of this run. Shall it become production?"
    try:
        told = pause_flow_run(
            wait_for_input=Approval.with_initial_data(description=why, approve=False, by=""), timeout=wait_s
        )
    except FlowPauseTimeout:
        raise Refusal(
            "Nobody approved this release in time",
            where=f"release {name}",
            expected=f"a person's yes within {wait_s} s",
            do="it stays candidate: run the promote flow again and resume it in Prefect",
        ) from None
    if not told.approve:
        raise Refusal(
            "This release was not approved",
            where=f"release {name}",
            got=f"no, by {told.by or 'nobody named'}: {told.words}",
        )
    return f"approved by {told.by or 'nobody named'}" + (f": {told.words}" if told.words else "")


if __name__ == "__main__":
    promote()
