"""data_config.json of speculators, and what else a tool writes of a run: read leniently, since people edit and copy it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from stages.contracts.adoption import MENDED_MASKS

CONFIG, LENGTHS = "data_config.json", "sample_lengths.json"
_MAX_JSON = 256 << 20
_BATCH = re.compile(r"--batch[-_]size[ =](\d{1,9})(?!\d)")


@dataclass(frozen=True)
class Run:
    """What one run says of itself; None where it does not. folder: relative to the store's root.

    mended: whether mend_masks put its masks in order; batch_size: rows in a batch, from the command; 0 when the command names none, so that the tool's default held.
    """

    folder: str
    tool: str = ""
    version: str | None = None
    layer_ids: tuple[int, ...] | None = None
    hidden_size: int | None = None
    target: str | None = None
    seq_length: int | None = None
    max_model_len: int | None = None
    rows: int | None = None
    rows_per_shard: int | None = None
    batch_size: int | None = None
    seed: int | None = None
    source: str | None = None
    dtype: str | None = None
    mended: bool = False


def read_object(path: Path) -> dict[str, Any] | str | None:
    """A JSON object; None where there is no file; else what is wrong with it."""
    try:
        if path.exists() and not path.is_file():
            return "no file"
        if path.stat().st_size > _MAX_JSON:
            return f"{path.stat().st_size} bytes, too long to be one"
        value: object = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        return str(error)
    return cast("dict[str, Any]", value) if isinstance(value, dict) else f"a {type(value).__name__}, no object"


def whole(value: object) -> int | None:
    return value if type(value) is int else None


def wholes(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, list) or not all(type(v) is int for v in cast("list[object]", value)):
        return None
    return tuple(cast("list[int]", value))


def text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def section(raw: dict[str, Any], name: str) -> dict[str, Any]:
    value = raw.get(name)
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def speculators_run(folder: str, raw: dict[str, Any]) -> Run:
    """A data_config.json of speculators 0.3 to 0.4."""
    model, data, made = section(raw, "model"), section(raw, "data"), section(raw, "reproducibility")
    command = text(made.get("command"))
    batch = _BATCH.search(command) if command else None
    packages = section(made, "package_versions")
    return Run(
        folder=folder,
        tool="speculators",
        version=text(raw.get("speculators_version")) or text(packages.get("speculators")),
        layer_ids=wholes(section(raw, "hidden_states").get("layer_ids")),
        hidden_size=whole(model.get("hidden_size")),
        target=text(model.get("target_model_path")),
        seq_length=whole(data.get("seq_length")),
        max_model_len=whole(model.get("max_model_len")),
        rows=whole(data.get("num_samples")),
        batch_size=int(batch[1]) if batch else 0 if command else None,
        seed=whole(data.get("seed")),
        source=text(data.get("train_data_path")),
    )


def automodel_run(raw: dict[str, Any]) -> Run:
    """manifest.json of NeMo Automodel's eagle3 cache."""
    ids = wholes(raw.get("aux_layer_ids"))
    width = whole(raw.get("aux_hidden_dim"))
    return Run(
        folder="",
        tool="nemo_automodel",
        version=f"format {raw.get('format_version')}",
        layer_ids=ids,
        hidden_size=width // len(ids) if width and ids else None,
        target=text(raw.get("target_model")),
        seq_length=whole(raw.get("seq_length")),
        rows=whole(raw.get("num_samples")),
        rows_per_shard=whole(raw.get("shard_size")),
        seed=whole(raw.get("shuffle_seed")),
        source=text(raw.get("input_data")),
        dtype=text(raw.get("dtype")),
    )


def read_runs(root: Path, folders: list[str], tool: str) -> tuple[list[Run], list[tuple[str, str]]]:
    """Runs that left a config, and the configs that cannot be read with the reason."""
    runs: list[Run] = []
    bad: list[tuple[str, str]] = []
    if tool == "nemo_automodel":
        raw = read_object(root / "manifest.json")
        if isinstance(raw, dict):
            runs.append(automodel_run(raw))
        elif raw:
            bad.append(("manifest.json", raw))
        return runs, bad
    mended = read_object(root / MENDED_MASKS)
    in_order = section(mended, "folders") if isinstance(mended, dict) else {}
    for folder in folders if "" in folders else ["", *folders]:
        raw = read_object(root / folder / CONFIG)
        if isinstance(raw, dict):
            run = speculators_run(folder, raw)
            runs.append(replace(run, mended=folder in in_order or (not folder and bool(in_order))))
        elif raw:
            bad.append((f"{folder}/{CONFIG}".lstrip("/"), raw))
    return runs, bad


def read_lengths(root: Path, folder: str) -> dict[str, int] | str | None:
    """sample_lengths.json of a folder: index as text -> tokens; None where there is none, or what is wrong with it."""
    raw = read_object(root / folder / LENGTHS)
    if not isinstance(raw, dict):
        return raw
    lengths = {k: v for k, v in raw.items() if type(v) is int and v >= 0}
    return lengths if len(lengths) == len(raw) else f"{len(raw) - len(lengths)} entries are no number of tokens"
