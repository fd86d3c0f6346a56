"""Stored states as gate-training judges them: every folder and row looked at, a sample run through the target again."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from stages.contracts.errors import DataError
from stages.contracts.manifest import HIDDEN_STATES, CapturedFolder, CaptureSpec
from stages.contracts.params import Params
from stages.contracts.progress import progress
from stages.gates._joined import Stored, blank_folder
from stages.targets import expect_rows

if TYPE_CHECKING:
    from pandas import DataFrame

    from stages.capture.norm_probe import NormProbe
    from stages.capture.probe import ProbeRow
    from stages.capture.store import RowFolder, RowStore
    from stages.targets._decoder import Decoder

PROBE_TOKENS = 1 << 20  # of a row, so all of it: a shift or a torn prefill may begin anywhere
MOST_PROBED = 64  # folders of which a row goes through the target again: minutes on a small target, and no more
_MOST_SEARCHED = 64  # rows of a folder at fault that go through it to learn why
_MOST_TOLD = 2  # folders, and rows of each, of which that is told
_CAUSES = {"wrong_row", "torn", "shifted_tokens", "no_point", "post_norm_slot"}


def look_at_folders(folders: Sequence[CapturedFolder], store: RowStore, rows: DataFrame) -> tuple[DataFrame, Stored]:
    """Facts a folder, and facts a stored row by row id. A folder that cannot be opened is a fact too."""
    import pandas as pd
    import torch

    from stages.capture.row_faults import Seen, row_faults
    from stages.capture.verify import found_digest

    wanted = {
        r: (torch.tensor(i), torch.tensor(m))
        for r, i, m in zip(rows["row_id"], rows["input_ids"], rows["loss_mask"], strict=True)
    }
    facts: list[dict[str, Any]] = []
    stored: Stored = {}
    seen = Seen()
    with progress(sum(f.tokens for f in folders), "gate-training: stored states", "tokens") as advance:
        for f in folders:
            fact = blank_folder(f)
            facts.append(fact)
            fact["found_digest"] = found_digest(store.root / f.name)
            try:
                opened = store.folder(f.name)
            except DataError as error:
                fact["fault"] = f"{error.what} ({error.got})"
                continue
            spec, (T, S, H) = opened.config.capture, opened.shape
            fact |= {"found_config": opened.config.digest(), "capture": spec.digest(), "slots": S, "width": H}
            fact |= {"rows_stored": len(opened), "tokens_stored": T, "dtype": str(opened.dtype).removeprefix("torch.")}
            members = (_probe_row(opened, i) for i in range(len(opened)))
            for i, fault in enumerate(row_faults(f.name, members, wanted, seen)):
                at = {"row_in_folder": i, "offset": int(opened.offsets[i]), "sizes": _sizes(opened, i)}
                stored.setdefault(fault.row_id, []).append({**vars(fault), **at})
            advance(f.tokens)
    return pd.DataFrame(facts), stored


def _sizes(folder: RowFolder, i: int) -> list[float]:
    """Median log2 norm of a row's stored states, by slot: what another layer, or a norm, shows without the target."""
    states, kept = folder.view(i)[0][1:].float(), folder.kept(i)[1:]
    return [float(states[k, s].norm(dim=-1).log2().median()) if k.any() else math.nan for s, k in enumerate(kept.T)]


def _odd_ones(stored: Stored) -> list[str]:
    """Rows whose states are the smallest or largest of their slot, or of the step from one slot to the next."""
    import numpy as np

    names = [r for r, s in stored.items() if np.isfinite(s[0]["sizes"]).all()]
    if not names:
        return []
    sizes = np.array([stored[r][0]["sizes"] for r in names])
    columns = np.concatenate([sizes, np.diff(sizes, axis=1)], 1)
    return list(dict.fromkeys(names[int(i)] for pick in (np.argmax, np.argmin) for i in pick(columns, 0)))


def _probe_row(folder: RowFolder, i: int) -> ProbeRow:
    """Row `i` as it lies on the disk: damaged bytes are the folders table's business."""
    from stages.capture.probe import ProbeRow

    states, ids, mask = folder.view(i)
    return ProbeRow(folder.config.row_ids[i], ids, mask, states, folder.kept(i))


def choose_rows(
    store: RowStore, folders: Sequence[CapturedFolder], stored: Stored, params: Params
) -> dict[str, list[ProbeRow]]:
    """A sample by hash, by folder: the same rows for the same data, and no folder twice before all once.

    Every folder gives a row, up to MOST_PROBED folders: any of them alone may have been captured wrong. A folder whose
    states have another shape is left to the folders table.
    """

    def rank(row_id: str) -> str:
        return hashlib.sha256(f"probe {row_id}".encode()).hexdigest()

    shape = (len(params.capture.points) + 1, params.target.hidden_size)
    fits = {f.name for f in folders if _shape_of(store, f.name) == shape}
    by_folder: dict[str, list[str]] = {f.name: [] for f in folders}
    for row_id in sorted((r for r, s in stored.items() if s[0]["tokens"] > 1 and s[0]["folder"] in fits), key=rank):
        by_folder[stored[row_id][0]["folder"]].append(row_id)
    order = sorted((ids for ids in by_folder.values() if ids), key=lambda ids: rank(ids[0]))
    turns = [ids[turn] for turn in range(max(map(len, order), default=0)) for ids in order if len(ids) > turn]
    chosen: dict[str, list[ProbeRow]] = {}
    most = max(params.gates.training.probe_rows, min(len(order), MOST_PROBED))
    odd = [r for r in _odd_ones({r: s for r, s in stored.items() if r in set(turns)}) if r not in turns[:most]]
    for row_id in [*turns[:most], *odd]:
        at = stored[row_id][0]
        row = _probe_row(store.folder(at["folder"]), at["row_in_folder"])
        chosen.setdefault(at["folder"], []).append(row)
    if not chosen:
        raise DataError(
            "No stored row can be read, so no layer can be proved",
            where=str(HIDDEN_STATES),
            expected=f"rows of two tokens or more, {shape[0]} states of {shape[1]} values a token",
            do="run `dvc repro extract`",
        )
    return {f.name: chosen[f.name] for f in folders if f.name in chosen}


def _shape_of(store: RowStore, folder: str) -> tuple[int, ...]:
    """Slots and width of a folder's states; none when it cannot be opened, which the folders table says."""
    try:
        return store.folder(folder).shape[1:]
    except DataError:
        return ()


def probe(
    target: Decoder,
    store: RowStore,
    rows: dict[str, list[ProbeRow]],
    capture: CaptureSpec,
    params: Params,
    greedy: bool,
) -> tuple[DataFrame, dict[str, Any]]:
    """Each slot of each folder against every point of the target, and the last state before and after the final norm."""
    import pandas as pd

    from stages.capture.forms import as_stored
    from stages.capture.margins import REFUSED, coarser, margin_of
    from stages.capture.norm_probe import probe_norm
    from stages.capture.probe import probe_rows

    slots: list[dict[str, Any]] = []
    odd: list[str] = []
    limit = margin_of(capture.stored_dtype, coarser(capture.compute_dtype, params.target.dtype)).p99
    norms: list[tuple[str, NormProbe]] = []
    with progress(sum(map(len, rows.values())), "gate-training: target run again", "rows") as advance:
        ids = [row.input_ids[:PROBE_TOKENS] for members in rows.values() for row in members]
        expect_rows(target, ids, lambda layers: advance(0, f"layer {layers} of {target.config.layers}"))
        for folder, members in rows.items():
            probes = probe_rows(
                target, members, params.capture.points, PROBE_TOKENS, partial(as_stored, form=capture.form)
            )
            slots += [
                {**vars(s), "folder": folder, "slot": f"{folder} slot {s.slot}", "p99_limit": limit} for s in probes
            ]
            odd += (
                [folder] if any(s.claimed_distance >= REFUSED or s.claimed_p99_distance > limit for s in probes) else []
            )
            norms += [(folder, probe_norm(target, [row], PROBE_TOKENS)) for row in members]
            advance(len(members), folder)
    told = causes(target, store, odd[:_MOST_TOLD], list(rows), capture, params)
    return pd.DataFrame([{**s, "cause": told.get(s["folder"], "")} for s in slots]), read_last(norms, greedy)


def causes(
    target: Decoder, store: RowStore, folders: Sequence[str], known: Sequence[str], capture: CaptureSpec, params: Params
) -> dict[str, str]:
    """What the value checks say of the first rows of folders that do not hold what they claim: whose states they are, if
    they are of a row in the `known` folders."""
    from stages.capture.own_rows import own_rows
    from stages.capture.values import check_values

    told: dict[str, str] = {}
    for folder in folders:
        found = check_values(
            own_rows(store, folder, _MOST_SEARCHED),
            target=target,
            points=params.capture.points,
            last_state="before_final_norm",
            computed=capture.compute_dtype,
            probe_rows=_MOST_SEARCHED,
            max_tokens=PROBE_TOKENS,
            others=(row for name in known for row in own_rows(store, name)),
            expect=lambda rows: expect_rows(target, rows, lambda _: None),
        )
        said = [f"row {f.index}: {f.what}: {f.found}" for f in found if not f.note and f.kind in _CAUSES]
        told[folder] = "; ".join(said[:_MOST_TOLD])
    return told


def read_last(norms: Sequence[tuple[str, NormProbe]], greedy: bool) -> dict[str, Any]:
    """The last state in one line: distance and likelihood of the rows that disagree most, agreement over all rows.

    One token of a short answer is a large share of it, so agreement alone is counted over all. For answers that were
    sampled or given, whose tokens need not be the target's first choice, it is agreement with the target run again.
    """
    far_at, far = max(norms, key=lambda n: n[1].before_distance / max(n[1].after_distance, 1e-30))
    odd_at, odd = max(norms, key=lambda n: _gap(n[1]))
    tokens = sum(n.tokens for _, n in norms)
    agreed = sum((n.before_agreement if greedy else n.own_agreement) * n.tokens for _, n in norms)
    return {
        "distance_folder": far_at,
        "before_distance": far.before_distance,
        "after_distance": far.after_distance,
        "likelihood_folder": odd_at,
        "before_nll": odd.before_nll,
        "after_nll": odd.after_nll,
        "target_nll": odd.target_nll,
        "argmax_agreement": agreed / max(tokens, 1),
        "tokens": tokens,
    }


def _gap(norm: NormProbe) -> float:
    """Nats a token between stored and recomputed state; what is no number is the widest gap."""
    gap = abs(norm.before_nll - norm.target_nll)
    return gap if gap == gap else float("inf")
