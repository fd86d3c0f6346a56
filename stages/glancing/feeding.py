"""Which points each engine and version would feed a draft, by the ids where that engine reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stages.contracts.draft import DraftRecord
from stages.contracts.errors import EngineError
from stages.contracts.points import name_points
from stages.glancing.places import Depth, PointsOf
from stages.glancing.runs import section, wholes
from stages.glancing.told import Facts, Told, some

IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class Engine:
    """An engine and its versions, the dialect it reads ids in, and for which targets. nested: it reads only
    eagle_config's ids; else the top-level key first."""

    name: str
    dialect: str
    model_type: str
    targets: str
    nested: bool


ENGINES = (
    Engine("SGLang ≥ 0.5.13", "sglang", "llama", "Llama, Qwen3, GLM-4, …", True),
    Engine("SGLang ≥ 0.5.13", "sglang", "deepseek_v3", "DeepSeek-V2/V3, Kimi-K2", True),
    Engine("SGLang ≥ 0.5.13", "sglang", "deepseek_v4", "DeepSeek-V4", True),
    Engine("SGLang < 0.5.13", "sglang_before_25454", "", "all", True),
    Engine("vLLM", "vllm", "", "all", False),
)


def tell_feeds(
    told: Told, config: dict[str, Any], record: DraftRecord | None, depth: Depth | None, points_of: PointsOf
) -> None:
    """A line an engine: the ids it reads and the points it would feed."""
    nested, top = wholes(section(config, "eagle_config").get(IDS)), wholes(config.get(IDS))
    trained = record.points if record else None
    engines = [e for e in ENGINES if e.targets == "all"]
    if depth and depth.model_type:
        own = Engine("SGLang ≥ 0.5.13", "sglang", depth.model_type, depth.model_type, True)
        engines = [own, *engines]
    else:
        engines = list(ENGINES)
    told.facts["fed_by"] = [_feed(e, nested, top, depth, trained, points_of) for e in engines]
    if nested is None and top is None:
        told.add(
            "risk", f"No {IDS}: every engine feeds its own default", "export the draft for one engine, its ids written"
        )
    if nested is None and top is not None:
        told.add(
            "risk", f"{IDS} stands at the top level only: SGLang reads it in eagle_config alone, and feeds its default"
        )
    if nested and top and nested != top:
        told.add(
            "fault",
            f"Two lists of ids: {list(top)} at the top, {list(nested)} in eagle_config; vLLM reads the first, SGLang the second",
            "keep one",
        )
    different = {tuple(f["points"]) for f in told.facts["fed_by"] if f["points"]}
    if len(different) > 1:
        told.add(
            "risk",
            f"Engines would feed it {len(different)} different sets of points: it is for one engine, version and target family only",
            f"serve it with {some(fitting)}"
            if (fitting := [f["engine"] for f in told.facts["fed_by"] if f["as_trained"] == "yes"])
            else "the value probe or its trainer's settings tell which",
        )
    embedded = [f["engine"] for f in told.facts["fed_by"] if f["points"] and 0 in f["points"]]
    if embedded:
        words = f"{some(sorted(set(embedded)))} would feed it the embedding (point 0), before any layer, as a state"
        told.add("risk", words, "unless it was trained on it, export its ids again")
    if trained and not any(f["as_trained"] == "yes" for f in told.facts["fed_by"]):
        told.add(
            "fault",
            f"No engine would feed it the points {some(list(map(str, trained)))} that it was trained on",
            "export it again: `dvc repro train`",
        )


def _feed(
    e: Engine,
    nested: tuple[int, ...] | None,
    top: tuple[int, ...] | None,
    depth: Depth | None,
    trained: Sequence[int] | None,
    points_of: PointsOf,
) -> Facts:
    ids = nested if e.nested else top or nested
    line: Facts = {
        "engine": e.name,
        "target": e.targets,
        "ids": list(ids) if ids else "its default",
        "points": None,
        "as_trained": None,
    }
    if not ids and not depth:
        return line | {"fed": "2, n//2, n-3"}
    try:
        points = points_of(ids or None, e.dialect, e.model_type, depth.layers if depth else max(ids or (0,)) + 2)
    except EngineError as error:
        return line | {"fed": f"cannot: {error.got}"}
    line |= {"points": list(points), "fed": ", ".join("embedding" if p == 0 else str(p) for p in points)}
    if trained:
        same = tuple(points) == tuple(trained)
        named = len(points) == len(trained) and depth is not None
        line["as_trained"] = (
            "yes"
            if same
            else name_points(points, tuple(trained), depth.layers)
            if named and depth
            else f"{len(points)} states"
        )
    return line
