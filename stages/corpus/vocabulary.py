"""The draft vocabulary: the D target ids a draft can propose.

The most frequent supervised tokens of the training split, with special tokens, end-of-turn and the single-byte tokens
always in: a vocabulary by frequency alone loses bytes that a small corpus never shows, and with them every accented word.
V ids of the target, D of the draft.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stages.contracts.errors import DataError, ParamsError

Ids = npt.NDArray[np.int64]


def _byte_alphabet() -> set[str]:
    """The 256 characters that byte-level BPE writes bytes with (GPT-2's bytes_to_unicode)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return {chr(b) for b in plain} | {chr(256 + i) for i in range(256 - len(plain))}


def always_in(target: Path) -> frozenset[int]:
    """Ids that every draft vocabulary holds: added and special tokens (end-of-turn, tool and think markers), EOS and BOS of
    config.json, and single bytes, be they byte-level (`Ġ`) or fallback (`<0x0A>`).

    Args:
        target: the target's folder, with config.json and tokenizer.json.

    Raises:
        DataError: tokenizer.json has no vocabulary.
    """
    config = json.loads((target / "config.json").read_text())
    config |= config.get("text_config") or {}  # a language model within a larger one has its figures there
    tokenizer = json.loads((target / "tokenizer.json").read_text())
    vocabulary = tokenizer.get("model", {}).get("vocab")
    if not vocabulary:
        raise DataError("The tokenizer has no vocabulary", where=str(target / "tokenizer.json"), do="fetch it again")
    bytes_ = _byte_alphabet() | {f"<0x{b:02X}>" for b in range(256)}
    ids = {i for token, i in _items(vocabulary) if token in bytes_}
    ids |= {int(token["id"]) for token in tokenizer.get("added_tokens", [])}
    for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
        value = config.get(name)
        ids |= set(value) if isinstance(value, list) else set() if value is None else {int(value)}
    return frozenset(i for i in ids if i < config["vocab_size"])


def _items(vocabulary: Any) -> list[tuple[str, int]]:
    """Token and id of a BPE or WordPiece map, or of a Unigram list of [token, score]."""
    if isinstance(vocabulary, dict):
        return [(str(token), int(i)) for token, i in vocabulary.items()]
    return [(str(item[0]), i) for i, item in enumerate(vocabulary)]


def choose_vocabulary(counts: Ids, size: int, always: frozenset[int]) -> Ids:
    """Target ids of the draft vocabulary, ascending, i64 [D].

    The ids of `always`, then by falling count, equal counts by rising id: fewer distinct tokens than D are filled up with
    the lowest unused ids, so equal data give an equal vocabulary.

    Args:
        counts: how often each target id is supervised in the training split, i64 [V].

    Raises:
        ParamsError: D is larger than V, or too small for the ids that are always in.
    """
    if not len(always) <= size <= len(counts):
        raise ParamsError(
            "No draft vocabulary of this size",
            where="params.yaml: merge.draft_vocab_size",
            expected=f"{len(always)} (special and byte tokens, always in) to {len(counts)} (the target's vocabulary)",
            got=str(size),
            do="mend merge.draft_vocab_size",
        )
    rank = counts.astype(np.int64).copy()
    rank[list(always)] = np.iinfo(np.int64).max
    return np.sort(np.argsort(-rank, kind="stable")[:size]).astype(np.int64)


def mapping(ids: Ids, vocab_size: int) -> tuple[Ids, npt.NDArray[np.bool_]]:
    """d2t i64 [D], the *offset* of each draft id (target id = draft id + d2t[draft id]), and t2d bool [V]."""
    t2d = np.zeros(vocab_size, dtype=np.bool_)
    t2d[ids] = True
    return ids - np.arange(len(ids), dtype=np.int64), t2d


def covered(counts: Ids, t2d: npt.NDArray[np.bool_]) -> float:
    """Share of the tokens counted whose id is in the draft vocabulary; 0.0 where nothing was counted."""
    total = int(counts.sum())
    return float(counts[t2d].sum()) / total if total else 0.0
