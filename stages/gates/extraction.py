"""gate-extraction: prepared rows, before the target spends hours on them."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stages.contracts.manifest import PreparedManifest, TargetIdentity, renewal
from stages.contracts.params import Params
from stages.contracts.quality import AcceptedDataset, PreparedQuality, digest_of_rows
from stages.gates._extraction_quality import quality
from stages.gates._judge import Expectation, Table, among, between, same, unique

if TYPE_CHECKING:
    from pandas import DataFrame

AGAIN = "run `dvc repro prepare`"


@dataclass(frozen=True)
class Evidence:
    """What the gate looks at.

    Args:
        manifest: data/prepared/prepared.json.
        rows: every row.parquet of the sources, one below the other.
        files: file, recorded, found: digests of the files that the manifest names.
        target: the target on this disk.
        template_prefix: token ids with which the target's template opens any conversation.
        bos_id: the tokenizer's beginning-of-sequence id, when it has one.
        quality: data/prepared/quality.json.
        earlier: the rows accepted before these; None before the first.
    """

    manifest: PreparedManifest
    rows: DataFrame
    files: DataFrame
    target: TargetIdentity
    template_prefix: tuple[int, ...]
    bos_id: int | None
    quality: PreparedQuality
    earlier: AcceptedDataset | None = None


def tables(evidence: Evidence, params: Params) -> list[Table]:
    """Tables files, target, rows, sources, splits, quality; the order in which a person mends things."""
    facts = row_facts(evidence)
    return [
        _files(evidence.files),
        _target(evidence, params),
        Table("rows", facts, "row_id", _row_expectations(evidence, params)),
        _sources(evidence, facts, params),
        _splits(evidence, facts, params),
        quality(evidence.quality, evidence.earlier, digest_of_rows(evidence.manifest), params.gates.extraction),
    ]


def _files(files: DataFrame) -> Table:
    check = same(
        "found",
        "recorded",
        says="every file holds the bytes that prepared.json recorded",
        why="rows changed after they were counted are not the rows that this report speaks of",
        do="for each file named: " + renewal(Path("FILE"), "prepare") + "; nothing edits data/prepared by hand",
    )
    return Table("files", files, "file", (check,))


def _target(evidence: Evidence, params: Params) -> Table:
    import pandas as pd

    was, now, asked = evidence.manifest.target, evidence.target, params.target
    pairs: list[tuple[str, Any, Any]] = [
        ("weights", was.weights_digest, now.weights_digest),
        ("tokenizer", was.tokenizer_digest, now.tokenizer_digest),
        ("chat template", was.template_digest, now.template_digest),
        ("model type", was.model_type, now.model_type),
        ("layers", asked.layers, now.layers),
        ("hidden size", asked.hidden_size, now.hidden_size),
        ("vocabulary", asked.vocab_size, now.vocab_size),
        ("seed", params.prepare.seed, evidence.manifest.seed),
        ("temperature", params.prepare.temperature, evidence.manifest.temperature),
        ("answer limit, tokens", params.prepare.max_new_tokens, evidence.manifest.max_new_tokens),
        ("engine of the answers", params.prepare.answers.name, evidence.manifest.answered_by),
        ("template arguments", params.prepare.rendering.template_arguments, evidence.manifest.template_arguments),
    ]
    rows = pd.DataFrame([{"item": i, "expected": str(a), "found": str(b)} for i, a, b in pairs])
    check = same(
        "found",
        "expected",
        says="rows were prepared for the target on this disk, by the params in force",
        why="ids of another tokenizer or template, or answers of other weights, teach the draft another model",
        do="mend target.* in params.yaml, or " + AGAIN + " for the target that is there",
    )
    return Table("target", rows, "item", (check,))


_TAKEN = (
    "row_id",
    "prompt_id",
    "source",
    "domain",
    "split",
    "finish",
    "messages",
    "repetitive",
    "on_policy",
    "prompt_tokens",
)
_COUNTED = ("tokens", "mask_tokens", "lowest_id", "highest_id", "strange_mask_values", "supervised_tokens")
_COMPARED = ("longest_supervised_run", "first_supervised_token", "recomputed_row_id", "recomputed_prompt_id")
_FACTS = [*_TAKEN, *_COUNTED, *_COMPARED, "begins_as_the_template", "opening_bos"]


def row_facts(evidence: Evidence) -> DataFrame:
    """One line a row: counts and comparisons that plain expectations can judge."""
    import pandas as pd

    splits: Any = evidence.rows.groupby("prompt_id")["split"].nunique()  # pandas is typed too widely to be of use
    facts = [_facts(row, evidence) for row in evidence.rows.to_dict("records")]
    frame = pd.DataFrame(facts, columns=_FACTS)
    frame["splits_of_prompt"] = frame["prompt_id"].map(splits)
    return frame


def _facts(row: dict[str, Any], evidence: Evidence) -> dict[str, Any]:
    ids, mask = np.asarray(row["input_ids"], np.int32), np.asarray(row["loss_mask"], np.uint8)
    prefix = evidence.template_prefix
    supervised = np.flatnonzero(mask)
    first = int(supervised[0]) if len(supervised) else -1
    return {
        **{k: row[k] for k in _TAKEN},
        "tokens": len(ids),
        "mask_tokens": len(mask),
        "lowest_id": int(ids.min(initial=0)),
        "highest_id": int(ids.max(initial=0)),
        "strange_mask_values": int((mask > 1).sum()),
        "supervised_tokens": int((mask == 1).sum()),
        "longest_supervised_run": _longest_run(mask),
        "first_supervised_token": first,
        "recomputed_row_id": hashlib.sha256(ids.tobytes() + mask.tobytes()).hexdigest()[:24],
        "recomputed_prompt_id": hashlib.sha256(ids[: row["prompt_tokens"]].tobytes()).hexdigest()[:24],
        "begins_as_the_template": tuple(ids[: len(prefix)].tolist()) == prefix,
        "opening_bos": _opening(ids, evidence.bos_id),
    }


def _longest_run(mask: np.ndarray) -> int:
    edges = np.diff(np.concatenate([[0], (mask == 1).astype(np.int8), [0]]))
    return int((np.flatnonzero(edges == -1) - np.flatnonzero(edges == 1)).max(initial=0))


def _opening(ids: np.ndarray, bos: int | None) -> int:
    """How many beginning-of-sequence tokens the row opens with."""
    others = np.flatnonzero(ids != (-1 if bos is None else bos))
    return int(others[0]) if len(others) else len(ids)


def _row_expectations(evidence: Evidence, params: Params) -> tuple[Expectation, ...]:
    V, prepare = params.target.vocab_size, params.prepare
    prefix = list(evidence.template_prefix)
    finishes = ["stop", "given"] + (["capped"] if prepare.capped == "keep" else [])
    names = [s.name for s in prepare.sources]
    return (
        unique("row_id", says="no row twice", why="a doubled row weighs double and breaks resume by row", do=AGAIN),
        same(
            "row_id",
            "recomputed_row_id",
            says="a row's name is the digest of its tokens and mask",
            why="extraction resumes by this name; a wrong one pairs a row with another row's states",
            do=AGAIN + "; the file was written by something else",
        ),
        same(
            "prompt_id",
            "recomputed_prompt_id",
            says="a prompt's name is the digest of its tokens",
            why="the split into train and held out goes by this name",
            do=AGAIN + "; the file was written by something else",
        ),
        between(
            "lowest_id",
            0,
            says="token ids are not negative",
            why="a negative id reads the end of the embedding table without an error",
            do="mend the tokenizer or the source's rendering, then " + AGAIN,
        ),
        between(
            "highest_id",
            high=V - 1,
            says="token ids lie within the target's vocabulary",
            why="the target has no embedding for a higher id; the tokenizer is another model's",
            do="check target.vocab_size and that tokenizer.json is the target's, then " + AGAIN,
        ),
        same(
            "mask_tokens",
            "tokens",
            says="the loss mask is as long as the row",
            why="a shorter or longer mask supervises the wrong tokens from there on",
            do=AGAIN,
        ),
        among(
            "strange_mask_values",
            [0],
            says="the loss mask holds only 0 and 1",
            why="another value would weigh a token without anyone having said so",
            do=AGAIN,
        ),
        between(
            "longest_supervised_run",
            2,
            says="at least two supervised tokens stand together",
            why="the draft learns from pairs of supervised tokens; a row without a pair costs a forward pass for nothing",
            do="raise prepare.max_row_tokens or drop the row at its source, then " + AGAIN,
        ),
        same(
            "prompt_tokens",
            "first_supervised_token",
            says="the prompt ends where supervision begins",
            why="a mask off by one teaches the draft the wrong boundary between prompt and answer",
            do="mend the loss mask of the source, then " + AGAIN,
        ),
        among(
            "begins_as_the_template",
            [True],
            says="the row opens as the target's chat template does",
            why="states of a prompt that the server never renders are states the draft never meets",
            do=f"render with the target's own template (it opens with ids {prefix}), then " + AGAIN,
        ),
        among(
            "opening_bos",
            [_opening(np.asarray(evidence.template_prefix, np.int32), evidence.bos_id)],
            says="beginning-of-sequence tokens are as many as the template writes",
            why="text rendered with one and tokenised with another has two; every state after it differs from the server's",
            do="tokenise the rendered text with add_special_tokens off, then " + AGAIN,
        ),
        between(
            "tokens",
            high=prepare.max_row_tokens,
            says="rows keep to prepare.max_row_tokens",
            why="a longer row exceeds the memory that extraction and training planned for",
            do="raise prepare.max_row_tokens, or " + AGAIN,
        ),
        among(
            "finish",
            finishes,
            says="answers ended in a way that the policy keeps",
            why="an answer cut off and kept as whole teaches the draft to go on after the end",
            do="set prepare.capped, then " + AGAIN,
        ),
        among(
            "source",
            names,
            says="rows come from the sources in params.yaml",
            why="a row of unknown origin has no licence and no domain",
            do="add the source to prepare.sources, or " + AGAIN,
        ),
        among(
            "split",
            ["train", "held_out"],
            says="each row is train or held out",
            why="a row in neither is trained on or measured by accident",
            do=AGAIN,
        ),
        unique(
            "prompt_id",
            says="no prompt twice",
            why="a doubled prompt outweighs the others, and its copy in the other split is leakage",
            do="remove the doubles at the source, then " + AGAIN,
        ),
        among(
            "splits_of_prompt",
            [1],
            says="no prompt stands both in train and in held out",
            why="held-out accept length would measure memory",
            do=AGAIN + "; the split goes by a hash of the prompt, so the file was edited",
        ),
    )


def _sources(evidence: Evidence, facts: Any, params: Params) -> Table:
    import pandas as pd

    gate = params.gates.extraction
    recorded = {s.name: s for s in evidence.manifest.sources}
    wanted = {s.name: s for s in params.prepare.sources}
    lines: list[dict[str, Any]] = []
    for name in dict.fromkeys([*wanted, *recorded]):
        rows, source = facts[facts["source"] == name], recorded.get(name)
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
                "rows": len(rows),
                "rows_recorded": source.rows if source else 0,
                "supervised_tokens": int(rows["supervised_tokens"].sum()),
                "supervised_tokens_recorded": source.supervised_tokens if source else 0,
                "rows_read": read,
                "rows_and_rejects": (source.rows - source.extra_rows if source else 0) + rejected,
                "reject_share": rejected / read if read else 0.0,
                "rejects": ", ".join(f"{n} {r}" for r, n in sorted(source.rejects.items())) if source else "",
                "capped_share": float((rows["finish"] == "capped").mean()) if len(rows) else 0.0,
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


def _splits(evidence: Evidence, facts: Any, params: Params) -> Table:
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
