"""A glance at 100,000 sample files, against a bare walk of the same tree.

    python -m benchmarks.glance

Two trees of the users' format: fifty rows_ folders of 2,000 files, and one flat folder. A bare walk lists every folder with
os.scandir and takes each file's size; a glance does that too, and tells what it found. Both are timed as whole commands, the
interpreter's start included, after one unmeasured pass each. Files are empty but for their length (sparse), so that the tree
costs inodes and no disk.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

FOLDERS, EACH, REPEATS, H, LENGTH = 50, 2000, 3, 576, 512
MAX_S = 10.0
_WALK = """
import os, sys
def walk(path):
    files = size = 0
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                more = walk(entry.path)
                files, size = files + more[0], size + more[1]
            else:
                files, size = files + 1, size + entry.stat().st_size
    return files, size
print(*walk(sys.argv[1]))
"""


def make_tree(root: Path, flat: bool) -> None:
    """100,000 files, each of the length of a sample of LENGTH tokens; the first of a folder is a real one."""
    value = {
        "input_ids": torch.arange(LENGTH),
        "hidden_states": [torch.zeros(LENGTH, H, dtype=torch.bfloat16) for _ in range(4)],
        "loss_mask": torch.ones(LENGTH, dtype=torch.long),
    }
    for k in range(1 if flat else FOLDERS):
        count = FOLDERS * EACH if flat else EACH
        folder = root if flat else root / f"rows_{k * EACH}-{(k + 1) * EACH}"
        folder.mkdir(parents=True)
        torch.save(value, folder / "data_0.pt")
        size = (folder / "data_0.pt").stat().st_size
        for i in range(1, count):
            with (folder / f"data_{i}.pt").open("wb") as file:
                file.truncate(size)
        config = {
            "speculators_version": "0.4.1",
            "reproducibility": {"command": "data_generation_offline.py"},
            "model": {"target_model_path": "benchmark", "hidden_size": H, "max_model_len": 4096},
            "data": {"num_samples": count},
            "hidden_states": {"layer_ids": [2, 15, 27, 29]},
        }
        (folder / "data_config.json").write_text(json.dumps(config))
        (folder / "sample_lengths.json").write_text(json.dumps({str(i): LENGTH for i in range(count)}))


def seconds(command: list[str]) -> tuple[float, float]:
    """Least wall time of a command and the CPU time of that pass, after one that is not measured: on a shared machine the
    least is what the others disturbed least."""
    passes: list[tuple[float, float]] = []
    for _ in range(REPEATS + 1):
        started = time.perf_counter()
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(child.pid, 0)
        if status:
            sys.exit(f"{command} left with {os.waitstatus_to_exitcode(status)}")
        passes.append((time.perf_counter() - started, used.ru_utime + used.ru_stime))
    return min(passes[1:])


def main() -> None:
    worst = 0.0
    for flat in (False, True):
        Path(".cache").mkdir(exist_ok=True)
        root = Path(tempfile.mkdtemp(dir=".cache"))
        try:
            make_tree(root / "store", flat)
            walk = seconds([sys.executable, "-c", _WALK, str(root / "store")])
            glance = seconds([sys.executable, "-m", "stages.glance", str(root / "store"), "--json"])
        finally:
            shutil.rmtree(root)
        worst = max(worst, glance[0])
        name = "one flat folder" if flat else f"{FOLDERS} rows_ folders"
        told = f"glance {glance[0]:.2f} s ({glance[1]:.2f} s CPU), bare walk {walk[0]:.2f} s ({walk[1]:.2f} s CPU)"
        print(f"{FOLDERS * EACH} files in {name}: {told}, {glance[0] / walk[0]:.1f} times", flush=True)
    if worst > MAX_S:
        sys.exit(1)


if __name__ == "__main__":
    main()
