"""SpecForge 0.2.0 and speculators 0.9.0: their own EAGLE-3 classes, losses and optimizers, fed with our rows.

Each stands unpacked in <name>-<version> below .peers (`make peers`) or the folder that DRAFTLINE_PEERS names, beside `deps` with what
they import. Their code is run as it is, with what it would do on a CPU: SpecForge's fused loss needs a GPU's Triton,
so its own plain version of the same loss is called; speculators' losses are its "eager" ones, its attention
"eager", one of its three.

Both are run in float32 and as their own settings have it, in bfloat16: SpecForge's draft and target head are bfloat16 beside its
optimizer's float32 masters; speculators keeps float32 weights and computes the forward pass under autocast.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import sys
import types
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.training_rows import Inputs
from stages.drafts.eagle3 import PackedBatch

PEERS = {"specforge": "specforge-0.2.0", "speculators": "speculators-0.9.0"}
DECAY, CLIP = 0.8, 1.0


def _root() -> Path:
    """Where the peers stand: DRAFTLINE_PEERS, or what `make peers` fetched."""
    return Path(os.environ.get("DRAFTLINE_PEERS") or Path(__file__).parents[1] / ".peers")


def absent(name: str) -> str | None:
    """Why a peer cannot be run here, in words; None when it can."""
    root = _root()
    lacking = [str(p) for p in (root / PEERS[name], root / "deps") if not p.is_dir()]
    return f"{name}: not run, for {' and '.join(lacking)} is not there" if lacking else None


def put_on_path(name: str) -> None:
    """Let the peer be imported."""
    root = _root()
    sys.path[:0] = [str(root / PEERS[name]), str(root / "deps")]


def llama_config(inputs: Inputs) -> Any:
    from transformers import LlamaConfig

    c = inputs.config
    told: dict[str, Any] = {"draft_vocab_size": c.draft_vocab_size, "rope_theta": c.rope_theta}
    return LlamaConfig(
        **told,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_attention_heads=c.heads,
        num_key_value_heads=c.kv_heads,
        head_dim=c.head_dim,
        num_hidden_layers=1,
        vocab_size=c.vocab_size,
        rms_norm_eps=c.eps,
        max_position_embeddings=c.max_positions,
        tie_word_embeddings=False,
        pad_token_id=None,
    )


class SpecForge:
    """OnlineEagle3Model over LlamaForCausalLMEagle3 (attention "sdpa", its default), its BF16Optimizer on float32.

    Of EAGLE-3.1's norms it has fc_norm alone: its `norm_output` says whether lm_head is given normed states (its pull request 879).

    Rows are padded to the longest of the batch, as its collator does; the target's head runs over the whole vocabulary,
    as its offline training does by default.
    """

    def __init__(self, inputs: Inputs, steps: int, seed: int, dtype: torch.dtype = torch.float32) -> None:
        put_on_path("specforge")
        assert set(inputs.config.norms) <= {"fc_norm"}
        self._loss()
        model, draft = (
            importlib.import_module(f"specforge.{name}")
            for name in ("algorithms.eagle3.model", "modeling.draft.llama3_eagle")
        )
        optimizer = importlib.import_module("specforge.optimizer")
        plain = importlib.import_module("specforge.core.loss")._compute_loss
        vars(model)["LogSoftmaxLoss"] = types.SimpleNamespace(apply=plain)
        torch.manual_seed(seed)
        config = llama_config(inputs)
        config.fc_norm = "fc_norm" in inputs.config.norms
        self._draft = draft.LlamaForCausalLMEagle3(config, attention_backend="sdpa")
        with torch.no_grad():
            self._draft.embed_tokens.weight.copy_(inputs.tensor("embedding"))
            self._draft.t2d.copy_(inputs.tensor("t2d"))
            self._draft.d2t.copy_(inputs.tensor("d2t"))
        self._draft.to(dtype).freeze_embedding()
        self._model = model.OnlineEagle3Model(self._draft, length=steps, attention_backend="sdpa")
        self._optimizer = optimizer.BF16Optimizer(self._draft, lr=1e-3, max_grad_norm=CLIP, total_steps=1_000_000)
        self._head, self._norm = inputs.tensor("head").to(dtype), inputs.tensor("norm").to(dtype)
        self._eps, self._dtype = inputs.config.eps, dtype

    @staticmethod
    def _loss() -> None:
        """Import its loss module, whose kernels are only defined, never run, with a stand-in for Triton's decorator."""
        for first in ("torch._dynamo", "torch._inductor.compile_fx"):  # these would take the stand-in for the real one
            importlib.import_module(first)
        language = types.ModuleType("triton.language")
        language.constexpr = int  # type: ignore[attr-defined]
        triton = types.ModuleType("triton")
        triton.jit, triton.language = (lambda f: f), language  # type: ignore[attr-defined]
        for module in (triton, language):
            module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
            sys.modules[module.__name__] = module
        importlib.import_module("specforge.core.loss")
        del sys.modules["triton"], sys.modules["triton.language"]

    def step(self, batch: PackedBatch, rate: float) -> None:
        def padded(x: Tensor) -> Tensor:
            return nn.utils.rnn.pad_sequence(list(x.split(list(batch.lengths))), batch_first=True)

        def shifted(x: Tensor) -> Tensor:
            return F.pad(x, (0, 0) * (x.dim() - 2) + (0, 1))[:, 1:]

        last = padded(F.rms_norm(batch.last.to(self._dtype), self._norm.shape, self._norm, self._eps))
        losses = self._model(
            input_ids=shifted(padded(batch.input_ids)),
            attention_mask=padded(torch.ones_like(batch.input_ids)),
            loss_mask=padded(batch.loss_mask.long())[..., None],
            target=shifted(last) @ self._head.T,
            hidden_states=padded(batch.aux.to(self._dtype)),
        )[0]
        torch.stack([DECAY**i * loss for i, loss in enumerate(losses)]).sum().backward()
        for group in self._optimizer.optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()

    def weights(self) -> dict[str, Tensor]:
        """Under our names."""
        own = self._draft.state_dict()
        return {n: t for n, t in own.items() if n not in ("embed_tokens.weight", "t2d", "d2t")}


class Speculators:
    """Eagle3DraftModel, its eager KL loss, AdamW as its build_optimizers makes it; rows packed with document ids.

    Its head is the target's own rows and frozen, as its load_verifier_weights leaves it.
    """

    def __init__(self, inputs: Inputs, steps: int, seed: int, dtype: torch.dtype = torch.float32) -> None:
        put_on_path("speculators")
        core, losses = (importlib.import_module(f"speculators.{name}") for name in ("models.eagle3.core", "losses"))
        config = llama_config(inputs)
        config._attn_implementation = "eager"
        torch.manual_seed(seed)
        told = core.Eagle3SpeculatorConfig(
            transformer_layer_config=config,
            draft_vocab_size=inputs.config.draft_vocab_size,
            **dict.fromkeys(inputs.config.norms, True),
        )
        self._draft, self._steps, self._dtype = core.Eagle3DraftModel(told), steps, dtype
        t2d, head = inputs.tensor("t2d"), inputs.tensor("head")
        self._draft.load_vocab_mappings(t2d, inputs.tensor("d2t"))
        with torch.no_grad():
            self._draft.embed_tokens.weight.copy_(inputs.tensor("embedding"))
            self._draft.lm_head.weight.copy_(head[t2d])
            self._draft.verifier_lm_head.weight.copy_(head[t2d])
            self._draft.verifier_norm.weight.copy_(inputs.tensor("norm"))
        self._kl = losses.resolve_loss_config("kl_div", "eager")
        optimizers = importlib.import_module("speculators.train.optimizers")
        self._learnt = [p for p in self._draft.parameters() if p.requires_grad]
        adamw = types.SimpleNamespace(optimizer="adamw", lr=1e-3, weight_decay=0.01)
        self._optimizer = optimizers.build_optimizers(self._draft, adamw)[0]

    def step(self, batch: PackedBatch, rate: float) -> None:
        """Its data loader's shift: the token, the last state and the mask of p+1 stand beside the states of p."""
        ends = torch.tensor(batch.lengths).cumsum(0)
        here = torch.ones(len(batch.input_ids), dtype=torch.bool)
        here[ends - 1] = False
        next_ = torch.ones_like(here)
        next_[ends - torch.tensor(batch.lengths)] = False
        documents = torch.repeat_interleave(torch.arange(len(batch.lengths)), torch.tensor(batch.lengths) - 1)
        positions = torch.cat([torch.arange(1, length) for length in batch.lengths])
        with torch.autocast("cpu", torch.bfloat16, enabled=self._dtype == torch.bfloat16):
            _, loss, _ = self._draft(
                hidden_states=batch.aux[here][None].to(self._dtype),
                input_ids=batch.input_ids[next_][None],
                document_ids=documents[None],
                loss_mask=batch.loss_mask[next_][None],
                position_ids=positions[None],
                verifier_last_hidden_states=batch.last[next_][None].to(self._dtype),
                ttt_steps=self._steps,
                ttt_step_loss_decay=DECAY,
                loss_config=self._kl,
            )
        loss.backward()
        nn.utils.clip_grad_norm_(self._learnt, CLIP)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad()

    def weights(self) -> dict[str, Tensor]:
        """Under our names."""
        left_out = ("embed_tokens.weight", "t2d", "d2t", "verifier_lm_head.weight", "verifier_norm.weight")
        own = {n: t for n, t in self._draft.state_dict().items() if n not in left_out and "rotary" not in n}
        return {n.replace("layers.0.", "midlayer."): t for n, t in own.items()}
