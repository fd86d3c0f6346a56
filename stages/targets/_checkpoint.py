"""Reading a Hugging Face-style checkpoint folder: safetensors by name, sharded or not, never unpickled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from stages.contracts.errors import EngineError
from stages.targets._decoder import Decoder, DecoderConfig, Layer, Linear


class Checkpoint:
    """Named tensors of a folder, read on demand."""

    def __init__(self, folder: Path, device: str, dtype: torch.dtype) -> None:
        self.folder, self.device, self.dtype = folder, device, dtype
        index = folder / "model.safetensors.index.json"
        if index.exists():
            self._file_of: dict[str, str] = json.loads(index.read_text())["weight_map"]
        else:
            with safe_open(folder / "model.safetensors", "pt") as file:
                self._file_of = dict.fromkeys(file.keys(), "model.safetensors")

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def __call__(self, name: str, *shape: int) -> Tensor:
        """The tensor `name`, on the device and in the dtype asked for.

        Raises:
            EngineError: not there, or not of `shape`.
        """
        if name not in self._file_of:
            raise EngineError(
                "The target lacks a tensor", where=str(self.folder), expected=name, do="fetch the checkpoint again"
            )
        with safe_open(self.folder / self._file_of[name], "pt", device=self.device) as file:
            tensor = file.get_tensor(name)
        if shape and tuple(tensor.shape) != shape:
            raise EngineError(
                "A tensor of the target does not fit its config.json",
                where=f"{self.folder}: {name}",
                expected=str(list(shape)),
                got=str(list(tensor.shape)),
                do="use the config.json that came with the weights",
            )
        return tensor.to(self.dtype)


def read_config(config: dict[str, Any]) -> DecoderConfig:
    """config.json of a Llama-shaped model.

    Raises:
        EngineError: a RoPE scaling this decoder does not compute.
    """
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise EngineError(
            f"RoPE scaling {kind!r} is not computed here",
            where="config.json",
            expected="default or llama3",
            got=str(rope),
            do="extract with engine sglang, or add it to stages/targets/_decoder.py",
        )
    eos = config.get("eos_token_id")
    return DecoderConfig(
        layers=config["num_hidden_layers"],
        hidden_size=hidden,
        heads=heads,
        kv_heads=config.get("num_key_value_heads", heads),
        head_dim=config.get("head_dim") or hidden // heads,
        vocab_size=config["vocab_size"],
        eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=float(config.get("rope_theta") or rope.get("rope_theta") or 10000.0),
        max_positions=config.get("max_position_embeddings", 2048),
        eos_ids=tuple(eos) if isinstance(eos, list) else (() if eos is None else (int(eos),)),
        bos_id=config.get("bos_token_id"),
        rope_scaling={k: float(v) for k, v in rope.items() if isinstance(v, int | float)} if kind == "llama3" else {},
    )


def read_decoder(folder: Path, config: dict[str, Any], device: str, dtype: str, *, qk_norm: bool) -> Decoder:
    """A Decoder from the tensor names that Llama and its descendants share."""
    c = read_config(config)
    tensor = Checkpoint(folder, device, getattr(torch, dtype))
    inter, H = config["intermediate_size"], c.hidden_size
    layers: list[Layer] = []
    for i in range(c.layers):
        at = f"model.layers.{i}."
        qkv = [
            tensor(f"{at}self_attn.{n}_proj.weight", h * c.head_dim, H)
            for n, h in zip("qkv", (c.heads, c.kv_heads, c.kv_heads), strict=True)
        ]
        layers.append(
            Layer(
                input_norm=tensor(at + "input_layernorm.weight", H),
                qkv=Linear(torch.cat(qkv)),
                out=Linear(tensor(at + "self_attn.o_proj.weight", H, c.heads * c.head_dim)),
                post_norm=tensor(at + "post_attention_layernorm.weight", H),
                gate_up=Linear(torch.cat([tensor(at + f"mlp.{n}_proj.weight", inter, H) for n in ("gate", "up")])),
                down=Linear(tensor(at + "mlp.down_proj.weight", H, inter)),
                q_norm=tensor(at + "self_attn.q_norm.weight", c.head_dim) if qk_norm else None,
                k_norm=tensor(at + "self_attn.k_norm.weight", c.head_dim) if qk_norm else None,
            )
        )
    embedding = tensor("model.embed_tokens.weight", c.vocab_size, H)
    head = embedding if config.get("tie_word_embeddings") else tensor("lm_head.weight", c.vocab_size, H)
    return Decoder(c, embedding, layers, tensor("model.norm.weight", H), head)
