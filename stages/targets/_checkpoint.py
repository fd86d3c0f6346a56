"""Reading a Hugging Face-style checkpoint folder: safetensors by name, sharded or not, never unpickled.

A target stands in memory whole, or is stored: its layers, experts and tables are then read from the files each time one
is asked for and forgotten afterwards (StoredParts, StoredTable), so that a target of any size goes through a small memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor

from stages.contracts.errors import EngineError
from stages.targets._decoder import Decoder, DecoderConfig
from stages.targets._layers import GatedMLP, GroupedAttention, Layer, Linear, Parts
from stages.targets._quantised import Files, read_stored
from stages.targets._rope import read_rope

Part = TypeVar("Part")
# What `model.` and everything else is written as in a checkpoint: plain, Kimi-K2.5 as it ships, and as transformers names it.
_SPELLINGS = (("model.", ""), ("language_model.model.", "language_model."), ("model.language_model.", ""))
_PLAIN = ("F64", "F32", "F16", "BF16")


class StoredParts(Generic[Part]):
    """`count` parts, each read when it is asked for."""

    def __init__(self, count: int, read: Callable[[int], Part]) -> None:
        self._count, self._read = count, read

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, i: int, /) -> Part:
        return self._read(i % self._count)


class StoredTable:
    """A table [V, H] in the files, of which rows are read; `whole` reads all of it."""

    def __init__(self, tensor: Checkpoint, name: str, *shape: int) -> None:
        self._tensor, self._name, self._shape = tensor, name, shape
        self.device, self.dtype = torch.device(tensor.device), tensor.dtype

    def rows(self, ids: Tensor) -> Tensor:
        """The rows of `ids`, as F.embedding gives them."""
        wanted, place = ids.unique(return_inverse=True)
        return self._tensor.rows(self._name, wanted.tolist(), *self._shape)[place]

    def whole(self) -> Tensor:
        return self._tensor(self._name, *self._shape)


class Checkpoint:
    """Named tensors of a folder, read on demand. Names are as in a plain causal model, whatever stands before them.

    bytes_read: of tensors, as they lie in the files; names_read: theirs.
    """

    def __init__(
        self, folder: Path, device: str, dtype: torch.dtype, *, stored: bool = False, config: Mapping[str, Any]
    ) -> None:
        self.folder, self.device, self.dtype, self.stored = folder, device, dtype, stored
        index = folder / "model.safetensors.index.json"
        if index.exists():
            self._file_of: dict[str, str] = json.loads(index.read_text())["weight_map"]
        else:
            with safe_open(folder / "model.safetensors", "pt") as file:
                self._file_of = dict.fromkeys(file.keys(), "model.safetensors")
        self._open: dict[str, Any] = {}
        self._quantised = config.get("quantization_config") or {}
        self._spelling = next((w for w in _SPELLINGS if w[0] + "embed_tokens.weight" in self._file_of), _SPELLINGS[0])
        self.bytes_read, self.names_read = 0, set[str]()

    def __contains__(self, name: str) -> bool:
        return self._stored_name(name) in self._file_of

    def __call__(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor `name`, on the device and in the dtype asked for; quantised weights come back as numbers.

        Raises:
            EngineError: not there, not of `shape`, or in a form that is not read here.
        """
        tensor = read_stored(self._files(), self._stored_name(name), self._quantised)
        self._demand_shape(name, shape, tuple(tensor.shape))
        return tensor.to(dtype or self.dtype)

    def rows(self, name: str, ids: list[int], *shape: int) -> Tensor:
        """Rows `ids` of the table `name`, without reading the others."""
        full = self._stored_name(name)
        part = self._file(full).get_slice(full)
        self._demand_shape(name, shape, tuple(part.get_shape()))
        if part.get_dtype() not in _PLAIN:
            return self(name, *shape)[ids]
        read = [part[i : i + 1] for i in ids]
        self._count(full, read)
        return torch.cat(read).to(self.dtype)

    def parts(self, count: int, read: Callable[[int], Part]) -> Parts[Part]:
        """Parts by number: a list in memory, or read each time when the target is stored."""
        return StoredParts(count, read) if self.stored else [read(i) for i in range(count)]

    def _stored_name(self, name: str) -> str:
        model, rest = self._spelling
        return model + name.removeprefix("model.") if name.startswith("model.") else rest + name

    def _files(self) -> Files:
        return Files(self._file_of.__contains__, self._tensor)

    def _tensor(self, name: str) -> Tensor:
        tensor = self._file(name).get_tensor(name)
        self._count(name, [tensor])
        return tensor

    def _count(self, name: str, read: list[Tensor]) -> None:
        self.names_read.add(name)
        self.bytes_read += sum(t.nbytes for t in read)

    def _file(self, name: str) -> Any:
        if name not in self._file_of:
            raise EngineError(
                "The target lacks a tensor", where=str(self.folder), expected=name, do="fetch the checkpoint again"
            )
        file = self._file_of[name]
        if file not in self._open:
            self._open[file] = safe_open(self.folder / file, "pt", device=self.device)
        return self._open[file]

    def _demand_shape(self, name: str, shape: tuple[int, ...], found: tuple[int, ...]) -> None:
        if shape and found != shape:
            raise EngineError(
                "A tensor of the target does not fit its config.json",
                where=f"{self.folder}: {name}",
                expected=str(list(shape)),
                got=str(list(found)),
                do="use the config.json that came with the weights",
            )


def demand_plain(config: Mapping[str, Any]) -> None:
    """Raises EngineError for biases and activations that no family here computes, and whose absence no shape would show."""
    for key, plain in (("attention_bias", False), ("mlp_bias", False), ("hidden_act", "silu")):
        if (config.get(key) or plain) != plain:
            raise EngineError(
                "This target has something that is not computed here",
                where=f"config.json: {key}",
                expected=str(plain),
                got=str(config[key]),
                do="extract with engine sglang, or add it to stages/targets/_layers.py",
            )


def eos_of(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids that end a turn: those of config.json, then what generation_config.json names beyond them; servers take both."""
    generation = folder / "generation_config.json"
    told = [config, json.loads(generation.read_text())] if generation.exists() else [config]
    named = [t.get("eos_token_id") for t in told]
    ids = [i for eos in named for i in (eos if isinstance(eos, list) else [eos]) if i is not None]
    return tuple(dict.fromkeys(map(int, ids)))


def read_config(folder: Path, config: Mapping[str, Any]) -> DecoderConfig:
    """config.json of a Llama-shaped model.

    Raises:
        EngineError: a RoPE scaling, bias or activation this decoder does not compute.
    """
    demand_plain(config)
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    kind, theta, figures = read_rope(config)
    return DecoderConfig(
        layers=config["num_hidden_layers"],
        hidden_size=hidden,
        heads=heads,
        kv_heads=config.get("num_key_value_heads", heads),
        head_dim=config.get("head_dim") or hidden // heads,
        vocab_size=config["vocab_size"],
        eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=theta,
        max_positions=config.get("max_position_embeddings", 2048),
        eos_ids=eos_of(folder, config),
        bos_id=config.get("bos_token_id"),
        rope_scaling=figures,
        rope_kind=kind,
    )


def assemble(tensor: Checkpoint, c: DecoderConfig, read_layer: Callable[[int], Layer], *, tied: bool) -> Decoder:
    """A Decoder of these layers, in memory or stored, as the checkpoint was opened."""
    shape, head_name = (c.vocab_size, c.hidden_size), "model.embed_tokens.weight" if tied else "lm_head.weight"
    if tensor.stored:
        embedding, head = (
            StoredTable(tensor, "model.embed_tokens.weight", *shape),
            StoredTable(tensor, head_name, *shape),
        )
        norm = StoredTable(tensor, "model.norm.weight", c.hidden_size)
        return Decoder(c, embedding, tensor.parts(c.layers, read_layer), norm, head)
    layers = tensor.parts(c.layers, read_layer)
    embedding = tensor("model.embed_tokens.weight", *shape)
    head = embedding if tied else tensor(head_name, *shape)
    return Decoder(c, embedding, layers, tensor("model.norm.weight", c.hidden_size), head)


def read_decoder(
    folder: Path, config: dict[str, Any], device: str, dtype: str, *, qk_norm: bool, stored: bool = False
) -> Decoder:
    """A Decoder from the tensor names that Llama and its descendants share."""
    c = read_config(folder, config)
    tensor = Checkpoint(folder, device, getattr(torch, dtype), stored=stored, config=config)
    inter, H = config["intermediate_size"], c.hidden_size

    def read_layer(i: int) -> Layer:
        at = f"model.layers.{i}."
        qkv = [
            tensor(f"{at}self_attn.{n}_proj.weight", h * c.head_dim, H)
            for n, h in zip("qkv", (c.heads, c.kv_heads, c.kv_heads), strict=True)
        ]
        attention = GroupedAttention(
            qkv=Linear(torch.cat(qkv)),
            out=Linear(tensor(at + "self_attn.o_proj.weight", H, c.heads * c.head_dim)),
            heads=c.heads,
            kv_heads=c.kv_heads,
            head_dim=c.head_dim,
            eps=c.eps,
            q_norm=tensor(at + "self_attn.q_norm.weight", c.head_dim) if qk_norm else None,
            k_norm=tensor(at + "self_attn.k_norm.weight", c.head_dim) if qk_norm else None,
        )
        return Layer(
            input_norm=tensor(at + "input_layernorm.weight", H),
            attention=attention,
            post_norm=tensor(at + "post_attention_layernorm.weight", H),
            mlp=read_gated(tensor, at + "mlp.", inter, H),
        )

    return assemble(tensor, c, read_layer, tied=bool(config.get("tie_word_embeddings")))


def read_gated(tensor: Checkpoint, at: str, inter: int, H: int) -> GatedMLP:
    return GatedMLP(
        Linear(torch.cat([tensor(f"{at}{n}_proj.weight", inter, H) for n in ("gate", "up")])),
        Linear(tensor(at + "down_proj.weight", H, inter)),
    )
