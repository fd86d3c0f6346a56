"""The stand-ins' own code is importable here; their borrowed names (sgl_kernel, triton, torchvision) are not."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "sglang_cpu"))
