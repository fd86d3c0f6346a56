"""What is checked before a server starts, and of one that runs: would this draft be served as it was trained?

Settings go by the names of SGLang's own fields, so that one check serves for a command to be run and for what a running server
says of itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.contracts.errors import EngineError

ALGORITHM = "EAGLE3"
_ABSENT = object()
_DTYPES = {"float32": ("float32", "float"), "bfloat16": ("bfloat16",)}  # of the capture: as SGLang may name it


@dataclass(frozen=True)
class DraftFacts:
    """A draft as the checks see it: from config.json what an engine reads there, from the record what it was trained on.

    `served_points` are what this engine and version make of config.json's layer ids for this model class.
    """

    folder: Path
    architecture: str
    tied_embeddings: bool
    vocab_size: int
    draft_vocab_size: int
    max_positions: int
    points: tuple[int, ...]
    served_points: tuple[int, ...]
    compute_dtype: str


def check_launch(
    fields: Mapping[str, Any], draft: DraftFacts | None, *, positions: int, by_value: bool = False, where: str = ""
) -> list[str]:
    """Refuse settings under which the draft cannot work as trained, before anything is started.

    Args:
        fields: by SGLang's field names: of a command, or what a running server reports.
        by_value: the layers fed are about to be compared by value, so that a wrong numbering is returned as a warning (parity
            names what was really fed) and not refused here.

    Returns:
        Warnings.

    Raises:
        EngineError: all faults at once.
    """
    faults, warnings = _length_faults(fields, draft, positions), []
    if draft is not None:
        faults += _draft_faults(fields, draft) + _numeric_faults(fields, draft)
        if draft.served_points != draft.points:
            said = f"the draft's config.json makes this engine feed points {list(draft.served_points)}, and it was trained on {list(draft.points)}"
            (warnings if by_value else faults).append(said)
    if faults:
        raise EngineError(
            "The draft would not be served as it was trained",
            where=where or "the launch command, made from params.yaml: serve, and the draft's record",
            expected="settings under which SGLang runs this draft as meant; it reports none of these faults itself",
            got="\n    " + "\n    ".join(faults),
            do="mend params.yaml: serve.sglang, or export the draft for this engine: `dvc repro train`",
        )
    return warnings


def _draft_faults(fields: Mapping[str, Any], draft: DraftFacts) -> list[str]:
    faults: list[str] = []
    algorithm, steps = fields.get("speculative_algorithm"), fields.get("speculative_num_steps") or 0
    topk, tokens = fields.get("speculative_eagle_topk") or 0, fields.get("speculative_num_draft_tokens") or 0
    if draft.architecture.endswith("Eagle3") and algorithm != ALGORITHM:
        faults.append(
            f"speculative_algorithm {algorithm} with a draft of class {draft.architecture}: the target's states would not be "
            f"captured and every verification would accept nothing; {ALGORITHM} is needed"
        )
    if not fields.get("speculative_draft_model_path"):
        faults.append("no speculative_draft_model_path: SGLang would load the target as its own draft and crash")
    if steps < 1 or topk < 1:
        faults.append(f"speculative_num_steps {steps} and speculative_eagle_topk {topk}: both must be at least 1")
    elif topk == 1 and tokens != steps + 1:
        faults.append(
            f"speculative_num_draft_tokens {tokens}: a chain (topk 1) of {steps} steps verifies {steps + 1} tokens"
        )
    if draft.tied_embeddings and draft.draft_vocab_size < draft.vocab_size:
        faults.append(
            f"tie_word_embeddings is true with a draft vocabulary of {draft.draft_vocab_size} out of {draft.vocab_size}: the "
            "head would be the embedding, of another size"
        )
    return faults


def _length_faults(fields: Mapping[str, Any], draft: DraftFacts | None, positions: int) -> list[str]:
    context = fields.get("context_length") or 0
    faults: list[str] = []
    if context and positions > context:
        faults.append(f"context_length {context} (context_tokens): the longest request has {positions} tokens")
    if draft is None:
        return faults
    longest = context or positions
    if longest > draft.max_positions:
        faults.append(
            f"context_length {longest}: the draft's max_position_embeddings is {draft.max_positions}, beyond which acceptance "
            "falls off and some engines crash"
        )
    return faults


def _numeric_faults(fields: Mapping[str, Any], draft: DraftFacts) -> list[str]:
    faults: list[str] = []
    dtype = str(fields.get("dtype") or "auto").removeprefix("torch.")
    if dtype not in _DTYPES.get(draft.compute_dtype, (draft.compute_dtype,)):
        faults.append(f"dtype {dtype}: the states the draft was trained on were computed in {draft.compute_dtype}")
    if quantization := fields.get("quantization"):
        faults.append(f"quantization {quantization}: the draft was trained on the states of the target as it is")
    return faults


def unmet(expected: Mapping[str, Any], effective: Mapping[str, Any]) -> list[str]:
    """Settings that did not take: asked for, and reported otherwise or not at all. `a.b` is a part of setting a."""
    faults: list[str] = []
    for name, asked in expected.items():
        got: Any = effective
        for part in name.split("."):
            got = got.get(part, _ABSENT) if isinstance(got, Mapping) else _ABSENT
        if got is _ABSENT:
            faults.append(f"{name}: {asked!r} was asked for, and the server reports no such setting")
        elif not _same(asked, got):
            faults.append(f"{name}: {asked!r} was asked for, {got!r} is in effect")
    return faults


def _same(asked: Any, got: Any) -> bool:
    if isinstance(asked, bool) or asked is None:
        return bool(asked) == bool(got)
    if isinstance(asked, float) and isinstance(got, int | float):
        return abs(asked - got) < 1e-9
    if isinstance(asked, list | tuple) and isinstance(got, list | tuple):
        return list(asked) == list(got)  # type: ignore[reportUnknownArgumentType]
    return str(asked) == str(got)


def differing(one: Mapping[str, Any], other: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Which of `names` two servers report differently; answers with and without a draft are compared under equal settings."""
    return [f"{n}: {one.get(n)!r} and {other.get(n)!r}" for n in names if one.get(n) != other.get(n)]


# What differs between any two servers, and says nothing of how they serve.
_OF_THE_PROCESS = {
    "host", "port", "nccl_port", "random_seed", "launch_command", "startup_time", "internal_states", "status", "base_gpu_id",
    "max_total_num_tokens", "max_req_input_len",
}  # fmt: skip


def differing_at_all(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[list[str], int]:
    """Settings that two servers report differently, speculation's own apart, and how many they report alike.

    Left out is what names the process, and the room for tokens that the server worked out: a draft takes some of it, which is a
    cost of its own. Greedy answers do not hang on the random seed.
    """
    names = {n for n in {*one, *other} - _OF_THE_PROCESS if not n.lstrip("_").startswith("speculative_")}
    faults = [f"{n}: {one.get(n)!r} and {other.get(n)!r}" for n in sorted(names) if one.get(n) != other.get(n)]
    return faults, len(names) - len(faults)
