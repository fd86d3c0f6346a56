"""The draft as files: model.safetensors and config.json in the layout that SGLang loads, and the audit on reading back.

SGLang neither reports unknown tensor names nor missing ones (a file without lm_head serves at accept length 1.00), so
every name, shape and vocabulary entry is checked here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from stages.contracts.draft import norms_of, read_draft_config
from stages.contracts.errors import DataError, EngineError
from stages.contracts.files import canonical, write_whole
from stages.drafts._module import Eagle3, Eagle3Config

WEIGHTS, CONFIG = "model.safetensors", "config.json"
EMBEDDING = "embed_tokens.weight"
_MEND = "export the draft again: `dvc repro train`"
_WEIGHTS = (torch.float32, torch.bfloat16, torch.float16)
_KINDS = {"d2t": (torch.int64,), "t2d": (torch.bool,)}


@dataclass(frozen=True)
class DraftCheckpoint:
    """A draft read from its folder. `tensors` has the parameters by name; d2t i64 offsets, t2d bool [V]."""

    config: Eagle3Config
    tensors: dict[str, Tensor]
    d2t: Tensor
    t2d: Tensor
    layer_ids: tuple[int, ...]

    def target_ids(self) -> Tensor:
        """Target id of every draft id, i64."""
        return self.d2t + torch.arange(len(self.d2t))

    def module(self, embedding: Tensor) -> Eagle3:
        """The draft as a module over the target's embedding [V, H] (or its own, when the file carries one)."""
        draft = Eagle3(self.config, self.tensors.get(EMBEDDING, embedding))
        draft.load_state_dict({n: t for n, t in self.tensors.items() if n != EMBEDDING}, strict=True)
        return draft


def config_json(c: Eagle3Config, layer_ids: Sequence[int], dtype: str = "float32") -> dict[str, Any]:
    """config.json; `layer_ids` are the engine's own spelling of the capture points."""
    eos = list(c.eos_ids)
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "num_hidden_layers": 1,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "vocab_size": c.vocab_size,
        "draft_vocab_size": c.draft_vocab_size,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": c.eps,
        "rope_theta": c.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": c.max_positions,
        "bos_token_id": c.bos_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "torch_dtype": dtype,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(layer_ids), "use_aux_hidden_state": True},
        **dict.fromkeys(c.norms, True),
    }


def export(
    draft: Eagle3, folder: Path, layer_ids: Sequence[int], d2t: Tensor, t2d: Tensor, *, with_embedding: bool = False
) -> None:
    """Write the two files into `folder`; the target's embedding is left out unless asked for."""
    tensors = {name: tensor.detach().contiguous() for name, tensor in draft.state_dict().items()}
    if with_embedding:
        tensors[EMBEDDING] = draft.embedding.contiguous()
    tensors |= {"d2t": d2t.long().contiguous(), "t2d": t2d.bool().contiguous()}
    folder.mkdir(parents=True, exist_ok=True)
    dtype = str(draft.lm_head.weight.dtype).removeprefix("torch.")
    write_whole(folder / WEIGHTS, save(dict(sorted(tensors.items())), metadata={"format": "pt"}))
    write_whole(folder / CONFIG, canonical(config_json(draft.config, layer_ids, dtype)))


def read_draft(folder: Path) -> DraftCheckpoint:
    """Read a draft's folder and audit every name, shape and vocabulary entry.

    Raises:
        DataError: a file is missing or damaged, or d2t and t2d do not describe one vocabulary.
        EngineError: tensors are missing, unknown or misshapen, or config.json is not what an engine loads; all faults
            are told at once.
    """
    raw = read_draft_config(folder / CONFIG)
    config, layer_ids = _parse(raw, folder / CONFIG)
    try:
        tensors = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise DataError(
            "The draft's weights cannot be read", where=str(folder / WEIGHTS), got=str(error), do=_MEND
        ) from error
    _audit_tensors(tensors, config, folder / WEIGHTS)
    d2t, t2d = tensors.pop("d2t"), tensors.pop("t2d")
    check_vocabulary(d2t, t2d, str(folder / WEIGHTS))
    return DraftCheckpoint(config, tensors, d2t, t2d, layer_ids)


def check_vocabulary(d2t: Tensor, t2d: Tensor, where: str) -> None:
    """Raises:
    DataError: d2t's target ids are out of range, not ascending (so perhaps doubled), or not those that t2d marks.
    """
    ids = d2t + torch.arange(len(d2t))
    faults: list[str] = []
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= len(t2d)):
        faults.append(f"d2t leads to target id {int(ids.max())}, outside 0..{len(t2d) - 1}")
    elif bool((ids[1:] <= ids[:-1]).any()):
        at = int((ids[1:] <= ids[:-1]).nonzero()[0])
        faults.append(f"d2t's target ids do not ascend at draft id {at}: {int(ids[at])}, then {int(ids[at + 1])}")
    elif not torch.equal(t2d.nonzero()[:, 0], ids):
        marked = torch.zeros_like(t2d)
        marked[ids] = True
        wrong = (marked != t2d).nonzero()[:, 0]
        faults.append(f"d2t and t2d differ on {len(wrong)} target ids, the first {int(wrong[0])}")
    if faults:
        raise DataError(
            "The draft vocabulary contradicts itself",
            where=where,
            expected="target id = draft id + d2t[draft id], ascending, and t2d true at exactly those ids",
            got="; ".join(faults),
            do="run `dvc repro merge train`",
        )


def _parse(raw: dict[str, Any], where: Path) -> tuple[Eagle3Config, tuple[int, ...]]:
    eagle = raw.get("eagle_config") or {}
    expected = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
    expected["tie_word_embeddings"] = False
    faults = [f"{key} is {raw.get(key)!r}, not {value!r}" for key, value in expected.items() if raw.get(key) != value]
    if not eagle.get("use_aux_hidden_state"):
        faults.append("eagle_config.use_aux_hidden_state is not true: the engine would not feed the target's states")
    layer_ids = eagle.get("eagle_aux_hidden_state_layer_ids") or ()
    if len(layer_ids) != 3:
        faults.append(f"eagle_config.eagle_aux_hidden_state_layer_ids {list(layer_ids)} are not three")
    needed = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    needed += ("vocab_size", "draft_vocab_size", "rms_norm_eps", "rope_theta", "max_position_embeddings")
    faults += [f"{key} is missing" for key in needed if raw.get(key) is None]
    faults += [
        f"{key} is {raw[key]!r}, no number above 0"
        for key in needed
        if raw.get(key) is not None and not _positive(raw[key], whole=not key.startswith(("rms", "rope")))
    ]
    eos = raw.get("eos_token_id")
    if any(type(i) is not int for i in (eos if isinstance(eos, list) else [] if eos is None else [eos])):
        faults.append(f"eos_token_id is {eos!r}, no token id")
    if {"fc_norm", "norm_before_fc"} <= set(norms := norms_of(raw)):
        faults.append("fc_norm and norm_before_fc are both set: a draft is trained with one of them at most")
    if faults:
        raise EngineError("No engine loads this draft as meant", where=str(where), got="; ".join(faults), do=_MEND)
    sizes = {key: raw[key] for key in needed}
    config = Eagle3Config(
        hidden_size=sizes["hidden_size"],
        intermediate_size=sizes["intermediate_size"],
        heads=sizes["num_attention_heads"],
        kv_heads=sizes["num_key_value_heads"],
        head_dim=sizes["head_dim"],
        vocab_size=sizes["vocab_size"],
        draft_vocab_size=sizes["draft_vocab_size"],
        eps=float(sizes["rms_norm_eps"]),
        rope_theta=float(sizes["rope_theta"]),
        max_positions=sizes["max_position_embeddings"],
        bos_id=raw.get("bos_token_id"),
        eos_ids=tuple(eos) if isinstance(eos, list) else (() if eos is None else (int(eos),)),
        norms=norms,
    )
    return config, tuple(layer_ids)


def _positive(value: Any, whole: bool) -> bool:
    return type(value) in ((int,) if whole else (int, float)) and 0 < value < math.inf


def _audit_tensors(tensors: dict[str, Tensor], config: Eagle3Config, where: Path) -> None:
    shapes = config.shapes() | {"d2t": (config.draft_vocab_size,), "t2d": (config.vocab_size,)}
    optional = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    known = shapes | optional
    faults = [f"{name} is missing" for name in sorted(shapes.keys() - tensors.keys())]
    faults += [f"{name} is unknown" for name in sorted(tensors.keys() - known.keys())]
    faults += [
        f"{name} is {list(tensor.shape)}, not {list(known[name])}"
        for name, tensor in sorted(tensors.items())
        if name in known and tuple(tensor.shape) != known[name]
    ]
    faults += [
        f"{name} is {tensor.dtype}, not {' or '.join(map(str, kinds))}"
        for name, tensor in sorted(tensors.items())
        if name in known and tensor.dtype not in (kinds := _KINDS.get(name, _WEIGHTS))
    ]
    faults += [
        f"{name} is not finite"
        for name, tensor in sorted(tensors.items())
        if tensor.dtype in _WEIGHTS and not bool(tensor.isfinite().all())
    ]
    if faults:
        raise EngineError(
            "The draft's tensors are not those an engine loads",
            where=str(where),
            expected="exactly the names and shapes that config.json implies; engines skip what they do not know",
            got="; ".join(faults),
            do=_MEND,
        )
