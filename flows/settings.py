"""The parameters of a run: a set of params/, and single values over it, written to params.yaml once they are known to be
valid. DVC notes what each stage ran with in dvc.lock, so that a run's overrides are part of its record."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

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
    """Write values into params.yaml by dotted key (`train.optimizer_steps`); everything else stays, to the byte.

    Raises:
        ParamsError: a key that is not there, or params that are not valid with these values; params.yaml is as it was.
    """
    text = (root / PARAMS).read_text(encoding="utf-8")
    for key, value in changes.items():
        node = _find(yaml.compose(text, Loader=yaml.SafeLoader), key)
        text = text[: node.start_mark.index] + _written(value) + text[node.end_mark.index :]
    with tempfile.TemporaryDirectory() as aside:
        path = Path(aside) / PARAMS.name
        path.write_text(text, encoding="utf-8")
        load_params(path)
    write_whole(root / PARAMS, text.encode())


def _written(value: Any) -> str:
    """A value on one line of YAML."""
    return yaml.safe_dump(value, default_flow_style=True, width=1 << 20).removesuffix("...\n").strip()


def _find(node: Any, key: str) -> Any:
    """The node of a value on one line, by its dotted key."""
    for part in key.split("."):
        found = _children(node)
        if part not in found:
            raise ParamsError(
                f"params.yaml has no {key}",
                where="overrides of this run",
                expected=f"one of {', '.join(found)}" if found else "a key that params.yaml has",
                got=part,
                do="name keys by dots as they stand in params.yaml: train.optimizer_steps, prepare.sources.0.limit",
            )
        node = found[part]
    if isinstance(node, yaml.CollectionNode) and not node.flow_style:
        raise ParamsError(
            f"{key} is a section, not a value",
            where="overrides of this run",
            expected=f"its keys one by one: {', '.join(f'{key}.{name}' for name in _children(node))}",
            got=key,
            do="give the values that change, each with its own key",
        )
    return node


def _children(node: Any) -> dict[str, Any]:
    """What lies in a mapping by its keys, or in a list by its places."""
    if isinstance(node, yaml.MappingNode):
        return {str(key.value): value for key, value in node.value}
    return {str(i): value for i, value in enumerate(node.value)} if isinstance(node, yaml.SequenceNode) else {}
