"""What every test needs: quiet tools, and an environment whose `python` is this one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One of several processes (`make test`) takes a whole file, and all that share a line served by SGLang, for what they share is
    made once a process."""
    for item in items:
        of = item.path.parent if item.get_closest_marker("sglang") else item.path
        item.add_marker(pytest.mark.xdist_group(str(of.relative_to(ROOT))))


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The repository this test run is of."""
    return ROOT
