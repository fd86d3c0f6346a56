"""What params.yaml says now against what dvc.lock says each stage ran with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

LOCK, PARAMS = "dvc.lock", "params.yaml"


def changed_params(root: Path = Path()) -> dict[str, list[str]]:
    """For every stage that ran with other parameters than stand there now, each in words: `train.seed 1, now 2`.

    Nothing where dvc.lock or params.yaml is missing or cannot be read: the stages and DVC itself say that.
    """
    lock, now = _read(root / LOCK), _read(root / PARAMS)
    stages = lock.get("stages")
    if not isinstance(stages, dict) or not now:
        return {}
    found: dict[str, list[str]] = {}
    for name, stage in stages.items():
        params = stage.get("params", {}).get(PARAMS, {}) if isinstance(stage, dict) else {}
        words = [w for key, value in params.items() for w in _differences(str(key), value, _at(now, str(key)))]
        if words:
            found[str(name)] = words
    return found


def _read(path: Path) -> Mapping[str, Any]:
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return raw if isinstance(raw, dict) else {}


def _at(params: Any, key: str) -> Any:
    for part in key.split("."):
        params = params.get(part) if isinstance(params, dict) else None
    return params


def _differences(key: str, was: Any, now: Any) -> Iterator[str]:
    """The leaves that differ, a key that came or went as `nothing`."""
    if isinstance(was, dict) and isinstance(now, dict):
        for name in [*was, *(n for n in now if n not in was)]:
            yield from _differences(f"{key}.{name}", was.get(name), now.get(name))
    elif was != now:
        yield f"{key} {_short(was)}, now {_short(now)}"


def _short(value: Any) -> str:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 40 else text[:37] + "…"
