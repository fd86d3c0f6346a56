"""A tiny random target with a real byte-level tokenizer and ChatML template: the whole line runs on it in seconds."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}"
    "{% endif %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTER = 6, 64, 4, 2, 16, 128
POINTS = (1, 3, 5)


def make_target(folder: Path, seed: int = 0, **changes: object) -> Path:
    """Write config.json, model.safetensors, tokenizer.json and tokenizer_config.json; equal seeds give equal bytes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<|im_start|>",
                "eos_token": "<|im_end|>",
                "pad_token": "<|im_end|>",
                "unk_token": "<|endoftext|>",
                "add_bos_token": False,
                "clean_up_tokenization_spaces": False,
                "chat_template": TEMPLATE,
            }
        )
    )
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN,
        "intermediate_size": INTER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": len(tokens),
        "max_position_embeddings": 1024,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "torch_dtype": "float32",
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    g = torch.Generator().manual_seed(seed)

    def rand(*shape: int, scale: float = 0.12) -> torch.Tensor:
        return torch.randn(*shape, generator=g) * scale

    V = len(tokens)
    tensors = {
        "model.embed_tokens.weight": rand(V, HIDDEN, scale=1.0),
        "model.norm.weight": 1 + rand(HIDDEN),
        "lm_head.weight": rand(V, HIDDEN),
    }
    for i in range(int(config["num_hidden_layers"])):  # type: ignore[call-overload]
        at = f"model.layers.{i}."
        tensors |= {
            at + "input_layernorm.weight": 1 + rand(HIDDEN),
            at + "post_attention_layernorm.weight": 1 + rand(HIDDEN),
            at + "self_attn.q_proj.weight": rand(HEADS * HEAD_DIM, HIDDEN),
            at + "self_attn.k_proj.weight": rand(KV_HEADS * HEAD_DIM, HIDDEN),
            at + "self_attn.v_proj.weight": rand(KV_HEADS * HEAD_DIM, HIDDEN),
            at + "self_attn.o_proj.weight": rand(HIDDEN, HEADS * HEAD_DIM),
            at + "mlp.gate_proj.weight": rand(INTER, HIDDEN),
            at + "mlp.up_proj.weight": rand(INTER, HIDDEN),
            at + "mlp.down_proj.weight": rand(HIDDEN, INTER),
        }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
