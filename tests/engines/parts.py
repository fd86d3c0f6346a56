"""A tiny target, a random draft of it, and two stand-ins: a draft that knows the answers and one that counts its calls."""

from __future__ import annotations

import torch
from torch import Tensor

from stages.contracts.draft import DraftNorm
from stages.drafts._decode import DraftDecoder
from stages.drafts._export import DraftCheckpoint
from stages.drafts.eagle3 import Eagle3Config
from stages.targets._decoder import Decoder
from tests import tiny


def random_checkpoint(
    target: Decoder, seed: int = 3, layer_ids: tuple[int, ...] = (0, 2, 4), norms: tuple[DraftNorm, ...] = ()
) -> DraftCheckpoint:
    """A draft of every second token of the target's vocabulary, weights drawn at random."""
    V = target.config.vocab_size
    config = Eagle3Config(tiny.HIDDEN, 96, 4, 2, 16, V, (V + 1) // 2, 1e-5, 10000.0, 1024, norms=norms)
    g = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(*shape, generator=g) * 0.2 for name, shape in config.shapes().items()}
    t2d = torch.arange(V) % 2 == 0
    d2t = t2d.nonzero()[:, 0] - torch.arange(config.draft_vocab_size)
    return DraftCheckpoint(config, tensors, d2t, t2d, layer_ids)


def random_draft(target: Decoder, points: tuple[int, ...] = tiny.POINTS, seed: int = 3) -> DraftDecoder:
    return DraftDecoder(random_checkpoint(target, seed), points=points, embedding=target.embedding)


class Knowing:
    """Proposes what really comes next, from whole texts (prompt and answer) it was told; every `wrong`-th one is spoilt."""

    def __init__(
        self, texts: list[list[int]], vocab: int, points: tuple[int, ...] = tiny.POINTS, wrong: int = 0
    ) -> None:
        self.texts, self.points, self.wrong = texts, points, wrong
        self.target_ids = torch.arange(vocab)
        self.calls = 0
        self._proposed = 0
        self.seen: dict[int, dict[int, int]] = {}

    def open(self, slots: int, positions: int) -> None: ...

    def move(self, source: int, to: int) -> None:
        self.calls += 1
        self.seen[to] = dict(self.seen[source])

    def _propose(self, slots: range, positions: list[int]) -> tuple[Tensor, Tensor]:
        self.calls += 1
        logits = torch.zeros(len(slots), len(self.target_ids))
        for slot, p in zip(slots, positions, strict=True):
            seen = {at: token for at, token in self.seen[slot].items() if at <= p + 1}
            text = next((t for t in self.texts if all(t[at : at + 1] == [x] for at, x in seen.items())), [])
            token = text[p + 2] if p + 2 < len(text) else 0
            self._proposed += 1
            if self.wrong and self._proposed % self.wrong == 0:
                token = (token + 1) % len(self.target_ids)
            logits[slot, token] = 50.0
        return logits, torch.zeros(len(slots), 1)

    def feed(self, ids: Tensor, aux: Tensor, slot: Tensor, position: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        for token, s, p in zip(ids.tolist(), slot.tolist(), position.tolist(), strict=True):
            if p == 0:
                self.seen[s] = {}
            self.seen[s][p + 1] = token
        return self._propose(range(len(last)), position[last].tolist())

    def step(self, ids: Tensor, state: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        for s, (token, p) in enumerate(zip(ids.tolist(), position.tolist(), strict=True)):
            self.seen[s][p + 1] = token
        return self._propose(range(len(ids)), position.tolist())
