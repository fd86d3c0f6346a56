"""A peer's own training step over a store that was handed over to it: run with the peer on the path, not by pytest.

    python peer_trainers.py specforge|speculators STORE START RATIO

START holds draft weights under our names, the target's head, norm and embedding, and sizes in its metadata. Everything else is
the peer's: its reader, its shift, its collator, its model, its loss, its optimizer. What SpecForge compiles for a GPU (a
fused loss in Triton) is replaced by its own plain form of the same loss; TORCHDYNAMO_DISABLE is expected to be set. Printed as
JSON: the loss of every step, the first at the given weights.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

DRAFT_STEPS, DECAY, OPTIMIZER_STEPS = 3, 0.8, 6
MAX_TOKENS = 4096
ROWS = 4  # the shortest training rows, which are trained on


def shortest(rows: list[Any], ids_of: Callable[[Any], list[int]]) -> list[Any]:
    """The rows that are trained on, in whatever order a reader gives them."""
    return sorted(rows, key=lambda row: (len(ids_of(row)), ids_of(row)))[:ROWS]


class Start:
    def __init__(self, path: str) -> None:
        with safe_open(path, "pt") as file:
            self.tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            self.sizes: dict[str, Any] = json.loads(file.metadata()["sizes"])

    def draft(self) -> dict[str, Tensor]:
        return {n.removeprefix("draft."): t for n, t in self.tensors.items() if n.startswith("draft.")}

    def config(self) -> Any:
        from transformers import LlamaConfig

        return LlamaConfig(num_hidden_layers=1, tie_word_embeddings=False, pad_token_id=None, **self.sizes)


def plain_loss() -> Any:
    """SpecForge's loss module, imported with a stand-in for Triton: its kernels are defined and never run."""
    for first in ("torch._dynamo", "torch._inductor.compile_fx"):  # these would take the stand-in for the real one
        importlib.import_module(first)
    language, triton = types.ModuleType("triton.language"), types.ModuleType("triton")
    language.constexpr = int  # type: ignore[attr-defined]
    triton.jit, triton.language = (lambda f: f), language  # type: ignore[attr-defined]
    for module in (triton, language):
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        sys.modules[module.__name__] = module
    loss = importlib.import_module("specforge.core.loss")
    del sys.modules["triton"], sys.modules["triton.language"]
    return loss._compute_loss


def specforge(store: Path, start: Start) -> list[float]:
    loss = plain_loss()
    from specforge.algorithms.eagle3 import model as eagle3
    from specforge.algorithms.eagle3.data import build_offline_collator, build_offline_reader, normalize_offline_sample
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
    from specforge.modeling.target.target_head import TargetHead
    from specforge.optimizer import BF16Optimizer
    from specforge.runtime.contracts import TrainBatch
    from specforge.runtime.data_plane.feature_store import load_feature_file
    from specforge.training.strategies.base import Eagle3TrainStrategy

    eagle3.LogSoftmaxLoss = types.SimpleNamespace(apply=loss)
    reader = build_offline_reader(str(store / "train"), run_id="r", ttt_length=DRAFT_STEPS, max_len=MAX_TOKENS)
    rows = [normalize_offline_sample(load_feature_file(ref.feature_store_uri[7:]), MAX_TOKENS) for ref in reader]
    rows = shortest(rows, lambda row: row["input_ids"][0].tolist())
    batch = {k: v for k, v in build_offline_collator()(rows).items() if v is not None}
    batch |= {name: batch[name].float() for name in ("hidden_state", "target")}
    draft = LlamaForCausalLMEagle3(start.config(), attention_backend="sdpa")
    mapping = torch.load(store / "vocab_mapping.pt", weights_only=True)
    draft.load_state_dict(start.draft() | {"embed_tokens.weight": start.tensors["embedding"]} | mapping)
    draft.freeze_embedding()
    head = TargetHead.__new__(TargetHead)
    nn.Module.__init__(head)
    vocab, hidden = start.tensors["head"].shape
    head.fc = nn.Linear(hidden, vocab, bias=False)
    head.fc.weight.data.copy_(start.tensors["head"])
    wrapped = eagle3.OnlineEagle3Model(draft, length=DRAFT_STEPS, attention_backend="sdpa")
    strategy = Eagle3TrainStrategy(wrapped, target_head=head.requires_grad_(False), ploss_decay=DECAY)
    optimizer = BF16Optimizer(draft, lr=2e-3, total_steps=100, warmup_ratio=0.0, lr_scheduler="constant")
    train_batch = TrainBatch([], "eagle3", batch, {"target_repr": "hidden_state"})
    losses = []
    for _ in range(OPTIMIZER_STEPS):
        out = strategy.forward_loss(train_batch).loss
        losses.append(float(out))
        out.backward()
        optimizer.step()
    return losses


def speculators(store: Path, start: Start, ratio: float) -> list[float]:
    import numpy as np
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3.core import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.data import ArrowDataset, CollateFn
    from speculators.train.optimizers import build_optimizers

    data = ArrowDataset(
        MAX_TOKENS, store, on_missing="raise", train_ratio=ratio, split="train", hidden_states_dtype=torch.float32
    )
    config = start.config()
    config._attn_implementation = "eager"
    size, hidden = start.sizes["draft_vocab_size"], start.sizes["hidden_size"]
    rows = shortest([data[i] for i in range(len(data))], lambda row: row["input_ids"].tolist())
    tokens = sum(len(row["input_ids"]) - 1 for row in rows)
    collate = CollateFn(tokens, hidden, dtype=torch.float32, preprocess=shift_batch)
    batch = {k: v for k, v in collate(rows).items() if isinstance(v, Tensor)}
    draft = Eagle3DraftModel(Eagle3SpeculatorConfig(transformer_layer_config=config, draft_vocab_size=size))
    t2d, d2t = (torch.from_numpy(np.load(store / f"{n}-{size}.npy")) for n in ("t2d", "d2t"))
    draft.load_vocab_mappings(t2d, d2t)
    own = {n.replace("midlayer.", "layers.0."): t for n, t in start.draft().items()}
    told = {"embed_tokens.weight": start.tensors["embedding"], "verifier_norm.weight": start.tensors["norm"]}
    told["verifier_lm_head.weight"] = start.tensors["head"][t2d]
    missing, strange = draft.load_state_dict(own | told, strict=False)
    assert not strange and all(n in ("t2d", "d2t") for n in missing), (missing, strange)
    adamw = types.SimpleNamespace(optimizer="adamw", lr=2e-3, weight_decay=0.01)
    optimizer = build_optimizers(draft, adamw)[0]
    losses = []
    for _ in range(OPTIMIZER_STEPS):
        _, out, _ = draft(
            **batch,
            ttt_steps=DRAFT_STEPS,
            ttt_step_loss_decay=DECAY,
            loss_config=resolve_loss_config("kl_div", "eager"),
        )
        losses.append(float(out))
        out.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def main() -> None:
    peer, store, start, ratio = sys.argv[1:]
    torch.manual_seed(0)
    told = Start(start)
    losses = specforge(Path(store), told) if peer == "specforge" else speculators(Path(store), told, float(ratio))
    print(json.dumps(losses))


if __name__ == "__main__":
    main()
