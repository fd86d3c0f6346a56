"""Round trips with the tools themselves: their readers on what is written here, their readers' view against ours.

Each peer stands unpacked in a folder of its own, <name>-<version>, below the folder that DRAFTLINE_PEERS names, beside
`deps` with what it imports; `make peers` puts them into .peers. Nothing is fetched here; what is absent is skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.bridges.formats import specforge, speculators
from stages.bridges.handing import OutRow, Parcel
from stages.bridges.stores import open_store
from tests.bridges import samples as make

pytestmark = pytest.mark.slow
PEERS = Path(os.environ.get("DRAFTLINE_PEERS", Path(__file__).parents[2] / ".peers"))


def ask(peer: str, code: str, *arguments: str) -> Any:
    """What `code` prints as JSON, run with the peer on its path."""
    if not (PEERS / peer).is_dir():
        pytest.skip(f"{peer} is not there: `make peers`, or unpack it below the folder that DRAFTLINE_PEERS names")
    path = os.pathsep.join(str(p) for p in (PEERS / peer, PEERS / "deps"))
    told = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert told.returncode == 0, told.stderr[-2000:]
    return json.loads(told.stdout.splitlines()[-1])


def sums(*tensors: torch.Tensor) -> list[float]:
    """What tells tensors apart: shape and a sum weighted by place, exact in float64 for bf16 values of few tokens."""
    said: list[float] = []
    for t in tensors:
        flat = t.double().flatten()
        said += [*t.shape, float((flat * (torch.arange(len(flat)) % 97 + 1)).sum())]
    return said


SUMS = """
import sys, json, types, torch
from pathlib import Path
def without_init(peer, *packages):
    # import a module of a package without the package's own __init__, which would import all of its world
    for name in packages:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(Path(next(p for p in sys.path if peer in p), *name.split('.')))]
def sums(*tensors):
    said = []
    for t in tensors:
        flat = t.double().flatten()
        said += [*t.shape, float((flat * (torch.arange(len(flat)) % 97 + 1)).sum())]
    return said
"""


def parcel(wanted: list[make.Sample], ids: tuple[int, ...]) -> Parcel:
    split = ["held_out" if i == len(wanted) - 1 else "train" for i in range(len(wanted))]
    rows = [OutRow(s, w.ids, w.mask, w.states) for s, w in zip(split, wanted, strict=True)]  # type: ignore[arg-type]
    marked = torch.tensor([False, True, True, False, True])
    d2t = marked.nonzero()[:, 0] - torch.arange(3)
    return Parcel(rows, ids, d2t, marked, lambda last: (last.float() * 2).bfloat16())


@pytest.mark.parametrize("version", ["0.3.0", "0.4.0"])
def test_the_old_speculators_reader_sees_in_a_legacy_row_what_is_read_here(version: str, tmp_path: Path) -> None:
    make.legacy_rows(tmp_path, make.make_samples(), 2)
    code = SUMS + (
        "without_init('speculators-', 'speculators', 'speculators.train')\n"
        "from speculators.train.data import standardize_data_v1, list_files\n"
        "out = {}\n"
        "for p in list_files(sys.argv[1]):\n"
        "    d = standardize_data_v1(torch.load(p, weights_only=True, mmap=True))\n"
        "    out[p.name] = sums(d['input_ids'], d['loss_mask'], d['hidden_states'], d['verifier_last_hidden_states'])\n"
        "print(json.dumps(out))"
    )
    theirs = ask(f"speculators-{version}", code, str(tmp_path))
    ours = {
        Path(r.file).name: sums(r.input_ids, r.loss_mask, torch.cat(r.aux, -1), r.last)  # type: ignore[arg-type]
        for r in open_store(tmp_path).rows()
    }
    assert theirs == ours and len(ours) == 4


def test_the_new_speculators_data_set_reads_what_is_written_here(tmp_path: Path) -> None:
    wanted = make.make_samples()
    told = speculators.write(tmp_path, parcel(wanted, (1, 3, 5)))
    code = SUMS + (
        "from speculators.train.data import ArrowDataset\n"
        "out = {}\n"
        "for split in ('train', 'val'):\n"
        "    data = ArrowDataset(4096, sys.argv[1], on_missing='raise', train_ratio=float(sys.argv[2]), split=split)\n"
        "    out[split] = [sums(*(data[i][k] for k in ('input_ids', 'loss_mask', 'hidden_states',"
        " 'verifier_last_hidden_states'))) for i in range(len(data))]\n"
        "print(json.dumps(out))"
    )
    ratio = told.split("--train-data-ratio ")[1].split()[0]
    theirs = ask("speculators-0.9.0", code, str(tmp_path), ratio)
    ours = [sums(s.ids, s.mask, s.states[:, :3].flatten(1), s.states[:, 3]) for s in wanted]
    assert theirs == {"train": ours[:-1], "val": ours[-1:]}


def test_specforge_reads_what_is_written_here(tmp_path: Path) -> None:
    wanted = make.make_samples()
    given = parcel(wanted, (0, 2, 4))
    specforge.write(tmp_path, given)
    code = SUMS + (
        "from specforge.runtime.data_plane.offline_reader import OfflineManifestReader\n"
        "from specforge.runtime.data_plane.feature_store import load_feature_file\n"
        "from specforge.algorithms.eagle3.data import normalize_offline_sample\n"
        "from specforge.core.compact_teacher import validate_vocab_mapping_consistency\n"
        "m = torch.load(sys.argv[1] + '/vocab_mapping.pt', weights_only=True)\n"
        "validate_vocab_mapping_consistency(m['t2d'], m['d2t'])\n"
        "out = []\n"
        "for ref in OfflineManifestReader(sys.argv[1] + '/train', validate_files=True):\n"
        "    d = normalize_offline_sample(load_feature_file(ref.feature_store_uri[7:]), 4096)\n"
        "    out.append(sums(d['input_ids'], d['hidden_state'], d['target']))\n"
        "print(json.dumps(out))"
    )
    theirs = ask("specforge-0.2.0", code, str(tmp_path))
    assert theirs == [
        sums(s.ids[None], s.states[None, :, :3].flatten(2), given.norm(s.states[:, 3])[None]) for s in wanted[:-1]
    ]


def test_the_automodel_reader_sees_in_a_shard_what_is_read_here(tmp_path: Path) -> None:
    make.nemo_automodel(tmp_path, make.make_samples())
    code = SUMS + (
        "base = 'nemo_automodel.components.datasets.llm'.split('.')\n"
        "without_init('nemo_automodel-', *('.'.join(base[:i]) for i in range(1, 5)))\n"
        "from nemo_automodel.components.datasets.llm.eagle3_cache import CachedEagle3Dataset\n"
        "out = []\n"
        "for d in (lambda s: [s[i] for i in range(len(s))])(CachedEagle3Dataset(sys.argv[1])):\n"
        "    n = int(d['attention_mask'].sum())\n"
        "    out.append(sums(d['input_ids'][:n], d['loss_mask'][:n], d['aux_hidden_states'][:n]))\n"
        "print(json.dumps(out))"
    )
    theirs = ask("nemo_automodel-0.7.0", code, str(tmp_path))
    ours = [sums(r.input_ids, r.loss_mask, torch.cat(r.aux, -1)) for r in open_store(tmp_path).rows()]  # type: ignore[arg-type]
    assert theirs == ours
