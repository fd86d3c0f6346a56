"""A repository of three shell stages, and the facts of a draft that passed: enough line for the flow, without a model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import yaml

from stages.contracts.draft import DRAFT, DRAFT_RECORD, DraftRecord
from stages.contracts.evidence import (
    BENCHMARK_EVIDENCE,
    POLICY,
    SERVE_EVIDENCE,
    TRAIN_METRICS,
    AcceptLength,
    Arm,
    BenchmarkEvidence,
    Losslessness,
    PolicyLevel,
    Ratio,
    ServeEvidence,
    ServingPolicy,
    TrainMetrics,
)
from stages.contracts.files import file_digest, write_whole
from stages.contracts.manifest import CaptureSpec, TargetIdentity
from stages.contracts.report import Check, GateName, GateReport, evidence_digests, report_path

ZERO = "sha256:" + "0" * 64
REGISTRY: dict[str, object] = {
    "uri": "releases/.registry",
    "endpoint_url": None,
    "region": None,
    "timeout_s": 10,
    "retries": 4,
    "keep_releases": 2,
    "grace_hours": 1,
}
PROMOTION: dict[str, object] = {
    "production_beside": "if_measured",
    "restart_command": [],
    "restart_limit_s": 20,
    "server_url": "",
    "canary_requests": 2,
    "canary_max_loss": 0.1,
}


def git(root: Path, *words: str) -> None:
    subprocess.run(
        ["git", "-c", "user.name=t", "-c", "user.email=t@t", *words], cwd=root, check=True, capture_output=True
    )


def make_repo(root: Path, dvc_yaml: str, params: str = "a: 1\n") -> Path:
    """A git and DVC repository with this graph."""
    root.mkdir(parents=True, exist_ok=True)
    git(root, "init", "-q")
    subprocess.run([sys.executable, "-m", "dvc", "init", "-q"], cwd=root, check=True)
    (root / "dvc.yaml").write_text(dvc_yaml)
    (root / "params.yaml").write_text(params)
    write_registry(root)
    return root


def write_registry(root: Path, **changes: object) -> None:
    """params.yaml's section `registry`, beside what else stands there."""
    path = root / "params.yaml"
    told = (yaml.safe_load(path.read_text()) or {}) if path.exists() else {}
    root.mkdir(parents=True, exist_ok=True)
    path.write_text(
        yaml.safe_dump({"promotion": PROMOTION} | told | {"registry": told.get("registry", REGISTRY) | changes})
    )


def accept(value: float) -> AcceptLength:
    return AcceptLength(
        requests=4,
        tokens=100,
        verifications=round(100 / value),
        accept_length=value,
        low=value - 0.1,
        high=value + 0.1,
        by_position=(0.5, 0.2, 0.1),
    )


def gate_report(gate: GateName, subject_digest: str, success: bool = True) -> GateReport:
    check = Check(
        table="layer slots",
        assertion="nearest point is the claimed one",
        column="nearest_point",
        success=success,
        expected="[3, 16, 28]",
        actual="[3, 16, 28]" if success else "[0, 3, 16]",
        failing=() if success else ("slot 0", "slot 1"),
        why="the draft would be trained on other states than it is served",
        do="capture again with the points of params.yaml",
    )
    return GateReport(gate=gate, subject="the draft", subject_digest=subject_digest, success=success, checks=(check,))


def write_evidence(root: Path, draft_digest: str, accept_length: float = 1.6) -> None:
    """reports/: training figures, serve evidence, benchmark and policy of this draft."""
    overall = accept(accept_length)
    domains = {"coding": overall, "general": accept(accept_length - 0.2)}
    TrainMetrics(
        draft_digest=draft_digest,
        train_loss=1.0,
        held_out_loss=1.1,
        overall=overall,
        by_domain=domains,
        optimizer_steps=1,
        parameters=1,
    ).write(root / TRAIN_METRICS)
    ServeEvidence(
        draft_digest=draft_digest,
        engine="in_process",
        engine_version="1",
        draft_steps=3,
        max_new_tokens=8,
        parity=(),
        parity_words="as claimed",
        greedy=Losslessness(requests=4, identical=4, near_ties=0, differing_prompt_ids=()),
        sampling=None,
        served=overall,
        served_by_domain=domains,
        simulated=overall,
        simulated_by_domain=domains,
        requests=(),
    ).write(root / SERVE_EVIDENCE)
    level = PolicyLevel(min_batch=1, draft_steps=3, ratio=1.3, low=1.2, high=1.4)
    policy = ServingPolicy(
        draft_digest=draft_digest,
        engine="in_process",
        engine_version="1",
        device="cpu",
        levels=(level,),
        measured_up_to=4,
    )
    policy.write(root / POLICY)

    def arm(name: str, steps: int, speed: float) -> Arm:
        return Arm.model_validate(
            {
                "name": name,
                "draft_steps": steps,
                "concurrency": 1,
                "tokens_per_s": (speed, speed + 1, speed + 2),
                "latency_p50_ms": 10,
                "latency_p95_ms": 20,
                "first_token_p50_ms": 5,
                "accept_length": 1.6,
            }
        )

    BenchmarkEvidence(
        draft_digest=draft_digest,
        engine="in_process",
        engine_version="1",
        device="cpu",
        max_new_tokens=8,
        repeats=3,
        arms=(arm("plain", 0, 50), arm("speculative", 3, 65)),
        ratios=(Ratio(arm="speculative", draft_steps=3, concurrency=1, ratio=1.3, low=1.2, high=1.4),),
        off_cost_ratio=1.0,
        off_cost_low=0.98,
        off_cost_high=1.01,
        accept_length_by_domain=domains,
        out_of_distribution=None,
        speculation_off_above=4,
        policy_digest=policy.digest(),
    ).write(root / BENCHMARK_EVIDENCE)


def write_draft(
    root: Path,
    weights: bytes = b"weights",
    accept_length: float = 1.6,
    passed: bool = True,
    config: bytes = b'{"hidden_size": 8}',
) -> DraftRecord:
    """models/draft, its evidence and three gate reports, and a dvc.lock."""
    folder = root / DRAFT
    write_whole(folder / "model.safetensors", weights)
    write_whole(folder / "config.json", config)
    record = DraftRecord(
        target=TargetIdentity(
            name="tiny",
            model_type="llama",
            layers=6,
            hidden_size=8,
            vocab_size=16,
            weights_digest=ZERO,
            tokenizer_digest=ZERO,
            template_digest=ZERO,
        ),
        capture=CaptureSpec(
            weights_digest=ZERO, code_digest=ZERO, points=(1, 3, 5), layers=6, hidden_size=8, compute_dtype="float32"
        ),
        merged_digest=ZERO,
        gate_training_digest=ZERO,
        params_digest=ZERO,
        steps_ahead=3,
        draft_vocab_size=8,
        optimizer_steps=1,
        supervised_tokens_seen=1,
        exported_for="sglang",
        layer_ids=(0, 2, 4),
        weights_digest=file_digest(folder / "model.safetensors"),
        config_digest=file_digest(folder / "config.json"),
    )
    record.write(folder / DRAFT_RECORD)
    write_evidence(root, record.digest(), accept_length)
    gate_report("extraction", ZERO).write(root / report_path("extraction"))
    gate_report("training", ZERO).write(root / report_path("training"))
    judged = {"evidence": evidence_digests(root)}
    gate_report("deployment", record.digest(), passed).model_copy(update=judged).write(root / report_path("deployment"))
    write_whole(root / "reports/index.html", b"<!doctype html>")
    write_whole(root / "dvc.lock", weights)
    if not (root / "params.yaml").exists():
        write_registry(root)
    return record
