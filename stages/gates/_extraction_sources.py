"""gate-extraction's table sources: what each gave, lost and rejected."""

from __future__ import annotations

from collections import Counter
from typing import Any

from stages.contracts.params import Params
from stages.gates._extraction_evidence import AGAIN, Evidence
from stages.gates._extraction_facts import Facts
from stages.gates._judge import Expectation, Table, among, between, same


def sources(evidence: Evidence, facts: Facts, params: Params) -> Table:
    import pandas as pd

    gate = params.gates.extraction
    recorded = {s.name: s for s in evidence.manifest.sources}
    wanted = {s.name: s for s in params.prepare.sources}
    lines: list[dict[str, Any]] = []
    for name in dict.fromkeys([*wanted, *recorded]):
        rows, source = facts.of_source.get(name, Counter()), recorded.get(name)
        read = source.rows_read if source else 0
        rejected = sum(source.rejects.values()) if source else 0
        lines.append(
            {
                "source": name,
                "named_in": " and ".join(
                    w for w, there in (("params", name in wanted), ("manifest", name in recorded)) if there
                ),
                "domain": source.domain if source else "",
                "domain_in_params": wanted[name].domain if name in wanted else "",
                "rows": rows["rows"],
                "rows_recorded": source.rows if source else 0,
                "supervised_tokens": rows["supervised_tokens"],
                "supervised_tokens_recorded": source.supervised_tokens if source else 0,
                "rows_read": read,
                "rows_and_rejects": (source.rows - source.extra_rows if source else 0) + rejected,
                "reject_share": rejected / read if read else 0.0,
                "rejects": ", ".join(f"{n} {r}" for r, n in sorted(source.rejects.items())) if source else "",
                "capped_share": rows["capped"] / rows["rows"] if rows["rows"] else 0.0,
            }
        )
    for line in lines:
        line["reject_words"] = f"{line['reject_share']:.1%} rejected ({line['rejects'] or 'none'})"
    return Table("sources", pd.DataFrame(lines), "source", _source_expectations(gate))


def _source_expectations(gate: Any) -> tuple[Expectation, ...]:
    return (
        among(
            "named_in",
            ["params and manifest"],
            says="prepared sources are those in params.yaml",
            why="a source that is missing or left over changes what the draft is trained on",
            do=AGAIN,
        ),
        same(
            "domain",
            "domain_in_params",
            says="a source's domain is the one in params.yaml",
            why="accept length is judged by domain",
            do=AGAIN,
        ),
        between(
            "rows",
            1,
            says="every source gave rows",
            why="an empty source passes in silence and its domain is never measured",
            do="read data/prepared/rejects.parquet, mend the source, then " + AGAIN,
        ),
        same(
            "rows",
            "rows_recorded",
            says="rows in the file are as many as recorded",
            why="rows were lost or added after they were counted",
            do=AGAIN,
        ),
        same(
            "supervised_tokens",
            "supervised_tokens_recorded",
            says="supervised tokens are as many as recorded",
            why="masks changed after they were counted",
            do=AGAIN,
        ),
        same(
            "rows_read",
            "rows_and_rejects",
            says="what was read is what was kept and what was rejected",
            why="a row that is neither was dropped without a reason",
            do=AGAIN + "; if it stays, the source's reader loses rows",
        ),
        between(
            "reject_share",
            high=gate.max_reject_share,
            says="rejects keep below gates.extraction.max_reject_share",
            why="a source that is mostly rejected is not the distribution its name promises",
            do="read data/prepared/rejects.parquet; mend the source or its limits, then " + AGAIN,
            tell="reject_words",
        ),
        between(
            "capped_share",
            high=gate.max_capped_share,
            says="capped answers keep below gates.extraction.max_capped_share",
            why="a draft that saw only cut answers never learns how they end",
            do="raise prepare.max_new_tokens, then " + AGAIN,
        ),
    )
