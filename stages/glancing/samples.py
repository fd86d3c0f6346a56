"""One sample of a store, by its shapes: what a row holds, and what it lacks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from stages.glancing.contents import Contents, Shape
from stages.glancing.folders import File
from stages.glancing.runs import CONFIG
from stages.glancing.told import Told, many

TOOLS = {
    "speculators": "speculators",
    "specforge": "SpecForge",
    "angelslim": "AngelSlim",
    "model_optimizer": "Model-Optimizer",
    "nemo_automodel": "NeMo Automodel",
}


class Kind(Protocol):
    """A tool's format, as bridges name it."""

    @property
    def tool(self) -> str: ...
    @property
    def era(self) -> str: ...
    @property
    def dialect(self) -> str | None: ...
    @property
    def last_state(self) -> str: ...
    @property
    def pattern(self) -> str: ...
    @property
    def numbering(self) -> str | None: ...


@dataclass(frozen=True)
class RowShape:
    """Of one sample: auxiliary states, whether the last is there, H, dtype, tokens, whether it has a loss mask."""

    aux: int
    last: bool
    hidden_size: int
    dtype: str
    tokens: int
    mask: bool


def row_of(tool: str, contents: Contents) -> RowShape | None:
    """Read a sample's shapes as `tool` lays them out; None when they are not as it writes them."""
    mask = contents.shape("loss_mask") is not None
    states = contents.tensors.get("hidden_states")
    if (
        tool == "speculators"
        and isinstance(states, list)
        and states
        and all(isinstance(s, Shape) and len(s.dims) == 2 for s in states)
    ):
        return RowShape(
            min(len(states), 3) if len(states) < 4 else len(states) - 1,
            len(states) > 3,
            states[0].dims[1],
            states[0].dtype,
            states[0].dims[0],
            mask,
        )
    if tool == "speculators" and isinstance(states, Shape) and len(states.dims) == 3:
        L, S, H = states.dims
        return RowShape(S - 1 if S > 3 else S, S > 3, H, states.dtype, L, mask)
    aux_name, last_name = {
        "specforge": ("aux_hidden_state", "hidden_state"),
        "angelslim": ("hidden_states", "target_hiddens"),
        "model_optimizer": ("aux_hidden_states", "hidden_states"),
        "nemo_automodel": ("aux_hidden_states", ""),
    }.get(tool, ("", ""))
    aux, last = contents.shape(aux_name), contents.shape(last_name)
    if aux is None or len(aux.dims) < 2:
        return None
    H = last.dims[-1] if last and last.dims else aux.dims[-1] // 3
    tokens = aux.dims[-2] * (aux.dims[0] if tool == "nemo_automodel" and len(aux.dims) == 3 else 1)
    return RowShape(aux.dims[-1] // H if H else 0, last is not None, H, aux.dtype, tokens, mask)


def tell_sample(
    told: Told, kind: Kind, contents: Contents, shape: RowShape | None, width: int | None, sample: File | None
) -> None:
    named = f"{sample.folder}/{sample.name}".lstrip("/") if sample else ""
    told.facts["sample"] = named or None
    before = contents.tensors.get("hidden_states_prenorm")  # newer files of Model-Optimizer say so
    told.facts["last_state"] = kind.last_state
    if isinstance(before, bool):
        told.facts["last_state"] = "before_final_norm" if before else "after_final_norm"
    if told.facts["last_state"] == "unknown" and kind.tool == "model_optimizer":
        words = "The last state is after the final norm from its transformers backend and before it from its vLLM dump; these files do not say which"
        told.add("risk", words, "`--deep` tries both readings against the tokens when the target is at hand")
    if contents.fault:
        told.add(
            "fault", f"The sample opened cannot be read: {contents.fault}", "remove it and extract its row again", named
        )
    elif shape is None:
        keys = ", ".join(sorted(contents.tensors)[:8]) or "nothing"
        told.add(
            "fault",
            f"The sample opened is not laid out as {TOOLS.get(kind.tool, kind.tool)} writes it: it holds {keys}",
            where=named,
        )
    told.facts["hidden_size"] = shape.hidden_size if shape else width
    told.facts["dtype"] = shape.dtype if shape else None
    told.facts["states_in_a_row"] = shape.aux + shape.last if shape else None
    if shape and width and shape.hidden_size != width:
        told.add("fault", f"The sample's states are {shape.hidden_size} wide, {CONFIG} says {width}", where=named)
    if shape and not shape.last and kind.tool == "speculators":
        told.add(
            "fault",
            f"{many(shape.aux, 'state')} a row instead of four: the last one is missing, and speculators' own reader takes slot {shape.aux - 1} for it",
            "extract again with the last layer's id too; without it there is nothing to train towards",
            named,
        )
    if shape and kind.tool == "speculators" and kind.era == "0.3-0.4" and not shape.mask:
        told.add("fault", "The sample has no loss mask", "rebuild the masks from the tokens", named)
    if shape and shape.dtype not in ("bfloat16", "float16", "float32"):
        told.add(
            "risk",
            f"States are stored as {shape.dtype}: what that costs in accept length is not known from here",
            where=named,
        )
