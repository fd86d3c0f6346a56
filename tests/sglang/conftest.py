"""The real SGLang on this CPU (`make sglang`), and a line whose draft it serves: SmolLM2, small but real. Thresholds are those of a draft of a minute's training."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from stages import benchmark, extract, merge, prepare, serve_validate, train
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
    """A folder in which the line has run up to serve-validate in this process, its draft exported for SGLang."""
    assert PYTHON.exists(), "no SGLang environment: run `make sglang`"
    root = tmp_path_factory.mktemp("line")
    if (ROOT / ".cache/targets").exists():
        shutil.copytree(ROOT / ".cache/targets", root / ".cache/targets", copy_function=os.link)
    with in_folder(root):
        write_params(root)
        told = json.loads((root / "params.yaml").read_text())["serve"]["sglang"]
        serve = {
            "engine": "sglang",
            "max_new_tokens": 16,
            "concurrency": 4,
            "sglang": told | {"python": str(PYTHON), "context_tokens": 512},
        }
        bench = {
            "concurrencies": [1, 2], "draft_steps": [3], "requests": 1, "max_new_tokens": 8, "repeats": 3,
            "out_of_distribution_prompts": 2, "arrival_rates": [2.0], "arrival_requests": 2,
        }  # fmt: skip
        # Enough prompts that call tools for one of them to be held out.
        sources = json.loads((root / "params.yaml").read_text())["prepare"]["sources"]
        set_params(root, prepare={"sources": [s | ({"limit": 16} if s["name"] == "bfcl" else {}) for s in sources]})
        train_told = {"optimizer_steps": 80, "evaluate_every": 80, "checkpoint_every": 80}
        set_params(root, serve=serve, train=train_told, benchmark=bench)
        prepare.main()
        assert judge("extraction") == {}
        extract.main()
        merge.main()
        assert judge("training") == {}
        train.main()
        set_params(root, serve={"engine": "in_process"}, benchmark={"arrival_rates": []})
        serve_validate.main()
    return root


@pytest.fixture(scope="session")
def served(line: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same line after serve-validate and benchmark in SGLang: four servers started and ended."""
    root = tmp_path_factory.mktemp("served") / "line"
    shutil.copytree(line, root, copy_function=os.link)  # stages write aside and rename, so the fixture's files stay
    with in_folder(root):
        set_params(root, serve={"engine": "sglang"}, benchmark={"arrival_rates": [2.0]})
        serve_validate.main()
        benchmark.main()
    return root


@contextmanager
def in_folder(root: Path) -> Iterator[None]:
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        yield
    torch.set_num_threads(threads)


@pytest.fixture
def here(line: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of the line, as the current folder, with SGLang as the engine that serves."""
    yield from copied(line, tmp_path)


@pytest.fixture
def there(served: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of the line that SGLang has served, as the current folder."""
    yield from copied(served, tmp_path)


def copied(root: Path, tmp_path: Path) -> Iterator[Path]:
    copy = tmp_path / "line"
    shutil.copytree(root, copy, copy_function=os.link, ignore=shutil.ignore_patterns("logs"))
    with in_folder(copy):
        set_params(copy, serve={"engine": "sglang"})
        yield copy
