"""A whole line's facts, made up and consistent: what the page and the glance are shown."""

from __future__ import annotations

import math
from pathlib import Path

from stages.contracts.draft import DRAFT, DRAFT_RECORD, DraftRecord
from stages.contracts.evidence import (
    BENCHMARK_EVIDENCE,
    POLICY,
    SERVE_EVIDENCE,
    TRAIN_CURVES,
    TRAIN_METRICS,
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
from stages.contracts.loads import Conditions, FirstRequest, Latencies, OpenLoop, Percentiles
from stages.contracts.manifest import (
    CAPTURE_MANIFEST,
    MERGED_MANIFEST,
    PREPARED_MANIFEST,
    CapturedFolder,
    CaptureManifest,
    CaptureSpec,
    Coverage,
    MergedManifest,
    PreparedManifest,
    PreparedSource,
    TargetIdentity,
)
from stages.contracts.report import Check, GateName, GateReport, report_path


def d(word: str) -> str:
    return digest(word.encode())


def target() -> TargetIdentity:
    return TargetIdentity(
        name="smollm2-135m-instruct",
        model_type="llama",
        layers=30,
        hidden_size=576,
        vocab_size=49152,
        weights_digest=d("weights"),
        tokenizer_digest=d("tokenizer"),
        template_digest=d("template"),
    )


def source(name: str, domain: str, licence: str, rows: int, held_out: int) -> PreparedSource:
    return PreparedSource(
        name=name,
        domain=domain,
        licence=licence,
        kind=name,
        answers="regenerate",
        origin_digest=d(name),
        rows_read=rows + rows // 8,
        rows=rows,
        train_rows=rows - held_out,
        held_out_rows=held_out,
        tokens=rows * 205,
        supervised_tokens=rows * 96,
        capped=rows // 2,
        repetitive=0,
        rejects={"repetitive": rows // 8},
        rows_digest=d(name + " rows"),
    )


def prepared() -> PreparedManifest:
    return PreparedManifest(
        target=target(),
        seed=7,
        temperature=0.0,
        max_new_tokens=112,
        sources=(
            source("human_eval", "coding", "MIT", 146, 17),
            source("stdlib", "coding", "PSF-2.0", 212, 25),
            source("bfcl", "agentic", "Apache-2.0", 118, 14),
            source("chatable", "general", "Apache-2.0", 58, 8),
        ),
        out_of_distribution_prompts=24,
        out_of_distribution_digest=d("apart"),
        rejects_digest=d("rejects"),
    )


def capture_spec() -> CaptureSpec:
    return CaptureSpec(
        weights_digest=d("weights"),
        code_digest=d("code"),
        points=(3, 16, 28),
        layers=30,
        hidden_size=576,
        compute_dtype="float32",
    )


def capture() -> CaptureManifest:
    folder = CapturedFolder(
        name="rows_0-534",
        source="human_eval",
        start=0,
        end=534,
        tokens=109470,
        config_digest=d("c"),
        rows_digest=d("r"),
    )
    return CaptureManifest(
        prepared_digest=prepared().digest(),
        capture=capture_spec(),
        slots=("point 3", "point 16", "point 28", "point 30, before the final norm"),
        folders=(folder,),
        rows=534,
        tokens=109470,
    )


def merged() -> MergedManifest:
    return MergedManifest(
        prepared_digest=prepared().digest(),
        capture_digest=capture().digest(),
        target=target(),
        capture=capture_spec(),
        folders=capture().folders,
        rows=534,
        train_rows=470,
        held_out_rows=64,
        tokens=109470,
        supervised_tokens=51264,
        draft_vocab_size=8192,
        coverage=Coverage(train=0.997, held_out=0.951, by_domain_held_out={"coding": 0.962, "agentic": 0.944}),
        index_digest=d("index"),
        vocabulary_digest=d("vocabulary"),
    )


def report(gate: GateName, subject: str, subject_digest: str, *failed: Check) -> GateReport:
    good = [
        Check(table="rows", assertion=says, column=column, success=True, expected=expected, actual=actual)
        for says, column, expected, actual in (
            ("there is at least one row", "", "1 row or more", "534 rows"),
            ("row id is never empty", "row_id", "a value in every row", "all 534 rows"),
            ("no row twice", "row_id", "each value once", "all 534 rows"),
            (
                "token ids lie within the target's vocabulary",
                "highest_id",
                "at most 49151",
                "1204 to 49118 over 534 rows",
            ),
        )
    ]
    return GateReport(
        gate=gate, subject=subject, subject_digest=subject_digest, success=not failed, checks=(*good, *failed)
    )


def shifted() -> Check:
    words = "every slot is shifted by +1 layer"
    return Check(
        table="slots",
        assertion="of all the target's points, the nearest is the claimed one",
        column="nearest_point, claimed_point",
        success=False,
        expected="equal to claimed point",
        actual="3 of 4 rows",
        failing=tuple(
            f"slot {i}: claims point {p}, nearest is point {p + 1} ({words})" for i, p in enumerate((3, 16, 28))
        ),
        why="a draft fed another layer than it was trained on keeps its shape and loses its acceptance",
        do="compare capture.points with the ids that the capturing engine was given, then `dvc repro extract`",
    )


def draft() -> DraftRecord:
    return DraftRecord(
        target=target(),
        capture=capture_spec(),
        merged_digest=merged().digest(),
        gate_training_digest=report("training", "merged rows and states", merged().digest()).digest(),
        params_digest=d("params"),
        steps_ahead=3,
        draft_vocab_size=8192,
        optimizer_steps=420,
        supervised_tokens_seen=412_000,
        exported_for="in_process",
        layer_ids=(2, 15, 27),
        weights_digest=d("draft"),
        config_digest=d("config"),
    )


def accept(length: float, requests: int, spread: float = 0.08) -> AcceptLength:
    verifications = requests * 60
    first = min(0.62 * (length - 0.75), 0.9)
    return AcceptLength(
        requests=requests,
        tokens=round(verifications * length),
        verifications=verifications,
        accept_length=length,
        low=length - spread,
        high=length + spread,
        by_position=(round(first, 4), round(first * 0.45, 4), round(first * 0.2, 4)),
    )


def serve() -> ServeEvidence:
    slots = [(0, 3, 0.0003, 0.262), (1, 16, 0.0004, 0.287), (2, 28, 0.0004, 0.301)]
    return ServeEvidence(
        draft_digest=draft().digest(),
        engine="in_process",
        engine_version="1",
        draft_steps=3,
        max_new_tokens=96,
        parity=tuple(
            ParitySlot(
                slot=s,
                claimed_point=p,
                nearest_point=p,
                distance=c,
                claimed_distance=c,
                next_best_distance=n,
                rows=6,
                tokens=900,
            )
            for s, p, c, n in slots
        ),
        parity_words="as claimed",
        served_by_length={"33-64": accept(1.7, 30), "129-256": accept(1.5, 24)},
        stops=(
            StoppedAnswers(
                condition="token", requests=8, plain_right=8, drafted_right=8, inside_a_draft=7, differing_prompt_ids=()
            ),
        ),
        greedy=Losslessness(requests=54, identical=53, near_ties=1, differing_prompt_ids=("0123456789abcdef01234567",)),
        sampling=SamplingFidelity(prompts=2, draws=4000, temperature=0.8, distance=0.021, distance_plain=0.019),
        served=accept(1.62, 54, 0.06),
        served_by_domain={
            "coding": accept(1.81, 32),
            "agentic": accept(1.55, 14, 0.11),
            "general": accept(1.27, 8, 0.12),
        },
        simulated=accept(1.63, 54, 0.06),
        simulated_by_domain={"coding": accept(1.82, 32), "agentic": accept(1.54, 14), "general": accept(1.28, 8)},
        requests=tuple(
            RequestRecord(
                prompt_id=f"{i:024x}",
                source="stdlib",
                domain="coding",
                prompt_tokens=80,
                tokens=96,
                verifications=53,
                accepted=(24, 12, 7),
                simulated_verifications=53,
            )
            for i in range(6)
        ),
    )


def policy() -> ServingPolicy:
    levels = [(1, 3, 1.31), (2, 2, 1.22), (4, 1, 1.08), (8, 0, 1.0)]
    return ServingPolicy(
        draft_digest=draft().digest(),
        engine="in_process",
        engine_version="1",
        device="cpu, 2 threads",
        levels=tuple(
            PolicyLevel(min_batch=b, draft_steps=s, ratio=r, low=r - 0.03, high=r + 0.03) for b, s, r in levels
        ),
        measured_up_to=16,
    )


def benchmark() -> BenchmarkEvidence:
    plain = {1: 26.0, 2: 44.0, 4: 76.0, 8: 122.0, 16: 171.0}
    fast = {1: 1.31, 2: 1.22, 4: 1.08, 8: 0.93, 16: 0.78}
    arms, ratios = [], []
    for c, rate in plain.items():
        on = max(fast[c], 1.0)
        for name, steps, share in (
            ("plain", 0, 1.0),
            ("speculative", 3, fast[c]),
            ("policy", policy().steps_for(c), on),
        ):
            rates = tuple(round(rate * share * s, 2) for s in (0.97, 1.0, 1.02))
            arms.append(
                Arm(
                    name=name,
                    draft_steps=steps,
                    concurrency=c,
                    tokens_per_s=rates,
                    latency_p50_ms=1000 * 40 * c / rates[1],
                    latency_p95_ms=1100 * 40 * c / rates[1],
                    first_token_p50_ms=210.0,
                    accept_length=1.0 if name == "plain" else 1.6,
                )
            )
            if name != "plain":
                ratios.append(
                    Ratio(arm=name, draft_steps=steps, concurrency=c, ratio=share, low=share - 0.03, high=share + 0.03)
                )
    return BenchmarkEvidence(
        draft_digest=draft().digest(),
        engine="in_process",
        engine_version="1",
        device="cpu, 2 threads",
        max_new_tokens=40,
        repeats=3,
        arms=tuple(arms),
        ratios=tuple(ratios),
        off_cost_ratio=0.996,
        off_cost_low=0.98,
        off_cost_high=1.01,
        accept_length_by_domain={"coding": accept(1.78, 24)},
        out_of_distribution=accept(1.22, 16),
        speculation_off_above=4,
        policy_digest=policy().digest(),
    )


def served_benchmark() -> BenchmarkEvidence:
    """The same of servers that were started: no cost of off, latencies, arrivals, first requests and conditions."""
    times = Percentiles(p50=100, p90=150, p99=190)
    known = Latencies(first_token_ms=times, per_token_ms=times, whole_ms=times)
    arrivals = OpenLoop(
        arm="speculative", draft_steps=3, rate_per_s=4, requests=48, tokens_per_s=(20.0, 21.0, 22.0), latencies=known,
        accept_length=1.6, closed_loop_per_s=2.0, overloaded=True, late_start_p99_ms=1.5,
    )  # fmt: skip
    first = FirstRequest(
        arm="plain", draft_steps=0, cold_first_token_ms=900, cold_whole_ms=2000, warm_first_token_ms=300,
        warm_whole_ms=1300,
    )  # fmt: skip
    conditions = Conditions(
        engines="servers started", cache="off", temperature=0, ignore_end_of_turn=True, settings_compared=471,
        cached_prompt_tokens=0, policy_served_by="an engine for each draft length", warnings=("figures of a CPU",),
    )  # fmt: skip
    found = benchmark()
    return found.model_copy(
        update={
            "arms": tuple(a.model_copy(update={"latencies": known}) for a in found.arms),
            "off_cost_ratio": None, "off_cost_low": None, "off_cost_high": None,
            "open_loop": (arrivals,), "first_requests": (first,), "conditions": conditions,
        }
    )  # fmt: skip


def write_curves(root: Path) -> None:
    folder = root / TRAIN_CURVES
    folder.mkdir(parents=True, exist_ok=True)
    steps = range(5, 421, 5)
    loss = [f"{s},{8.4 * math.exp(-s / 90) + 1.6 + 0.12 * math.sin(s):.4f},0.0015" for s in steps]
    (folder / "training.csv").write_text("\n".join(["step,loss,learning_rate", *loss]) + "\n")
    held = [
        f"{s},{2.2 + 2 * math.exp(-s / 90):.3f},{1.64 - 0.5 * math.exp(-s / 120):.3f},"
        f"{1.82 - 0.7 * math.exp(-s / 120):.3f},{1.3 - 0.2 * math.exp(-s / 150):.3f},"
        f"{1.54 - 0.5 * math.exp(-s / 120):.3f},{1.74 - 0.5 * math.exp(-s / 120):.3f},{1.9 - 0.6 * math.exp(-s / 120):.3f},"
        f"{0.45 - 0.3 * math.exp(-s / 120):.3f},{0.2 - 0.15 * math.exp(-s / 120):.3f}"
        for s in range(60, 421, 60)
    ]
    head = (
        "step,loss,accept_length,accept_length_coding,accept_length_general,low,high,train_like,accepted_1,accepted_2"
    )
    speed = [f"{s},412.5,0.0125,1404.2" for s in range(10, 421, 10)]
    head_of_speed = "step,tokens_per_s,waiting_share,peak_memory_mb"
    (folder / "speed.csv").write_text("\n".join([head_of_speed, *speed]) + "\n")
    (folder / "held_out.csv").write_text("\n".join([head, *held]) + "\n")


def write_data(root: Path) -> None:
    prepared().write(root / PREPARED_MANIFEST)
    capture().write(root / CAPTURE_MANIFEST)
    merged().write(root / MERGED_MANIFEST)
    report("extraction", "prepared rows", prepared().digest()).write(root / report_path("extraction"))
    report("training", "merged rows and states", merged().digest()).write(root / report_path("training"))


def write_whole_line(root: Path) -> None:
    """Everything a finished run leaves."""
    write_data(root)
    write_curves(root)
    draft().write(root / DRAFT / DRAFT_RECORD)
    TrainMetrics(
        draft_digest=draft().digest(),
        train_loss=1.6,
        held_out_loss=2.2,
        overall=accept(1.63, 64),
        by_domain={"coding": accept(1.82, 42)},
        optimizer_steps=420,
        parameters=9_800_000,
        train_like=accept(1.88, 12),
        stopped_after=420,
    ).write(root / TRAIN_METRICS)
    serve().write(root / SERVE_EVIDENCE)
    benchmark().write(root / BENCHMARK_EVIDENCE)
    policy().write(root / POLICY)
    report("deployment", "draft", draft().digest()).write(root / report_path("deployment"))
