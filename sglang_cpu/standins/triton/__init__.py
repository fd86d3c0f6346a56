"""Inert: SGLang and torch define triton kernels when they are imported, and launch none on a CPU.

Every name imports. Decorators hand back what they were given, so launching a kernel (`kernel[grid]`) fails at once.
"""

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__version__ = "3.0.0"
_EXCEPTIONS = ("Error", "OutOfResources")


class Inert(ModuleType):
    """A module that has every name: classes for names in capitals, more such modules for the rest."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[:1].isupper():
            made: Any = type(name, (Exception,) if name.endswith(_EXCEPTIONS) else (), {})
        else:
            made = sys.modules.setdefault(f"{self.__name__}.{name}", _new(f"{self.__name__}.{name}"))
        setattr(self, name, made)
        return made

    def __call__(self, *args: Any, **how: Any) -> Any:
        """As a decorator, with or without arguments."""
        return _decorate(*args, **how)

    def __bool__(self) -> bool:
        return False

    def __contains__(self, item: object) -> bool:
        """Nothing is in it: so torch finds that no device has triton."""
        return False


class _Finder:
    """Answers `import triton.whatever`."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.startswith("triton.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules.get(spec.name) or _new(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


class Config:
    """A variant for autotune; never tried."""

    def __init__(
        self, kwargs: dict[str, Any] | None = None, num_warps: int = 4, num_stages: int = 2, **more: Any
    ) -> None:
        self.kwargs, self.num_warps, self.num_stages = kwargs or {}, num_warps, num_stages


class constexpr:
    """A constant of a kernel, as an annotation or made at import."""

    def __init__(self, value: Any = None) -> None:
        self.value = value


def _new(name: str) -> Inert:
    module = Inert(name)
    module.__path__ = []
    module.__spec__ = ModuleSpec(name, None, is_package=True)
    return module


def _decorate(*args: Any, **how: Any) -> Any:
    return args[0] if len(args) == 1 and callable(args[0]) and not how else lambda fn: fn


def cdiv(a: int, b: int) -> int:
    return -(a // -b)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length() if n > 0 else 1


jit: Callable[..., Any] = _decorate
autotune: Callable[..., Any] = _decorate
heuristics: Callable[..., Any] = _decorate
sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]
sys.modules[__name__].__class__ = Inert

import triton.language as language  # noqa: E402 - after the finder that answers it

language.constexpr = constexpr
