"""Small stores and checkpoints of every kind, as their tools write them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

H, TOKENS = 8, 12


def states(tokens: int, width: int = H, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(tokens, width, dtype=dtype)


def legacy_config(**changes: Any) -> dict[str, Any]:
    """data_config.json of speculators 0.3 to 0.4; changes: version, layer_ids, command, and any key of `data` or `model`."""
    model = {
        "target_model_path": "moonshotai/Kimi-K2.5",
        "tensor_parallel_size": 8,
        "max_model_len": 4096,
        "hidden_size": H,
    }
    data = {"train_data_path": "chats.jsonl", "seq_length": 4096, "max_samples": None, "num_samples": 4, "seed": 0}
    for part in (model, data):
        part.update({k: v for k, v in changes.items() if k in part})
    return {
        "version": "2.0",
        "generated_at": "2026-01-01T00:00:00+00:00",
        "speculators_version": changes.get("version", "0.4.1"),
        "reproducibility": {
            "command": changes.get("command", "data_generation_offline.py --batch-size 8"),
            "package_versions": {"speculators": changes.get("version", "0.4.1")},
            "gpu": "8x H200",
        },
        "model": model,
        "data": data,
        "hidden_states": {"layer_ids": changes.get("layer_ids", [2, 30, 58, 60]), "description": "…"},
        "generation": {"cache_dir": "…"},
        "format": {"file_pattern": "data_{idx}.pt", "schema": {}},
    }


def legacy_sample(path: Path, tokens: int = TOKENS, count: int = 4, width: int = H, mask: bool = True) -> None:
    value: dict[str, Any] = {
        "input_ids": torch.arange(tokens),
        "hidden_states": [states(tokens, width) for _ in range(count)],
    }
    if mask:
        value["loss_mask"] = torch.ones(tokens, dtype=torch.long)
    torch.save(value, path)


def legacy(
    folder: Path,
    numbers: Iterable[int] = range(4),
    config: dict[str, Any] | None = None,
    lengths: bool = True,
    **sample: Any,
) -> Path:
    """A folder of data_{i}.pt with config and lengths; `config` None: as a run writes it, {}: none."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = list(numbers)
    for i in numbers:
        legacy_sample(folder / f"data_{i}.pt", **sample)
    if config is None:
        config = legacy_config(num_samples=len(numbers))
    if config:
        (folder / "data_config.json").write_text(json.dumps(config))
    if lengths:
        told = {str(i): sample.get("tokens", TOKENS) for i in numbers}
        (folder / "sample_lengths.json").write_text(json.dumps(told))
    return folder


def specforge(folder: Path, numbers: Iterable[int], compressed: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for i in numbers:
        value = {
            "input_ids": torch.arange(TOKENS),
            "loss_mask": torch.ones(TOKENS, dtype=torch.long),
            "hidden_state": states(TOKENS)[None],
            "aux_hidden_state": states(TOKENS, 3 * H)[None],
        }
        path = folder / f"data_{i}.ckpt"
        if compressed:
            with gzip.open(f"{path}.gz", "wb") as file:
                torch.save(value, file)
        else:
            torch.save(value, path)
    return folder


def speculators(folder: Path, numbers: Iterable[int]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for i in numbers:
        tensors = {"hidden_states": torch.zeros(TOKENS, 4, H, dtype=torch.bfloat16), "token_ids": torch.arange(TOKENS)}
        save_file(tensors, folder / f"hs_{i}.safetensors")
    return folder


def angelslim(folder: Path, numbers: Iterable[int]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for i in numbers:
        value = {
            "input_ids": torch.arange(TOKENS)[None],
            "loss_mask": torch.ones(1, TOKENS, dtype=torch.long),
            "hidden_states": states(TOKENS, 3 * H)[None],
            "target_hiddens": states(TOKENS)[None],
        }
        torch.save(value, folder / f"data_{i}.ckpt")
    return folder


def model_optimizer(folder: Path, names: Iterable[str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        value = {
            "input_ids": torch.arange(TOKENS),
            "hidden_states": states(TOKENS),
            "aux_hidden_states": states(TOKENS, 3 * H),
            "loss_mask": torch.ones(TOKENS, dtype=torch.long),
            "conversation_id": name,
        }
        torch.save(value, folder / f"{name}.pt")
    return folder


def automodel(folder: Path, shards: Iterable[int], rows: int = 10, each: int = 4, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for k in shards:
        n = min(each, rows - k * each)
        tensors = {
            "input_ids": torch.zeros(n, TOKENS, dtype=torch.long),
            "attention_mask": torch.ones(n, TOKENS, dtype=torch.long),
            "loss_mask": torch.ones(n, TOKENS, dtype=torch.long),
            "aux_hidden_states": torch.zeros(n, TOKENS, 3 * H, dtype=torch.bfloat16),
            "position_mask": torch.ones(n, TOKENS, 1, dtype=torch.bool),
            "target_probs": torch.zeros(n, TOKENS, 6, dtype=torch.bfloat16),
        }
        save_file(tensors, folder / f"shard-{k:06d}.safetensors")
    manifest = {
        "format_version": 2,
        "target_model": "meta-llama/Llama-3.1-8B-Instruct",
        "seq_length": TOKENS,
        "dtype": "bf16",
        "num_samples": rows,
        "shard_size": each,
        "aux_hidden_dim": 3 * H,
        "aux_layer_ids": [1, 15, 28],
        "input_data": "chats",
        "shuffle_seed": 42,
        **changes,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def draft(
    folder: Path,
    drop: Iterable[str] = (),
    block: str = "midlayer",
    fed: int = 3,
    more: Iterable[str] = (),
    **config: Any,
) -> Path:
    """A draft as SGLang loads it: vocabulary 32, draft vocabulary 16. drop: tensors to leave out; more: norms' weights to
    add; config: keys changed."""
    folder.mkdir(parents=True, exist_ok=True)
    V, D = 32, 16
    tensors = {
        "fc.weight": torch.zeros(H, fed * H),
        f"{block}.self_attn.q_proj.weight": torch.zeros(H, 2 * H),
        "norm.weight": torch.zeros(H),
        "lm_head.weight": torch.zeros(D, H),
        "d2t": torch.zeros(D, dtype=torch.long),
        "t2d": torch.zeros(V, dtype=torch.bool),
    }
    tensors |= {name: torch.ones(H) for name in more}
    save_file({k: v for k, v in tensors.items() if k not in set(drop)}, folder / "model.safetensors")
    raw = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": H,
        "vocab_size": V,
        "draft_vocab_size": D,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 30, 58], "use_aux_hidden_state": True},
        **config,
    }
    (folder / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))
    return folder
