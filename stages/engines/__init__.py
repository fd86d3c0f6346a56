"""Engines: one file each, whose name is its name in params.yaml (serve.engine), loaded by that name.

An engine file offers `NAME` and `Request`, and something to open whose `generate(requests, concurrency=, draft_steps=, on_answer=,
observe=, watch=)` gives answers: in_process its `Engine`, over a target and a draft in memory, with `version()` and
`served_points()` (what its own layer ids mean as points); sglang `serve()`, a server over their folders, with `VERSION` and
`DIALECT` (the numbering of its layer ids). stages/_served.py opens either. Only the files in here know an engine's numbering and API. Files that start with an underscore are shared parts, not engines.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

from stages.contracts.errors import EngineError


def names() -> list[str]:
    """Names of the engines there are."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))


def load(name: str) -> ModuleType:
    """The engine module called `name`.

    Raises:
        EngineError: there is none; the error lists those there are.
    """
    if name not in names():
        raise EngineError(
            f"No engine {name!r}",
            where="params.yaml: serve.engine",
            expected=f"one of {names()}",
            got=name,
            do="name one of them, or add stages/engines/<name>.py",
        )
    return importlib.import_module(f"stages.engines.{name}")
