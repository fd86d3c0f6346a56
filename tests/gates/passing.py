"""For each gate, evidence that passes; tests change one thing in it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from stages.contracts.draft import DraftRecord
from stages.contracts.evidence import (
    AcceptLength,
    Arm,
    BenchmarkEvidence,
    Losslessness,
    ParitySlot,
    PolicyLevel,
    Ratio,
    RequestRecord,
    SamplingFidelity,
    ServeEvidence,
    ServingPolicy,
    StoppedAnswers,
    TrainMetrics,
)
from stages.contracts.files import digest
from stages.contracts.manifest import (
    CapturedFolder,
    CaptureSpec,
    Coverage,
    MergedManifest,
    PreparedManifest,
    PreparedSource,
    TargetIdentity,
)
from stages.contracts.params import Params
from stages.contracts.quality import (
    LENGTH_BINS,
    TOKEN_BINS,
    DomainQuality,
    PreparedQuality,
    SourceShare,
    digest_of_rows,
)
from stages.contracts.quality import accept as accepted
from stages.contracts.release import ReleaseRecord
from stages.contracts.report import Check, GateReport
from stages.gates import deployment, extraction, training
from tests import tiny

V, H, D, LAYERS, POINTS = 259, 64, 32, tiny.LAYERS, tiny.POINTS
PREFIX = (1, 40, 41)
ROWS_A_SOURCE = 20


def d(word: str) -> str:
    return digest(word.encode())


def params(**gate: Any) -> Params:
    """params.yaml made small; `gate` overrides thresholds as extraction__min_rows=3."""
    raw = yaml.safe_load((Path(__file__).parents[2] / "params.yaml").read_text())
    raw["target"] |= {"name": "tiny", "layers": LAYERS, "hidden_size": H, "vocab_size": V}
    raw["prepare"] |= {"max_prompt_tokens": 20, "max_new_tokens": 12, "max_row_tokens": 32}
    raw["prepare"]["sources"] = [
        {
            "name": n,
            "kind": "jsonl",
            "path": f"{n}.jsonl",
            "domain": n,
            "licence": "MIT",
            "answers": "regenerate",
            "limit": 50,
        }
        for n in ("coding", "general")
    ]
    raw["capture"]["points"] = list(POINTS)
    raw["merge"]["draft_vocab_size"] = D
    raw["gates"]["extraction"] |= {"min_rows": 30, "min_held_out_rows": 4, "min_supervised_tokens": 100}
    raw["gates"]["deployment"]["min_domain_accept_length"] = {"coding": 1.5, "general": 1.1}
    for name, value in gate.items():
        section, key = name.split("__")
        raw["gates"][section][key] = value
    return Params.model_validate(raw)


def target() -> TargetIdentity:
    return TargetIdentity(
        name="tiny",
        model_type="llama",
        layers=LAYERS,
        hidden_size=H,
        vocab_size=V,
        weights_digest=d("weights"),
        tokenizer_digest=d("tokenizer"),
        template_digest=d("template"),
    )


def row(source: str, i: int) -> dict[str, Any]:
    """A prepared row of 12 prompt and 8 answer tokens."""
    draw = np.random.default_rng([i, len(source)])
    ids = np.concatenate([PREFIX, draw.integers(3, V, 17)]).astype(np.int32)
    mask = np.array([0] * 12 + [1] * 8, np.uint8)
    made = {
        "source": source,
        "domain": source,
        "split": "held_out" if i % 5 == 0 else "train",
        "input_ids": ids,
        "loss_mask": mask,
        "prompt_tokens": 12,
        "finish": "capped" if i % 2 else "stop",
        "repetitive": False,
        "on_policy": True,
        "messages": json.dumps(
            [{"role": "user", "content": f"Question {source} {i}?"}, {"role": "assistant", "content": "Yes."}]
        ),
    }
    return renamed(made)


def renamed(made: dict[str, Any]) -> dict[str, Any]:
    """The row under the names that its content gives it."""
    ids, mask = made["input_ids"], made["loss_mask"]
    row_id = hashlib.sha256(ids.tobytes() + mask.tobytes()).hexdigest()[:24]
    prompt_id = hashlib.sha256(ids[: made["prompt_tokens"]].tobytes()).hexdigest()[:24]
    return {**made, "row_id": row_id, "prompt_id": prompt_id}


def prepared_rows() -> pd.DataFrame:
    return pd.DataFrame([row(source, i) for source in ("coding", "general") for i in range(ROWS_A_SOURCE)])


def prepared() -> PreparedManifest:
    sources = tuple(
        PreparedSource(
            name=name,
            domain=name,
            licence="MIT",
            kind="jsonl",
            answers="regenerate",
            origin_digest=d(name),
            rows_read=ROWS_A_SOURCE + 2,
            rows=ROWS_A_SOURCE,
            train_rows=16,
            held_out_rows=4,
            tokens=20 * ROWS_A_SOURCE,
            supervised_tokens=8 * ROWS_A_SOURCE,
            capped=10,
            repetitive=0,
            rejects={"too long": 2},
            rows_digest=d(f"{name} rows"),
        )
        for name in ("coding", "general")
    )
    return PreparedManifest(
        target=target(),
        seed=7,
        temperature=0.0,
        max_new_tokens=12,
        sources=sources,
        out_of_distribution_prompts=0,
        out_of_distribution_digest=d("apart"),
        rejects_digest=d("rejects"),
    )


def extraction_evidence() -> extraction.Evidence:
    files = [
        ("coding/rows.parquet", d("coding rows")),
        ("general/rows.parquet", d("general rows")),
        ("rejects.parquet", d("rejects")),
    ]
    return extraction.Evidence(
        manifest=prepared(),
        rows=prepared_rows(),
        files=pd.DataFrame([{"file": f, "recorded": r, "found": r} for f, r in files]),
        target=target(),
        template_prefix=PREFIX,
        bos_id=1,
        quality=prepared_quality(),
        earlier=accepted(prepared_quality().model_copy(update={"rows_digest": d("before")}), None),
    )


def domain_quality(domain: str, **values: Any) -> DomainQuality:
    """20 rows of 20 tokens, 8 of them supervised, of two kinds."""
    lengths, bins = [0] * LENGTH_BINS, [0] * TOKEN_BINS
    lengths[4], bins[1], bins[2] = ROWS_A_SOURCE, 4 * ROWS_A_SOURCE, 4 * ROWS_A_SOURCE
    known: dict[str, Any] = {"rows": ROWS_A_SOURCE, "tokens": 20 * ROWS_A_SOURCE, "capped": 10}
    known |= {"supervised_tokens": 8 * ROWS_A_SOURCE, "lengths": tuple(lengths), "token_bins": tuple(bins)}
    return DomainQuality(domain=domain, **{**known, **values})


def prepared_quality() -> PreparedQuality:
    return PreparedQuality(
        rows_digest=digest_of_rows(prepared()),
        tokenizer_digest=d("tokenizer"),
        domains=(domain_quality("coding"), domain_quality("general")),
        sources=tuple(
            SourceShare(source=n, rows=ROWS_A_SOURCE, supervised_tokens=160, weight=1.0) for n in ("coding", "general")
        ),
        near_duplicates=0,
        nearest=(),
        leaks=0,
        leaking=(),
    )


def capture_spec() -> CaptureSpec:
    return CaptureSpec(
        weights_digest=d("weights"),
        code_digest=d("code"),
        points=POINTS,
        layers=LAYERS,
        hidden_size=H,
        compute_dtype="float32",
    )


def merged() -> MergedManifest:
    folders = tuple(
        CapturedFolder(
            name=f"rows_{a}-{a + 20}",
            source=name,
            start=a,
            end=a + 20,
            tokens=400,
            config_digest=d(f"config {a}"),
            rows_digest=d(f"rows {a}"),
        )
        for a, name in ((0, "coding"), (20, "general"))
    )
    return MergedManifest(
        prepared_digest=prepared().digest(),
        capture_digest=d("capture"),
        target=target(),
        capture=capture_spec(),
        folders=folders,
        rows=40,
        train_rows=32,
        held_out_rows=8,
        tokens=800,
        supervised_tokens=320,
        draft_vocab_size=D,
        coverage=Coverage(train=0.99, held_out=0.93, by_domain_held_out={"coding": 0.95}),
        index_digest=d("index"),
        vocabulary_digest=d("vocabulary"),
    )


def training_evidence() -> training.Evidence:
    folders = [
        {
            "folder": f.name,
            "source": f.source,
            "start": f.start,
            "end": f.end,
            "tokens": f.tokens,
            "recorded_digest": f.rows_digest,
            "found_digest": f.rows_digest,
            "recorded_config": f.config_digest,
            "found_config": f.config_digest,
            "capture": capture_spec().digest(),
            "rows_stored": 20,
            "tokens_stored": 400,
            "slots": 4,
            "width": H,
            "dtype": "bfloat16",
            "fault": "none",
        }
        for f in merged().folders
    ]
    good = {"times_prepared": 1, "times_captured": 1, "times_indexed": 1, "tokens": 20, "stored_tokens": 20}
    good |= {"ids_equal": True, "mask_equal": True, "not_finite": 0, "zero_states": 0, "constant_slots": 0}
    good |= {"equal_slots": 0, "copy_of": "none", "index_finds_it": True, "split_equal": True}
    slots = [(f"rows_0-20 slot {i}", p, 0.0016, 0.3) for i, p in enumerate((*POINTS, LAYERS))]
    chain = ("prepared rows of the merged set", "weights that the states were captured from", "points")
    return training.Evidence(
        manifest=merged(),
        folders=pd.DataFrame(folders),
        rows=pd.DataFrame([{"row_id": r, **good} for r in prepared_rows()["row_id"]]),
        slots=pd.DataFrame(
            [
                {
                    "folder": "rows_0-20",
                    "slot": s,
                    "claimed_point": p,
                    "nearest_point": p,
                    "claimed_distance": c,
                    "claimed_p99_distance": 2 * c,
                    "p99_limit": 0.008,
                    "cause": "",
                    "next_best_distance": n,
                    "tokens": 100,
                }
                for s, p, c, n in slots
            ]
        ),
        unprobed=1,
        last={
            "distance_folder": "rows_0-20",
            "likelihood_folder": "rows_0-20",
            "before_distance": 0.0016,
            "after_distance": 0.8,
            "argmax_agreement": 0.98,
            "before_nll": 0.4,
            "after_nll": 5.0,
            "target_nll": 0.401,
            "tokens": 48,
        },
        target_ids=tuple(range(0, 2 * D, 2)),
        in_t2d=frozenset(range(0, 2 * D, 2)),
        always={"<|endoftext|>": 0, "<|im_end|>": 2},
        coverage=pd.DataFrame(
            [
                {"set": "train", "recorded": 0.99, "found": 0.99, "least": 0.95, "words": "99 %"},
                {"set": "held out", "recorded": 0.93, "found": 0.93, "least": 0.85, "words": "93 %"},
            ]
        ),
        chain=pd.DataFrame([{"item": i, "expected": d(i), "found": d(i)} for i in chain]),
    )


CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": H,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": V,
    "draft_vocab_size": D,
    "tie_word_embeddings": False,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4], "use_aux_hidden_state": True},
}
SHAPES: dict[str, list[int]] = {
    "fc.weight": [H, 3 * H],
    "norm.weight": [H],
    "lm_head.weight": [D, H],
    "midlayer.hidden_norm.weight": [H],
    "midlayer.input_layernorm.weight": [H],
    "midlayer.post_attention_layernorm.weight": [H],
    "midlayer.self_attn.q_proj.weight": [64, 2 * H],
    "midlayer.self_attn.k_proj.weight": [32, 2 * H],
    "midlayer.self_attn.v_proj.weight": [32, 2 * H],
    "midlayer.self_attn.o_proj.weight": [H, 64],
    "midlayer.mlp.gate_proj.weight": [128, H],
    "midlayer.mlp.up_proj.weight": [128, H],
    "midlayer.mlp.down_proj.weight": [H, 128],
}


def gate_reports() -> tuple[GateReport, GateReport]:
    check = Check(table="rows", assertion="no row twice", column="row_id", success=True, expected="", actual="")
    first = GateReport(
        gate="extraction", subject="rows", subject_digest=prepared().digest(), success=True, checks=(check,)
    )
    second = GateReport(
        gate="training", subject="states", subject_digest=merged().digest(), success=True, checks=(check,)
    )
    return first, second


def record() -> DraftRecord:
    return DraftRecord(
        target=target(),
        capture=capture_spec(),
        merged_digest=merged().digest(),
        gate_training_digest=gate_reports()[1].digest(),
        params_digest=d("params"),
        steps_ahead=3,
        draft_vocab_size=D,
        optimizer_steps=10,
        supervised_tokens_seen=1000,
        exported_for="in_process",
        layer_ids=(0, 2, 4),
        weights_digest=d("draft"),
        config_digest=d("config"),
    )


def accept(length: float) -> AcceptLength:
    return AcceptLength(
        requests=8,
        tokens=round(400 * length),
        verifications=400,
        accept_length=length,
        low=length - 0.1,
        high=length + 0.1,
        by_position=(0.5, 0.2, 0.1),
    )


def serve() -> ServeEvidence:
    return ServeEvidence(
        draft_digest=record().digest(),
        engine="in_process",
        engine_version="1",
        draft_steps=3,
        max_new_tokens=12,
        parity=tuple(
            ParitySlot(
                slot=i,
                claimed_point=p,
                nearest_point=p,
                distance=1e-4,
                claimed_distance=1e-4,
                next_best_distance=0.3,
                rows=6,
                tokens=100,
            )
            for i, p in enumerate(POINTS)
        ),
        parity_words="as claimed",
        greedy=Losslessness(requests=16, identical=15, near_ties=1, differing_prompt_ids=("ab" * 12,)),
        greedy_by_domain={
            "coding": Losslessness(requests=15, identical=15, near_ties=0, differing_prompt_ids=()),
            "general": Losslessness(requests=1, identical=0, near_ties=1, differing_prompt_ids=()),
        },
        stops=(
            StoppedAnswers(
                condition="token",
                requests=8,
                plain_right=8,
                drafted_right=8,
                inside_a_draft=6,
                differing_prompt_ids=(),
            ),
        ),
        sampling=SamplingFidelity(prompts=2, draws=1000, temperature=0.8, distance=0.03, distance_plain=0.025),
        served=accept(1.6),
        served_by_domain={"coding": accept(1.7), "general": accept(1.4)},
        simulated=accept(1.7),
        simulated_by_domain={"coding": accept(1.71), "general": accept(1.4)},
        requests=tuple(
            RequestRecord(
                prompt_id=f"{i:024x}",
                source="coding",
                domain="coding",
                prompt_tokens=12,
                tokens=12,
                verifications=7,
                accepted=(3, 1, 0),
                simulated_verifications=7,
                simulated_accepted=(1, 0, 3),
            )
            for i in range(8)
        ),
    )


def policy() -> ServingPolicy:
    levels = (
        PolicyLevel(min_batch=1, draft_steps=2, ratio=1.2, low=1.1, high=1.3),
        PolicyLevel(min_batch=2, draft_steps=0, ratio=1, low=1, high=1),
    )
    return ServingPolicy(
        draft_digest=record().digest(),
        engine="in_process",
        engine_version="1",
        device="cpu",
        levels=levels,
        measured_up_to=2,
    )


def benchmark() -> BenchmarkEvidence:
    arms = tuple(
        Arm(
            name=name,
            draft_steps=steps if c == 1 else 0,
            concurrency=c,
            tokens_per_s=(10.0, 10.5, 11.0),
            latency_p50_ms=10,
            latency_p95_ms=12,
            first_token_p50_ms=2,
            accept_length=1.6,
        )
        for c in (1, 2)
        for name, steps in (("plain", 0), ("speculative", 2), ("policy", 2))
    )
    ratios = (
        Ratio(arm="policy", draft_steps=2, concurrency=1, ratio=1.2, low=1.1, high=1.3),
        Ratio(arm="policy", draft_steps=0, concurrency=2, ratio=1.0, low=0.99, high=1.01),
        Ratio(arm="speculative", draft_steps=2, concurrency=1, ratio=1.2, low=1.1, high=1.3),
    )
    return BenchmarkEvidence(
        draft_digest=record().digest(),
        engine="in_process",
        engine_version="1",
        device="cpu",
        max_new_tokens=12,
        repeats=3,
        arms=arms,
        ratios=ratios,
        off_cost_ratio=0.995,
        off_cost_low=0.98,
        off_cost_high=1.01,
        accept_length_by_domain={"coding": accept(1.6)},
        out_of_distribution=None,
        speculation_off_above=1,
        policy_digest=policy().digest(),
    )


def release() -> ReleaseRecord:
    return ReleaseRecord(
        draft_digest=d("old"),
        merged_digest=d("old merged"),
        gate_reports={},
        policy_digest=d("old policy"),
        engine="in_process",
        engine_version="1",
        accept_length=1.58,
        accept_length_by_domain={"coding": 1.65, "general": 1.42},
        dvc_lock_digest=d("lock"),
    )


def deployment_evidence() -> deployment.Evidence:
    tensors = [{"tensor": n, "shape": str(s), "dtype": "float32", "finite": True} for n, s in SHAPES.items()]
    tensors += [
        {"tensor": "d2t", "shape": str([D]), "dtype": "int64", "finite": True},
        {"tensor": "t2d", "shape": str([V]), "dtype": "bool", "finite": True},
    ]
    train = TrainMetrics(
        draft_digest=record().digest(),
        train_loss=1,
        held_out_loss=2,
        overall=accept(1.6),
        by_domain={},
        optimizer_steps=10,
        parameters=9,
    )
    return deployment.Evidence(
        record=record(),
        config=CONFIG,
        config_points=POINTS,
        tensors=pd.DataFrame(tensors),
        d2t=tuple(range(D)),
        in_t2d=frozenset(range(0, 2 * D, 2)),
        weights_digest=d("draft"),
        config_digest=d("config"),
        target=target(),
        train=train,
        serve=serve(),
        benchmark=benchmark(),
        policy=policy(),
        reports=gate_reports(),
        prepared_digest=prepared().digest(),
        release=release(),
    )
