"""The parameters of a run: sets of params/, and values over them."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows import settings
from stages.contracts.errors import ParamsError
from stages.contracts.params import load_params


def test_an_unknown_or_broken_parameter_set_leaves_params_yaml_alone(tmp_path: Path, repo_root: Path) -> None:
    (tmp_path / "params").mkdir()
    (tmp_path / "params.yaml").write_text("mine\n")
    good = (repo_root / "params.yaml").read_text()
    (tmp_path / "params/small.yaml").write_text(good)
    (tmp_path / "params/broken.yaml").write_text(good.replace("threads: 2", "threads: 0"))
    with pytest.raises(ParamsError, match=r"No parameter set 'big'(.|\n)*one of \['broken', 'small'\]"):
        settings.choose_params("big", tmp_path)
    with pytest.raises(ParamsError, match=r"target.threads"):
        settings.choose_params("broken", tmp_path)
    assert (tmp_path / "params.yaml").read_text() == "mine\n"
    settings.choose_params("small", tmp_path)
    assert (tmp_path / "params.yaml").read_text() == good


def test_values_are_written_by_dotted_key_and_everything_else_stays_as_it_is(tmp_path: Path, repo_root: Path) -> None:
    before = (repo_root / "params.yaml").read_text()
    (tmp_path / "params.yaml").write_text(before)
    settings.override(
        {
            "train.optimizer_steps": 600,
            "prepare.sources.1.limit": 5,
            "serve.engine": "sglang",
            "serve.sampling_prompts": 0,
        },
        tmp_path,
    )
    params = load_params(tmp_path / "params.yaml")
    assert params.train.optimizer_steps == 600 and params.prepare.sources[1].limit == 5
    assert params.serve.engine == "sglang"
    old, new = before.splitlines(), (tmp_path / "params.yaml").read_text().splitlines()
    changed = [(a, b) for a, b in zip(old, new, strict=True) if a != b]
    assert len(changed) == 4 and [a.partition("#")[2] for a, _ in changed] == [b.partition("#")[2] for _, b in changed]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train.steps": 3}, r"params.yaml has no train.steps(.|\n)*optimizer_steps(.|\n)*got: steps"),
        ({"training.seed": 3}, r"has no training.seed(.|\n)*got: training"),
        ({"prepare.sources.9.limit": 3}, r"has no prepare.sources.9.limit"),
        ({"prepare.sources.first.limit": 3}, r"has no prepare.sources.first.limit"),
        ({"serve": {}}, r"serve is a section, not a value(.|\n)*serve.engine"),
        ({"train.seed.more": 3}, r"has no train.seed.more"),
        ({"train.optimizer_steps": 0}, r"train.optimizer_steps: must be at least 1 \(got 0\)"),
        ({"train.optimizer_steps": "many"}, r"train.optimizer_steps: a whole number is needed"),
    ],
)
def test_a_wrong_key_or_value_leaves_params_yaml_alone(
    tmp_path: Path, repo_root: Path, changes: dict[str, object], words: str
) -> None:
    before = (repo_root / "params.yaml").read_bytes()
    (tmp_path / "params.yaml").write_bytes(before)
    with pytest.raises(ParamsError, match=words):
        settings.override(changes, tmp_path)
    assert (tmp_path / "params.yaml").read_bytes() == before
