"""What a promotion demands beyond a passing gate-deployment: one engine throughout, and no step back from production."""

from __future__ import annotations

from pathlib import Path

from stages.contracts.beside import BESIDE, BesideProduction
from stages.contracts.draft import DRAFT, DRAFT_RECORD, DraftRecord
from stages.contracts.errors import Refusal
from stages.contracts.evidence import (
    BENCHMARK_EVIDENCE,
    POLICY,
    SERVE_EVIDENCE,
    BenchmarkEvidence,
    ServeEvidence,
    ServingPolicy,
)
from stages.contracts.params import Promotion
from stages.contracts.release import ReleaseRecord
from stages.contracts.report import GATE_REPORTS, GateReport, demand

_KEEP = (
    "keep production; where the machine was not idle, remove this file and promote again, which measures anew; where the loss "
    "is wanted, set promotion.production_beside to `ignore`"
)


def demand_gates(root: Path) -> None:
    """Every gate passed, gate-training on exactly the rows and states that this draft was trained on.

    Raises:
        Refusal: one did not.
    """
    draft = DraftRecord.read(root / DRAFT / DRAFT_RECORD)
    demand("training", draft.merged_digest, root)
    path = GATE_REPORTS / "extraction.json"
    extraction = GateReport.read(root / path)
    demand("extraction", extraction.subject_digest, root)


def demand_one_engine(root: Path) -> None:
    """Validation, benchmark and policy are of one engine in one version: a policy timed on another promises nothing.

    Raises:
        Refusal: they differ; both are named.
    """
    validated = ServeEvidence.read(root / SERVE_EVIDENCE)
    for path, told in (
        (BENCHMARK_EVIDENCE, BenchmarkEvidence.read(root / BENCHMARK_EVIDENCE)),
        (POLICY, ServingPolicy.read(root / POLICY)),
    ):
        if (told.engine, told.engine_version) != (validated.engine, validated.engine_version):
            raise Refusal(
                "The draft was validated in one engine and timed in another",
                where=str(path),
                expected=f"{validated.engine} {validated.engine_version}, as in {SERVE_EVIDENCE}",
                got=f"{told.engine} {told.engine_version}",
                do="run `dvc repro -f serve-validate` and `dvc repro -f benchmark` with the engine that will serve",
            )


def demand_no_step_back(root: Path, production: ReleaseRecord | None, promotion: Promotion) -> str:
    """Accept length and throughput are not below production's beyond the interval of one run that measured both.

    Args:
        production: the release that this one would replace, if there is one.

    Returns:
        What was compared, in words for the ledger; nothing where there is no production yet.

    Raises:
        Refusal: worse beyond the interval, in what and by how much; not measured where it is required; or measured beside
            another draft or in another engine.
    """
    if production is None:
        return ""
    if promotion.production_beside == "ignore":
        return "not compared with production: promotion.production_beside is `ignore`"
    draft = DraftRecord.read(root / DRAFT / DRAFT_RECORD).digest()
    if production.draft_digest == draft:
        return "production's own draft"
    if not (root / BESIDE).exists():
        return _unmeasured(promotion)
    beside = BesideProduction.read(root / BESIDE)
    _demand_of_these(beside, draft, production, ServeEvidence.read(root / SERVE_EVIDENCE))
    worse = _worse(beside)
    if worse:
        raise Refusal(
            "The new draft is a step back from production",
            where=str(BESIDE),
            expected=f"no {100 * beside.confidence:.3g} % interval wholly below production's",
            got="; ".join(worse),
            do=_KEEP,
        )
    overall = beside.accept_length.get("overall")
    return "measured beside production" + (
        f": accept length {overall.new:.3f} against {overall.production:.3f}" if overall else ""
    )


def _unmeasured(promotion: Promotion) -> str:
    if promotion.production_beside == "require":
        raise Refusal(
            "The draft in production was not measured beside this one",
            where=str(BESIDE),
            expected="accept length and throughput of both in one run, as promotion.production_beside: require asks for",
            got="no such file",
            do="measure both: `python -m stages.beside`, or the promote flow, which does; or set promotion.production_beside to "
            "`if_measured`: then gate-deployment's "
            "comparison with the release's remembered figures has to do",
        )
    return "not measured beside production; gate-deployment compared with its remembered accept length"


def _demand_of_these(beside: BesideProduction, draft: str, production: ReleaseRecord, served: ServeEvidence) -> None:
    pairs = (
        ("the new draft", draft, beside.draft_digest),
        ("production's draft", production.draft_digest, beside.production_draft_digest),
        (
            "the engine",
            f"{served.engine} {served.engine_version}",
            f"{beside.engine} {beside.engine_version}",
        ),
    )
    for what, expected, got in pairs:
        if expected != got:
            raise Refusal(
                f"The comparison with production is of another run: {what} differs",
                where=str(BESIDE),
                expected=expected,
                got=got,
                do="measure both drafts again in one run, or remove this file where promotion.production_beside allows it",
            )


def _worse(beside: BesideProduction) -> list[str]:
    """What is below production's over the whole interval, in words."""
    lengths = [
        f"accept length, {name}: {d.new:.3f} against {d.production:.3f} ({d.low:+.3f} to {d.high:+.3f} tokens, {d.requests} requests)"
        for name, d in sorted(beside.accept_length.items())
        if d.high < 0
    ]
    speeds = [
        f"throughput at concurrency {r.concurrency}: {r.ratio:.3f} of production's ({r.low:.3f} to {r.high:.3f})"
        for r in beside.throughput
        if r.high < 1
    ]
    return lengths + speeds
