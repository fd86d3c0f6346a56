"""gate-deployment: the draft as an engine loads it, what it did there, and whether it may take the old draft's place."""

from __future__ import annotations

from typing import Any

from stages.contracts.draft import norms_of
from stages.contracts.evidence import BenchmarkEvidence, ServingPolicy
from stages.contracts.params import Params
from stages.gates._deployment_draft import tensors, vocabulary
from stages.gates._deployment_evidence import TRAIN, Evidence
from stages.gates._deployment_served import losslessness, parity, sampling, simulation
from stages.gates._deployment_worth import accept, policy, speed_up
from stages.gates._judge import Table, same

__all__ = ["Evidence", "tables"]


def tables(evidence: Evidence, params: Params) -> list[Table]:
    """Tables chain, tensors, config, vocabulary, parity, losslessness, accept length, simulation, sampling, speed-up, policy."""
    return [
        _chain(evidence),
        tensors(evidence, params),
        _config(evidence, params),
        vocabulary(evidence, params),
        parity(evidence, params),
        losslessness(evidence, params),
        accept(evidence, params),
        simulation(evidence, params),
        sampling(evidence, params),
        speed_up(evidence, params),
        policy(evidence, params),
    ]


def _pairs(name: str, pairs: list[tuple[str, Any, Any]], *, says: str, why: str, do: str) -> Table:
    """A table of things that have to be equal: item, expected, found."""
    import pandas as pd

    rows = pd.DataFrame([{"item": i, "expected": _text(e), "found": _text(f)} for i, e, f in pairs])
    return Table(name, rows, "item", (same("found", "expected", says=says, why=why, do=do),))


def _text(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple | list) else str(value)


def _chain(e: Evidence) -> Table:
    draft, (extraction, training) = e.record.digest(), e.reports
    was, now = e.record.target, e.target
    pairs: list[tuple[str, Any, Any]] = [
        ("model.safetensors", e.record.weights_digest, e.weights_digest),
        ("config.json", e.record.config_digest, e.config_digest),
        ("training figures are of this draft", draft, e.train.draft_digest),
        ("serving evidence is of this draft", draft, e.serve.draft_digest),
        ("benchmark is of this draft", draft, e.benchmark.draft_digest),
        ("serving policy is of this draft", draft, e.policy.draft_digest),
        ("serving policy is the one benchmarked", e.benchmark.policy_digest, e.policy.digest()),
        ("engine of the benchmark", f"{e.serve.engine} {e.serve.engine_version}", _engine(e.benchmark)),
        ("engine of the policy", f"{e.serve.engine} {e.serve.engine_version}", _engine(e.policy)),
        ("engine that the draft was exported for", e.serve.engine, e.record.exported_for),
        ("target's weights", was.weights_digest, now.weights_digest),
        ("target's tokenizer", was.tokenizer_digest, now.tokenizer_digest),
        ("target's chat template", was.template_digest, now.template_digest),
        ("weights that the states were captured from", was.weights_digest, e.record.capture.weights_digest),
        ("gate-extraction judged the draft's rows", e.prepared_digest, extraction.subject_digest),
        ("gate-extraction passed", True, extraction.success),
        ("gate-training judged the draft's merged set", e.record.merged_digest, training.subject_digest),
        ("gate-training passed", True, training.success),
        ("gate-training's report is the one trained on", e.record.gate_training_digest, training.digest()),
    ]
    return _pairs(
        "chain",
        pairs,
        says="evidence, draft, data and target are links of one chain",
        why="figures of another draft say nothing about this one",
        do="run `dvc repro`; it renews whatever is out of step. Never copy reports between runs",
    )


def _engine(fact: BenchmarkEvidence | ServingPolicy) -> str:
    return f"{fact.engine} {fact.engine_version}"


def _config(e: Evidence, params: Params) -> Table:
    eagle = e.config.get("eagle_config") or {}
    pairs: list[tuple[str, Any, Any]] = [
        ("architectures", ["LlamaForCausalLMEagle3"], e.config.get("architectures")),
        ("num_hidden_layers", 1, e.config.get("num_hidden_layers")),
        ("hidden_size", params.target.hidden_size, e.config.get("hidden_size")),
        ("vocab_size", params.target.vocab_size, e.config.get("vocab_size")),
        ("draft_vocab_size", params.merge.draft_vocab_size, e.config.get("draft_vocab_size")),
        ("draft_vocab_size in the record", params.merge.draft_vocab_size, e.record.draft_vocab_size),
        ("tie_word_embeddings", False, e.config.get("tie_word_embeddings")),
        ("eagle_config.use_aux_hidden_state", True, eagle.get("use_aux_hidden_state")),
        ("norms that engines make of it", e.record.norms, norms_of(e.config)),
        ("layer ids in the record", e.record.layer_ids, eagle.get("eagle_aux_hidden_state_layer_ids") or ()),
        ("points that the engine makes of the layer ids", e.record.points, e.config_points),
        ("layers of the target", params.target.layers, e.record.target.layers),
    ]
    return _pairs(
        "config",
        pairs,
        says="config.json makes the engine feed and read what was trained",
        why="the same layer ids mean other layers in another engine, and a tied head or a wrong size loads in silence",
        do=f"export for {e.record.exported_for} again: " + TRAIN,
    )
