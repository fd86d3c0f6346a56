"""prepare.rendering and prepare.answers: what is refused, in which words, and how a key is kept out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from stages.contracts.errors import ParamsError
from stages.contracts.params import Answers, load_params


@pytest.mark.parametrize(
    ("section", "change", "words"),
    [
        ("rendering", {"date": "31.1.2026"}, "prepare.rendering.date"),
        ("rendering", {"date": "2026-13-01"}, "prepare.rendering.date"),
        ("rendering", {"rewritten_history": "guess"}, "prepare.rendering.rewritten_history"),
        ("rendering", {"mask": "all"}, "prepare.rendering.mask"),
        ("answers", {"engine": "openai"}, "engine openai needs `base_url` and `model`"),
        ("answers", {"base_url": "localhost:30000"}, "prepare.answers.base_url"),
        ("answers", {"base_url": "http://key@host/v1"}, "holds credentials; give the key in the environment variable"),
        ("answers", {"concurrency": 0}, "prepare.answers.concurrency"),
        ("answers", {"retries": 21}, "prepare.answers.retries"),
        ("answers", {"timeout_s": 0}, "prepare.answers.timeout_s"),
        ("answers", {"max_failed_share": 2}, "prepare.answers.max_failed_share"),
    ],
)
def test_each_fault_is_told_by_name(
    tmp_path: Path, repo_root: Path, section: str, change: dict[str, Any], words: str
) -> None:
    raw = yaml.safe_load((repo_root / "params/smollm2-135m.yaml").read_text())
    raw["prepare"][section] |= change
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(raw))
    with pytest.raises(ParamsError) as error:
        load_params(tmp_path / "params.yaml")
    assert words in error.value.got


def test_a_date_stands_quoted(tmp_path: Path, repo_root: Path) -> None:
    text = (repo_root / "params/smollm2-135m.yaml").read_text()
    (tmp_path / "params.yaml").write_text(text.replace("date: null", "date: '2026-01-31'"))
    assert load_params(tmp_path / "params.yaml").prepare.rendering.date == "2026-01-31"


def test_answers_are_named_by_engine_and_model_and_not_by_where_it_stands() -> None:
    told = {"concurrency": 1, "timeout_s": 1, "retries": 0, "token_ids": "require", "max_failed_share": 0}
    here = Answers.model_validate({**told, "engine": "in_process", "base_url": None, "model": None})
    names = {
        Answers.model_validate({**told, "engine": "openai", "base_url": f"http://{h}/v1", "model": "m"}).name
        for h in "ab"
    }
    assert here.name == "in_process" and names == {"openai m"}
