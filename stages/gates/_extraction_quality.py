"""gate-extraction, table quality: near duplicates, leaks, drift from the last accepted rows, answers too short, the mix.

Drift is the Jensen-Shannon divergence in bits (0: equal, 1: nothing in common) between histograms of a domain now and in the
rows accepted before, less what two samples of their sizes differ by when drawn from one distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from stages.contracts.quality import AcceptedDataset, DomainQuality, PreparedQuality, SharedText
from stages.gates._judge import Expectation, Table, between, same

if TYPE_CHECKING:
    from stages.contracts.params import ExtractionGate

_AGAIN = "run `dvc repro prepare`"
_SEE = "`python -m stages.glance data/prepared ROW` shows a row"
_ANEW = "if the change is meant, remove reports/gates/accepted_dataset.json and run `dvc repro -f gate-extraction`"
_NO_EARLIER = "no earlier dataset"
_SHOWN = 5


def quality(found: PreparedQuality, earlier: AcceptedDataset | None, rows_digest: str, gate: ExtractionGate) -> Table:
    """One line of facts over all rows.

    Args:
        earlier: the rows accepted before these; None before the first.
        rows_digest: of the rows being judged.
    """
    import pandas as pd

    rows = sum(d.rows for d in found.domains)
    earlier = earlier if earlier and earlier.tokenizer_digest == found.tokenizer_digest else None  # ids mean the same
    tokens, lengths = (_drifts(found, earlier, of) for of in ("token_bins", "lengths"))
    thin = {d.domain: d.supervised_tokens / d.rows if d.rows else 0.0 for d in found.domains}
    mix = _mix(found)
    line: dict[str, Any] = {
        "set": "all rows",
        "measured_of": found.rows_digest,
        "rows_recorded": rows_digest,
        "near_duplicate_share": found.near_duplicates / rows if rows else 0.0,
        "near_words": _named(found.near_duplicates, f"of {rows} rows", found.nearest, "like"),
        "leaks": found.leaks,
        "leak_words": _named(found.leaks, "training rows", found.leaking, "gives away"),
        "supervised_tokens_per_row": min(thin.values(), default=0.0),
        "supervised_words": _listed(thin, "tokens a row"),
        "token_drift": max(tokens.values(), default=0.0),
        "token_drift_words": _listed(tokens, "bits") if earlier else _NO_EARLIER,
        "length_drift": max(lengths.values(), default=0.0),
        "length_drift_words": (_listed(lengths, "bits") if earlier else _NO_EARLIER) + _histogram(found),
        "mix_difference": max((abs(a - b) for a, b in mix.values()), default=0.0),
        "mix_words": ", ".join(f"{s} {a:.1%} for {b:.1%} asked" for s, (a, b) in mix.items())
        or "no weights in params.yaml",
    }
    return Table("quality", pd.DataFrame([line]), "set", _expectations(gate))


def divergence(now: Sequence[int], before: Sequence[int]) -> float:
    """Jensen-Shannon divergence of two histograms in bits, less what sampling alone gives, at least 0.

    For n and m draws from one distribution over k bins it is (k - 1) / (8 ln 2) · (1/n + 1/m) in the mean.
    """
    p, q = np.asarray(now, np.float64), np.asarray(before, np.float64)
    n, m = p.sum(), q.sum()
    if not n or not m:
        return 0.0 if n == m else 1.0
    p, q = p / n, q / m
    middle = (p + q) / 2

    def bits(x: np.ndarray) -> float:
        there = x > 0
        return float((x[there] * np.log2(x[there] / middle[there])).sum())

    chance = (np.count_nonzero(middle) - 1) / (8 * np.log(2)) * (1 / n + 1 / m)
    return max(0.0, (bits(p) + bits(q)) / 2 - chance)


def _drifts(found: PreparedQuality, earlier: AcceptedDataset | None, of: str) -> dict[str, float]:
    """By domain, of either set: a domain that is new or gone has nothing in common with before."""
    if earlier is None:
        return {}
    now, before = ({d.domain: d for d in ds} for ds in (found.domains, earlier.domains))
    return {d: _drift(now.get(d), before.get(d), of) for d in sorted(now | before)}


def _drift(now: DomainQuality | None, before: DomainQuality | None, of: str) -> float:
    if now is None or before is None:
        return 1.0
    return divergence(getattr(now, of), getattr(before, of))


def _histogram(found: PreparedQuality) -> str:
    """Rows by length over all domains, as `; rows of 32-63 tokens: 40, …`."""
    counts = np.sum([d.lengths for d in found.domains], axis=0) if found.domains else np.zeros(1, np.int64)
    return "; rows of " + ", ".join(f"{2**k}-{2 ** (k + 1) - 1} tokens: {n}" for k, n in enumerate(counts) if n)


def _mix(found: PreparedQuality) -> dict[str, tuple[float, float]]:
    """By source with a weight: its share of the rows, and the share that its weight asks for."""
    weighted = [s for s in found.sources if s.weight is not None]
    rows, weights = sum(s.rows for s in weighted), sum(s.weight or 0.0 for s in weighted)
    return {s.source: (s.rows / rows if rows else 0.0, (s.weight or 0.0) / weights) for s in weighted}


def _named(count: int, of: str, shown: Sequence[SharedText], verb: str) -> str:
    rows = ", ".join(f"{s.row_id} {verb} {s.other} ({s.share:.2f})" for s in shown[:_SHOWN])
    return f"{count} {of}" + (f": {rows}" if rows else "") + (" …" if count > _SHOWN else "")


def _listed(values: dict[str, float], unit: str) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in values.items()) + f" {unit}"


def _expectations(gate: ExtractionGate) -> tuple[Expectation, ...]:
    return (
        same(
            "measured_of",
            "rows_recorded",
            says="data/prepared/quality.json was measured on these rows",
            why="figures of other rows say nothing about these",
            do=_AGAIN,
        ),
        between(
            "near_duplicate_share",
            high=gate.max_near_duplicate_share,
            says="near duplicates keep below gates.extraction.max_near_duplicate_share",
            why="a prompt asked a hundred times with one word changed weighs a hundredfold",
            do=f"{_SEE}; set prepare.near_duplicates: drop, then " + _AGAIN,
            tell="near_words",
        ),
        between(
            "leaks",
            high=0,
            says="no training row gives away a held-out, out-of-distribution or benchmark prompt",
            why="accept length over prompts that were trained on measures memory",
            do=f"{_SEE}; remove these rows at their source, then " + _AGAIN,
            tell="leak_words",
        ),
        between(
            "supervised_tokens_per_row",
            gate.min_supervised_tokens_per_row,
            says="rows of every domain have enough supervised tokens",
            why="a domain of one-word answers costs a forward pass a row and teaches next to nothing",
            do=f"{_SEE}; raise prepare.max_new_tokens or leave the source out, then " + _AGAIN,
            tell="supervised_words",
        ),
        between(
            "token_drift",
            high=gate.max_token_drift,
            says="the domains say what they said in the rows accepted before",
            why="another language or subject under an old name trains a draft for traffic that does not come",
            do=f"{_SEE}, `python -m stages.glance data/prepared` the set; mend the source, then {_AGAIN}; {_ANEW}",
            tell="token_drift_words",
        ),
        between(
            "length_drift",
            high=gate.max_length_drift,
            says="rows are as long as in the rows accepted before",
            why="a source cut short or grown long trains a draft for other contexts than it serves",
            do=f"{_SEE}, `python -m stages.glance data/prepared` the set; mend the source, then {_AGAIN}; {_ANEW}",
            tell="length_drift_words",
        ),
        between(
            "mix_difference",
            high=gate.max_mix_difference,
            says="sources give the shares of rows that their weights ask for",
            why="rejects after the mix was drawn move it, and with it what the draft is good at",
            do=f"read data/prepared/rejects.parquet; {_SEE}; mend the source that lost rows, or its weight, then "
            + _AGAIN,
            tell="mix_words",
        ),
    )
