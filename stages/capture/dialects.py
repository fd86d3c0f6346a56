"""Dialects: how each tool writes the points this project names by decoder layers applied.

Every tool numbers the same places on the residual stream differently, all have the same width, and no shape check sees
a wrong one. Facts, for a target of n layers (n = 61 in the examples; ids as written -> points captured):

    eagle                original trainer: input of layer i         2,30,58 -> 2,30,58       default 2, n//2, n-3
    sglang               explicit ids, most models: always id+1     1,29,57 -> 2,30,58; -1 -> 0 (embedding)
                         DeepSeek-V2/V3, Kimi-K2.x, glm4_moe_lite   1,29,57 -> 2,30,58; 2,30,58 -> 2,30,58; 0,.. -> 0,..
                         (since PR 25454, so in 0.5.23): +1 only when the first id is 1
                         DeepSeek-V4: never +1
                         default 2, n//2, n-3 (input of layer i); doubles dropped in silence; cannot capture point n
    sglang_before_25454  always id+1, DeepSeek and Kimi too
    specforge, torchspec, nemo_automodel, model_optimizer
                         output of 0-based layer                    1,29,57 -> 2,30,58       default 1, n//2-1, n-4
    vllm, speculators    as they are                                2,30,58,61 -> same       default 2, n//2, n-3, n
                         (speculators from 0.5 on; the last before the final norm)
    speculators_legacy   0.3-0.4, output of 0-based layer           2,30,58,60 -> 3,31,59,61 default 2, n//2, n-3, n-1
    transformers         hidden_states[k] is point k, but the last entry (k = n) is after the final norm in most models

So one config.json means different points on vLLM and SGLang, and on two versions of SGLang: an export is always for an
engine, a version and a model class. Engines concatenate captures in ascending order, whatever the list says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stages.contracts.errors import EngineError

_FIRST_ID_DECIDES = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25", "glm4_moe_lite")
_AS_WRITTEN_IN_SGLANG = ("deepseek_v4",)


@dataclass(frozen=True)
class Dialect:
    """point = id + shift. `takes_last`: whether the tool can capture point n, before the final norm."""

    shift: int
    takes_last: bool


_TAKEN_IN = Dialect(0, False)
_PUT_OUT = Dialect(1, False)
DIALECTS: dict[str, Dialect] = {
    "eagle": _TAKEN_IN,
    "sglang": _PUT_OUT,
    "sglang_before_25454": _PUT_OUT,
    "specforge": _PUT_OUT,
    "torchspec": _PUT_OUT,
    "nemo_automodel": _PUT_OUT,
    "model_optimizer": _PUT_OUT,
    "vllm": Dialect(0, True),
    "speculators": Dialect(0, True),
    "speculators_legacy": Dialect(1, True),
    "transformers": _TAKEN_IN,
}


def _dialect(name: str) -> Dialect:
    if name not in DIALECTS:
        raise EngineError(
            f"No dialect {name!r}",
            where="stages/capture/dialects.py",
            expected=f"one of {sorted(DIALECTS)}",
            do="use one of these, or add the tool's numbering there, with the fact it rests on",
        )
    return DIALECTS[name]


def layer_ids(points: Sequence[int], dialect: str, model_type: str = "", layers: int | None = None) -> tuple[int, ...]:
    """Ids to write in `dialect` so that it captures exactly `points` of a target of family `model_type`.

    Raises:
        EngineError: an unknown dialect, or points the tool cannot be told to capture.
    """
    good = tuple(sorted(points))
    ids = tuple(p - _shift(good, dialect, model_type, writing=True) for p in good)
    if layers is None:
        layers = good[-1] if _dialect(dialect).takes_last else good[-1] + 1
    if points_of(ids, dialect, model_type, layers) != good:
        raise EngineError(
            f"{dialect} cannot be told to capture these points",
            where=f"points {list(good)}, model type {model_type or 'any'}",
            expected="ids that mean these points",
            got=f"{list(ids)} means {list(points_of(ids, dialect, model_type, layers))}",
            do="choose other capture.points; with SGLang and this family the first must not be 1",
        )
    return ids


def points_of(ids: Sequence[int] | None, dialect: str, model_type: str, layers: int) -> tuple[int, ...]:
    """Points that `dialect` captures for `ids` as written (None: its own default) in a target of `layers` layers.

    Ascending, doubles dropped, as engines do.

    Raises:
        EngineError: an unknown dialect, or an id that names no point this tool can capture.
    """
    known = _dialect(dialect)
    if ids is None:
        return tuple(sorted(set(_default_points(dialect, layers))))
    points = tuple(sorted({i + _shift(ids, dialect, model_type, writing=False) for i in ids}))
    last = layers if known.takes_last else layers - 1
    strange = [p for p in points if not 0 <= p <= last]
    if strange:
        raise EngineError(
            f"{dialect} cannot capture these points",
            where=f"ids {list(ids)}, model type {model_type or 'any'}",
            expected=f"points from 0 (embedding) to {last}, of {layers} layers"
            + ("" if known.takes_last else f"; {layers} before the final norm is out of its reach"),
            got=str(strange),
            do="write ids for this very engine, version and model class",
        )
    return points


def _shift(numbers: Sequence[int], dialect: str, model_type: str, *, writing: bool) -> int:
    """What is added to an id to get the point. `numbers` are ids when reading, points when `writing`."""
    if dialect == "sglang" and model_type in _AS_WRITTEN_IN_SGLANG:
        return 0
    if dialect == "sglang" and model_type in _FIRST_ID_DECIDES:
        return 1 if not writing and len(numbers) > 0 and numbers[0] == 1 else 0
    return _dialect(dialect).shift


def _default_points(dialect: str, layers: int) -> tuple[int, ...]:
    """Points a tool captures when no ids are given."""
    if dialect == "speculators_legacy":
        return (3, layers // 2 + 1, layers - 2, layers)
    aux = (2, layers // 2, layers - 3)
    return (*aux, layers) if dialect == "speculators" else aux
