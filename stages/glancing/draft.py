"""A draft checkpoint: which points each engine would feed it, and what an engine would pass over in silence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stages.contracts.draft import DraftRecord, norms_of
from stages.glancing.contents import Shape
from stages.glancing.feeding import IDS, tell_feeds
from stages.glancing.figures import of_spec
from stages.glancing.places import Depth, PointsOf
from stages.glancing.runs import section, text, whole, wholes
from stages.glancing.told import Told, some
from stages.glancing.weights import Weights, tell_weights

_PREFIXES = ("model.", "draft_model.", "module.")
_SHORT_CONTEXT = 2048
_NORM_WEIGHTS = {
    "fc_norm": ("fc_norm.", "aux_norm_"),
    "norm_before_fc": ("input_norm.",),
}  # aux_norm_: SGLang's old name


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
    tell_feeds(told, config, record, depth, points_of)
    tensors = {_bare(n): s for n, s in weights.tensors.items()}
    _tensors(told, config, tensors)
    _norms(told, config, tensors, record)
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


def _norms(told: Told, config: dict[str, Any], tensors: dict[str, Shape], record: DraftRecord | None) -> None:
    """EAGLE-3.1's norms: an engine that does not know a key, or finds no weight for it, says nothing."""
    told.facts["norms"] = list(norms := norms_of({**config, "eagle_config": section(config, "eagle_config")}))
    if record and record.norms != norms:
        told.add(
            "fault",
            f"config.json makes engines compute the norms {list(norms)}; it was trained with {list(record.norms)}",
            "export the draft again",
        )
    for name, prefixes in _NORM_WEIGHTS.items():
        there = any(n.startswith(prefixes) for n in tensors)
        if tensors and there != (name in norms):
            said = f"{name} is set, and there is no" if name in norms else f"{name} is not set, and there is"
            told.add(
                "fault", f"{said} {prefixes[0]}*: engines leave it at ones, or pass over it", "export the draft again"
            )
    if norms and not record:
        told.add(
            "risk",
            f"{' and '.join(norms)} {'is' if len(norms) == 1 else 'are'} set: SGLang's Llama class reads EAGLE-3.1's keys in 0.5.23, "
            "its Kimi-K2.5 class all but norm_before_fc; older engines ignore them and their weights",
            "look for the key in sglang/srt/models/llama_eagle3.py, or vLLM's llama_eagle3.py, of the version that serves",
        )
    if "norm_output" in norms and not record:
        told.add(
            "risk",
            "norm_output is set: SpecForge 0.2.0 means by it what every draft does, and trains the next step on states before the "
            "norm; SGLang and vLLM would feed it states after the norm",
            "of a draft trained with SpecForge before its pull request 879, take the key out of config.json",
        )


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
    layers = whole(config.get("num_hidden_layers"))
    if layers is not None and layers != 1:
        told.add("note", f"num_hidden_layers is {layers}; EAGLE-3 drafts have one")
