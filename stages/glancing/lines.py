"""Facts in words for people: numbers, sizes and lists, and the lines that say what a thing of each kind is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from stages.glancing.told import Facts, many

_STEPS = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))
_IN_WORDS = {"tool", "points", "layers", "last_state", "dtype", "hidden_size"}  # what points_in_words says
_KEPT = "\n\u202f"  # not printable by their class, and used here
_DIGEST = 19  # characters of one that are shown; programs get it whole


def plain(text: str) -> str:
    """Text that a terminal shows and does not obey: names may hold escape codes, and bytes that are no text."""
    return "".join(c if c.isprintable() or c in _KEPT else "\ufffd" for c in text)


def say(name: str, value: Any) -> str:
    """A fact's value for people."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return size(value) if name.endswith("bytes") else f"{value:,}".replace(",", "\u202f")
    if isinstance(value, dict):
        return ", ".join(f"{k} {say(str(k), v)}" for k, v in cast("Facts", value).items())
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list):
        items = cast("list[Any]", value)
        if not items:
            return "none"
        return "; ".join(items) if isinstance(items[0], str) and " " in items[0] else listed(items)
    told = str(value)
    return f"{told[:_DIGEST]}…" if name.endswith("digest") and len(told) > _DIGEST else told


def listed(values: Sequence[Any]) -> str:
    """`2, 30, 58`; spans as `0–1999`."""
    if values and all(isinstance(v, list) and len(v) == 2 for v in values):
        return ", ".join(f"{a}–{b - 1}" for a, b in values[:6]) + (
            f" … ({len(values) - 6} more)" if len(values) > 6 else ""
        )
    return ", ".join(map(str, values[:12])) + (f" … ({len(values) - 12} more)" if len(values) > 12 else "")


def size(count: int) -> str:
    """`1.41 TB`, `640 B`."""
    for unit, step in _STEPS:
        if count >= step:
            return f"{count / step:.3g} {unit}B"
    return f"{count} B"


def is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _dots(*parts: str) -> str:
    return " · ".join(p for p in parts if p)


def _states(f: Facts) -> list[tuple[str, str]]:
    if f.get("tool") == "draftline":
        return _plain(f)
    rows = f"{say('rows', f['rows'])} rows" + (
        f", {say('', f['rows_missing'])} missing" if f.get("rows_missing") else ""
    )
    tokens = (
        f"{say('', f['tokens'])} tokens" + (f" ({f['tokens_are']})" if f.get("tokens_are") else "")
        if f.get("tokens") is not None
        else ""
    )
    folders = many(f["folders"], "folder") if f.get("folders") else ""
    ids = f"ids {listed(f['layer_ids'])} as {f['written_in']} writes them" if f.get("layer_ids") else "no ids written"
    return [
        ("rows", _dots(rows, many(f["shards"], "shard") if "shards" in f else folders, tokens, size(f["bytes"]))),
        ("ranges", listed(f.get("ranges") or [])),
        ("layers", _dots(ids, _meaning(f))),
        ("", _others(f) if f.get("ambiguous") else ""),
        ("last state", _last(f)),
        (
            "stored",
            _dots(
                f["layout"],
                f["dtype"] or "",
                f"{f['states_in_a_row']} states a row" if f.get("states_in_a_row") else "",
                f"H {f['hidden_size']}" if f.get("hidden_size") else "",
            ),
        ),
        ("target", f.get("target") or ""),
        ("source", f.get("source") or ""),
    ]


def _last(f: Facts) -> str:
    if f.get("states_in_a_row") == 3:
        return "not stored"
    known = {"before_final_norm": "before the final norm", "after_final_norm": "after the final norm"}
    return known.get(f["last_state"], "before or after the final norm: not recorded")


def _draft(f: Facts) -> list[tuple[str, str]]:
    head = f"lm_head {'×'.join(map(str, f['lm_head']))}" if f.get("lm_head") else "no lm_head"
    fed = f"fc {'×'.join(map(str, f['fc']))}, {f.get('states_fed')} states" if f.get("fc") else "no fc"
    maps = ", ".join(f"{'' if f.get(n) else 'no '}{n}" for n in ("d2t", "t2d"))
    embedding = "own embedding" if f.get("own_embedding") else "the target's embedding"
    vocab = f"draft vocabulary {say('', f.get('draft_vocab_size'))} of {say('', f.get('vocab_size'))}"
    block = ", ".join(f.get("block") or [])
    weights = _dots(f"{say('', f['parameters'])} parameters", f.get("dtype") or "", size(f["bytes"]), block)
    positions = f"up to {say('', f.get('max_position_embeddings'))} positions"
    tied = "tied embeddings" if f.get("tie_word_embeddings") else ""
    engine = f.get("exported_for")
    engine = "this process, whose layer ids are SGLang's of Llama and Qwen" if engine == "in_process" else engine
    steps = f"for {engine}; {say('', f['optimizer_steps'])} optimizer steps" if engine else ""
    return [
        ("weights", weights),
        ("reads", _dots(fed, f"H {f.get('hidden_size')}", positions)),
        ("proposes", _dots(head, vocab, maps, embedding, tied)),
        ("trained on", _dots(f.get("points_in_words") or "not recorded", f.get("target") or f.get("verifier") or "")),
        ("exported", steps),
        ("digest", f.get("digest") or ""),
    ]


def _target(f: Facts) -> list[tuple[str, str]]:
    tied = "tied embeddings" if f.get("tie_word_embeddings") else ""
    sizes = (f"{f['layers']} layers", f"H {f.get('hidden_size')}", f"V {say('', f.get('vocab_size'))}")
    positions = f"up to {say('', f.get('max_position_embeddings'))} positions"
    weights = (f"{say('', f['parameters'])} parameters", f.get("dtype") or "", f.get("quantization") or "")
    template = "chat template" if f.get("chat_template") else "no chat template"
    usual = f"usual: after layer {listed(f['usual_points'])}; to capture them:" if f.get("usual_points") else ""
    return [
        ("shape", _dots(*sizes, positions, tied)),
        ("weights", _dots(*weights, size(f["bytes"]), many(f["files"], "file"))),
        ("text", _dots(listed(f.get("tokenizer") or []) or "no tokenizer", template)),
        ("points", usual),
    ]


def _meaning(f: Facts) -> str:
    of = f" of {f['layers']} ({f['layers_known_from']})" if f.get("layers") else ""
    if f.get("points"):
        last = f"; last after {f['last_point']}" if f.get("last_point") is not None else ""
        return f"points after layer {listed(f['points'])}{last}{of}"
    if f.get("points_if_default"):
        return f"its default would be after layer {listed(f['points_if_default'])}{of}"
    return ""


def _others(f: Facts) -> str:
    others = f.get("other_readings") or []
    return (
        "written by another tool: " + "; ".join(f"{o['if_written_by']} {listed(o['points'])}" for o in others)
        if others
        else ""
    )


def _plain(f: Facts) -> list[tuple[str, str]]:
    quiet = _IN_WORDS if "points_in_words" in f else set[str]()
    shown = {k: v for k, v in f.items() if not is_table(v) and v not in (None, [], {}) and k not in quiet}
    return [(name.replace("_", " "), say(name, value)) for name, value in shown.items()]


_LINES: dict[str, Callable[[Facts], list[tuple[str, str]]]] = {
    "hidden_states": _states,
    "draft": _draft,
    "target": _target,
}


def lines_of(kind: str, facts: Facts) -> list[tuple[str, str]]:
    """Label and value of each line of a thing of `kind`; those that say nothing are left out."""
    return [(label, value) for label, value in _LINES.get(kind, _plain)(facts) if value]
