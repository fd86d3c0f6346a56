"""An SGLang plug-in: a draft of this line is served as it was judged by gate-deployment, or the server does not start.

SGLang itself reports neither missing tensors nor wrong layer ids nor an algorithm that leaves the draft inert; it serves at an
accept length of 1.00. The record that travels with every draft of this line says what it must find. A draft without a record is
not this line's, and is let through. Standard library only: this runs inside SGLang's own environment.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

VERSION = "0.5.23"
HOOKED = "sglang.srt.server_args.ServerArgs.check_server_args"
RECORD = "draft_record.json"
_READ = 1 << 22


def register() -> None:
    """Called by SGLang in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(HOOKED, refuse, HookType.BEFORE)


def refuse(server_args: Any, *more: Any, **named: Any) -> None:
    """Before SGLang's own check of its arguments.

    Raises:
        ValueError: all that is wrong, at once.
    """
    import sglang

    settings = server_args.resolved_dict()
    draft = settings.get("speculative_draft_model_path")
    if not draft or not (Path(draft) / RECORD).exists():
        return
    if faults := faults_of(settings, Path(draft), sglang.__version__):
        raise ValueError(
            "draftline: this draft would not be served as it was judged\n  where: "
            + f"{draft}\n  got: " + "\n    ".join(faults) + "\n  what to do: mount releases/<name>/draft as it was promoted, and "
            "start SGLang as docker/sglang.Dockerfile does"
        )  # fmt: skip


def faults_of(settings: Mapping[str, Any], draft: Path, version: str) -> list[str]:
    """What stands against serving `draft` with `settings`, by SGLang's field names; empty when nothing does."""
    record = json.loads((draft / RECORD).read_text())
    faults = [f"SGLang {version}: layer ids are written for {VERSION}"] if version.split("+")[0] != VERSION else []
    for name, file in (("weights_digest", "model.safetensors"), ("config_digest", "config.json")):
        if (got := _digest(draft / file)) != record[name]:
            faults.append(f"{file} is {got}, and the record says {record[name]}")
    return faults + _speculation(settings) + _numerics(settings, record) + _context(settings, draft)


def _speculation(settings: Mapping[str, Any]) -> list[str]:
    faults: list[str] = []
    if (algorithm := settings.get("speculative_algorithm")) != "EAGLE3":
        faults.append(f"speculative_algorithm {algorithm}: an EAGLE-3 draft is inert under any other than EAGLE3")
    topk, steps = settings.get("speculative_eagle_topk"), settings.get("speculative_num_steps") or 0
    tokens = settings.get("speculative_num_draft_tokens") or 0
    if topk == 1 and tokens != steps + 1 and not settings.get("speculative_adaptive"):
        faults.append(f"speculative_num_draft_tokens {tokens}: a chain of {steps} steps verifies {steps + 1} tokens")
    return faults


def _numerics(settings: Mapping[str, Any], record: Mapping[str, Any]) -> list[str]:
    faults: list[str] = []
    dtype, trained = str(settings.get("dtype")).removeprefix("torch."), record["capture"]["compute_dtype"]
    if dtype not in ("auto", trained):
        faults.append(f"dtype {dtype}: the draft was trained on states computed in {trained}")
    if quantization := settings.get("quantization"):
        faults.append(f"quantization {quantization}: the draft was trained on the states of the target as it is")
    return faults


def _context(settings: Mapping[str, Any], draft: Path) -> list[str]:
    try:
        reach = json.loads((draft / "config.json").read_text()).get("max_position_embeddings") or 0
    except (OSError, ValueError):
        return []  # its digest has told already
    context = settings.get("context_length") or 0
    if context > reach:
        return [f"context_length {context}: the draft's max_position_embeddings is {reach}"]
    return []


def _digest(path: Path) -> str:
    if not path.exists():
        return "missing"
    sha = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_READ):
            sha.update(piece)
    return "sha256:" + sha.hexdigest()
