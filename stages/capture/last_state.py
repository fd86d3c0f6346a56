"""The last state of probed rows, read before and after the final norm, in words: distance, argmax and likelihood together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from stages.capture.findings import Finding, LastState, RowLike
from stages.capture.margins import REFUSED
from stages.capture.norm_probe import NormProbe, probe_norm
from stages.capture.probe import ProbeRow

if TYPE_CHECKING:
    from stages.targets._decoder import Decoder

_FITS_NATS = 0.5  # a token; a second norm, or one left out, moves the likelihood of answers by far more
_WORDS = {"before_final_norm": "before the final norm", "after_final_norm": "after the final norm"}


@dataclass(frozen=True, eq=False)
class NormReading:
    """reading: before_final_norm, after_final_norm, or unknown where neither fits; probe: the figures."""

    row: RowLike
    reading: LastState
    probe: NormProbe

    @property
    def words(self) -> str:
        p = self.probe
        return (
            f"read as before the norm: distance {p.before_distance:.4f}, {p.before_nll:.3f} nats a token, argmax "
            f"{p.before_agreement:.0%}; as after it: distance {p.after_distance:.4f}, {p.after_nll:.3f} nats, argmax "
            f"{p.after_agreement:.0%}; the target run again: {p.target_nll:.3f} nats; {p.tokens} tokens"
        )


def read_norm(target: Decoder, row: RowLike, max_tokens: int) -> NormReading | None:
    """Both readings of a row's last state, over its supervised tokens, or all of them if it has no mask; None without one.

    Value decides where either reading comes near; else likelihood, which survives other weights or coarse storage.
    """
    if row.last is None:
        return None
    ids = row.input_ids[:max_tokens]
    mask = torch.ones_like(ids) if row.loss_mask is None or len(row.loss_mask) != len(row.input_ids) else row.loss_mask
    mask = mask[:max_tokens] if mask[1:max_tokens].any() else torch.ones_like(ids)
    probe = probe_norm(target, [ProbeRow(str(row.index), ids, mask, row.last[:max_tokens, None].float())], max_tokens)
    return NormReading(row, _reading(probe), probe)


def _reading(p: NormProbe) -> LastState:
    near = min(p.before_distance, p.after_distance) < REFUSED
    before, after = abs(p.before_nll - p.target_nll), abs(p.after_nll - p.target_nll)
    if not near and not min(before, after) < _FITS_NATS:  # NaN is no fit either
        return "unknown"
    nearer = p.before_distance <= p.after_distance if near else before <= after
    return "before_final_norm" if nearer else "after_final_norm"


def norm_findings(readings: Sequence[NormReading], claimed: LastState) -> Iterator[Finding]:
    """Rows whose last state is not read as claimed; as a note what fits when nothing is claimed and all rows agree."""
    found = {r.reading for r in readings}
    if claimed == "unknown" and len(found) == 1 and found != {"unknown"}:
        reading = next(iter(found))
        what, expected = f"The last state was stored {_WORDS[reading]}", "it is not written down"
        worst = max(readings, key=lambda r: min(r.probe.before_distance, r.probe.after_distance))
        do = "name it when the store is adopted"
        detail = {"reading": reading}
        yield Finding("last_state", "", None, what, expected, worst.words, do, note=True, detail=detail)
        return
    wanted = claimed if claimed != "unknown" else readings[0].reading if readings else claimed
    for r in readings:
        if r.reading == wanted != "unknown":
            continue
        if r.reading == "unknown":
            what = "The last state fits neither reading, before or after the final norm"
            do = "compare weights and revision of the target that was captured with those of this one"
        else:
            what = f"The last state was stored {_WORDS[r.reading]}"
            do = "read it so, or extract again; a norm applied twice or never makes soft targets far too sharp or flat"
        expected = _WORDS.get(wanted, "one reading that fits")
        detail = {"reading": r.reading}
        yield Finding("norm", r.row.file, r.row.index, what, expected, r.words, do, detail=detail)
