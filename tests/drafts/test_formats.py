"""The draft in vLLM's files and in the speculators format: read back by value, and by the peer's own reader."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from stages.contracts.draft import NORMS, DraftNorm
from stages.contracts.errors import EngineError
from stages.drafts._formats import audit
from stages.drafts.eagle3 import FORMATS, DraftCheckpoint, Verifier, export, look_ahead, read_draft, write_as
from tests.drafts.reference import CHOICES, make_batch, make_draft, make_teacher
from tests.drafts.test_export import vocabulary

POINTS = (2, 5, 7)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def draft(tmp_path: Path, request: pytest.FixtureRequest) -> DraftCheckpoint:
    export(make_draft(dtype=request.param), tmp_path / "draft", (1, 4, 6), *vocabulary())
    return read_draft(tmp_path / "draft")


def write(name: str, draft: DraftCheckpoint, folder: Path) -> Path:
    embedding = make_draft(dtype=torch.float32).embedding
    write_as(name, draft, folder, POINTS, steps=3, target=Verifier("tiny", ["LlamaForCausalLM"]), embedding=embedding)
    return folder


def test_vllm_gets_its_own_names_and_ids_at_both_places(draft: DraftCheckpoint, tmp_path: Path) -> None:
    folder = write("vllm", draft, tmp_path / "vllm")
    names = set(load_file(folder / "model.safetensors"))
    assert "layers.0.self_attn.q_proj.weight" in names and not any(n.startswith(("midlayer", "embed")) for n in names)
    raw = json.loads((folder / "config.json").read_text())
    assert (
        raw["eagle_aux_hidden_state_layer_ids"]
        == list(POINTS)
        == raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    )
    assert raw["architectures"] == ["LlamaForCausalLMEagle3"]
    assert raw["torch_dtype"] == str(draft.tensors["fc.weight"].dtype).removeprefix("torch.")


def test_the_speculators_format_has_its_config_and_the_embedding(draft: DraftCheckpoint, tmp_path: Path) -> None:
    folder = write("speculators", draft, tmp_path / "speculators")
    raw, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    assert raw["speculators_model_type"] == "eagle3" and raw["eagle_aux_hidden_state_layer_ids"] == list(POINTS)
    assert raw["transformer_layer_config"]["vocab_size"] == 40 and raw["draft_vocab_size"] == 23
    assert raw["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert tensors["embed_tokens.weight"].dtype == draft.tensors["fc.weight"].dtype


@pytest.mark.parametrize("norms", CHOICES, ids=" ".join)
@pytest.mark.parametrize("name", FORMATS)
def test_each_format_says_the_norms_at_its_top_and_a_key_changed_is_named(
    tmp_path: Path, name: str, norms: tuple[DraftNorm, ...]
) -> None:
    export(make_draft(dtype=torch.float32, norms=norms), tmp_path / "draft", (1, 4, 6), *vocabulary())
    draft = read_draft(tmp_path / "draft")
    path = write(name, draft, tmp_path / name) / "config.json"
    told = json.loads(path.read_text())
    assert {key: told.get(key, False) for key in NORMS} == {key: key in norms for key in NORMS}
    assert (set(NORMS) <= told.keys()) == (name == "speculators" or set(NORMS) == set(norms))
    for key in NORMS:
        path.write_text(json.dumps(told | {key: key not in norms}))
        with pytest.raises(EngineError, match=f"{key} is {key not in norms}, not {key in norms}"):
            audit(name, draft, path.parent, POINTS, make_draft(dtype=torch.float32).embedding)


def damaged(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t: t.pop("lm_head.weight"), "lm_head.weight is missing"),
        (lambda t: t["layers.0.mlp.up_proj.weight"][0].neg_(), "layers.0.mlp.up_proj.weight is not the draft's"),
        (lambda t: t["d2t"][3:4].add_(1), "d2t is not the draft's"),
        (lambda t: t.update({"midlayer.x": torch.zeros(1)}), "midlayer.x is unknown"),
        (lambda t: t.update({"norm.weight": t["norm.weight"].double()}), "norm.weight is not the draft's"),
    ],
)
def test_what_is_not_the_draft_is_named_on_reading_back(
    tmp_path: Path, name: str, edit: Callable[[dict[str, torch.Tensor]], object], words: str
) -> None:
    export(make_draft(dtype=torch.float32), tmp_path / "draft", (1, 4, 6), *vocabulary())
    draft = read_draft(tmp_path / "draft")
    folder = write(name, draft, tmp_path / name)
    damaged(folder, edit)
    with pytest.raises(EngineError, match=words):
        audit(name, draft, folder, POINTS, make_draft(dtype=torch.float32).embedding)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"eagle_aux_hidden_state_layer_ids": [1, 4, 6]},
            r"eagle_aux_hidden_state_layer_ids is \[1, 4, 6\], not \[2, 5, 7\]",
        ),
        ({"draft_vocab_size": 24}, "draft_vocab_size is 24, not 23"),
        ({"rope_theta": 1.0, "transformer_layer_config": None}, "rope_theta is 1.0, not 10000.0"),
    ],
)
def test_a_config_that_means_another_draft_is_named(tmp_path: Path, change: dict, words: str) -> None:
    export(make_draft(dtype=torch.float32), tmp_path / "draft", (1, 4, 6), *vocabulary())
    draft = read_draft(tmp_path / "draft")
    folder = write("vllm", draft, tmp_path / "vllm")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in (raw | change).items() if v is not None}))
    with pytest.raises(EngineError, match=words):
        audit("vllm", draft, folder, POINTS, make_draft(dtype=torch.float32).embedding)


def test_a_draft_rounded_to_bfloat16_drafts_what_its_files_draft(tmp_path: Path) -> None:
    module = make_draft(dtype=torch.bfloat16)
    export(module, tmp_path / "draft", (1, 4, 6), *vocabulary())
    again = read_draft(tmp_path / "draft").module(make_draft(dtype=torch.float32).embedding)
    rounded = make_draft(dtype=torch.float32)
    with torch.no_grad():
        for parameter in rounded.parameters():
            parameter.copy_(parameter.bfloat16())
    batch, teacher = make_batch(["0011111"], dtype=torch.float32), make_teacher(dtype=torch.float32)
    ours, theirs = (look_ahead(d, teacher, batch, 3, 0.8).drafted for d in (rounded, again))
    assert torch.equal(ours, theirs)
