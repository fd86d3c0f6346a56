"""Which code made a state: part of what names it, so that mending that code makes new states."""

from __future__ import annotations

import hashlib
from pathlib import Path

STAGES = Path(__file__).parents[1]
_SHARED = ("_checkpoint", "_decoder", "_latent", "_layers", "_mixture", "_quantised", "_rope", "_stream")


def code_digest(model_type: str, stages: Path = STAGES, engine: str = "in_process") -> str:
    """sha256 over the sources that run a target of family `model_type` in `engine` and lay its states out, names included.

    A family without a file of its own is refused when the target is loaded; here it is merely left out.
    """
    shared = (f"targets/{name}.py" for name in _SHARED)
    names = ("capture/spill.py", "capture/forms.py", *shared, f"targets/{model_type.replace('-', '_')}.py")
    if engine == "sglang":
        names += ("capture/served.py", "engines/sglang.py", "engines/_sglang_answers.py", "engines/_sglang_launch.py")
    sha = hashlib.sha256()
    for path in (stages / name for name in names):
        if path.exists():
            sha.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return "sha256:" + sha.hexdigest()
