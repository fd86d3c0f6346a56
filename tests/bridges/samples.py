"""Small stores in the forms that other tools write, made from states that are known. Written as their own code does it."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN = 8


class Sample(NamedTuple):
    """ids i64 [L], mask i64 [L], states bf16 [L, 4, H]: three auxiliary ones and the last."""

    ids: Tensor
    mask: Tensor
    states: Tensor


def make_samples(count: int = 4, seed: int = 0, hidden: int = HIDDEN) -> list[Sample]:
    g = torch.Generator().manual_seed(seed)
    samples = []
    for i in range(count):
        length = 5 + 2 * i
        ids = torch.randint(10, 90, (length,), generator=g)
        mask = (torch.arange(length) >= length // 2).long()
        samples.append(Sample(ids, mask, torch.randn(length, 4, hidden, generator=g).bfloat16()))
    return samples


def config(layer_ids: Sequence[int], hidden: int = HIDDEN, version: str = "0.3.0") -> dict[str, Any]:
    """data_config.json as speculators 0.3 writes it at the end of a run."""
    return {
        "version": "2.0",
        "generated_at": "2026-01-05T10:00:00+00:00",
        "speculators_version": version,
        "reproducibility": {
            "command": "data_generation_offline.py",
            "package_versions": {"torch": "2.9.0", "vllm": "0.12.0", "transformers": "4.57.0", "speculators": version},
            "gpu": "8x H100",
        },
        "model": {
            "target_model_path": "tiny",
            "tensor_parallel_size": 8,
            "gpu_memory_utilization": 0.8,
            "hidden_size": hidden,
        },
        "data": {
            "train_data_path": "rows.jsonl",
            "seq_length": 4096,
            "max_samples": None,
            "num_samples": 4,
            "seed": 0,
            "chat_template_note": "Uses tokenizer's built-in chat template",
        },
        "hidden_states": {
            "layer_ids": list(layer_ids),
            "description": "Layers selected for EAGLE3 fusion and target logits",
        },
        "generation": {"cache_dir": "cache"},
        "format": {"file_pattern": "data_{idx}.pt", "data_format_version": 1, "schema": {}},
    }


def legacy_dict(sample: Sample) -> dict[str, Any]:
    """As speculators 0.3 saves it: states as a list, each a tensor of its own."""
    listed = [s.contiguous() for s in sample.states.unbind(1)]
    return {"input_ids": sample.ids, "hidden_states": listed, "loss_mask": sample.mask}


def legacy(
    root: Path, samples: Sequence[Sample], layer_ids: Sequence[int] | None = (0, 2, 4, 5), start: int = 0
) -> Path:
    """One run: data_{i}.pt from `start` on; a config and lengths unless it crashed (`layer_ids` None)."""
    root.mkdir(parents=True, exist_ok=True)
    for i, sample in enumerate(samples, start):
        torch.save(legacy_dict(sample), root / f"data_{i}.pt")
    if layer_ids is not None:
        hidden = samples[0].states.shape[-1]
        (root / "data_config.json").write_text(json.dumps(config(layer_ids, hidden)))
        lengths = {str(i): len(s.ids) for i, s in enumerate(samples, start)}
        (root / "sample_lengths.json").write_text(json.dumps(lengths))
    return root


def legacy_rows(
    root: Path, samples: Sequence[Sample], per_folder: int, layer_ids: Sequence[int] | None = (0, 2, 4, 5)
) -> Path:
    """Runs in rows_{a}-{b}/, end exclusive, the number of a file counted over all."""
    for a in range(0, len(samples), per_folder):
        part = samples[a : a + per_folder]
        legacy(root / f"rows_{a}-{a + len(part)}", part, layer_ids, a)
    return root


def specforge(root: Path, samples: Sequence[Sample], packed: bool = False, pad_to: int = 0, pad_id: int = 2) -> Path:
    """rows_0-2000/data_{i}.ckpt[.gz], padded to `pad_to` tokens."""
    folder = root / "rows_0-2000"
    folder.mkdir(parents=True, exist_ok=True)
    for i, s in enumerate(samples):
        more = max(pad_to - len(s.ids), 0)
        states = torch.cat([s.states, torch.ones(more, *s.states.shape[1:], dtype=s.states.dtype)])
        value = {
            "input_ids": torch.cat([s.ids, torch.full((more,), pad_id)]),
            "loss_mask": torch.cat([s.mask, torch.zeros(more, dtype=torch.long)]),
            "hidden_state": states[None, :, 3].contiguous(),
            "aux_hidden_state": states[None, :, :3].flatten(2).contiguous(),
        }
        if packed:
            buffer = io.BytesIO()
            torch.save(value, buffer)
            (folder / f"data_{i}.ckpt.gz").write_bytes(gzip.compress(buffer.getvalue(), mtime=0))
        else:
            torch.save(value, folder / f"data_{i}.ckpt")
    return root


def angelslim(root: Path, samples: Sequence[Sample]) -> Path:
    folder = root / "rows_0-5000"
    folder.mkdir(parents=True, exist_ok=True)
    for i, s in enumerate(samples):
        value = {"input_ids": s.ids[None], "loss_mask": s.mask[None], "hidden_states": s.states[None, :, :3].flatten(2)}
        torch.save(value | {"target_hiddens": s.states[None, :, 3].contiguous()}, folder / f"data_{i}.ckpt")
    return root


def model_optimizer(root: Path, samples: Sequence[Sample], prenorm: bool | None = None) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for i, s in enumerate(samples):
        value: dict[str, Any] = {
            "input_ids": s.ids,
            "hidden_states": s.states[:, 3].contiguous(),
            "aux_hidden_states": s.states[:, :3].flatten(1),
            "loss_mask": s.mask,
            "conversation_id": f"chat-{i:03d}",
        }
        if prenorm is not None:
            value["hidden_states_prenorm"] = prenorm
        torch.save(value, root / f"chat-{i:03d}.pt")
    return root


def speculators(root: Path, samples: Sequence[Sample]) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for i, s in enumerate(samples):
        save_file({"hidden_states": s.states, "token_ids": s.ids}, root / f"hs_{i}.safetensors")
    return root


def nemo_automodel(
    root: Path, samples: Sequence[Sample], shard_size: int = 3, layer_ids: Sequence[int] = (0, 2, 4)
) -> Path:
    """manifest.json and shards, rows padded on the right to one length; soft targets instead of a last state."""
    root.mkdir(parents=True, exist_ok=True)
    longest = max(len(s.ids) for s in samples) + 2

    def padded(x: Tensor) -> Tensor:
        return torch.cat([x, x.new_zeros(longest - len(x), *x.shape[1:])])

    for k in range(0, len(samples), shard_size):
        part = samples[k : k + shard_size]
        save_file(
            {
                "input_ids": torch.stack([padded(s.ids) for s in part]),
                "attention_mask": torch.stack([padded(torch.ones_like(s.ids)) for s in part]),
                "loss_mask": torch.stack([padded(s.mask) for s in part]),
                "aux_hidden_states": torch.stack([padded(s.states[:, :3].flatten(1)) for s in part]),
                "position_mask": torch.stack([padded(s.mask)[:, None].bool() for s in part]),
                "target_probs": torch.full((len(part), longest, 16), 1 / 16, dtype=torch.bfloat16),
            },
            root / f"shard-{k // shard_size:06d}.safetensors",
        )
    hidden = samples[0].states.shape[-1]
    manifest = {
        "format_version": 2,
        "num_samples": len(samples),
        "shard_size": shard_size,
        "aux_layer_ids": list(layer_ids),
        "aux_hidden_dim": 3 * hidden,
        "draft_vocab_size": 16,
        "seq_length": longest,
    }
    (root / "manifest.json").write_text(json.dumps(manifest))
    return root
