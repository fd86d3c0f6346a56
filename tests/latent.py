"""Tiny random targets of DeepSeek-V3's kind (latent attention, mixture of experts), laid out as each family ships them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests import tiny

EXPERTS, CHOSEN, DENSE = 8, 2, 1
YARN = {
    "type": "yarn",
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}
VISION = {
    "model_type": "kimi_k25_vision",
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "patch_size": 2,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
    "pos_emb_time": 2,
}
FAMILIES = ("deepseek_v3", "kimi_k2", "kimi_k25")


def text_config(**changes: object) -> dict[str, Any]:
    """config.json of the language model; head_dim is left to the model, as DeepSeek leaves it."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_act": "silu",
        "attention_bias": False,
        "num_hidden_layers": tiny.LAYERS,
        "hidden_size": tiny.HIDDEN,
        "intermediate_size": tiny.INTER,
        "num_attention_heads": tiny.HEADS,
        "num_key_value_heads": tiny.HEADS,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": CHOSEN,
        "moe_intermediate_size": 32,
        "moe_layer_freq": 1,
        "first_k_dense_replace": DENSE,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 0,
        "vocab_size": 259,
        "max_position_embeddings": 1024,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
        **changes,
    }


def make_tensors(c: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Weights by the names that DeepSeek-V3 ships, an expert at a time."""
    g = torch.Generator().manual_seed(seed)

    def rand(*shape: int, scale: float = 0.12) -> Tensor:
        return torch.randn(*shape, generator=g) * scale

    H, V, heads, latent, rope = c["hidden_size"], c["vocab_size"], c["num_attention_heads"], 32, c["qk_rope_head_dim"]
    plain, value, rank = c["qk_nope_head_dim"], c["v_head_dim"], c["q_lora_rank"]

    def gated(at: str, inter: int) -> dict[str, Tensor]:
        return {
            f"{at}gate_proj.weight": rand(inter, H),
            f"{at}up_proj.weight": rand(inter, H),
            f"{at}down_proj.weight": rand(H, inter),
        }

    tensors = {
        "model.embed_tokens.weight": rand(V, H, scale=1.0),
        "model.norm.weight": 1 + rand(H),
        "lm_head.weight": rand(V, H),
    }
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}."
        tensors[at + "input_layernorm.weight"] = 1 + rand(H)
        tensors[at + "post_attention_layernorm.weight"] = 1 + rand(H)
        if rank is None:
            tensors[at + "self_attn.q_proj.weight"] = rand(heads * (plain + rope), H)
        else:
            tensors[at + "self_attn.q_a_proj.weight"] = rand(rank, H)
            tensors[at + "self_attn.q_a_layernorm.weight"] = 1 + rand(rank)
            tensors[at + "self_attn.q_b_proj.weight"] = rand(heads * (plain + rope), rank, scale=0.3)
        tensors[at + "self_attn.kv_a_proj_with_mqa.weight"] = rand(latent + rope, H)
        tensors[at + "self_attn.kv_a_layernorm.weight"] = 1 + rand(latent)
        tensors[at + "self_attn.kv_b_proj.weight"] = rand(heads * (plain + value), latent, scale=0.3)
        tensors[at + "self_attn.o_proj.weight"] = rand(H, heads * value)
        if i < c["first_k_dense_replace"]:
            tensors |= gated(at + "mlp.", c["intermediate_size"])
            continue
        tensors[at + "mlp.gate.weight"] = rand(EXPERTS, H, scale=0.5)
        tensors[at + "mlp.gate.e_score_correction_bias"] = rand(EXPERTS, scale=0.3)
        for e in range(EXPERTS):
            tensors |= gated(f"{at}mlp.experts.{e}.", c["moe_intermediate_size"])
        tensors |= gated(at + "mlp.shared_experts.", c["moe_intermediate_size"] * c["n_shared_experts"])
    return tensors


def make_target(folder: Path, family: str = "deepseek_v3", seed: int = 0, **changes: object) -> Path:
    """A target's folder with tokenizer, config.json and safetensors; kimi_k25 as a text model within a larger one."""
    tiny.make_target(folder, seed)
    config = text_config(**changes)
    tensors = make_tensors(config, seed)
    if family == "kimi_k2":
        config |= {"model_type": "kimi_k2"}
    if family == "kimi_k25":
        tensors = {f"language_model.{name}": t for name, t in tensors.items()}
        tensors["vision_tower.not_read"] = torch.ones(2, 2)
        config = {
            "architectures": ["KimiK25ForConditionalGeneration"],
            "model_type": "kimi_k25",
            "text_config": config | {"model_type": "kimi_k2"},
            "vision_config": VISION,
            "projection_hidden_size": 32,
            "tie_word_embeddings": False,
        }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def shard(folder: Path, tensors: dict[str, Tensor], layers: int) -> None:
    """Write weights as a file a layer and one for the rest, with an index, in place of the single file."""
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        at = name.split("layers.")[1].split(".")[0] if "layers." in name else str(layers)
        parts.setdefault(f"model-{int(at) + 1:05}-of-{layers + 1:05}.safetensors", {})[name] = tensor
    for file, part in parts.items():
        save_file(part, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "model.safetensors").unlink(missing_ok=True)
