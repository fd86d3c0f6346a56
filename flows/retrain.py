"""The retrain flow: time and consequences around the line that DVC describes.

Its tasks are the stages DVC lists, so there is no second graph. A refusal is an answer and is never retried; a stage that
crashed is, for finished work is kept. What passes every gate is promoted to the release folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from flows import artifacts, beside, git_state, line, release, settings
from flows.notice import notify as tell
from stages.contracts.errors import LineError

RETRY_DELAYS_S = (15.0, 60.0)


def worth_a_retry(task: Any, task_run: Any, state: State[Any]) -> bool:
    """Only a crash is: a refusal, a mendable error and a time limit would come out the same."""
    return isinstance(state.result(raise_on_failure=False), line.StageCrash)


@task(
    retries=len(RETRY_DELAYS_S),
    retry_delay_seconds=list(RETRY_DELAYS_S),
    retry_condition_fn=worth_a_retry,
    cache_policy=NO_CACHE,
    persist_result=False,
)
def stage(name: str, root: Path, time_limit_s: float, unchanged: bool = False) -> None:
    """Bring one stage up to date; what it prints goes to this task's log."""
    if unchanged:
        get_run_logger().info("Stage '%s' didn't change, skipping", name)
        return
    line.run_stage(name, root, time_limit_s, get_run_logger().info)


@task(
    name=beside.TASK,
    task_run_name=beside.TASK,
    retries=len(RETRY_DELAYS_S),
    retry_delay_seconds=list(RETRY_DELAYS_S),
    retry_condition_fn=worth_a_retry,
    cache_policy=NO_CACHE,
    persist_result=False,
)
def measure_beside(root: Path, time_limit_s: float) -> None:
    """The new draft and production's over the same prompts, in one run."""
    beside.measure(root, time_limit_s, get_run_logger().info)


@flow(name="retrain")
def retrain(
    params_set: str | None = None,
    overrides: dict[str, Any] | None = None,
    promote: bool = True,
    commit_to: str | None = None,
    notify: str | None = None,
    warm_start: bool = False,
    stage_time_limit_s: float = 6 * 3600,
    lock_wait_s: float = 900,
) -> State[Any]:
    """Run the line, judge, promote.

    Args:
        params_set: a file in params/ (without .yaml) to put in the place of params.yaml; none runs it as it stands.
        overrides: values of params.yaml for this run and those after it, by dotted key: {"train.optimizer_steps": 600}.
        promote: move releases/current.json to the draft that passed.
        commit_to: branch that params.yaml, dvc.lock and reports/ are committed to, refusals too; it begins at HEAD.
        notify: notification block of Prefect, <type>/<name>, that is told how the run ended.
        warm_start: train on from the current release's draft, not from the target (it sets train.start_from).
        stage_time_limit_s: seconds a stage may take before it is ended with all its children.
        lock_wait_s: seconds to wait for another run of DVC in this clone.
    """
    root = Path.cwd()
    try:
        line.wait_until_free(root, lock_wait_s, get_run_logger().info)
        if params_set:
            settings.choose_params(params_set, root)
        if warm_start:
            settings.override({"train.start_from": "current_release"}, root)
        if overrides:
            settings.override(overrides, root)
        words, failed = _retrain(root, promote, stage_time_limit_s)
        if commit_to:
            _commit(commit_to, words, root)
    except LineError as error:
        words, failed = error.text(), True
    if notify:
        tell(notify, f"retrain {'failed' if failed else 'done'}: {words.splitlines()[0]}", words)
    return Failed(message=words) if failed else Completed(message=words)


def _retrain(root: Path, promote: bool, stage_time_limit_s: float) -> tuple[str, bool]:
    """How it ended in words, and whether it failed."""
    try:
        release.follow(root)  # gate-deployment judges against what is production now
        names = line.stage_names(root)
        unchanged = line.unchanged(names, root)
        for name in names:
            _run(name, root, stage_time_limit_s, name in unchanged)
        if not promote:
            return "The line is up to date; nothing was promoted.", False
        if beside.is_due(root):
            measure_beside(root, stage_time_limit_s)
        promoted = release.promote(root)
    except LineError as error:
        return error.text(), True
    create_markdown_artifact(key="release", markdown=release.release_markdown(promoted))
    return f"Release {promoted.name}: accept length {promoted.record.accept_length:.2f}", False


def _commit(branch: str, words: str, root: Path) -> None:
    head, _, rest = words.partition("\n")
    commit = git_state.commit_record(branch, f"retrain: {head}\n\n{rest}".strip(), root)
    get_run_logger().info("recorded on %s: %s", branch, commit or "nothing changed")


def _run(name: str, root: Path, time_limit_s: float, unchanged: bool) -> None:
    """One stage as a task, then its artifacts.

    Raises:
        LineError: the stage's own.
    """
    state = stage.with_options(name=name, task_run_name=name)(name, root, time_limit_s, unchanged, return_state=True)
    report = line.gate_report(name, root)
    if report is not None:
        artifacts.publish_gate(report)
    if state.is_completed():
        artifacts.publish_stage(name, root)
        return
    fault = state.result(raise_on_failure=False)
    raise fault if isinstance(fault, BaseException) else line.StageCrash(f"{name}: {state.message}")


if __name__ == "__main__":
    retrain()
