"""The draft's files: the layout that engines load, and every fault named on reading back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stages.contracts.draft import DraftNorm
from stages.contracts.errors import DataError, EngineError
from stages.drafts.eagle3 import Eagle3, export, look_ahead, read_draft
from tests.drafts.reference import CHOICES, CONFIG, make_batch, make_draft, make_teacher

LAYER_IDS = (1, 4, 6)


def vocabulary() -> tuple[Tensor, Tensor]:
    ids = make_teacher().target_ids
    t2d = torch.zeros(CONFIG.vocab_size, dtype=torch.bool)
    t2d[ids] = True
    return ids - torch.arange(len(ids)), t2d


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    export(make_draft(dtype=torch.float32), tmp_path / "draft", LAYER_IDS, *vocabulary())
    return tmp_path / "draft"


def test_the_names_and_shapes_are_those_that_sglang_loads(folder: Path) -> None:
    H, I, D = CONFIG.hidden_size, CONFIG.intermediate_size, CONFIG.draft_vocab_size
    q, kv = CONFIG.heads * CONFIG.head_dim, CONFIG.kv_heads * CONFIG.head_dim
    assert {n: tuple(t.shape) for n, t in load_file(folder / "model.safetensors").items()} == {
        "fc.weight": (H, 3 * H),
        "midlayer.hidden_norm.weight": (H,),
        "midlayer.input_layernorm.weight": (H,),
        "midlayer.post_attention_layernorm.weight": (H,),
        "midlayer.self_attn.q_proj.weight": (q, 2 * H),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * H),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * H),
        "midlayer.self_attn.o_proj.weight": (H, q),
        "midlayer.mlp.gate_proj.weight": (I, H),
        "midlayer.mlp.up_proj.weight": (I, H),
        "midlayer.mlp.down_proj.weight": (H, I),
        "norm.weight": (H,),
        "lm_head.weight": (D, H),
        "d2t": (D,),
        "t2d": (CONFIG.vocab_size,),
    }


def test_the_config_says_what_the_engine_reads(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    assert raw["architectures"] == ["LlamaForCausalLMEagle3"] and raw["num_hidden_layers"] == 1
    assert raw["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [1, 4, 6], "use_aux_hidden_state": True}
    assert (raw["vocab_size"], raw["draft_vocab_size"], raw["tie_word_embeddings"]) == (40, 23, False)


def test_what_is_read_back_is_what_was_exported(folder: Path) -> None:
    checkpoint, draft = read_draft(folder), make_draft(dtype=torch.float32)
    assert checkpoint.config == CONFIG and checkpoint.layer_ids == LAYER_IDS
    assert torch.equal(checkpoint.target_ids(), make_teacher().target_ids)
    again = checkpoint.module(draft.embedding)
    batch, teacher = make_batch(["0011111"], dtype=torch.float32), make_teacher(dtype=torch.float32)
    assert torch.equal(
        look_ahead(again, teacher, batch, 3, 0.8).drafted, look_ahead(draft, teacher, batch, 3, 0.8).drafted
    )


@pytest.mark.parametrize("norms", CHOICES, ids=" ".join)
def test_norms_are_exported_under_the_keys_and_names_that_engines_read(
    tmp_path: Path, norms: tuple[DraftNorm, ...]
) -> None:
    draft = make_draft(dtype=torch.float32, norms=norms)
    export(draft, tmp_path, LAYER_IDS, *vocabulary())
    raw, H = json.loads((tmp_path / "config.json").read_text()), CONFIG.hidden_size
    assert {key: raw[key] for key in raw if "norm" in key and key != "rms_norm_eps"} == dict.fromkeys(norms, True)
    known = {"hidden_norm", "input_layernorm", "post_attention_layernorm"}
    found = {n: tuple(t.shape) for n, t in load_file(tmp_path / "model.safetensors").items() if "norm" in n}
    found = {n: shape for n, shape in found.items() if not known & set(n.split(".")) and n != "norm.weight"}
    wanted = {f"fc_norm.{i}.weight": (H,) for i in range(3)} if "fc_norm" in norms else {}
    assert found == wanted | ({"input_norm.weight": (3 * H,)} if "norm_before_fc" in norms else {})
    checkpoint = read_draft(tmp_path)
    assert checkpoint.config == draft.config and checkpoint.config.norms == norms
    again = checkpoint.module(draft.embedding).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in draft.state_dict().items())


@pytest.mark.parametrize(
    ("norms", "change", "words"),
    [
        (("fc_norm",), {"fc_norm": None}, r"fc_norm\.0\.weight is unknown; fc_norm\.1\.weight is unknown; fc_norm\.2"),
        (("norm_before_fc",), {"norm_before_fc": False}, r"input_norm\.weight is unknown"),
        ((), {"fc_norm": True}, r"fc_norm\.0\.weight is missing; fc_norm\.1\.weight is missing; fc_norm\.2"),
        ((), {"norm_before_fc": True}, r"input_norm\.weight is missing"),
        (("fc_norm",), {"norm_before_fc": True}, "fc_norm and norm_before_fc are both set"),
        (
            ("norm_before_fc",),
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 6], "use_aux_hidden_state": True, "norm_before_fc": False}},
            r"input_norm\.weight is unknown",
        ),
    ],
)  # fmt: skip
def test_a_norm_that_config_and_weights_do_not_both_have_is_refused(
    tmp_path: Path, norms: tuple[DraftNorm, ...], change: dict[str, object], words: str
) -> None:
    """Engines leave the norm at ones where a weight is missing, and pass over a weight that they have no norm for."""
    export(make_draft(dtype=torch.float32, norms=norms), tmp_path, LAYER_IDS, *vocabulary())
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(EngineError, match=words):
        read_draft(tmp_path)


def test_a_norm_of_which_a_weight_is_lost_is_refused(tmp_path: Path) -> None:
    export(make_draft(dtype=torch.float32, norms=("fc_norm",)), tmp_path, LAYER_IDS, *vocabulary())
    change(tmp_path, lambda t: t.pop("fc_norm.1.weight"))
    with pytest.raises(EngineError, match=r"got: fc_norm\.1\.weight is missing\n"):
        read_draft(tmp_path)


def test_sglangs_old_key_for_fc_norm_means_the_same(tmp_path: Path) -> None:
    export(make_draft(dtype=torch.float32, norms=("fc_norm",)), tmp_path, LAYER_IDS, *vocabulary())
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"fc_norm"', '"use_aux_norm"'))
    assert "use_aux_norm" in path.read_text() and read_draft(tmp_path).config.norms == ("fc_norm",)


def test_the_targets_embedding_is_left_out_unless_asked_for(folder: Path) -> None:
    draft = make_draft(dtype=torch.float32)
    assert "embed_tokens.weight" not in load_file(folder / "model.safetensors")
    export(draft, folder, LAYER_IDS, *vocabulary(), with_embedding=True)
    assert torch.equal(read_draft(folder).tensors["embed_tokens.weight"], draft.embedding)
    assert isinstance(read_draft(folder).module(torch.zeros(1)), Eagle3)


def change(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def rename_head(tensors: dict[str, Tensor]) -> None:
    tensors["model.lm_head.weight"] = tensors.pop("lm_head.weight")


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t: t.pop("lm_head.weight"), "lm_head.weight is missing"),
        (rename_head, r"lm_head.weight is missing; model.lm_head.weight is unknown"),
        (lambda t: t.update({"layers.0.mlp.up_proj.weight": torch.zeros(2)}), "layers.0.mlp.up_proj.weight is unknown"),
        (lambda t: t.update({"fc.weight": torch.zeros(16, 32)}), r"fc.weight is \[16, 32\], not \[16, 48\]"),
        (lambda t: t["norm.weight"].fill_(torch.nan), "norm.weight is not finite"),
        (lambda t: t.update({"d2t": t["d2t"].int()}), "d2t is torch.int32, not torch.int64"),
        (
            lambda t: t.update({"fc.weight": t["fc.weight"].to(torch.int8)}),
            "fc.weight is torch.int8, not torch.float32 or",
        ),
        (
            lambda t: t.update({"norm.weight": t["norm.weight"].to(torch.float8_e4m3fn)}),
            "norm.weight is torch.float8_e4m3fn, not torch.float32 or",
        ),
        (lambda t: t.pop("t2d"), "t2d is missing"),
    ],
)
def test_a_fault_in_the_tensors_is_named(folder: Path, edit: Callable[[dict[str, Tensor]], object], words: str) -> None:
    change(folder, edit)
    with pytest.raises(EngineError, match=words):
        read_draft(folder)


def shift_one(tensors: dict[str, Tensor]) -> None:
    tensors["d2t"][-1] -= 40


def swap_mark(tensors: dict[str, Tensor]) -> None:
    free = int((~tensors["t2d"]).nonzero()[0])
    tensors["t2d"][free] = True


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t: t["d2t"].add_(torch.arange(23)), "outside 0..39"),
        (shift_one, "do not ascend|outside"),
        (swap_mark, "d2t and t2d differ on 1 target ids"),
        (lambda t: t["d2t"].zero_(), "d2t and t2d differ"),
    ],
)
def test_a_vocabulary_that_contradicts_itself_is_refused(
    folder: Path, edit: Callable[[dict[str, Tensor]], object], words: str
) -> None:
    change(folder, edit)
    with pytest.raises(DataError, match=words):
        read_draft(folder)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("architectures", ["LlamaForCausalLM"], "architectures is"),
        ("tie_word_embeddings", True, "tie_word_embeddings is True, not False"),
        ("eagle_config", {}, "use_aux_hidden_state is not true"),
        ("draft_vocab_size", None, "draft_vocab_size is missing"),
        ("rope_theta", float("inf"), "rope_theta is inf, no number above 0"),
        ("draft_vocab_size", 24, r"lm_head.weight is \[23, 16\], not \[24, 16\]"),
    ],
)
def test_a_config_that_serves_something_else_is_refused(folder: Path, key: str, value: object, words: str) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {key: value}))
    with pytest.raises(EngineError, match=words):
        read_draft(folder)


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
@pytest.mark.parametrize("keep", [0.6, 0.0, None])
def test_a_file_cut_short_or_missing_is_refused(folder: Path, file: str, keep: float | None) -> None:
    path = folder / file
    data = path.read_bytes()
    path.unlink()
    if keep is not None:
        path.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(DataError, match="cannot be read") as caught:
        read_draft(folder)
    assert file in caught.value.where


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_a_folder_in_a_files_place_is_told(folder: Path, file: str) -> None:
    (folder / file).unlink()
    (folder / file).mkdir()
    with pytest.raises(DataError, match="cannot be read") as caught:
        read_draft(folder)
    assert file in caught.value.where
