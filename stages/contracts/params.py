"""params.yaml, parsed once into frozen models. Unknown keys are refused; all faults are told at once."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError, model_validator

from stages.contracts._fit import between_sections
from stages.contracts._params_words import in_words
from stages.contracts._yaml import read_sections
from stages.contracts.errors import ParamsError
from stages.contracts.sections.base import Section
from stages.contracts.sections.gates import DeploymentGate, ExtractionGate, Gates, TrainingGate
from stages.contracts.sections.prepare import Answers, Prepare, Rendering, Source
from stages.contracts.sections.serve import Benchmark, Serve, SGLang
from stages.contracts.sections.states import Capture, Merge
from stages.contracts.sections.target import Target
from stages.contracts.sections.train import Train

__all__ = [
    "Answers",
    "Benchmark",
    "Capture",
    "DeploymentGate",
    "ExtractionGate",
    "Gates",
    "Merge",
    "Params",
    "Prepare",
    "Rendering",
    "SGLang",
    "Serve",
    "Source",
    "Target",
    "Train",
    "TrainingGate",
    "load_params",
]


class Params(Section):
    target: Target
    prepare: Prepare
    capture: Capture
    merge: Merge
    train: Train
    serve: Serve
    benchmark: Benchmark
    gates: Gates

    @model_validator(mode="after")
    def _sections_fit(self) -> Params:
        faults = between_sections({name: getattr(self, name) for name in Params.model_fields})
        if faults:
            raise ValueError("; ".join(faults))
        return self


def load_params(path: Path = Path("params.yaml")) -> Params:
    """Read the only configuration there is.

    Raises:
        ParamsError: no file, no YAML, doubled or unknown keys, values out of range or sections that contradict each other;
            every fault is named in the one error.
    """
    raw = read_sections(path)
    try:
        return Params.model_validate(raw)
    except ValidationError as error:
        faults = [in_words(f, Params) for f in error.errors() if f["loc"]]
        faults += between_sections(_sound(raw))
        raise ParamsError(
            f"params.yaml has {len(faults)} fault{'s' if len(faults) > 1 else ''}",
            where=str(path),
            expected="keys and ranges as commented in params.yaml",
            got="\n    " + "\n    ".join(faults),
            do="mend each line named",
        ) from error


def _sound(raw: Mapping[Any, Any]) -> dict[str, Section]:
    """The sections that are valid by themselves."""
    sections: dict[str, Section] = {}
    for name, field in Params.model_fields.items():
        model: Any = field.annotation
        with contextlib.suppress(ValidationError):
            sections[name] = model.model_validate(raw.get(name))
    return sections
