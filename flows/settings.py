"""The parameters of a run: a set of params/, and single values over it, written to params.yaml once they are known to be
valid. DVC notes what each stage ran with in dvc.lock, so that a run's overrides are part of its record."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stages.contracts.errors import ParamsError
from stages.contracts.files import write_whole
from stages.contracts.params import load_params

PARAMS = Path("params.yaml")


def choose_params(name: str, root: Path) -> None:
    """Put params/<name>.yaml in the place of params.yaml, once it is known to be valid.

    Raises:
        ParamsError: no such set (the error lists those there are), or not valid.
    """
    sets = {path.stem: path for path in sorted((root / "params").glob("*.yaml"))}
    if name not in sets:
        raise ParamsError(
            f"No parameter set {name!r}",
            where=str(root / "params"),
            expected=f"one of {sorted(sets)}",
            do="pass one of them as params_set, or none to run params.yaml as it stands",
        )
    load_params(sets[name])
    write_whole(root / PARAMS, sets[name].read_bytes())


def override(changes: Mapping[str, Any], root: Path) -> None:
    """Write values into params.yaml by dotted key (`train.optimizer_steps`), comments and order kept.

    Raises:
        ParamsError: a key that is not there, or params that are not valid with these values; params.yaml is as it was.
    """
    import ruamel.yaml

    yaml = ruamel.yaml.YAML()
    yaml.preserve_quotes = True
    yaml.width = 1 << 20  # no line is broken
    raw = yaml.load((root / PARAMS).read_text(encoding="utf-8"))
    for key, value in changes.items():
        section, name = _section(raw, key)
        section[name] = value
    text = io.StringIO()
    yaml.dump(raw, text)
    with tempfile.TemporaryDirectory() as aside:
        path = Path(aside) / PARAMS.name
        path.write_text(text.getvalue(), encoding="utf-8")
        load_params(path)
    write_whole(root / PARAMS, text.getvalue().encode())


def _section(raw: Any, key: str) -> tuple[Any, Any]:
    """The mapping or list that holds a key, and the key in it."""
    *path, name = key.split(".")
    for part in path:
        raw = _under(raw, part, key)
    _under(raw, name, key)
    return raw, _index(raw, name)


def _under(raw: Any, part: str, key: str) -> Any:
    try:
        return raw[_index(raw, part)]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ParamsError(
            f"params.yaml has no {key}",
            where="overrides of this run",
            expected=f"one of {sorted(map(str, raw))}" if isinstance(raw, Mapping) else "a key that params.yaml has",
            got=part,
            do="name keys by dots as they stand in params.yaml: train.optimizer_steps, prepare.sources.0.limit",
        ) from error


def _index(raw: Any, part: str) -> Any:
    return int(part) if isinstance(raw, list) else part
