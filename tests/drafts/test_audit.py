"""A draft that an engine would load in silence and run otherwise than it was trained is refused before one is started."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from stages.contracts.errors import DataError, EngineError
from stages.drafts._audit import audit_for_target
from stages.drafts.eagle3 import Eagle3, Eagle3Config, export, read_draft

H, V, D = 32, 24, 12
Edit = Callable[[dict[str, Any]], None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    draft = Eagle3(Eagle3Config(H, 48, 4, 2, 8, V, D, 1e-5, 10000.0, 256), embedding())
    t2d = torch.arange(V) % 2 == 0
    export(draft, tmp_path, (0, 2, 4), t2d.nonzero()[:, 0] - torch.arange(D), t2d)
    return tmp_path


def embedding() -> torch.Tensor:
    return torch.randn(V, H, generator=torch.Generator().manual_seed(1))


def audit(folder: Path, **told: Any) -> None:
    audit_for_target(
        folder, read_draft(folder), **({"hidden_size": H, "vocab_size": V, "embedding": embedding()} | told)
    )


def edit(folder: Path, change: Edit) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def with_tensors(folder: Path, change: Edit) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_a_sound_draft_passes_with_and_without_the_target_s_embedding(folder: Path) -> None:
    audit(folder)
    with_tensors(folder, lambda t: t.update({"embed_tokens.weight": embedding()}))
    audit(folder)


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"hidden_size": 64}, "hidden_size 32: the target has 64"),
        ({"vocab_size": 25}, "vocab_size 24: the target has 25"),
    ],
)
def test_a_draft_of_another_target_is_refused(folder: Path, told: dict[str, int], words: str) -> None:
    with pytest.raises(EngineError, match=words):
        audit(folder, **told)


def test_an_embedding_of_its_own_is_refused_for_the_engine_takes_the_target_s(folder: Path) -> None:
    with_tensors(folder, lambda t: t.update({"embed_tokens.weight": embedding() + 1e-3}))
    with pytest.raises(EngineError, match=r"embed_tokens\.weight is not the target's"):
        audit(folder)
    with pytest.raises(EngineError, match="whether they are equal cannot be told"):
        audit(folder, embedding=None)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.update(rope_scaling={"rope_type": "yarn", "factor": 64.0}), "RoPE scaling 'yarn'"),
        (lambda c: c.update(rope_parameters={"rope_type": "default", "rope_theta": 5e4}), "rope_theta 50000.0 is not"),
        (lambda c: c["eagle_config"].update(norm_before_fc=True), r"input_norm\.weight is missing"),
        (lambda c: c.update(use_aux_norm=True), r"fc_norm\.0\.weight is missing"),
        (lambda c: c.update(mlp_bias=True, attention_bias=True), "attention_bias is True(.|\n)*mlp_bias is True"),
        (lambda c: c.update(target_hidden_size=64), "target_hidden_size is 64"),
        (lambda c: c.update(num_aux_hidden_states=4), "num_aux_hidden_states is 4"),
    ],
)
def test_a_config_that_computes_something_else_is_refused(folder: Path, change: Edit, words: str) -> None:
    edit(folder, change)
    with pytest.raises(EngineError, match=words):
        audit(folder)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda t: t.pop("lm_head.weight"), EngineError, "lm_head.weight is missing"),
        (lambda t: t.update({"lm_head.bias": torch.zeros(D)}), EngineError, "lm_head.bias is unknown"),
        (lambda t: t.update({"d2t": t["d2t"] + torch.arange(D)}), DataError, "outside 0..23"),
        (lambda t: t.update({"d2t": t["d2t"].flip(0)}), DataError, "do not ascend"),
    ],
)
def test_what_the_file_lacks_or_adds_or_maps_amiss_is_named(
    folder: Path, change: Edit, error: type[Exception], words: str
) -> None:
    with_tensors(folder, change)
    with pytest.raises(error, match=words):
        audit(folder)
