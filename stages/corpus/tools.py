"""Function schemas as short text, for chat templates that know no tools."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any


def tools_message(tools: Iterable[Mapping[str, Any]]) -> str:
    """A system message that offers `tools`, one signature a line, and says how to call them."""
    lines = [f"- {signature(tool)}" for tool in tools]
    return "\n".join(
        ["You can call these functions:", *lines, "Answer with the calls to make, one a line: name(argument=value)."]
    )


def signature(tool: Mapping[str, Any]) -> str:
    """`name(argument: type, other: type = default): description`. Takes OpenAI's {"type", "function"} wrapping too."""
    inner = tool.get("function")
    function: Mapping[str, Any] = inner if isinstance(inner, Mapping) else tool
    parameters = function.get("parameters") or {}
    required = parameters.get("required") or []
    arguments = [
        _argument(name, schema, name in required) for name, schema in (parameters.get("properties") or {}).items()
    ]
    described = " ".join(str(function.get("description", "")).split())
    return f"{function.get('name')}({', '.join(arguments)}): {described}"


def _argument(name: str, schema: Any, required: bool) -> str:
    kind = schema.get("type", "any") if isinstance(schema, Mapping) else "any"
    if required:
        return f"{name}: {kind}"
    default = schema.get("default") if isinstance(schema, Mapping) else None
    return f"{name}: {kind} = {_json(default)}"


def calls_text(calls: Iterable[Mapping[str, Any]]) -> str:
    """An assistant's tool calls as `tools_message` asks for them; arguments sorted, so that equal calls give equal text."""
    return "\n".join(_call_text(call.get("function") or call) for call in calls)


def _call_text(function: Mapping[str, Any]) -> str:
    given = function.get("arguments") or {}
    told = [f"{k}={_json(v)}" for k, v in sorted(given.items())] if isinstance(given, Mapping) else [_json(given)]
    return f"{function.get('name')}({', '.join(told)})"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)
