"""Prompts about documented functions of Python's own standard library (PSF licence)."""

from __future__ import annotations

import ast
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stages.corpus.items import Item, seeded_order

_LEFT_OUT = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "turtledemo",
    "ensurepip",
    "__pycache__",
}
MIN_LINES, MAX_LINES = 6, 50

# {head}: signature and docstring; {body}: the function without its docstring; {name}: its qualified name.
_PHRASINGS = (
    ("complete", "Complete this Python function.\n\n```python\n{head}\n```"),
    ("explain", "Explain what this function does.\n\n```python\n{body}\n```"),
    ("docstring", "Write a docstring for this function.\n\n```python\n{body}\n```"),
    ("implement", "Write the Python function that this docstring describes.\n\n```python\n{head}\n```"),
    ("tests", "Write unit tests for this function with pytest.\n\n```python\n{body}\n```"),
    ("hints", "Add type hints to this function and show it again.\n\n```python\n{body}\n```"),
    ("review", "Review this function from the module {module}. What could go wrong?\n\n```python\n{body}\n```"),
    ("rename", "Rewrite this function with clearer variable names.\n\n```python\n{body}\n```"),
    ("example", "Show a short example that calls {name} from the module {module}.\n\n```python\n{head}\n```"),
    ("steps", "Describe this code step by step.\n\n```python\n{body}\n```"),
)


@dataclass(frozen=True)
class _Function:
    module: str
    name: str
    head: str
    body: str


def standard_library(seed: int, max_characters: int, root: Path | None = None) -> Iterator[Item]:
    """One prompt a documented function of 6 to 50 lines, in a seeded order; the phrasing follows from the content.

    Prompts longer than `max_characters` are not offered. `root` is Python's own library unless given.
    """
    items: dict[str, Item] = {}
    for function in _functions(root or Path(sysconfig.get_paths()["stdlib"])):
        kind, phrasing = _PHRASINGS[seeded_order(seed, function.body)[0] % len(_PHRASINGS)]
        text = phrasing.format(head=function.head, body=function.body, name=function.name, module=function.module)
        if len(text) <= max_characters:
            items.setdefault(
                text, Item(f"{function.module}:{function.name}:{kind}", ({"role": "user", "content": text},))
            )
    yield from (items[text] for text in sorted(items, key=lambda text: seeded_order(seed, text)))


def _functions(root: Path) -> Iterator[_Function]:
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if _LEFT_OUT.intersection(parts):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(source)
        except (SyntaxError, UnicodeDecodeError):
            continue  # the library keeps a few files that are broken on purpose, as examples
        module = ".".join(parts).removesuffix(".py").removesuffix(".__init__")
        yield from _of_module(module, source.splitlines(), tree)


def _of_module(module: str, lines: list[str], tree: ast.Module) -> Iterator[_Function]:
    """Functions at the top of a module and methods of its classes."""
    for node in tree.body:
        members = [(node, "")] if not isinstance(node, ast.ClassDef) else [(m, node.name + ".") for m in node.body]
        for member, prefix in members:
            if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
                function = _cut(module, prefix + member.name, lines, member)
                if function is not None:
                    yield function


def _cut(module: str, name: str, lines: list[str], node: ast.FunctionDef | ast.AsyncFunctionDef) -> _Function | None:
    """Take a function apart by line numbers, so that comments and layout stay as they were written."""
    if ast.get_docstring(node) is None or len(node.body) < 2 or node.end_lineno is None:
        return None
    if not MIN_LINES <= node.end_lineno - node.lineno + 1 <= MAX_LINES:
        return None
    doc = node.body[0]
    if doc.lineno <= node.lineno or doc.end_lineno is None:
        return None
    head = lines[node.lineno - 1 : doc.end_lineno]
    body = [*lines[node.lineno - 1 : doc.lineno - 1], *lines[doc.end_lineno : node.end_lineno]]
    return _Function(module, name, _dedent(head), _dedent(body))


def _dedent(lines: list[str]) -> str:
    return textwrap.dedent("\n".join(line.rstrip() for line in lines)).strip("\n")
