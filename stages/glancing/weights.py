"""A checkpoint folder: config.json, and the names and shapes of its tensors from headers alone."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, cast

from stages.glancing.contents import Shape, contents_of
from stages.glancing.runs import read_object
from stages.glancing.told import Told, many, some

INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_SHARD = re.compile(r"(model|pytorch_model|consolidated|draft).*\.(safetensors|bin)")


@dataclass
class Weights:
    """tensors: Shape by name, of all files; faults: (file, words); missing: files that the index names and are not there."""

    tensors: dict[str, Shape] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    bytes: int = 0
    faults: list[tuple[str, str]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)

    @property
    def parameters(self) -> int:
        """Numbers that were learned: the maps between a draft's and its target's vocabulary are none."""
        return sum(prod(s.dims) for n, s in self.tensors.items() if n.rpartition(".")[2] not in ("d2t", "t2d"))

    @property
    def dtypes(self) -> list[str]:
        """Of matrices, the commonest first."""
        count: dict[str, int] = {}
        for s in self.tensors.values():
            if len(s.dims) > 1:
                count[s.dtype] = count.get(s.dtype, 0) + prod(s.dims)
        return sorted(count, key=lambda d: -count[d])


def read_config(folder: Path) -> dict[str, Any] | str | None:
    """config.json as an object; None without one; else what is wrong with it."""
    return read_object(folder / "config.json")


def read_weights(folder: Path) -> Weights:
    """Headers of every file of weights in `folder`; safetensors are preferred where both kinds stand."""
    found = Weights()
    names = sorted(p.name for p in folder.iterdir() if p.is_file() and _SHARD.fullmatch(p.name))
    tensors = [n for n in names if n.endswith(".safetensors")] or names
    index = next((raw for name in INDEXES if isinstance(raw := read_object(folder / name), dict)), None)
    told = (
        cast("dict[str, str]", index.get("weight_map")) if index and isinstance(index.get("weight_map"), dict) else {}
    )
    found.missing = sorted(set(map(str, told.values())) - set(names))
    for name in tensors:
        contents = contents_of(folder / name)
        found.files.append(name)
        found.bytes += (folder / name).stat().st_size
        if contents.fault:
            found.faults.append((name, contents.fault))
        found.tensors |= {k: v for k, v in contents.tensors.items() if isinstance(v, Shape)}
    if told and not found.missing and not found.faults:
        found.absent = sorted(told.keys() - found.tensors.keys())
    return found


def tell_weights(told: Told, weights: Weights) -> None:
    """What holds for any checkpoint: files there, whole, of one dtype."""
    told.facts |= {
        "files": len(weights.files),
        "bytes": weights.bytes,
        "tensors": len(weights.tensors),
        "parameters": weights.parameters,
        "dtype": ", ".join(weights.dtypes) or None,
    }
    if not weights.files:
        told.add("fault", "No weights: neither model.safetensors nor a shard of it", "fetch the checkpoint again")
    if weights.missing:
        told.add(
            "fault",
            f"{many(len(weights.missing), 'file')} of the index are not there: {some(weights.missing)}",
            "fetch the checkpoint again",
        )
    if weights.absent:
        told.add(
            "fault",
            f"{many(len(weights.absent), 'tensor')} of the index are in no file: {some(weights.absent)}",
            "fetch the checkpoint again",
        )
    for name, words in weights.faults:
        told.add("fault", f"Damaged: {words}", "fetch or export it again", name)
    if weights.files and not weights.files[0].endswith(".safetensors"):
        told.add(
            "note",
            f"Weights are pickled ({weights.files[0]}); nothing here runs such a file",
            "convert them to safetensors",
        )
