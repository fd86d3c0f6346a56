"""hadolint finds nothing in the container files, and does find what it is there for."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DOCKER = Path(__file__).resolve().parents[2] / "docker"


def lint(path: Path) -> set[str]:
    """Codes of the rules that a file breaks, of whatever severity."""
    command = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    assert command, "no hadolint beside this Python: run `make install`"
    words = [command, "--format", "json", "--failure-threshold", "style", str(path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode in (0, 1) and done.stdout, done.stderr
    return {finding["code"] for finding in json.loads(done.stdout)}


@pytest.mark.parametrize("path", sorted(DOCKER.glob("*.Dockerfile")), ids=lambda p: p.stem)
def test_a_container_file_breaks_no_rule_of_the_linter(path: Path) -> None:
    assert lint(path) == set()


def test_the_linter_sees_a_missing_tag_a_user_by_name_and_a_shell_command(tmp_path: Path) -> None:
    path = tmp_path / "Dockerfile"
    path.write_text("FROM python\nUSER line\nCMD prefect --help\n")
    assert {"DL3006", "DL3025", "DL3066"} <= lint(path)
