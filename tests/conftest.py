"""What every test needs: quiet tools, and an environment whose `python` is this one."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]

for _name, _value in {
    "DO_NOT_TRACK": "1",
    "DVC_NO_ANALYTICS": "1",
    "GX_ANALYTICS_ENABLED": "false",
    "HF_HUB_OFFLINE": "1",
    "OMP_WAIT_POLICY": "passive",  # threads of two tests side by side that spin only keep each other from the CPU
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
}.items():
    os.environ.setdefault(_name, _value)
_bin = str(Path(sys.executable).parent)
if not os.environ.get("PATH", "").startswith(_bin):
    os.environ["PATH"] = f"{_bin}{os.pathsep}{os.environ.get('PATH', '')}"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One of several processes (`make test`) takes a whole file, or all that share the line served by SGLang: what a process shares is
    made once. (A mark `xdist_group` would say the same, but xdist 3.8 writes it where pytest 9.2 no longer looks.)"""
    from xdist.scheduler import LoadFileScheduling

    class BySharing(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "tests/sglang" if nodeid.startswith("tests/sglang/") else super()._split_scope(nodeid)

    return BySharing(config, log)


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The repository this test run is of."""
    return ROOT
