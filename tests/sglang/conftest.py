"""The real SGLang on this CPU (`make sglang`), and a line whose draft it serves: SmolLM2, small but real."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from stages import extract, merge, prepare, serve_validate, train
from tests.test_users_bug import judge, write_params

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-sglang/bin/python"


def set_params(root: Path, **sections: dict[str, object]) -> None:
    path = root / "params.yaml"
    params = json.loads(path.read_text())
    for name, values in sections.items():
        params[name] |= values
    path.unlink()
    path.write_text(json.dumps(params))


@pytest.fixture(scope="session")
def line(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the line has run up to serve-validate in this process."""
    assert PYTHON.exists(), "no SGLang environment: run `make sglang`"
    root = tmp_path_factory.mktemp("line")
    if (ROOT / ".cache/targets").exists():
        shutil.copytree(ROOT / ".cache/targets", root / ".cache/targets", copy_function=os.link)
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        write_params(root)
        told = json.loads((root / "params.yaml").read_text())["serve"]["sglang"]
        serve = {
            "max_new_tokens": 16,
            "concurrency": 4,
            "sglang": told | {"python": str(PYTHON), "context_tokens": 512},
        }
        set_params(root, serve=serve, train={"optimizer_steps": 40, "evaluate_every": 40, "checkpoint_every": 40})
        prepare.main()
        assert judge("extraction") == {}
        extract.main()
        merge.main()
        assert judge("training") == {}
        train.main()
        serve_validate.main()
    torch.set_num_threads(threads)
    return root


@pytest.fixture
def here(line: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the line, as the current folder, with SGLang as the engine that serves."""
    copy = tmp_path / "line"
    shutil.copytree(line, copy, copy_function=os.link)  # stages write aside and rename, so the fixture's files stay
    monkeypatch.chdir(copy)
    set_params(copy, serve={"engine": "sglang"})
    threads = torch.get_num_threads()
    yield copy
    torch.set_num_threads(threads)
