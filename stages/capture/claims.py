"""What another tool's states are held to be: which points, and on which side of the final norm; told before one is read.

The claim comes from the store's configs, or from params.yaml where they do not say. What does not fit is refused in words,
with the points that the store's own layer ids mean. That a claim is true gate-training proves by value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from stages.capture.dialects import layer_ids, points_of
from stages.capture.findings import RowLike
from stages.contracts.errors import EngineError, ParamsError, Refusal
from stages.contracts.files import canonical, digest
from stages.contracts.manifest import CaptureSpec
from stages.contracts.points import name_points

SHOWN = 5
Told = Literal["store", "params"]


class ForeignRow(RowLike, Protocol):
    """See stages/bridges/kinds.py."""

    @property
    def padding(self) -> int: ...
    @property
    def last_state(self) -> str | None: ...
    @property
    def whole(self) -> ForeignRow | None: ...
    def first(self, tokens: int) -> ForeignRow: ...


class ForeignKind(Protocol):
    @property
    def tool(self) -> str: ...
    @property
    def era(self) -> str: ...
    @property
    def numbering(self) -> str | None: ...
    @property
    def last_state(self) -> str: ...


class ForeignStore(Protocol):
    """See stages/bridges/stores.py. `files` are opaque but for their `path`."""

    @property
    def root(self) -> Path: ...
    @property
    def kind(self) -> ForeignKind: ...
    @property
    def files(self) -> Sequence[Any]: ...
    @property
    def strange(self) -> Sequence[Path]: ...
    @property
    def layer_ids(self) -> tuple[int, ...] | None: ...
    @property
    def without_config(self) -> tuple[str, ...]: ...
    @property
    def versions(self) -> tuple[str, ...]: ...
    @property
    def hidden_size(self) -> int | None: ...
    def rows_of(self, file: Any, *, check_bytes: bool = False) -> Iterator[ForeignRow]: ...


@dataclass(frozen=True)
class Claim:
    """What a store's states are held to be: ids as written, who says so, and who says where the last state stands."""

    layer_ids: tuple[int, ...]
    layer_ids_from: Told
    last_state_from: Told


def demand_claim(
    store: ForeignStore, spec: CaptureSpec, model_type: str, ids: Sequence[int] | None, last_state: str | None
) -> Claim:
    """What the store's states are, from its configs, or from params.yaml where they do not say.

    Args:
        spec: points, layers and width that are needed.
        ids: params.yaml: capture.adopt_layer_ids. last_state: capture.adopt_last_state.

    Raises:
        Refusal: other points than are needed, no last state, or one after the final norm.
        ParamsError: the store says nothing and neither does params.yaml, or both and something else.
    """
    if store.kind.numbering is None:
        raise Refusal(
            "This store needs no adoption",
            where=str(store.root),
            expected="another tool's",
            got=f"one of {store.kind.tool}",
            do="set capture.adopt to null; finished folders are found by their content in the work cache",
        )
    if store.hidden_size not in (None, spec.hidden_size):
        raise Refusal(
            "The store is of another model",
            where=str(store.root),
            expected=f"states {spec.hidden_size} wide, as this target's",
            got=f"{store.hidden_size} wide",
            do="mend capture.adopt, or the target",
        )
    last_from = _demand_before_norm(store, last_state)
    told, ids_from = _demand_ids(store, spec, ids)
    _demand_points(store, told, spec, model_type)
    return Claim(told, ids_from, last_from)


def _demand_before_norm(store: ForeignStore, told: str | None) -> Told:
    known = store.kind.last_state
    if known != "unknown" and told not in (None, known):
        raise ParamsError(
            "params.yaml contradicts the store",
            where="params.yaml: capture.adopt_last_state",
            expected=f"{known}, which is where {store.kind.tool} puts the last state",
            got=str(told),
            do="set capture.adopt_last_state to null",
        )
    where = told if known == "unknown" else known
    if where is None:
        raise ParamsError(
            "The store does not say whether its last state stands before or after the final norm",
            where=str(store.root),
            expected="before_final_norm: soft targets are computed from it, and a wrong reading leaves the argmax intact",
            got=f"{store.kind.tool}, which stores either",
            do="set capture.adopt_last_state; gate-training refuses the wrong one by value",
        )
    if where != "before_final_norm":
        raise Refusal(
            "The store's last state stands after the final norm",
            where=str(store.root),
            expected="the residual stream before it: the norm drops the scale, so it cannot be undone",
            got=f"{store.kind.tool} {store.kind.era}, {where}",
            do="set capture.adopt to null and extract; only the target can give the stream before the norm",
        )
    return "params" if known == "unknown" else "store"


def _demand_ids(store: ForeignStore, spec: CaptureSpec, ids: Sequence[int] | None) -> tuple[tuple[int, ...], Told]:
    written = store.layer_ids
    if written is not None and ids is not None and tuple(ids) != written:
        raise ParamsError(
            "params.yaml contradicts the store",
            where="params.yaml: capture.adopt_layer_ids",
            expected=f"{list(written)}, as the store's config says",
            got=str(list(ids)),
            do="set capture.adopt_layer_ids to null, or mend the store's config if it is that which errs",
        )
    if ids is None and (written is None or store.without_config):
        tool, dialect = store.kind.tool, store.kind.numbering
        bare = ", ".join(f or "." for f in store.without_config[:SHOWN]) or "."
        usual = _said(points_of(None, dialect, "", spec.layers), spec.layers) if dialect else "unknown"
        raise ParamsError(
            "Nothing says which layers these states are of",
            where=f"{store.root}: {bare}",
            expected=f"layer ids beside the samples; a run that crashed has none, and {tool} {store.kind.era} "
            "may never write them",
            got=f"{len(store.without_config)} folders without; without a setting, {tool} captures {usual}",
            do="set capture.adopt_layer_ids to the ids that the run was given, as they were written there",
        )
    if ids is not None and (written is None or store.without_config):
        return tuple(ids), "params"
    assert written is not None
    return written, "store"


def _demand_points(store: ForeignStore, ids: tuple[int, ...], spec: CaptureSpec, model_type: str) -> None:
    dialect = store.kind.numbering
    assert dialect is not None
    where = f"{store.root}: layer_ids {list(ids)}, as {store.kind.tool} {store.kind.era} numbers them"
    try:
        points = points_of(ids, dialect, model_type, spec.layers)
    except EngineError as error:
        raise Refusal(
            "The store's layer ids name layers that this target has not",
            where=where,
            expected=error.expected,
            got=error.got,
            do="check capture.adopt and the target; ids are what the run was given, as written",
        ) from error
    aux = tuple(p for p in points if p < spec.layers)
    if dialect == "speculators_legacy" and spec.layers not in points:
        raise Refusal(
            "The store has no last state",
            where=where,
            expected=f"ids {_ids(spec, dialect)}: three points and the last one ({spec.layers})",
            got=f"{_said(points, spec.layers)}; its own reader would take the highest of them for the last",
            do="extract again with the last layer in the list; soft targets cannot be had from another state",
        )
    if aux != spec.points:
        words = name_points(aux, spec.points, spec.layers) if len(aux) == len(spec.points) else f"{len(aux)} points"
        raise Refusal(
            "The store's states are of other points than capture.points",
            where=where,
            expected=f"points {list(spec.points)}, which are ids {_ids(spec, dialect)} there",
            got=f"points {list(aux)}: {words}",
            do=f"set capture.points to {list(aux)} if the draft is to be fed those, or extract again",
        )


def _ids(spec: CaptureSpec, dialect: str) -> list[int]:
    last = (spec.layers,) if dialect in ("speculators_legacy", "speculators") else ()
    return list(layer_ids((*spec.points, *last), dialect, layers=spec.layers))


def _said(points: Sequence[int], layers: int) -> str:
    return "points " + ", ".join(
        f"{p} (the embedding)" if p == 0 else f"{p} (the last)" if p == layers else str(p) for p in points
    )


def adopted_spec(
    spec: CaptureSpec, kind: ForeignKind, fingerprint: str, code: str, *, extract_lacking: bool
) -> CaptureSpec:
    """Of states that come from a store: its fingerprint and the code that reads it stand where the capturing code does."""
    made = {"store": fingerprint, "bridge": code, "lacking": spec.code_digest if extract_lacking else ""}
    engine = f"adopted from {kind.tool} {kind.era}" + (f", what it lacks {spec.engine}" if extract_lacking else "")
    return spec.model_copy(update={"code_digest": digest(canonical(made)), "engine": engine})
