"""Weights in fp8 with block scales and int4 with group scales are read as the numbers they stand for; others are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stages.contracts.errors import EngineError
from stages.targets import load_target
from stages.targets._decoder import Decoder
from stages.targets._latent import LatentAttention
from stages.targets._layers import GatedMLP
from stages.targets._mixture import Mixture
from stages.targets._quantised import unpack_int4, unscale_blocks
from tests import latent
from tests.targets.test_conformance import IDS, close

BLOCK, GROUP = 8, 16
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "symmetric": True, "group_size": GROUP}}},
}


def to_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """fp8 values and a scale for each block, written with loops so that nothing is shared with the code under test."""
    out, wide = weight.shape
    scale = torch.zeros(-(-out // BLOCK), -(-wide // BLOCK))
    value = torch.zeros_like(weight)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            block = (slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK))
            scale[i, j] = weight[block].abs().max() / 448
            value[block] = weight[block] / scale[i, j]
    return value.to(torch.float8_e4m3fn), scale


def to_int4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Words, scales, and what they stand for."""
    groups = weight.unflatten(1, (-1, GROUP))
    scale = (groups.abs().amax(-1) / 7).bfloat16()
    value = (groups / scale.float()[..., None]).round().clamp(-8, 7)
    words = torch.zeros(weight.shape[0], weight.shape[1] // 8, dtype=torch.int64)
    for i, one in enumerate(value.flatten(1).to(torch.int64).T + 8):
        words[:, i // 8] += one << 4 * (i % 8)
    return words.to(torch.int32), scale, (value * scale.float()[..., None]).flatten(1)


def quantise(folder: Path, kind: str) -> dict[str, Tensor]:
    """Quantise a target's files in place as its makers do, and return the plain weights that they now stand for."""
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    kept: dict[str, Tensor] = {}
    for name in [n for n in tensors if n.endswith("_proj.weight") and (kind == "fp8" or ".experts." in n)]:
        weight = tensors.pop(name)
        if kind == "fp8":
            tensors[name], tensors[name + "_scale_inv"] = to_fp8(weight)
            scale = tensors[name + "_scale_inv"].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            kept[name] = tensors[name].float() * scale[: weight.shape[0], : weight.shape[1]]
        else:
            words, scale, kept[name] = to_int4(weight)
            shape = torch.tensor(weight.shape)
            tensors |= {f"{name}_packed": words, f"{name}_scale": scale, f"{name}_shape": shape}
    (config.get("text_config", config))["quantization_config"] = FP8 if kind == "fp8" else INT4
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    plain = {n: t for n, t in tensors.items() if n.removesuffix("_scale_inv") not in kept and "weight_" not in n}
    return plain | kept


@pytest.mark.parametrize(("family", "kind"), [("deepseek_v3", "fp8"), ("kimi_k25", "int4")])
def test_a_quantised_target_is_the_one_of_the_numbers_it_stands_for(tmp_path: Path, family: str, kind: str) -> None:
    folder = latent.make_target(tmp_path / "t", family)
    exact = load_target(folder)
    plain = latent.make_target(tmp_path / "plain", family)
    save_file(quantise(folder, kind), plain / "model.safetensors", metadata={"format": "pt"})
    ids = torch.tensor(IDS)
    theirs, before = (t.packed(ids, [len(ids)], (1, 3)) for t in (load_target(plain), exact))
    assert not torch.allclose(before.last, theirs.last, atol=1e-3), "the weights were not rounded, so nothing is shown"
    for stored in (False, True):
        target = load_target(folder, stored=stored)
        ours = target.packed(ids, [len(ids)], (1, 3))
        close(ours.last, theirs.last)
        close(ours.states[3], theirs.states[3])
        for mine, other in zip(weights(target), weights(load_target(plain)), strict=True):
            assert torch.equal(mine, other)


def weights(target: Decoder) -> list[Tensor]:
    """Of one dense layer and one with experts, all that may be quantised."""
    found: list[Any] = []
    for layer in (target.layers[0], target.layers[3]):
        attention, mlp = layer.attention, layer.mlp
        assert isinstance(attention, LatentAttention)
        found += [attention.query[0], attention.kv_b, attention.out]
        for part in (mlp.experts[0], mlp.experts[7], mlp.shared) if isinstance(mlp, Mixture) else (mlp,):
            assert isinstance(part, GatedMLP)
            found += [part.gate_up, part.down]
    return [linear.weight for linear in found]


def test_fp8_weights_are_those_that_transformers_reads() -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    value, scale = to_fp8(torch.randn(64, 40, generator=torch.Generator().manual_seed(0)))
    theirs = Fp8Dequantize(None)._dequantize_one(value, scale, torch.float32)
    assert torch.equal(unscale_blocks(value, scale, (BLOCK, BLOCK)), theirs)


def test_words_are_those_of_compressed_tensors() -> None:
    """compressed-tensors 0.20.0 packs these values into these words."""
    for words, values in (([1985229328, -19088744], range(-8, 8)), ([-365201393], (7, -8, 0, -1, 3, -5, 2, 6))):
        packed, scale = torch.tensor([words], dtype=torch.int32), torch.full((1, 1), 0.5)
        assert (unpack_int4(packed, scale, (1, len(values))) * 2).tolist() == [list(values)]


def test_blocks_at_the_edge_are_cut() -> None:
    weight = torch.ones(130, 300).to(torch.float8_e4m3fn)
    scale = torch.arange(6, dtype=torch.float32).view(2, 3)
    plain = unscale_blocks(weight, scale)
    assert plain.shape == (130, 300)
    assert plain[127, 127] == 0 and plain[127, 128] == 1 and plain[127, 299] == 2 and plain[128, 0] == 3
    with pytest.raises(EngineError, match="do not fit its blocks") as error:
        unscale_blocks(weight, scale.T)
    assert error.value.expected == "scales [2, 3]" and error.value.got == "[3, 2]"


def test_words_and_scales_that_do_not_cover_a_weight_are_refused() -> None:
    for packed, scale in (((4, 3), (4, 2)), ((4, 4), (3, 2)), ((4, 4), (4, 3))):
        with pytest.raises(EngineError, match="do not fit its shape"):
            unpack_int4(torch.zeros(packed, dtype=torch.int32), torch.ones(scale), (4, 32))


NAME = "model.layers.1.mlp.experts.0.up_proj."


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"weight": torch.zeros(32, 64).to(torch.float8_e4m3fn)}, f"{NAME}weight, float8_e4m3fn"),
        ({"weight": torch.zeros(32, 64, dtype=torch.int8)}, f"{NAME}weight, int8"),
        ({"qweight": torch.zeros(8, 64, dtype=torch.int32)}, f"{NAME}qweight"),
        ({"weight_zero_point": torch.zeros(32, 1, dtype=torch.int32)}, f"{NAME}weight_zero_point"),
    ],
)
def test_another_kind_of_quantisation_is_refused_by_name(tmp_path: Path, change: dict[str, Tensor], where: str) -> None:
    folder = latent.make_target(tmp_path / "t")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {NAME + k: t for k, t in change.items()}, folder / "model.safetensors")
    with pytest.raises(EngineError, match="quantised in a form that is not read here") as error:
        load_target(folder)
    assert error.value.where == where and "give target.origin as an unquantised copy" in error.value.do


@pytest.mark.parametrize("told", [{"num_bits": 8}, {"symmetric": False}, {"type": "float"}])
def test_a_config_that_says_other_than_symmetric_four_bits_is_refused(tmp_path: Path, told: dict[str, Any]) -> None:
    folder = latent.make_target(tmp_path / "t")
    quantise(folder, "int4")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"] |= told
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineError, match="quantised in a form that is not read here"):
        load_target(folder)
