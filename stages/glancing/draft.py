"""A draft checkpoint: which points each engine would feed it, and what an engine would pass over in silence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.contracts.draft import DraftRecord
from stages.contracts.errors import EngineError
from stages.contracts.points import name_points
from stages.glancing.contents import Shape
from stages.glancing.figures import of_spec
from stages.glancing.places import Depth, PointsOf
from stages.glancing.runs import section, text, whole, wholes
from stages.glancing.told import Facts, Told, some
from stages.glancing.weights import Weights, tell_weights

IDS = "eagle_aux_hidden_state_layer_ids"
_PREFIXES = ("model.", "draft_model.", "module.")
_SHORT_CONTEXT = 2048


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


def is_draft(config: dict[str, Any]) -> bool:
    """Whether config.json is of a draft that is fed a target's states."""
    names = config.get("architectures")
    eagle = isinstance(names, list) and any("eagle" in str(n).lower() or "Speculator" in str(n) for n in names)
    return eagle or "draft_vocab_size" in config or "eagle_config" in config or "speculators_config" in config


def tell_draft(
    folder: Path,
    config: dict[str, Any],
    weights: Weights,
    record: DraftRecord | None,
    depth: Depth | None,
    points_of: PointsOf,
) -> Told:
    """All there is to say of the draft in `folder` from its config and headers.

    Args:
        record: the draft's own record, if it was trained here.
        depth: its target's layers, if something tells them.
    """
    names = config.get("architectures")
    kind = str(names[0]) if isinstance(names, list) and names else "architecture not named"
    told = Told(str(folder), "draft", f"draft checkpoint ({kind})")
    if record:
        depth = Depth(record.target.layers, "its record", record.target.model_type)
        told.facts |= {
            "digest": record.digest(),
            "target": record.target.name,
            "algorithm": record.algorithm,
            "exported_for": record.exported_for,
            "optimizer_steps": record.optimizer_steps,
            "merged_digest": record.merged_digest,
            **of_spec(record.capture),
        }
    tell_weights(told, weights)
    _sizes(told, config)
    _feeds(told, config, record, depth, points_of)
    _tensors(told, config, {_bare(n): s for n, s in weights.tensors.items()})
    _config(told, config)
    told.next = ["dvc repro serve-validate benchmark gate-deployment"] if record else []
    told.next.append(f"python -m stages.glance {told.path} --{'verify' if record else 'deep'}")
    return told


def verifier_of(config: dict[str, Any]) -> str | None:
    """The target that a speculators config names."""
    return text(section(section(config, "speculators_config"), "verifier").get("name_or_path"))


def _bare(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _sizes(told: Told, config: dict[str, Any]) -> None:
    inner = {**section(config, "transformer_layer_config"), **config}
    told.facts |= {
        "hidden_size": inner.get("hidden_size"),
        "vocab_size": inner.get("vocab_size"),
        "draft_vocab_size": inner.get("draft_vocab_size"),
        "max_position_embeddings": inner.get("max_position_embeddings"),
        "tie_word_embeddings": inner.get("tie_word_embeddings"),
        "verifier": verifier_of(config),
    }


def _feeds(
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
            "serve it with the engine it was exported for"
            if record
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


def _tensors(told: Told, config: dict[str, Any], tensors: dict[str, Shape]) -> None:
    """Names and shapes that engines demand but do not miss aloud."""
    if not tensors:
        return
    V, D, H = (told.facts[k] for k in ("vocab_size", "draft_vocab_size", "hidden_size"))
    small = type(V) is int and type(D) is int and D < V
    fc, head = tensors.get("fc.weight"), tensors.get("lm_head.weight")
    told.facts |= {
        "fc": list(fc.dims) if fc else None,
        "lm_head": list(head.dims) if head else None,
        "d2t": "d2t" in tensors,
        "t2d": "t2d" in tensors,
        "own_embedding": "embed_tokens.weight" in tensors,
    }
    if fc is None:
        told.add("fault", "No fc.weight: this draft takes no auxiliary states (EAGLE-1/2?), or the projection was lost")
    else:
        _fc(told, config, fc, H)
    if head is None and (small or not told.facts["tie_word_embeddings"]):
        told.add(
            "fault",
            "No lm_head.weight: SGLang misses it in silence and serves at accept length 1.00",
            "export the draft again",
        )
    if head and D and head.dims[0] != D:
        told.add(
            "fault",
            f"lm_head.weight has {head.dims[0]} rows, draft_vocab_size is {D}",
            "mend config.json or export again",
        )
    if small and "d2t" not in tensors:
        told.add(
            "fault",
            f"No d2t: a draft vocabulary of {D} out of {V} would be taken for ids 0–{D - 1}",
            "export d2t and t2d with it",
        )
    _vocabulary(told, tensors, V, D)
    blocks = {
        n.split(".")[0] + ("." + n.split(".")[1] if n.startswith("layers.") else "")
        for n in tensors
        if n.startswith(("midlayer.", "layers."))
    }
    told.facts["block"] = sorted(blocks)
    if not blocks:
        told.add("fault", "No decoder block: neither midlayer.* nor layers.0.*")
    elif "midlayer" not in blocks:
        told.add(
            "risk",
            f"The block is called {some(sorted(blocks))}.*: SGLang knows midlayer.* and passes over other names in silence",
            "rename it for SGLang",
        )


def _fc(told: Told, config: dict[str, Any], fc: Shape, H: object) -> None:
    width = whole(config.get("target_hidden_size")) or whole(H)
    if not width or len(fc.dims) != 2:
        return
    told.facts["states_fed"] = states = fc.dims[1] / width
    ids = wholes(section(config, "eagle_config").get(IDS)) or wholes(config.get(IDS))
    if states != int(states) or (ids and int(states) != len(ids)):
        told.add(
            "fault",
            f"fc.weight takes {fc.dims[1]} values = {states:g} states of {width}; {len(ids) if ids else 'no'} ids are written",
            "mend the ids, or export again",
        )
    told.facts["states_fed"] = int(states) if states == int(states) else round(states, 3)


def _vocabulary(told: Told, tensors: dict[str, Shape], V: object, D: object) -> None:
    for name, size, dtypes in (("d2t", D, ("int64", "int32")), ("t2d", V, ("bool", "uint8", "int64"))):
        shape = tensors.get(name)
        if shape is None:
            continue
        if type(size) is int and shape.dims != (size,):
            told.add(
                "fault", f"{name} is {list(shape.dims)}, not [{size}]", "it is of another vocabulary: build it again"
            )
        if shape.dtype not in dtypes:
            told.add("fault", f"{name} is {shape.dtype}, not {dtypes[0]}", "export it again")
    if "d2t" in tensors and "t2d" not in tensors:
        told.add("note", "d2t without t2d: engines need only the first, trainers both")


def _config(told: Told, config: dict[str, Any]) -> None:
    """Settings that make a draft useless without an error."""
    V, D = told.facts["vocab_size"], told.facts["draft_vocab_size"]
    if told.facts["tie_word_embeddings"] and type(V) is int and type(D) is int and D < V:
        told.add(
            "fault",
            f"tie_word_embeddings is true with a draft vocabulary of {D}: the head would be the embedding's {V} rows",
            "set it to false",
        )
    limit = told.facts["max_position_embeddings"]
    if type(limit) is int and limit <= _SHORT_CONTEXT:
        told.add(
            "risk",
            f"max_position_embeddings is {limit}: longer requests run slower than plain decoding, or fail",
            "raise it to the target's",
        )
    eagle = section(config, "eagle_config")
    if eagle.get("use_aux_hidden_state") is False:
        told.add(
            "fault", "eagle_config.use_aux_hidden_state is false: SGLang feeds it no auxiliary states", "set it to true"
        )
    if "speculators_config" in config:
        told.add(
            "note", "Written in speculators' format: vLLM serves it; for SGLang export it as LlamaForCausalLMEagle3"
        )
    if config.get("norm_before_fc") or eagle.get("norm_before_fc"):
        told.add("risk", "norm_before_fc is set: SGLang ignores it and its weight", "serve it with vLLM")
    layers = whole(config.get("num_hidden_layers"))
    if layers is not None and layers != 1:
        told.add("note", f"num_hidden_layers is {layers}; EAGLE-3 drafts have one")
