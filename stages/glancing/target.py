"""A target checkpoint: its depth, the points a draft would use, and how each tool has to be told them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stages.contracts.errors import EngineError, ParamsError
from stages.contracts.points import CapturePoints
from stages.glancing.runs import read_object, section, text, whole
from stages.glancing.told import Facts, Told
from stages.glancing.weights import Weights, tell_weights

LayerIds = Callable[[Sequence[int], str, str, int], tuple[int, ...]]
"""capture.dialects.layer_ids: points, dialect, model type, layers -> ids."""
_TOOLS = (
    ("SGLang ≥ 0.5.13", "sglang"),
    ("SGLang < 0.5.13", "sglang_before_25454"),
    ("vLLM", "vllm"),
    ("SpecForge, NeMo Automodel", "specforge"),
    ("speculators ≥ 0.5", "speculators"),
    ("speculators 0.3–0.4", "speculators_legacy"),
)


def is_target(config: dict[str, Any]) -> bool:
    return depth_of(config) is not None


def depth_of(config: dict[str, Any]) -> int | None:
    """num_hidden_layers, of a multimodal model its text part's."""
    return whole(config.get("num_hidden_layers")) or whole(section(config, "text_config").get("num_hidden_layers"))


def tell_target(
    folder: Path, config: dict[str, Any], weights: Weights, family: str, families: Sequence[str], layer_ids: LayerIds
) -> Told:
    """All there is to say of the target in `folder` from its config and headers.

    Args:
        family: the model class engines take it for, as a model_type.
        families: those that run in this process.
    """
    inner = {**config, **section(config, "text_config")}
    layers = depth_of(config) or 0
    told = Told(str(folder), "target", f"target checkpoint ({config.get('model_type') or family})")
    told.facts |= {
        "layers": layers,
        "hidden_size": inner.get("hidden_size"),
        "vocab_size": inner.get("vocab_size"),
        "max_position_embeddings": inner.get("max_position_embeddings"),
        "tie_word_embeddings": inner.get("tie_word_embeddings"),
        "quantization": text(section(inner, "quantization_config").get("quant_method")),
    }
    tell_weights(told, weights)
    _points(told, layers, family, layer_ids)
    _tokenizer(told, folder)
    if (
        weights.tensors
        and not told.facts["tie_word_embeddings"]
        and not any(n.endswith("lm_head.weight") for n in weights.tensors)
    ):
        told.add("fault", "No lm_head.weight, and tie_word_embeddings is not true", "fetch the checkpoint again")
    runs = str(config.get("model_type", "")).replace("-", "_") in families
    if not runs:
        told.add(
            "note",
            f"Its family does not run in this process; those that do: {', '.join(families)}",
            "extract with engine sglang",
        )
    if told.facts["quantization"]:
        told.add(
            "note",
            f"Quantised ({told.facts['quantization']}): train a draft on the states of the very weights that are served",
        )
    sizes = f"layers: {layers}, hidden_size: {told.facts['hidden_size']}, vocab_size: {told.facts['vocab_size']}"
    told.next = [f"in params.yaml: target.origin: {told.path}; {sizes}", "dvc repro"]
    return told


def _points(told: Told, layers: int, family: str, layer_ids: LayerIds) -> None:
    try:
        points = CapturePoints.usual(layers)
    except ParamsError as error:
        told.add("fault", f"{layers} layers: {error.got.partition(': ')[2]}", error.do)
        return
    told.facts["usual_points"] = list(points)
    told.facts["to_capture_them"] = [_ids(name, dialect, points, family, layers, layer_ids) for name, dialect in _TOOLS]


def _ids(name: str, dialect: str, points: CapturePoints, family: str, layers: int, layer_ids: LayerIds) -> Facts:
    wanted = (*points, layers) if dialect.startswith("speculators") else tuple(points)
    try:
        return {"tool": name, "ids": list(layer_ids(wanted, dialect, family, layers)), "states": len(wanted)}
    except EngineError as error:
        return {"tool": name, "ids": f"cannot: {error.got}", "states": len(wanted)}


def _tokenizer(told: Told, folder: Path) -> None:
    files = {p.name for p in folder.iterdir()}
    raw = read_object(folder / "tokenizer_config.json")
    template = raw.get("chat_template") if isinstance(raw, dict) else None
    if "chat_template.jinja" in files:
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8", errors="replace")
    told.facts["tokenizer"] = sorted(files & {"tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json"})
    told.facts["chat_template"] = bool(template)
    if not told.facts["tokenizer"]:
        told.add("fault", "No tokenizer here", "fetch the checkpoint again, with its tokenizer")
    if not template:
        told.add(
            "fault",
            "No chat template: conversations cannot be rendered as the server does",
            "put chat_template.jinja beside it",
        )
