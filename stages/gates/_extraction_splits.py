"""gate-extraction's table splits: enough rows, the target's own answers, no leakage."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from stages.contracts.params import Params
from stages.gates._extraction_evidence import AGAIN, Evidence
from stages.gates._judge import Expectation, Table, between

if TYPE_CHECKING:
    from pandas import DataFrame


def splits(evidence: Evidence, facts: Any, params: Params) -> Table:
    import pandas as pd

    gate = params.gates.extraction
    held, train = facts[facts["split"] == "held_out"], facts[facts["split"] == "train"]
    supervised = int(facts["supervised_tokens"].sum())
    on_policy = int(facts.loc[facts["on_policy"].astype(bool), "supervised_tokens"].sum())
    shared = _overlap(held, train)
    line = {
        "set": "all sources",
        "rows": len(facts),
        "held_out_rows": len(held),
        "train_supervised_tokens": int(train["supervised_tokens"].sum()),
        "on_policy_share": on_policy / supervised if supervised else 0.0,
        "repetitive_share": float(facts["repetitive"].astype(float).mean()) if len(facts) else 0.0,
        "prompt_overlap_share": len(shared) / len(held) if len(held) else 0.0,
        "overlap_words": f"{len(shared)} of {len(held)} held-out prompts"
        + (f": rows {', '.join(shared[:5])}" if shared else ""),
    }
    return Table("splits", pd.DataFrame([line]), "set", _split_expectations(gate))


def _overlap(held: DataFrame, train: DataFrame) -> list[str]:
    """Held-out rows whose prompt, after normalisation, is also a training prompt."""
    seen = {normalised_prompt(m) for m in train["messages"]}
    pairs = zip(held["row_id"], held["messages"], strict=True)
    return [row_id for row_id, messages in pairs if normalised_prompt(messages) in seen]


def normalised_prompt(messages: str) -> str:
    """The conversation before the first answer: roles and words, without case, spacing or punctuation."""
    turns: list[str] = []
    for message in json.loads(messages):
        if message.get("role") == "assistant":
            break
        content = message.get("content")
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        words = re.findall(r"\w+", text.lower())
        turns.append(f"{message.get('role')}: {' '.join(words)}")
    return "\n".join(turns)


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
