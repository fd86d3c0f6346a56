"""The plug-in that SGLang finds through its entry points: the attention backend that EAGLE needs, kept on a CPU without AMX.

SGLang falls back from intel_amx to torch_native where the processor has no AMX, and torch_native cannot verify drafts. The two
operations that backend calls come from this package, so it may stay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

FALLBACKS = "sglang.srt.arg_groups.overrides._attention_backend_platform_fallbacks"


def register() -> None:
    """Called by SGLang in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(FALLBACKS, keep_backend, HookType.AROUND)


def keep_backend(fallbacks: Callable[[Any], dict[str, Any]], view: Any) -> dict[str, Any]:
    """No fallback for intel_amx on a CPU; whatever SGLang decides elsewhere."""
    if view.device == "cpu" and view.attention_backend == "intel_amx":
        return {}
    return fallbacks(view)
