"""The figures of the line's own manifests, as facts."""

from __future__ import annotations

from stages.contracts.manifest import CaptureManifest, CaptureSpec, MergedManifest, PreparedManifest
from stages.glancing.told import Facts


def of_prepared(m: PreparedManifest) -> Facts:
    return {
        "target": m.target.name,
        "sources": len(m.sources),
        "rows": sum(s.rows for s in m.sources),
        "held_out_rows": sum(s.held_out_rows for s in m.sources),
        "tokens": sum(s.tokens for s in m.sources),
        "supervised_tokens": sum(s.supervised_tokens for s in m.sources),
    }


def of_capture(m: CaptureManifest) -> Facts:
    return {"rows": m.rows, "tokens": m.tokens, "folders": len(m.folders), "points": list(m.capture.points)}


def of_merged(m: MergedManifest) -> Facts:
    return {
        "rows": m.rows,
        "draft_vocab_size": m.draft_vocab_size,
        "held_out_coverage": round(m.coverage.held_out, 4),
    }


def of_spec(spec: CaptureSpec) -> Facts:
    """Points, in numbers and in words."""
    after = ", ".join(f"after {p}" for p in spec.points)
    stored = f"H {spec.hidden_size}, {spec.stored_dtype}"
    words = f"{after} of {spec.layers} layers; the last state {spec.last_state.replace('_', ' ')}; {stored}"
    return {
        "points": list(spec.points),
        "points_in_words": words,
        "layers": spec.layers,
        "last_state": spec.last_state,
        "hidden_size": spec.hidden_size,
        "dtype": spec.stored_dtype,
    }
