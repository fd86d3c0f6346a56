"""The draft in the words of engines and tools beside SGLang: vLLM's checkpoint, and the speculators format from 0.5 on.

Both call the layer `layers.0`. vLLM looks for layer ids at the top of config.json before it looks into eagle_config; the
speculators format has the layer's own config within, and the embedding in its file. Whatever is written is read back and
compared, value by value, before anyone sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from stages.contracts.draft import NORMS, read_draft_config
from stages.contracts.errors import EngineError
from stages.contracts.files import canonical, write_whole
from stages.drafts._export import CONFIG, EMBEDDING, WEIGHTS, DraftCheckpoint, config_json

_OURS, _THEIRS = "midlayer.", "layers.0."
_SPECULATORS = "0.9.0"  # the release whose reader this was held to; the format is that of 0.5 and later
_INSIDE = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
_INSIDE += ("num_hidden_layers", "hidden_act", "attention_bias", "mlp_bias", "rms_norm_eps", "max_position_embeddings")
_INSIDE += ("bos_token_id", "eos_token_id", "tie_word_embeddings", "model_type")


class Verifier(NamedTuple):
    """The target as a file names it: what it is called, and its config's architectures."""

    name: str
    architectures: Sequence[str]


@dataclass(frozen=True)
class DraftFormat:
    """One tool's files. dialect: how it numbers layers (see capture/dialects.py); config: config.json of a draft with
    these layer ids, this dtype and this many drafted tokens; with_embedding: whether its file holds the target's."""

    dialect: str
    config: Callable[[DraftCheckpoint, Sequence[int], str, int, Verifier], dict[str, Any]]
    ids_at: tuple[str, ...]
    with_embedding: bool


def _vllm(draft: DraftCheckpoint, ids: Sequence[int], dtype: str, steps: int, target: Verifier) -> dict[str, Any]:
    told = config_json(draft.config, ids, dtype)
    return told | {"eagle_aux_hidden_state_layer_ids": list(ids)}


def _speculators(
    draft: DraftCheckpoint, ids: Sequence[int], dtype: str, steps: int, target: Verifier
) -> dict[str, Any]:
    told = config_json(draft.config, ids, dtype)
    rope = {"rope_theta": draft.config.rope_theta, "rope_type": "default"}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": _SPECULATORS,
        "draft_vocab_size": draft.config.draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(ids),
        "norm_before_residual": False,
        **{name: name in draft.config.norms for name in NORMS},
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "transformer_layer_config": {name: told[name] for name in _INSIDE}
        | {"rope_theta": draft.config.rope_theta, "rope_parameters": rope, "torch_dtype": dtype},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": steps}],
            "verifier": {"name_or_path": target.name, "architectures": list(target.architectures)},
        },
    }


FORMATS = {
    "vllm": DraftFormat("vllm", _vllm, ("eagle_aux_hidden_state_layer_ids",), False),
    "speculators": DraftFormat("speculators", _speculators, ("eagle_aux_hidden_state_layer_ids",), True),
}


def write_as(
    name: str,
    draft: DraftCheckpoint,
    folder: Path,
    layer_ids: Sequence[int],
    *,
    steps: int,
    target: Verifier,
    embedding: Tensor,
) -> None:
    """Write `draft` below `folder` in format `name`, then read it back.

    Args:
        layer_ids: in the format's own dialect.
        steps: drafted tokens a verification that the file proposes.
        embedding: the target's [V, H]; written where the format has it.

    Raises:
        EngineError: what was read back is not what was to be written.
    """
    wanted = FORMATS[name]
    dtype = draft.tensors["fc.weight"].dtype
    tensors = {n.replace(_OURS, _THEIRS): t.contiguous() for n, t in draft.tensors.items() if n != EMBEDDING}
    if wanted.with_embedding:
        tensors[EMBEDDING] = embedding.to(dtype).contiguous()
    tensors |= {"d2t": draft.d2t.contiguous(), "t2d": draft.t2d.contiguous()}
    config = wanted.config(draft, layer_ids, str(dtype).removeprefix("torch."), steps, target)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / WEIGHTS, save(dict(sorted(tensors.items())), metadata={"format": "pt"}))
    write_whole(folder / CONFIG, canonical(config))
    audit(name, draft, folder, layer_ids, embedding)


def audit(name: str, draft: DraftCheckpoint, folder: Path, layer_ids: Sequence[int], embedding: Tensor) -> None:
    """Read files of format `name` back and compare them with the draft that they are to be.

    Raises:
        EngineError: every name, shape, value and layer id that differs, at once.
    """
    wanted, there = FORMATS[name], load_file(folder / WEIGHTS)
    good = {n.replace(_OURS, _THEIRS): t for n, t in draft.tensors.items() if n != EMBEDDING}
    good |= {"d2t": draft.d2t, "t2d": draft.t2d}
    if wanted.with_embedding:
        good[EMBEDDING] = embedding.to(draft.tensors["fc.weight"].dtype)
    faults = [f"{n} is missing" for n in sorted(good.keys() - there.keys())]
    faults += [f"{n} is unknown" for n in sorted(there.keys() - good.keys())]
    faults += [
        f"{n} is not the draft's"
        for n in sorted(good.keys() & there.keys())
        if there[n].dtype != good[n].dtype or not torch.equal(there[n], good[n].cpu())
    ]
    raw = read_draft_config(folder / CONFIG)
    for key in wanted.ids_at:
        if raw.get(key) != list(layer_ids):
            faults.append(f"{key} is {raw.get(key)}, not {list(layer_ids)}")
    faults += _size_faults(raw, draft)
    if faults:
        raise EngineError(
            f"This is not the draft in {name}'s format",
            where=str(folder),
            expected="the tensors, sizes and layer ids of the draft that was exported",
            got="; ".join(faults),
            do=f"write it again: `python -m stages.export_draft {name} {folder}`",
        )


def _size_faults(raw: dict[str, Any], draft: DraftCheckpoint) -> list[str]:
    good = config_json(draft.config, ())
    inside = raw.get("transformer_layer_config", raw)
    pairs = [(key, good[key], inside.get(key)) for key in (*_INSIDE, "rope_theta")]
    pairs.append(("draft_vocab_size", good["draft_vocab_size"], raw.get("draft_vocab_size")))
    pairs += [(name, name in draft.config.norms, raw.get(name, False)) for name in NORMS]
    return [f"{key} is {got!r}, not {value!r}" for key, value, got in pairs if got != value]
