"""The draft's tensors and its vocabulary, as an engine loads them: tables of gate-deployment."""

from __future__ import annotations

from typing import Any

from stages.contracts.draft import norms_of
from stages.contracts.params import Params
from stages.gates._deployment_evidence import TRAIN, Evidence
from stages.gates._judge import Expectation, Table, among, between, same, unique


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
    norms = norms_of(config)
    if "fc_norm" in norms:
        floats |= {f"fc_norm.{i}": [H] for i in range(3)}
    if "norm_before_fc" in norms:
        floats["input_norm"] = [3 * H]
    needed = {f"{name}.weight": (str(shape), "floating") for name, shape in floats.items()}
    return {**needed, "d2t": (str([D]), "int64"), "t2d": (str([V]), "bool")}


def tensors(e: Evidence, params: Params) -> Table:
    """Every tensor the engine reads or the file holds: there, of the shape and dtype config.json asks for, finite."""
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


def vocabulary(e: Evidence, params: Params) -> Table:
    """Every draft id: the target id that d2t leads to, and the one that t2d marks in its place."""
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
