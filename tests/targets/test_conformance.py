"""Every target family against transformers, and its three uses (packed, cached, packed weights) against each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from stages import targets
from stages.contracts.errors import EngineError
from stages.targets import load_target
from stages.targets._decoder import Decoder, Linear
from tests import latent, tiny

IDS = [1, 30, 40, 50, 60, 70, 80, 90, 100, 9, 8, 7]


def make_family(folder: Path, family: str) -> Path:
    """A tiny random target of `family`."""
    if family in latent.FAMILIES:
        scaling = latent.YARN if family != "deepseek_v3" else None
        return latent.make_target(folder, family, rope_scaling=scaling)
    changes: dict[str, Any] = {"model_type": family}
    if family == "qwen3":
        changes |= {"architectures": ["Qwen3ForCausalLM"], "rms_norm_eps": 1e-6, "attention_bias": False}
    tiny.make_target(folder, **changes)
    if family == "qwen3":
        tensors = load_file(folder / "model.safetensors")
        g = torch.Generator().manual_seed(9)
        for i in range(tiny.LAYERS):
            for name in ("q_norm", "k_norm"):
                norm = 1 + 0.3 * torch.randn(tiny.HEAD_DIM, generator=g)
                tensors[f"model.layers.{i}.self_attn.{name}.weight"] = norm
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module", params=targets.families())
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def target(folder: Path) -> Decoder:
    return load_target(folder)


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5)


def reference(folder: Path, aside: Path) -> Any:
    """The same weights in transformers; Kimi's text models as what they are there, DeepSeek-V3."""
    from transformers import AutoModelForCausalLM

    config = json.loads((folder / "config.json").read_text())
    if config["model_type"].startswith("kimi"):
        aside.mkdir()
        told = config.get("text_config", config) | {"model_type": "deepseek_v3"}
        (aside / "config.json").write_text(json.dumps(told))
        tensors = load_file(folder / "model.safetensors")
        plain = {n.removeprefix("language_model."): t for n, t in tensors.items() if not n.startswith("vision")}
        save_file(plain, aside / "model.safetensors", metadata={"format": "pt"})
        folder = aside
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_every_point_and_the_logits_are_those_of_transformers(folder: Path, target: Decoder, tmp_path: Path) -> None:
    model = reference(folder, tmp_path / "plain")
    before_norm: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, args: before_norm.append(args[0]))
    with torch.no_grad():
        theirs = model(torch.tensor([IDS]), output_hidden_states=True)
    n = target.config.layers
    ours = target.packed(torch.tensor(IDS), [len(IDS)], range(n + 1))
    for point in range(n):
        close(ours.states[point], theirs.hidden_states[point][0])
    close(ours.states[n], before_norm[0][0])  # transformers' own last entry comes after the final norm
    close(ours.last, before_norm[0][0])
    assert not torch.allclose(theirs.hidden_states[n][0], ours.last, atol=1e-2)
    close(target.logits(ours.last), theirs.logits[0])


def test_rows_laid_end_to_end_do_not_see_each_other(target: Decoder) -> None:
    rows = [IDS, IDS[:1], IDS[3:8]]
    together = target.packed(torch.tensor([t for row in rows for t in row]), [len(row) for row in rows], (3,))
    at = 0
    for row in rows:
        alone = target.packed(torch.tensor(row), [len(row)], (3,))
        close(together.last[at : at + len(row)], alone.last)
        close(together.states[3][at : at + len(row)], alone.states[3])
        at += len(row)


def test_decoding_a_few_tokens_from_the_cache_equals_one_packed_pass(target: Decoder) -> None:
    prompts, cache = [IDS[:4], IDS[:7]], target.new_cache(3, 16)
    target.packed(torch.tensor([t for p in prompts for t in p]), [4, 7], (), cache, [2, 1])
    cache.move(2, 0)
    wrong = torch.tensor([[11, 12, 13], [14, 15, 16]])
    lengths = torch.tensor([4, 7])
    target.decode(wrong, lengths, cache)  # a refused draft: its keys are written over
    step = target.decode(torch.tensor([IDS[4:7], IDS[7:10]]), lengths, cache, (1, 5))
    for b, end in enumerate((7, 10)):
        full = target.packed(torch.tensor(IDS[:end]), [end], (1, 5))
        close(step.last[b], full.last[-3:])
        close(step.aux((5, 1))[b], full.aux((1, 5))[-3:])


def test_states_are_joined_in_ascending_order_whatever_is_asked(target: Decoder) -> None:
    stream = target.packed(torch.tensor(IDS), [len(IDS)], (1, 3, 5))
    assert torch.equal(stream.aux((5, 1, 3)), torch.cat([stream.states[p] for p in (1, 3, 5)], -1))


def test_stopping_early_gives_the_state_at_that_point(target: Decoder) -> None:
    full = target.packed(torch.tensor(IDS), [len(IDS)], (2,))
    close(target.packed(torch.tensor(IDS), [len(IDS)], until=2).last, full.states[2])


def test_packed_weights_give_the_plain_product_for_any_number_of_rows(folder: Path, target: Decoder) -> None:
    packed = load_target(folder).pack()
    for length in (1, 2, 3, 5, 12):
        ids = torch.tensor(IDS[:length])
        close(packed.packed(ids, [length]).last, target.packed(ids, [length]).last)
    linear, x = Linear(torch.randn(24, 16)), torch.randn(2, 3, 16)
    before = linear(x)
    linear.pack()
    close(linear(x), before)
    assert linear.weight is None, "this machine has no packed products, so this test has shown nothing"


def test_positions_go_on_beyond_the_first_rotary_table(target: Decoder) -> None:
    ids = torch.randint(3, 250, (1030,), generator=torch.Generator().manual_seed(0))
    cache = target.new_cache(1, 1040)
    target.packed(ids[:1020], [1020], (), cache, [0])
    step = target.decode(ids[None, 1020:1030], torch.tensor([1020]), cache)
    close(step.last[0, -1], target.packed(ids, [1030]).last[-1])


def test_rope_scaling_of_llama_3_is_that_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    folder = tiny.make_target(tmp_path / "t", rope_scaling=scaling, rope_theta=500000.0)
    ids = torch.randint(3, 250, (150,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(ids[None]).logits[0]
    target = load_target(folder)
    close(target.logits(target.packed(ids, [150]).last), theirs)
    (folder / "config.json").write_text(
        json.dumps(json.loads((folder / "config.json").read_text()) | {"rope_scaling": None})
    )
    plain = load_target(folder)
    assert not torch.allclose(plain.logits(plain.packed(ids, [150]).last), theirs, atol=1e-3)


YARN = {**latent.YARN, "mscale": 0.7, "mscale_all_dim": 1.2}


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": latent.YARN},
        {"rope_scaling": YARN},
        {"rope_scaling": {**YARN, "beta_fast": 1.0}},
        {"rope_scaling": {k: v for k, v in YARN.items() if "mscale" not in k}},
        {"rope_interleave": False},
        {"q_lora_rank": None},
        {"n_group": 1, "topk_group": 1},
        {"norm_topk_prob": False},
        {"n_shared_experts": 2},
        {"first_k_dense_replace": 3, "routed_scaling_factor": 2.5},
    ],
    ids=str,
)
def test_what_a_config_of_deepseeks_kind_may_say_is_what_transformers_computes(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    from transformers import AutoModelForCausalLM

    folder = latent.make_target(tmp_path / "t", **changes)
    ids = torch.randint(3, 250, (100,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(ids[None]).logits[0]
    target = load_target(folder)
    close(target.logits(target.packed(ids, [100]).last), theirs)


def test_yarn_in_a_llama_is_that_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    folder = tiny.make_target(tmp_path / "t", rope_scaling=scaling)
    ids = torch.randint(3, 250, (150,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(ids[None]).logits[0]
    target, plain = load_target(folder), load_target(tiny.make_target(tmp_path / "plain"))
    ours, unscaled = (t.logits(t.packed(ids, [150]).last) for t in (target, plain))
    close(ours, theirs)
    assert not torch.allclose(unscaled, theirs, atol=1e-3)


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"scoring_func": "softmax"}, "config.json: scoring_func"),
        ({"topk_method": "greedy"}, "config.json: topk_method"),
        ({"attention_bias": True}, "config.json: attention_bias"),
        ({"hidden_act": "gelu"}, "config.json: hidden_act"),
    ],
)
def test_what_is_not_computed_is_refused_by_its_key(tmp_path: Path, changes: dict[str, Any], where: str) -> None:
    with pytest.raises(EngineError, match="not computed here") as error:
        load_target(latent.make_target(tmp_path / "t", **changes))
    assert error.value.where == where and "extract with engine sglang" in error.value.do


def test_kimis_text_model_is_the_one_within_transformers_own_larger_model(tmp_path: Path) -> None:
    from transformers import Kimi_K25ForConditionalGeneration

    folder = latent.make_target(tmp_path / "t", "kimi_k25", rope_scaling=latent.YARN)
    model = Kimi_K25ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        theirs: Any = model(input_ids=torch.tensor([IDS]), output_hidden_states=True)
    target = load_target(folder)
    ours = target.packed(torch.tensor(IDS), [len(IDS)], range(tiny.LAYERS))
    for point in range(tiny.LAYERS):
        close(ours.states[point], theirs.hidden_states[point][0])
    close(target.logits(ours.last), theirs.logits[0])


def test_a_figure_that_the_config_lacks_is_named(tmp_path: Path) -> None:
    folder = latent.make_target(tmp_path / "t")
    config = json.loads((folder / "config.json").read_text())
    del config["routed_scaling_factor"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineError, match="does not say all that this family needs") as error:
        load_target(folder)
    assert error.value.expected == "routed_scaling_factor"


def test_kimis_text_model_is_identified_by_its_own_sizes_under_the_larger_models_name(tmp_path: Path) -> None:
    identity = targets.identify_target(latent.make_target(tmp_path / "t", "kimi_k25"), "kimi")
    assert (identity.model_type, identity.layers, identity.hidden_size, identity.vocab_size) == ("kimi_k25", 6, 64, 259)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_a_turn_ends_at_what_either_config_names(tmp_path: Path, family: str) -> None:
    folder = make_family(tmp_path, family)
    assert load_target(folder).config.eos_ids == (2,)
    for named, ends in ((2, (2,)), ([7, 2], (2, 7)), (None, (2,))):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
        assert load_target(folder).config.eos_ids == ends


def test_an_unknown_family_is_named_beside_those_there_are(tmp_path: Path) -> None:
    folder = tiny.make_target(tmp_path / "t", model_type="mamba")
    with pytest.raises(EngineError, match="mamba") as error:
        load_target(folder)
    assert "llama" in str(error.value) and "qwen3" in str(error.value)


def test_a_missing_or_misshapen_tensor_is_named(tmp_path: Path) -> None:
    folder = tiny.make_target(tmp_path / "t")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.2.mlp.up_proj.weight"
    lacking = {k: v for k, v in tensors.items() if k != name}
    save_file(lacking, folder / "model.safetensors")
    with pytest.raises(EngineError, match=name):
        load_target(folder)
    save_file(tensors | {name: tensors[name][:-1].contiguous()}, folder / "model.safetensors")
    with pytest.raises(EngineError, match=rf"{name}"):
        load_target(folder)
