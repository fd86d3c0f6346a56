"""gate-extraction's table splits: enough rows, the target's own answers, no leakage."""

from __future__ import annotations

from typing import Any

from stages.contracts.params import Params
from stages.gates._extraction_evidence import AGAIN
from stages.gates._extraction_facts import Facts
from stages.gates._judge import Expectation, Table, between


def splits(facts: Facts, params: Params) -> Table:
    import pandas as pd

    held, shared = facts.held_out_rows, facts.shared_prompts
    supervised = facts.supervised_tokens
    line = {
        "set": "all sources",
        "rows": facts.rows,
        "held_out_rows": held,
        "train_supervised_tokens": facts.train_supervised_tokens,
        "on_policy_share": facts.on_policy_tokens / supervised if supervised else 0.0,
        "repetitive_share": facts.repetitive_rows / facts.rows if facts.rows else 0.0,
        "prompt_overlap_share": len(shared) / held if held else 0.0,
        "overlap_words": f"{len(shared)} of {held} held-out prompts"
        + (f": rows {', '.join(shared[:5])}" if shared else ""),
    }
    return Table("splits", pd.DataFrame([line]), "set", _split_expectations(params.gates.extraction))


def _split_expectations(gate: Any) -> tuple[Expectation, ...]:
    return (
        between(
            "rows",
            gate.min_rows,
            says="there are enough rows",
            why="a draft starved of prompts learns its rows by heart",
            do="raise the limits in prepare.sources, then " + AGAIN,
        ),
        between(
            "held_out_rows",
            gate.min_held_out_rows,
            says="there are enough held-out rows",
            why="accept length over a handful of prompts is noise",
            do="raise prepare.held_out_share, then " + AGAIN,
        ),
        between(
            "train_supervised_tokens",
            gate.min_supervised_tokens,
            says="there are enough supervised tokens to train on",
            why="below this, accept length is bounded by data, whatever is spent on steps",
            do="raise prepare.max_new_tokens or the sources' limits, then " + AGAIN,
        ),
        between(
            "on_policy_share",
            gate.min_on_policy_share,
            says="supervised tokens are the target's own",
            why="the draft has to guess what the target says, not what someone else said",
            do="set answers: regenerate for the source, then " + AGAIN,
        ),
        between(
            "repetitive_share",
            high=gate.max_repetitive_share,
            says="answers that loop keep below gates.extraction.max_repetitive_share",
            why="loops are easy to guess: they flatter accept length and teach looping",
            do="set prepare.repetitive: drop, then " + AGAIN,
        ),
        between(
            "prompt_overlap_share",
            high=gate.max_prompt_overlap,
            says="held-out prompts do not share their text with training prompts",
            why="a prompt that differs in case or spacing only is the same prompt; held-out figures would measure memory",
            do="remove near doubles at the source, then " + AGAIN,
            tell="overlap_words",
        ),
    )
