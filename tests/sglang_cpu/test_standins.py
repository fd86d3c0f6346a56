"""The borrowed names: imports succeed, kernels are defined, and whatever is really called says that it is not there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2] / "sglang_cpu"

TRITON = """
import triton, triton.language as tl
from triton.runtime.jit import JITFunction, KernelInterface
from triton.runtime.autotuner import OutOfResources
from triton.language.extra import libdevice

@triton.autotune(configs=[triton.Config({"BLOCK": 16}, num_warps=2)], key=["n"])
@triton.heuristics({"EVEN": lambda args: True})
@triton.jit(do_not_specialize=["n"])
def kernel(x, n, BLOCK: tl.constexpr = 16): ...

@triton.jit
def other(x): ...

class Kernel(KernelInterface): ...

assert not isinstance(kernel, JITFunction) and issubclass(OutOfResources, Exception)
assert "cpu" not in triton.backends.backends
assert triton.cdiv(7, 2) == 4 and triton.next_power_of_2(9) == 16 and tl.constexpr(3).value == 3
assert tl.float32 is tl.float32 and {tl.float32: 1} and not hasattr(triton, "__missing__")
try:
    kernel[(1,)](None, 3)
except TypeError:
    print("no launch")
"""
VISION = """
import torchvision.io, torchvision.transforms.v2.functional as tvF, torchvision.transforms.functional as TF
from torchvision.io import decode_jpeg
assert TF.InterpolationMode("bicubic").name == "BICUBIC"
try:
    decode_jpeg(b"")
except NotImplementedError as error:
    print(error)
"""
KERNEL = """
import ast, pathlib, sys, sgl_kernel, torch
from draftline_sglang_cpu import attention
assert torch.ops.sgl_kernel.extend_attention_cpu is attention.extend_attention
assert all(callable(getattr(sgl_kernel, name)) for name in sgl_kernel.__all__)
print(len(sgl_kernel.__all__))
"""


@pytest.mark.parametrize(
    ("program", "said"), [(TRITON, "no launch"), (VISION, "torchvision.io.decode_jpeg: images"), (KERNEL, "10")]
)
def test_a_stand_in_imports_and_does_nothing_by_stealth(program: str, said: str) -> None:
    env = {"PYTHONPATH": f"{ROOT}:{ROOT / 'standins'}", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    told = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60)
    assert told.returncode == 0, told.stderr
    assert said in told.stdout


def test_the_backend_is_kept_on_a_cpu_and_left_alone_elsewhere() -> None:
    from draftline_sglang_cpu.plugin import keep_backend

    class View:
        def __init__(self, device: str, attention_backend: str) -> None:
            self.device, self.attention_backend = device, attention_backend

    def fallback(view: object) -> dict[str, str]:
        return {"attention_backend": "torch_native"}

    assert keep_backend(fallback, View("cpu", "intel_amx")) == {}
    assert (
        keep_backend(fallback, View("cpu", "triton"))
        == keep_backend(fallback, View("xpu", "intel_amx"))
        == fallback("")
    )
