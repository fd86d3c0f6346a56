"""gate-deployment: the draft as an engine loads it, what it did there, and whether it may take the old draft's place."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stages.contracts.draft import DraftRecord
from stages.contracts.evidence import AcceptLength, BenchmarkEvidence, Ratio, ServeEvidence, ServingPolicy, TrainMetrics
from stages.contracts.manifest import TargetIdentity
from stages.contracts.params import Params
from stages.contracts.points import name_points
from stages.contracts.release import ReleaseRecord
from stages.contracts.report import GateReport
from stages.gates._judge import Expectation, Table, among, at_most, between, same, unique

if TYPE_CHECKING:
    from pandas import DataFrame

TRAIN = "run `dvc repro train`"
SERVE = "run `dvc repro serve-validate`"
BENCHMARK = "run `dvc repro benchmark`"
INERT = 1.02  # tokens a verification; SGLang serves a draft without lm_head, HTTP 200, at exactly 1.00
_CEILING = 0.995  # of the most there can be; every draft accepted is a draft compared with itself, or NaN logits
_LEAST_EQUAL = 0.5  # of simulated requests; bfloat16 states shift a verification now and then, not in most requests


@dataclass(frozen=True)
class Evidence:
    """What the gate looks at, as plain values.

    Args:
        record: models/draft/draft_record.json.
        config: models/draft/config.json.
        config_points: the points that the engine named in the record makes of config.json's layer ids.
        tensors: tensor, shape (as text), dtype, finite, of model.safetensors.
        d2t: offsets; target id = draft id + offset.
        in_t2d: ids for which t2d is true.
        weights_digest, config_digest: of the two files.
        target: the target on this disk.
        reports: the reports of the two earlier gates.
        prepared_digest: of the prepared rows that the draft's merged set names.
        release: the last release, or None before the first.
    """

    record: DraftRecord
    config: dict[str, Any]
    config_points: tuple[int, ...]
    tensors: DataFrame
    d2t: tuple[int, ...]
    in_t2d: frozenset[int]
    weights_digest: str
    config_digest: str
    target: TargetIdentity
    train: TrainMetrics
    serve: ServeEvidence
    benchmark: BenchmarkEvidence
    policy: ServingPolicy
    reports: tuple[GateReport, GateReport]
    prepared_digest: str
    release: ReleaseRecord | None


def tables(evidence: Evidence, params: Params) -> list[Table]:
    """Tables chain, tensors, config, vocabulary, parity, losslessness, accept length, simulation, sampling, policy."""
    return [
        _chain(evidence),
        _tensors(evidence, params),
        _config(evidence, params),
        _vocabulary(evidence, params),
        _parity(evidence, params),
        _losslessness(evidence, params),
        _accept(evidence, params),
        _simulation(evidence, params),
        _sampling(evidence, params),
        _policy(evidence, params),
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


def needed_tensors(config: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Shape and dtype class of every tensor that SGLang's EAGLE-3 loader reads, from config.json's sizes.

    Source: SGLang 0.5.23, models/llama_eagle3.py. It reports neither unknown names nor missing ones.
    """
    H, I, D, V = (
        int(config.get(k) or 0) for k in ("hidden_size", "intermediate_size", "draft_vocab_size", "vocab_size")
    )
    head = int(config.get("head_dim") or 0)
    q, kv = (int(config.get(k) or 0) * head for k in ("num_attention_heads", "num_key_value_heads"))
    layer: dict[str, list[int]] = {
        **{n: [H] for n in ("hidden_norm", "input_layernorm", "post_attention_layernorm")},
        "self_attn.q_proj": [q, 2 * H],
        "self_attn.k_proj": [kv, 2 * H],
        "self_attn.v_proj": [kv, 2 * H],
        "self_attn.o_proj": [H, q],
        "mlp.gate_proj": [I, H],
        "mlp.up_proj": [I, H],
        "mlp.down_proj": [H, I],
    }
    floats = {"fc": [H, 3 * H], "norm": [H], "lm_head": [D, H], **{f"midlayer.{n}": s for n, s in layer.items()}}
    needed = {f"{name}.weight": (str(shape), "floating") for name, shape in floats.items()}
    return {**needed, "d2t": (str([D]), "int64"), "t2d": (str([V]), "bool")}


def _tensors(e: Evidence, params: Params) -> Table:
    import pandas as pd

    needed = needed_tensors(e.config)
    optional = {"embed_tokens.weight": (str([params.target.vocab_size, params.target.hidden_size]), "floating")}
    found = {row["tensor"]: row for row in e.tensors.to_dict("records")}
    lines: list[dict[str, Any]] = []
    for name in sorted({*needed, *found}):
        shape, kind = {**optional, **needed}.get(name, ("any", "any"))
        row = found.get(name)
        floating = row is not None and row["dtype"] in ("float32", "bfloat16", "float16")
        lines.append(
            {
                "tensor": name,
                "state": "missing" if row is None else "unknown" if shape == "any" else "there",
                "shape": row["shape"] if row is not None and shape != "any" else shape,
                "shape_by_config": shape,
                "dtype": kind if row is None or shape == "any" else "floating" if floating else row["dtype"],
                "dtype_needed": kind,
                "finite": row is None or bool(row["finite"]),
            }
        )
    return Table("tensors", pd.DataFrame(lines), "tensor", _tensor_expectations())


def _tensor_expectations() -> tuple[Expectation, ...]:
    return (
        unique("tensor", says="no tensor twice", why="which one an engine reads is chance", do=TRAIN),
        among(
            "state",
            ["there"],
            says="the file holds exactly the tensors that the engine reads",
            why="SGLang says nothing of a missing or unknown name: without lm_head it serves at accept length 1.00",
            do="export under SGLang's names, then " + TRAIN,
        ),
        same(
            "shape",
            "shape_by_config",
            says="tensors have the shapes that config.json says",
            why="an engine that pads or slices a wrong shape guesses in silence",
            do=TRAIN,
        ),
        same(
            "dtype",
            "dtype_needed",
            says="weights are floating point, d2t is int64, t2d is bool",
            why="another dtype is cast on load, and an offset or a mark is no longer one",
            do=TRAIN,
        ),
        among(
            "finite",
            [True],
            says="weights are finite",
            why="NaN logits are accepted never or always, depending on the engine",
            do="lower train.learning_rate or train.gradient_clip, then " + TRAIN,
        ),
    )


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


def _vocabulary(e: Evidence, params: Params) -> Table:
    import pandas as pd

    ids = [i + offset for i, offset in enumerate(e.d2t)]
    marked = sorted(e.in_t2d)
    # the k-th marked id belongs to draft id k; a mark too many or too few shifts all behind it
    rows = pd.DataFrame(
        {
            "draft_id": range(len(ids)),
            "target_id": ids,
            "marked_id": [marked[i] if i < len(marked) else -1 for i in range(len(ids))],
            "marks_in_all": [len(marked)] * len(ids),
        }
    )
    checks = (
        between(
            "target_id",
            0,
            params.target.vocab_size - 1,
            says="every draft id leads to a target id",
            why="d2t holds offsets: target id = draft id + d2t[draft id]; read as ids it leads out of the vocabulary",
            do="run `dvc repro merge train`",
        ),
        unique(
            "target_id",
            says="no two draft ids mean the same token",
            why="its probability would be split between them",
            do="run `dvc repro merge train`",
        ),
        same(
            "target_id",
            "marked_id",
            says="d2t and t2d describe one vocabulary",
            why="training looks at t2d and serving at d2t; where they differ the draft says another token",
            do="run `dvc repro merge train`",
        ),
        among(
            "marks_in_all",
            [len(ids)],
            says="t2d marks as many tokens as there are draft ids",
            why="a mark too many is a token that the draft was taught and cannot say",
            do="run `dvc repro merge train`",
        ),
    )
    return Table("vocabulary", rows, "draft_id", checks)


def _parity(e: Evidence, params: Params) -> Table:
    import pandas as pd

    slots = sorted(e.serve.parity, key=lambda s: s.slot)
    points = e.record.points
    fed = tuple(s.nearest_point for s in slots)
    words = name_points(fed, points, params.target.layers) if len(fed) == len(points) else f"{len(fed)} slots were fed"
    rows = pd.DataFrame(
        [
            {
                "slot": f"slot {s.slot}",
                "trained_on": point,
                "claimed_point": s.claimed_point,
                "fed_point": s.nearest_point,
                "claimed_distance": s.claimed_distance,
                "next_best_distance": s.next_best_distance,
                "tokens": s.tokens,
                "words": f"trained on point {point}, fed point {s.nearest_point} ({words})",
            }
            for s, point in zip(slots, [*points, *[-1] * len(slots)], strict=False)
        ],
        columns=[
            *("slot", "trained_on", "claimed_point", "fed_point"),
            *("claimed_distance", "next_best_distance", "tokens", "words"),
        ],
    )
    rows["slots"], rows["slots_trained_on"] = len(slots), len(points)
    do = "mend eagle_aux_hidden_state_layer_ids for this engine and export again: " + TRAIN
    checks = (
        same(
            "slots",
            "slots_trained_on",
            says="the engine fed as many slots as the draft was trained on",
            why="SGLang drops doubled layer ids in silence",
            do=do,
        ),
        same(
            "fed_point",
            "trained_on",
            says="the engine feeds the draft the points that it was trained on",
            why="output stays right and accept length falls, by so little for one layer that no threshold sees it",
            do=do,
            tell="words",
        ),
        same(
            "claimed_point",
            "trained_on",
            says="the engine says that it feeds the points of the record",
            why="an engine with other layer ids than the draft's config was started with another draft's flags",
            do=do,
        ),
        at_most(
            "claimed_distance",
            "next_best_distance",
            says="the claimed point is nearer than every other",
            why="where another point is as near, the nearest is chance",
            do=do,
        ),
    )
    return Table("parity", rows, "slot", checks)


def _losslessness(e: Evidence, params: Params) -> Table:
    import pandas as pd

    greedy = e.serve.greedy
    compared = greedy.requests - greedy.near_ties
    line = {
        "mode": "greedy",
        "compared": compared,
        "identical_share": greedy.identical / compared if compared else 0.0,
        "words": f"{greedy.identical} of {compared} answers identical, {greedy.near_ties} near tie{'s' * (greedy.near_ties != 1)} apart"
        + (f"; differing: {', '.join(greedy.differing_prompt_ids[:5])}" if greedy.differing_prompt_ids else ""),
    }
    checks = (
        between(
            "compared",
            1,
            says="answers could be compared",
            why="when all are near ties, nothing is shown",
            do="raise serve.prompts_per_source, then " + SERVE,
        ),
        between(
            "identical_share",
            params.gates.deployment.min_identical_outputs,
            says="greedy answers are those of plain decoding",
            why="speculation may only change how fast an answer comes",
            do="serve the listed prompts both ways; the fault is in verification or in rolling back the cache",
            tell="words",
        ),
    )
    return Table("losslessness", pd.DataFrame([line]), "mode", checks)


def _accept(e: Evidence, params: Params) -> Table:
    import pandas as pd

    gate, release = params.gates.deployment, e.release
    before = {"overall": release.accept_length, **release.accept_length_by_domain} if release else {}
    found: dict[str, AcceptLength | None] = {"overall": e.serve.served, **e.serve.served_by_domain}
    least = {"overall": gate.min_accept_length, **gate.min_domain_accept_length}
    lines = [
        _accept_line(name, found.get(name), least.get(name, 1.0), before.get(name), gate.max_accept_length_loss)
        for name in dict.fromkeys([*found, *least])
    ]
    most = (e.serve.draft_steps + 1) * _CEILING
    return Table("accept length", pd.DataFrame(lines), "domain", _accept_expectations(most))


def _accept_line(
    name: str, found: AcceptLength | None, least: float, before: float | None, loss: float
) -> dict[str, Any]:
    length = found.accept_length if found else math.nan
    interval = f"{found.low:.2f} to {found.high:.2f}, {found.requests} requests" if found else "not served"
    return {
        "domain": name,
        "accept_length": length,
        "least": least,
        "least_by_release": before - loss if before is not None else 0.0,
        "words": f"{length:.3f} ({interval}), least {least:g}",
        "release_words": f"{length:.3f} against {before:.3f} of the last release"
        if before is not None
        else "no earlier release",
    }


def _accept_expectations(most: float) -> tuple[Expectation, ...]:
    more = "more distinct prompts help most: raise limits in prepare.sources, then `dvc repro`"
    return (
        at_most(
            "least",
            "accept_length",
            says="accept length reaches its threshold",
            why="below it a verification costs more than it brings",
            do=more,
            tell="words",
        ),
        between(
            "accept_length",
            INERT,
            says="the draft does something",
            why="1.00 is a draft whose guesses are never taken: a tensor not loaded, states not fed",
            do="look at tables tensors, config and parity first; then serve one prompt with the engine's log on",
        ),
        between(
            "accept_length",
            high=round(most, 3),
            says="accept length is below its ceiling",
            why="every guess taken is no draft: the target serves as its own, or NaN passes verification",
            do="check that models/draft is what the engine loaded",
        ),
        at_most(
            "least_by_release",
            "accept_length",
            says="accept length is not below the last release's by more than gates.deployment.max_accept_length_loss",
            why="a weekly retrain that loses a domain should not replace a draft that has it",
            do="compare `dvc params diff` and the sources' rows with the release's; keep the release until it is mended",
            tell="release_words",
        ),
    )


def _simulation(e: Evidence, params: Params) -> Table:
    import pandas as pd

    both = [r for r in e.serve.requests if r.simulated_verifications is not None]
    equal = sum(r.simulated_verifications == r.verifications for r in both)
    # Over the same requests: an answer that parted from the stored row at a near tie was served but cannot be simulated.
    verifications = sum(r.verifications for r in both)
    simulated = e.serve.simulated.accept_length
    served = sum(r.tokens for r in both) / verifications if verifications else simulated
    line = {
        "set": "requests served and simulated",
        "requests": len(both),
        "gap": abs(simulated - served) / served,
        "equal_share": equal / len(both) if both else 0.0,
        "gap_words": f"simulated {simulated:.3f}, served {served:.3f}",
        "equal_words": f"{equal} of {len(both)} requests took as many verifications as simulated",
    }
    do = "compare tables parity and slots; then the loss mask and the draft's first position in the engine"
    checks = (
        between(
            "requests",
            1,
            says="served requests were simulated too",
            why="the two can only be compared on the same requests",
            do=SERVE,
        ),
        between(
            "gap",
            high=params.gates.deployment.max_simulation_gap,
            says="served accept length is what the offline simulation foretold",
            why="a gap means that the engine feeds or reads something else than training did",
            do=do,
            tell="gap_words",
        ),
        between(
            "equal_share",
            _LEAST_EQUAL,
            says="request by request, verifications are as simulated",
            why="two averages can agree by chance; requests do not",
            do=do,
            tell="equal_words",
        ),
    )
    return Table("simulation", pd.DataFrame([line]), "set", checks)


def _sampling(e: Evidence, params: Params) -> Table:
    import pandas as pd

    s = e.serve.sampling
    line = {
        "mode": f"temperature {s.temperature:g}" if s else "sampling",
        "excess_distance": s.distance - s.distance_plain if s else 0.0,
        "words": f"{s.distance:.4f} against {s.distance_plain:.4f} of plain sampling, {s.draws} draws of {s.prompts} prompts"
        if s
        else "switched off in params.yaml (serve.sampling_prompts: 0); only greedy answers are vouched for",
    }
    check = between(
        "excess_distance",
        high=params.gates.deployment.max_sampling_distance,
        says="sampled tokens follow the target's own distribution",
        why="a biased acceptance rule changes answers without any of them looking wrong",
        do="mend the engine's rejection sampling, then " + SERVE,
        tell="words",
    )
    return Table("sampling", pd.DataFrame([line]), "mode", (check,))


def _told_apart(r: Ratio, least: float) -> float:
    """The ratio to judge: where the policy is off both arms run the same code, and a few noisy repeats must not refuse
    a draft. Slower means that the whole interval lies below plain decoding."""
    return r.ratio if r.high < 1 else max(r.ratio, least)


def _policy(e: Evidence, params: Params) -> Table:
    import pandas as pd

    ratios = {r.concurrency: r for r in e.benchmark.ratios if r.arm == "policy"}
    least = params.gates.deployment.min_policy_throughput_ratio
    lines: list[dict[str, Any]] = []
    for concurrency in sorted({a.concurrency for a in e.benchmark.arms} | set(ratios)):
        r = ratios.get(concurrency)
        lines.append(
            {
                "load": f"concurrency {concurrency}",
                "ratio": _told_apart(r, least) if r else math.nan,
                "draft_steps": r.draft_steps if r else -1,
                "draft_steps_by_policy": e.policy.steps_for(concurrency),
                "words": f"{r.ratio:.3f} × plain ({r.low:.3f} to {r.high:.3f}), {r.draft_steps} draft steps"
                if r
                else "the policy was not measured here",
            }
        )
    for line in lines:
        line["off_cost_ratio"] = e.benchmark.off_cost_ratio
    checks = (
        between(
            "ratio",
            least,
            says="the serving policy is never slower than plain decoding",
            why="speculation pays with compute that a full batch does not have",
            do="raise benchmark.repeats when the interval is wide; otherwise " + BENCHMARK,
            tell="words",
        ),
        same(
            "draft_steps",
            "draft_steps_by_policy",
            says="the policy measured is the policy written",
            why="a table that says something else than was timed promises nothing",
            do=BENCHMARK,
        ),
        between(
            "off_cost_ratio",
            least,
            says="switched off, speculation costs nothing",
            why="an engine that keeps drafting state while off is slower than one that never had a draft",
            do="look for work done for the draft at zero draft steps in the engine",
        ),
    )
    return Table("policy", pd.DataFrame(lines, columns=_POLICY_COLUMNS), "load", checks)


_POLICY_COLUMNS = ["load", "ratio", "draft_steps", "draft_steps_by_policy", "words", "off_cost_ratio"]
