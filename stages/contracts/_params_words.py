"""Faults of params.yaml in a user's words: pydantic names kinds of faults, a person needs the key, the rule and the value."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_WORDS = {
    "missing": "missing",
    "int_type": "a whole number is needed",
    "int_from_float": "a whole number is needed",
    "float_type": "a number is needed",
    "float_parsing": "a number is needed",
    "finite_number": "a finite number is needed",
    "string_type": "text is needed",
    "bool_type": "true or false is needed",
    "bool_parsing": "true or false is needed",
    "tuple_type": "a list is needed",
    "dict_type": "a mapping is needed, as {key: value}",
    "model_type": "a section is needed, as {key: value}",
    "model_attributes_type": "a section is needed, as {key: value}",
}


def in_words(fault: ErrorDetails, params: type[BaseModel]) -> str:
    """One fault: where, what rule, what was found."""
    where, kind = ".".join(map(str, fault["loc"])), fault["type"]
    if kind == "extra_forbidden":
        return f"{where}: no such key{_meant(fault['loc'], params)}"
    if kind == "missing":
        return f"{where}: missing"
    rule = _WORDS.get(kind) or _ruled(kind, fault.get("ctx", {})) or fault["msg"].removeprefix("Value error, ")
    value = fault["input"]
    got = "a whole section" if isinstance(value, Mapping | BaseModel) else repr(value)[:60]
    return f"{where}: {rule} (got {got})"


def _ruled(kind: str, about: Mapping[str, Any]) -> str | None:
    bounds = {"greater_than_equal": ("ge", "at least"), "greater_than": ("gt", "more than")}
    bounds |= {"less_than_equal": ("le", "at most"), "less_than": ("lt", "less than")}
    if kind in bounds:
        key, words = bounds[kind]
        return f"must be {words} {about[key]:g}"
    if kind == "literal_error":
        return f"must be one of {str(about['expected']).replace(chr(39), '')}"
    if kind in ("too_short", "too_long"):
        limit = about["min_length" if kind == "too_short" else "max_length"]
        return (
            f"{'at least' if kind == 'too_short' else 'at most'} {limit} are needed, {about['actual_length']} are there"
        )
    if kind == "string_pattern_mismatch":
        return f"must look like {about['pattern']}"
    return None


def _meant(loc: Sequence[int | str], params: type[BaseModel]) -> str:
    """The key of that section that is most like an unknown one."""
    section: Any = params
    for part in loc[:-1]:
        fields = getattr(section, "model_fields", {})
        section = getattr(fields.get(part), "annotation", None) if isinstance(part, str) else section
    near = difflib.get_close_matches(str(loc[-1]), list(getattr(section, "model_fields", {})), 1)
    return f"; is {near[0]} meant?" if near else ""
