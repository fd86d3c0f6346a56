"""The simulation on states as the target computes them. Stored ones are rounded to bfloat16, which moves a token that the
draft is in two minds about now and then; on these, served and simulated counts are equal or something is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from stages import serve_validate
from stages._served import open_served
from stages.acceptance.prompts import held_out_prompts
from stages.capture.store import RowStore
from stages.contracts.draft import DRAFT, DRAFT_RECORD, DraftRecord
from stages.contracts.evidence import ServeEvidence
from stages.contracts.manifest import PREPARED_MANIFEST, PreparedManifest
from stages.contracts.params import load_params


def simulated_unrounded(evidence: ServeEvidence) -> dict[str, tuple[int, ...]]:
    """Tokens accepted at every verification by request, of those that were simulated; of the line in the current folder,
    whose engine must be this process."""
    params, record = load_params(), DraftRecord.read(DRAFT / DRAFT_RECORD)
    served = open_served(params, record)
    simulated = {r.prompt_id: r.tokens for r in evidence.requests if r.simulated_verifications is not None}
    prompts = held_out_prompts(PreparedManifest.read(PREPARED_MANIFEST), params.serve.prompts_per_source)
    rows = [(p, simulated[p.prompt_id]) for p in prompts if p.prompt_id in simulated]

    class Unrounded:
        def __init__(self, folder: Path) -> None:
            self.stored = RowStore(folder)

        @torch.inference_mode()
        def row(self, folder: str, i: int) -> tuple[Tensor, Tensor, Tensor]:
            states, ids, mask = self.stored.row(folder, i)
            stream = served.target.packed(ids.long(), [len(ids)], record.points)
            whole = torch.stack([*(stream.states[p] for p in record.points), stream.last], dim=1).float()
            assert not torch.equal(whole, states.float()), "the stored states are not rounded: compare with them"
            return whole, ids, mask

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serve_validate, "RowStore", Unrounded)
        answers = serve_validate.simulate(served, rows, params.serve.draft_steps)
    return {p.prompt_id: a.accepted for (p, _), a in zip(rows, answers, strict=True)}
