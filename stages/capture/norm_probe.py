"""The last state's norm: stored before or after it? Told by value, by argmax and by likelihood, under both readings.

RMSNorm changes scale and per-channel weight, so a wrong guess may leave the argmax nearly intact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from stages.capture.probe import FIRST, MOST_TOKENS, ProbeRow, apart

if TYPE_CHECKING:
    from stages.targets._decoder import Decoder


@dataclass(frozen=True)
class NormProbe:
    """Both readings of the stored last state, before and after the final norm. Columns:

    *_distance: median relative L2 to the target's own last state, read that way; *_agreement: share of supervised
    tokens that the stored state's argmax reproduces when its logits are taken that way; own_agreement: share of positions
    before them at which it is the argmax of the target's own recomputed state; *_nll: mean negative log-likelihood of the
    supervised tokens, nats, and target_nll: by the target's own recomputed state, which the right reading reproduces;
    reading: `before_final_norm` or `after_final_norm`, whichever is nearer in value; rows, tokens:
    rows and supervised tokens judged. A wrong reading may leave the argmax nearly intact and make the distribution too
    sharp or too flat: distance and likelihood tell.
    """

    reading: str
    before_distance: float
    after_distance: float
    before_agreement: float
    after_agreement: float
    own_agreement: float
    before_nll: float
    after_nll: float
    target_nll: float
    rows: int
    tokens: int


@torch.inference_mode()
def probe_norm(target: Decoder, rows: Sequence[ProbeRow], max_tokens: int = MOST_TOKENS) -> NormProbe:
    """Read the last slot of each row before and after the final norm; see NormProbe.

    Agreement is a check on rows that the target answered greedily; on others it is merely informative.
    """
    far: list[Tensor] = []
    hits, nll, tokens, as_own = [0, 0, 0], [0.0, 0.0, 0.0], 0, 0
    for row in rows:
        ids, stored = row.input_ids[:max_tokens].long().to(target.device), row.states[:max_tokens, -1].to(target.device)
        own = target.packed(ids, [len(ids)]).last
        normed = F.rms_norm(own, (own.shape[-1],), target.norm, target.config.eps)
        both = torch.stack([apart(stored, own)[FIRST:], apart(stored, normed)[FIRST:]], -1)
        far.append(both if row.kept is None else both[row.kept[FIRST:max_tokens, -1]])
        asked = row.loss_mask[1:max_tokens].bool().nonzero()[:, 0].to(target.device)
        label, read = ids[1:][asked], stored[asked].to(target.dtype)
        readings = target.logits(read), target.head(read).float(), target.logits(own[asked])
        for i, logits in enumerate(readings):
            hits[i] += int((logits.argmax(-1) == label).sum())
            nll[i] += float(F.cross_entropy(logits, label, reduction="sum"))
        as_own += int((readings[0].argmax(-1) == readings[2].argmax(-1)).sum())
        tokens += len(asked)
    before, after = torch.cat(far).median(0).values.tolist()
    count = max(tokens, 1)
    return NormProbe(
        reading="before_final_norm" if before <= after else "after_final_norm",
        before_distance=before,
        after_distance=after,
        before_agreement=hits[0] / count,
        after_agreement=hits[1] / count,
        own_agreement=as_own / count,
        before_nll=nll[0] / count,
        after_nll=nll[1] / count,
        target_nll=nll[2] / count,
        rows=len(rows),
        tokens=tokens,
    )
