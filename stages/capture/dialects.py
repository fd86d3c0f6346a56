"""Dialects: how each tool writes the points this project names by decoder layers applied.

Every tool numbers the same places on the residual stream differently, all have the same width, and no shape check sees
a wrong one. Facts, for a target of n layers (n = 61 in the examples; ids as written -> points captured):

    eagle                original trainer: input of layer i         2,30,58 -> 2,30,58       default 2, n//2, n-3
    sglang               explicit ids, most models: always id+1     1,29,57 -> 2,30,58; -1 -> 0 (embedding)
                         DeepSeek-V2/V3, Kimi-K2.x, glm4_moe_lite   1,29,57 -> 2,30,58; 2,30,58 -> 2,30,58; 0,.. -> 0,..
                         (since 0.5.13, PR 25454): +1 only when the first id is 1
                         gpt_oss since 0.5.17: as written when the largest id is n, which it then captures; else id+1
                         DeepSeek-V4: never +1
                         default 2, n//2, n-3 (input of layer i); cannot capture point n
                         doubles and ids out of reach are dropped in silence; DeepSeek's class of 0.5.23 breaks off at them
                         ("captured 2 of 3 aux hidden states")
    sglang_before_25454  up to 0.5.12: always id+1, DeepSeek and Kimi too (gpt_oss up to 0.5.16)
    specforge, torchspec, nemo_automodel, model_optimizer (its "eagle" preset)
                         output of 0-based layer                    1,29,57 -> 2,30,58       default 1, n//2-1, n-4
    vllm, speculators    as they are                                2,30,58,61 -> same       default 2, n//2, n-3, n
                         (speculators from 0.5 on; n before the final norm, and only speculators adds it by default;
                         vLLM's DeepSeek classes captured nothing for n in mid-2026, vllm#46788)
    speculators_legacy   0.3-0.4, output of 0-based layer           2,30,58,60 -> 3,31,59,61 default 2, n//2, n-3, n-1
    transformers         hidden_states[k] is point k, but the last entry (k = n, or -1) is after the final norm

So one config.json means different points on vLLM and SGLang, and on two versions of SGLang: an export is always for an
engine, a version and a model class. Engines concatenate captures in ascending order, whatever the list says.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stages.contracts.errors import EngineError
from stages.contracts.points import default_points

# Model classes of SGLang's, by model_type. Read in its own sources, 0.5.12 to 0.5.23.
_FIRST_ID_DECIDES = frozenset(
    {
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "kimi_k2",
        "kimi_k25",
        "mistral_large_3",
    }
)
_LAST_ID_DECIDES = frozenset({"gpt_oss"})
_AS_WRITTEN_IN_SGLANG = frozenset({"deepseek_v4"})
# SGLang chooses its class by `architectures`, whatever model_type says: Kimi-K2 ships as DeepseekV3ForCausalLM.
_FAMILY_OF_CLASS = {
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "DeepseekV32ForCausalLM": "deepseek_v32",
    "DeepseekV4ForCausalLM": "deepseek_v4",
    "GlmMoeDsaForCausalLM": "glm_moe_dsa",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
    "GptOssForCausalLM": "gpt_oss",
    "KimiK25ForConditionalGeneration": "kimi_k25",
    "MistralLarge3ForCausalLM": "mistral_large_3",
}


@dataclass(frozen=True)
class Dialect:
    """point = id + shift. `takes_last`: whether the tool can capture point n, before the final norm; `default`: the points
    it captures in a target of n layers when no ids are given."""

    shift: int
    takes_last: bool = False
    default: Callable[[int], tuple[int, ...]] = default_points


_PUT_OUT = Dialect(1)
DIALECTS: dict[str, Dialect] = {
    "eagle": Dialect(0),
    "sglang": _PUT_OUT,
    "sglang_before_25454": _PUT_OUT,
    "specforge": _PUT_OUT,
    "torchspec": _PUT_OUT,
    "nemo_automodel": _PUT_OUT,
    "model_optimizer": _PUT_OUT,
    "vllm": Dialect(0, True),
    "speculators": Dialect(0, True, lambda n: (*default_points(n), n)),
    "speculators_legacy": Dialect(1, True, lambda n: (*(p + 1 for p in default_points(n)), n)),
    "transformers": Dialect(0),
}
# A tool's version below which another dialect of it was written: (first version of the new one, the old one's name).
_ERAS = {"sglang": ((0, 5, 13), "sglang_before_25454"), "speculators": ((0, 5), "speculators_legacy")}
_LAST_ID_SINCE = (0, 5, 17)


def family_of(config: Mapping[str, Any]) -> str:
    """The model class that an engine takes a target's config.json for, as a model_type."""
    named = config.get("architectures")
    for name in named if isinstance(named, list) else ():
        if isinstance(name, str) and name in _FAMILY_OF_CLASS:
            return _FAMILY_OF_CLASS[name]
    return _family(str(config.get("model_type", "")))


def _family(name: str) -> str:
    """A model_type as spelt here, from a model_type or the name of a model class."""
    return _FAMILY_OF_CLASS.get(name, name.replace("-", "_"))


def dialect_of(tool: str, version: str | None = None, model_type: str = "") -> str:
    """The dialect that `version` of `tool` writes for a target of family `model_type`; without a version its newest.

    Raises:
        EngineError: an unknown tool, or a version that is no number.
    """
    _dialect(tool)
    if version is None or tool not in _ERAS:
        return tool
    numbers = re.match(r"v?(\d{1,9}(?:\.\d{1,9})+)", version.strip())
    if numbers is None:
        raise EngineError(
            f"This is no version of {tool}",
            where="stages/capture/dialects.py",
            expected="numbers with dots, as the tool prints its own",
            got=repr(version),
            do="give the version that wrote or will read the ids: one list of ids means other points in another version",
        )
    since, before = _ERAS[tool]
    if tool == "sglang" and _family(model_type) in _LAST_ID_DECIDES:
        since = _LAST_ID_SINCE
    return tool if tuple(map(int, numbers[1].split("."))) >= since else before


def _dialect(name: str) -> Dialect:
    if name not in DIALECTS:
        raise EngineError(
            f"No dialect {name!r}",
            where="stages/capture/dialects.py",
            expected=f"one of {sorted(DIALECTS)}",
            do="use one of these, or add the tool's numbering there, with the fact it rests on",
        )
    return DIALECTS[name]


def layer_ids(
    points: Iterable[int], dialect: str, model_type: str = "", layers: int | None = None, version: str | None = None
) -> tuple[int, ...]:
    """Ids to write in `dialect` so that it captures exactly `points` of a target of family `model_type` (or model class).

    Raises:
        EngineError: an unknown dialect, or points the tool cannot be told to capture.
    """
    dialect, model_type = dialect_of(dialect, version, model_type), _family(model_type)
    good = tuple(sorted(points))
    if layers is None:
        layers = good[-1] if _dialect(dialect).takes_last else good[-1] + 1
    ids = tuple(p - _shift_for(good, dialect, model_type, layers) for p in good)
    if points_of(ids, dialect, model_type, layers) != good:
        raise EngineError(
            f"{dialect} cannot be told to capture these points",
            where=f"points {list(good)}, model type {model_type or 'any'}",
            expected="ids that mean these points",
            got=f"{list(ids)} means {list(points_of(ids, dialect, model_type, layers))}",
            do="choose other capture.points; with SGLang and this family the first must not be 1",
        )
    return ids


def points_of(
    ids: Sequence[int] | None, dialect: str, model_type: str, layers: int, version: str | None = None
) -> tuple[int, ...]:
    """Points that `dialect` captures for `ids` as written (None: its own default) in a target of `layers` layers.

    Ascending, doubles dropped, as engines do.

    Args:
        version: of the tool; without one, its newest dialect is meant.

    Raises:
        EngineError: an unknown dialect, or an id that names no point this tool can capture.
    """
    dialect, model_type = dialect_of(dialect, version, model_type), _family(model_type)
    if ids is None:
        return tuple(sorted(set(_dialect(dialect).default(layers))))
    points = tuple(sorted({i + _shift(ids, dialect, model_type, layers) for i in ids}))
    last = layers if _takes_last(dialect, model_type) else layers - 1
    strange = [p for p in points if not 0 <= p <= last]
    if strange:
        raise EngineError(
            f"{dialect} cannot capture these points",
            where=f"ids {list(ids)}, model type {model_type or 'any'}",
            expected=f"points from 0 (embedding) to {last}, of {layers} layers" + _beyond(dialect, last, layers),
            got=str(strange),
            do="write ids for this very engine, version and model class",
        )
    return points


def _beyond(dialect: str, last: int, layers: int) -> str:
    """Why the last point is out of reach."""
    if last == layers:
        return ""
    if dialect == "transformers":
        return f"; hidden_states[{layers}], which is hidden_states[-1], comes after the final norm and is no point"
    return f"; {layers} before the final norm is out of its reach"


def _takes_last(dialect: str, model_type: str) -> bool:
    return DIALECTS[dialect].takes_last or (dialect == "sglang" and model_type in _LAST_ID_DECIDES)


def _shift(ids: Sequence[int], dialect: str, model_type: str, layers: int) -> int:
    """What is added to each of these ids to get its point."""
    if dialect == "sglang" and ids:
        if model_type in _AS_WRITTEN_IN_SGLANG:
            return 0
        if model_type in _FIRST_ID_DECIDES:
            return 1 if ids[0] == 1 else 0
        if model_type in _LAST_ID_DECIDES:
            return 0 if max(ids) == layers else 1
    return _dialect(dialect).shift


def _shift_for(points: Sequence[int], dialect: str, model_type: str, layers: int) -> int:
    """What is taken from each of these points to get its id; as written where the tool leaves a choice."""
    if dialect == "sglang" and model_type in _AS_WRITTEN_IN_SGLANG | _FIRST_ID_DECIDES:
        return 0
    return _shift(points, dialect, model_type, layers)


def alternatives(ids: Sequence[int] | None, layers: int, model_type: str = "") -> dict[str, tuple[int, ...]]:
    """What these ids would mean in every dialect, for a target of `layers` layers; dialects that could not capture them
    are left out. `by_points` tells whether they agree."""
    found: dict[str, tuple[int, ...]] = {}
    for name in DIALECTS:
        try:
            found[name] = points_of(ids, name, model_type, layers)
        except EngineError:
            continue
    return found


def by_points(found: Mapping[str, tuple[int, ...]]) -> dict[tuple[int, ...], tuple[str, ...]]:
    """The dialects of `alternatives` that agree on the points, by these; more than one key is an ambiguous list of ids."""
    grouped: dict[tuple[int, ...], tuple[str, ...]] = {}
    for name, points in found.items():
        grouped[points] = (*grouped.get(points, ()), name)
    return grouped
