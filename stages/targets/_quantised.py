"""Weights stored in fewer bits, read back as numbers: DeepSeek-V3's fp8 with a scale for each block, and the int4 with a
scale for each group that Kimi ships (compressed-tensors, pack-quantized).

    fp8   X.weight float8_e4m3fn [out, in], X.weight_scale_inv float32 [ceil(out/b), ceil(in/b)], b = 128:
          weight = value * scale of its block
    int4  X.weight_packed int32 [out, in/8], eight unsigned values a word, the lowest bits first, each with 8 added;
          X.weight_scale [out, in/g], g = 32; X.weight_shape [2]: weight = (value - 8) * scale of its group

Engines may multiply fp8 weights with activations rounded to fp8; states computed here are those of the weights alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stages.contracts.errors import EngineError

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_PLAIN = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_STRANGE = ("qweight", "weight_zero_point", "weight_g_idx", "weight_global_scale", "weight_blocks")


class Files(NamedTuple):
    """A checkpoint as seen here: whether it has a name, and the tensor of that name as it lies in the file."""

    has: Callable[[str], bool]
    tensor: Callable[[str], Tensor]


def read_stored(files: Files, name: str, quantised: Mapping[str, Any]) -> Tensor:
    """The tensor `name`, in its own dtype, or float32 when it was quantised.

    Args:
        quantised: config.json's quantization_config.

    Raises:
        EngineError: a form that is not read here, or one that contradicts the config.
    """
    stem = name.removesuffix("weight")
    if stem != name:
        if strange := [s for s in _STRANGE if files.has(stem + s)]:
            raise _refused(stem + strange[0], quantised)
        if files.has(stem + "weight_packed"):
            return _read_int4(files, stem, quantised)
    tensor = files.tensor(name)
    if tensor.dtype in _PLAIN:
        return tensor
    if tensor.dtype not in _FP8 or not files.has(name + "_scale_inv"):
        raise _refused(f"{name}, {str(tensor.dtype).removeprefix('torch.')}", quantised)
    return unscale_blocks(tensor, files.tensor(name + "_scale_inv"), tuple(quantised.get("weight_block_size") or ()))


def _refused(got: str, quantised: Mapping[str, Any]) -> EngineError:
    return EngineError(
        "The target's weights are quantised in a form that is not read here",
        where=got,
        expected="float32, float16 or bfloat16; float8_e4m3fn with weight_scale_inv for each block; "
        "symmetric 4-bit pack-quantized with weight_scale for each group",
        got=f"quantization_config {dict(quantised)}"[:400],
        do="give target.origin as an unquantised copy of the checkpoint, or extract with engine sglang",
    )


def unscale_blocks(weight: Tensor, scale: Tensor, block: tuple[int, ...] = (128, 128)) -> Tensor:
    """fp8 [out, in] times the scale of its block, float32.

    Raises:
        EngineError: scales that do not cover the weight in blocks of this size.
    """
    tall, wide = block or (128, 128)
    expected = (-(-weight.shape[0] // tall), -(-weight.shape[1] // wide))
    if tuple(scale.shape) != expected:
        raise EngineError(
            "The scales of an fp8 weight do not fit its blocks",
            where=f"a weight of {list(weight.shape)} in blocks of {tall} x {wide}",
            expected=f"scales {list(expected)}",
            got=str(list(scale.shape)),
            do="fetch the checkpoint again; config.json's quantization_config.weight_block_size must be its own",
        )
    scales = scale.float().repeat_interleave(tall, 0)[: weight.shape[0]]
    return weight.float() * scales.repeat_interleave(wide, 1)[:, : weight.shape[1]]


def _read_int4(files: Files, stem: str, quantised: Mapping[str, Any]) -> Tensor:
    groups = quantised.get("config_groups") or {}
    told = [g.get("weights") or {} for g in groups.values()]
    good = all(w.get("num_bits", 4) == 4 and w.get("type", "int") == "int" and w.get("symmetric", True) for w in told)
    if not good or quantised.get("format", "pack-quantized") != "pack-quantized":
        raise _refused(stem + "weight_packed", quantised)
    shape = tuple(files.tensor(stem + "weight_shape").tolist())
    return unpack_int4(files.tensor(stem + "weight_packed"), files.tensor(stem + "weight_scale"), shape)


def unpack_int4(packed: Tensor, scale: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Weight [out, in] float32 of `shape` from int32 words of eight values each and a scale for each group.

    Raises:
        EngineError: words or scales that do not cover `shape`.
    """
    out, wide = shape
    if tuple(packed.shape) != (out, -(-wide // 8)) or scale.shape[0] != out or wide % scale.shape[1]:
        raise EngineError(
            "The words and scales of a 4-bit weight do not fit its shape",
            where=f"a weight of {list(shape)}",
            expected=f"words [{out}, {-(-wide // 8)}] and scales [{out}, groups], the groups of equal size",
            got=f"words {list(packed.shape)}, scales {list(scale.shape)}",
            do="fetch the checkpoint again",
        )
    places = torch.arange(0, 32, 4, device=packed.device, dtype=torch.int32)
    values = ((packed[..., None] >> places) & 15).flatten(1)[:, :wide].float() - 8
    return (values.unflatten(1, (scale.shape[1], -1)) * scale.float()[..., None]).flatten(1)
