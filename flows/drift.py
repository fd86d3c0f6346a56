"""The watch over what is served: `python -m flows.drift` takes one look; the deployment `drift/hourly` does every hour.

A look reads each endpoint's counters, judges what was served since the last one, and on a fall opens the Prefect event
`draftline.drift.fall`, for which prefect.yaml starts `retrain`. Nothing is served, changed or promoted here.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from flows.drifting import state
from flows.drifting.endpoint import look
from flows.drifting.watching import Expected, Verdict, judge, take
from stages.contracts.errors import DataError, LineError, run
from stages.contracts.evidence import SERVE_EVIDENCE, ServeEvidence
from stages.contracts.params import load_params
from stages.contracts.release import RELEASES, current, current_record
from stages.contracts.repository import demand_repository

EVENT = "draftline.drift.fall"
_ROWS = 24


def expected_of(root: Path) -> Expected:
    """What the current release showed when it was validated.

    Raises:
        LineError: nothing was promoted yet.
        DataError: the pointer or the record cannot be read.
    """
    name, record = current(root), current_record(root)
    if name is None or record is None:
        raise LineError(
            "Nothing was promoted yet, so there is nothing to compare with",
            where=str(root / RELEASES),
            do="`make retrain`, then `python -m flows.release promote`",
        )
    path = root / RELEASES / name / "evidence" / SERVE_EVIDENCE.name
    served = ServeEvidence.read(path)
    if served.draft_digest != record.draft_digest:
        raise DataError(
            "The release's evidence is of another draft",
            where=str(path),
            expected=record.draft_digest,
            got=served.draft_digest,
            do="`python -m flows.audit` tells what was changed",
        )
    domains = {k: v.low for k, v in served.served_by_domain.items()}
    of = served.served
    return Expected(name, of.accept_length, of.low, of.high, domains, served.draft_steps)


def one_look(root: Path) -> tuple[Verdict, state.Watch]:
    """Look at every endpoint, judge, remember.

    Raises:
        LineError: no endpoint is named, or nothing was promoted.
        EngineError: an endpoint does not answer; nothing is remembered then, so that its requests are counted at the next look.
    """
    params = load_params(root / "params.yaml").drift
    if not params.endpoints:
        raise LineError(
            "No endpoint is watched",
            where="params.yaml: drift.endpoints",
            expected="the address of every serving replica",
            do="name them there, or switch the schedule of drift/hourly off",
        )
    expected = expected_of(root)
    looks = {url: look(url, params.timeout_s) for url in params.endpoints}
    watch = state.read(root).of(expected.release)
    take(watch, looks)
    verdict = judge(watch, expected, params, time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
    state.write(root, watch)
    return verdict, watch


def markdown(verdict: Verdict, watch: state.Watch) -> str:
    """A look for a person: the verdict, and the last windows."""
    head = f"# {verdict.status}\n\nRelease `{watch.release}`: {verdict.words}.\n"
    rows = [
        f"| {w.at} | {w.accept_length:.3f} | {w.verifications:.0f} | {w.prompt_length:.0f} | {w.statistic:.2f} of {w.threshold:.2f} | {'; '.join(w.changed)} |"
        for w in watch.windows[-_ROWS:]
    ]
    table = ["| window until | accept length | verifications | tokens a prompt | evidence of a fall | changed |"]
    return "\n".join([head, *table, "|---|---|---|---|---|---|", *rows])


def payload(verdict: Verdict, watch: state.Watch) -> dict[str, Any]:
    """What the event carries."""
    return {
        "release": watch.release,
        "status": verdict.status,
        "cause": verdict.cause,
        "accept_length": verdict.accept_length,
        "normal": verdict.normal,
        "words": verdict.words,
    }


def main() -> None:
    """One look, told in a line; exit code 1 on a fall."""
    demand_repository()
    verdict, watch = one_look(Path())
    print(f"{verdict.status}: release {watch.release}: {verdict.words}")
    raise SystemExit(1 if verdict.status in ("fallen", "below the release") else 0)


if __name__ == "__main__":
    run(main)
