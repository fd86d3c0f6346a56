"""params.yaml's bytes to its sections: one text encoding, every key once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import yaml

from stages.contracts.errors import ParamsError


def read_sections(path: Path) -> dict[Any, Any]:
    """The mapping that a YAML file holds.

    Raises:
        ParamsError: no file, not UTF-8, no YAML, nothing in it, something else than sections, or doubled keys, which YAML
            would settle in silence (the last one wins); each is named with its lines.
    """
    loader: Any = None
    raw: Any = None
    doubled: list[str] = []
    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        root = loader.get_single_node()
        if root is not None:
            doubled += _doubled(root, "", set())
            raw = loader.construct_document(root)
    except FileNotFoundError as error:
        raise ParamsError(
            "No params.yaml here", where=str(path.absolute()), do="run from the repository root"
        ) from error
    except UnicodeDecodeError as error:
        raise ParamsError(
            "params.yaml is not UTF-8",
            where=f"{path}: byte {error.start}",
            expected="UTF-8 text",
            got=f"byte 0x{error.object[error.start]:02x}",
            do="save it as UTF-8 (`iconv -f LATIN1 -t UTF-8`, or your editor's save-as)",
        ) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ParamsError(
            "params.yaml is not YAML", where=str(path), got=str(error), do="mend the line named"
        ) from error
    finally:
        if loader is not None:
            loader.dispose()
    if doubled:
        raise ParamsError(
            f"params.yaml has {len(doubled)} doubled key{'s' if len(doubled) > 1 else ''}",
            where=str(path),
            expected="every key once",
            got="; ".join(doubled),
            do="remove one line of each",
        )
    if not isinstance(raw, dict):
        raise ParamsError(
            "params.yaml is empty" if raw is None else "params.yaml does not hold sections",
            where=str(path),
            expected="the sections target, prepare, capture, merge, train, serve, benchmark, gates",
            got="nothing" if raw is None else type(raw).__name__,
            do="`make use PARAMS=smollm2-135m` copies a set of params/ here",
        )
    return cast("dict[Any, Any]", raw)


def _doubled(node: yaml.Node, at: str, seen: set[int]) -> Iterator[str]:
    """Doubled keys below a node, each with its path and lines; an anchored node is looked at once."""
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for i, child in enumerate(node.value):
            yield from _doubled(child, f"{at}[{i}]", seen)
    if not isinstance(node, yaml.MappingNode):
        return
    lines: dict[str, int] = {}
    pairs: list[tuple[yaml.Node, yaml.Node]] = node.value
    for key, value in pairs:
        name, line = str(key.value), key.start_mark.line + 1
        here = f"{at}.{name}" if at else name
        if name in lines and isinstance(key, yaml.ScalarNode):
            yield f"{here} in lines {lines[name]} and {line}"
        lines.setdefault(name, line)
        yield from _doubled(value, here, seen)
