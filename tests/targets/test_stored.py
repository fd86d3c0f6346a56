"""A target that stays in its files gives the same states, reads what it needs once, and holds one layer at a time."""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from stages import targets
from stages.capture.norm_probe import probe_norm
from stages.capture.probe import ProbeRow, probe_rows
from stages.contracts.errors import EngineError
from stages.targets import _checkpoint, expect_rows, load_target, open_target
from stages.targets._checkpoint import Checkpoint, StoredParts
from stages.targets._decoder import Decoder
from stages.targets._room import choose, free_bytes, tokens_together, weight_bytes
from tests import latent, tiny
from tests.targets.test_conformance import IDS, make_family

ROWS = [torch.tensor(IDS), torch.tensor(IDS[2:9]), torch.tensor(IDS[::-1])]
N = tiny.LAYERS


@pytest.fixture(scope="module", params=targets.families())
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target in a file a layer."""
    folder = make_family(tmp_path_factory.mktemp(request.param), request.param)
    latent.shard(folder, load_file(folder / "model.safetensors"), N)
    return folder


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Checkpoint]:
    """The checkpoints that are opened from now on."""
    seen: list[Checkpoint] = []
    for module in (_checkpoint, sys.modules["stages.targets._latent"]):
        monkeypatch.setattr(module, "Checkpoint", lambda *a, **k: seen.append(Checkpoint(*a, **k)) or seen[-1])
    return seen


def layers_of(names: set[str]) -> set[int]:
    return {int(m[1]) for name in names if (m := re.search(r"layers\.(\d+)\.", name))}


def test_a_stored_target_is_the_whole_one_bit_for_bit(folder: Path) -> None:
    whole, stored = load_target(folder), load_target(folder, stored=True)
    assert stored.stored and not whole.stored and stored.device == whole.device and stored.dtype == whole.dtype
    ids = torch.cat(ROWS)
    ours, theirs = (t.packed(ids, [len(r) for r in ROWS], range(N + 1)) for t in (stored, whole))
    assert torch.equal(ours.last, theirs.last)
    assert all(torch.equal(ours.states[p], theirs.states[p]) for p in range(N + 1))
    assert torch.equal(stored.logits(ours.last), whole.logits(theirs.last))
    assert torch.equal(stored.norm, whole.norm) and torch.equal(stored.embedding, whole.embedding)


def test_weights_above_the_highest_point_are_never_opened(folder: Path, opened: list[Checkpoint]) -> None:
    stored = load_target(folder, stored=True)
    state = stored.packed(ROWS[0], [len(IDS)], (1, 3), until=3).states[3]
    tensor = opened[0]
    assert layers_of(tensor.names_read) == {0, 1, 2}
    assert {n for n in tensor.names_read if "layers" not in n} == {tensor._stored_name("model.embed_tokens.weight")}
    assert torch.equal(state, load_target(folder).packed(ROWS[0], [len(IDS)], (3,)).states[3])
    files = sorted(tensor._open)
    assert files == [f"model-{i:05}-of-{N + 1:05}.safetensors" for i in (1, 2, 3, N + 1)]


def test_the_bytes_read_are_those_of_the_layers_run_and_of_the_rows_of_the_embedding(
    folder: Path, opened: list[Checkpoint]
) -> None:
    stored = load_target(folder, stored=True)
    stored.packed(ROWS[0], [len(IDS)], until=1)  # the first layer is dense in every family
    everything = {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}
    layer = sum(t.nbytes for n, t in everything.items() if layers_of({n}) == {0})
    assert opened[0].bytes_read == layer + len(set(IDS)) * tiny.HIDDEN * 4


def test_one_layer_at_a_time_is_alive(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[Any]] = []
    most, read = 0, StoredParts.__getitem__

    def counted(self: StoredParts[Any], i: int, /) -> Any:
        nonlocal most
        part = read(self, i)
        if type(part).__name__ == "Layer":
            alive.append(weakref.ref(part))
            most = max(most, sum(ref() is not None for ref in alive))
        return part

    monkeypatch.setattr(StoredParts, "__getitem__", counted)
    gc.disable()  # freed by their last reference, not by a collection that may come late
    try:
        load_target(folder, stored=True).packed(ROWS[0], [len(IDS)], range(N + 1))
    finally:
        gc.enable()
    assert len(alive) == N and most == 1


def test_only_experts_that_a_token_is_routed_to_are_read(tmp_path: Path, opened: list[Checkpoint]) -> None:
    folder = latent.make_target(tmp_path / "t")
    load_target(folder, stored=True).packed(torch.tensor([5]), [1])
    read = {(m[1], m[2]) for n in opened[0].names_read if (m := re.search(r"layers\.(\d+)\.mlp\.experts\.(\d+)", n))}
    assert len(read) == (N - latent.DENSE) * latent.CHOSEN


def passes(target: Decoder) -> list[int]:
    """Layers run from now on."""
    done: list[int] = []
    expect_rows(target, ROWS, done.append)
    return done


def probed(target: Decoder, rows: list[ProbeRow]) -> tuple[Any, Any]:
    return probe_rows(target, rows, tiny.POINTS), [probe_norm(target, [row]) for row in rows]


def stored_rows(target: Decoder) -> list[ProbeRow]:
    rows = []
    for i, ids in enumerate(ROWS):
        stream = target.packed(ids, [len(ids)], tiny.POINTS)
        states = torch.stack([*(stream.states[p] for p in tiny.POINTS), stream.last], 1).bfloat16()
        rows.append(ProbeRow(str(i), ids, torch.ones(len(ids), dtype=torch.bool), states))
    return rows


def test_the_probe_reads_each_layer_once_for_all_rows_and_finds_what_it_finds_in_a_whole_target(folder: Path) -> None:
    whole, stored = load_target(folder), load_target(folder, stored=True)
    rows = stored_rows(whole)
    done = passes(stored)
    (slots, norms), (expected, expected_norms) = probed(stored, rows), probed(whole, rows)
    assert done == list(range(1, N + 1))
    for ours, theirs in zip([*slots, *norms], [*expected, *expected_norms], strict=True):
        numbers = {k: v for k, v in vars(theirs).items() if not isinstance(v, str)}
        assert {k: vars(ours)[k] for k in numbers} == pytest.approx(numbers, rel=1e-3, abs=1e-5)
    assert [n.reading for n in norms] == ["before_final_norm"] * len(rows)
    assert [s.nearest_point for s in slots] == [*tiny.POINTS, N]


def test_rows_that_do_not_fit_together_are_run_in_turns_and_are_the_same(folder: Path) -> None:
    whole, stored = load_target(folder), load_target(folder, stored=True)
    done: list[int] = []
    stored.expect(ROWS, len(ROWS[0]) + len(ROWS[1]), done.append)
    for row in ROWS:
        for points in (range(N + 1), ()):  # as the two probes ask
            ours, theirs = (t.packed(row, [len(row)], points) for t in (stored, whole))
            torch.testing.assert_close(ours.last, theirs.last, rtol=2e-4, atol=2e-5)
            assert set(ours.states) >= set(points)
    assert done == 2 * list(range(1, N + 1))
    strange = torch.tensor(IDS[:3])
    torch.testing.assert_close(stored.packed(strange, [3]).last, whole.packed(strange, [3]).last, rtol=2e-4, atol=2e-5)
    assert len(done) == 3 * N


def test_how_a_target_is_held_is_chosen_by_size_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny.make_target(tmp_path / "t")
    need = weight_bytes(folder, "float32")
    assert need == sum(t.nbytes for t in load_file(folder / "model.safetensors").values())
    assert weight_bytes(folder, "bfloat16") == need // 2
    target, words = open_target(folder, "cpu", "float32", "auto")
    assert not target.stored and re.fullmatch(
        r"the target is held whole, by size: 0\.00 GB of weights, [\d.]+ GB free on cpu", words
    )
    monkeypatch.setattr("stages.targets._room.free_bytes", lambda device: need)
    target, words = open_target(folder, "cpu", "float32", "auto")
    assert target.stored and words.startswith("the target is read layer by layer, by size: ")
    assert choose("whole", 10**12, 10**9, "cpu") == (
        False,
        "the target is held whole, as params.yaml says: 1000.00 GB of weights, 1.0 GB free on cpu",
    )
    assert choose("layer_by_layer", 1, 10**9, "cpu")[0]


def test_four_bit_words_count_for_eight_values_and_scales_for_none(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file(
        {
            "a.weight_packed": torch.zeros(4, 2, dtype=torch.int32),
            "a.weight_scale": torch.zeros(4, 1),
            "a.weight_shape": torch.tensor([4, 16]),
            "b.weight": torch.zeros(3, dtype=torch.bfloat16),
        },
        tmp_path / "model.safetensors",
    )
    assert weight_bytes(tmp_path, "float32") == (4 * 16 + 3) * 4
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(EngineError, match="has no header"):
        weight_bytes(tmp_path, "float32")


def test_free_memory_is_that_of_the_container_where_it_is_less(tmp_path: Path) -> None:
    proc = tmp_path / "meminfo"
    proc.write_text("MemTotal: 4000 kB\nMemAvailable: 2000 kB\n")
    assert free_bytes("cpu", proc, tmp_path) == 2000 * 1024
    for name, text in (
        ("memory.max", "1000000"),
        ("memory.current", "900000"),
        ("memory.stat", "inactive_file 50000\n"),
    ):
        (tmp_path / name).write_text(text)
    assert free_bytes("cpu", proc, tmp_path) == 150_000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_bytes("cpu", proc, tmp_path) == 2000 * 1024
    assert tokens_together(61, 7168, torch.bfloat16, 4 * 64 * 7168 * 2 * 100) == 100
    assert tokens_together(61, 7168, torch.bfloat16, 0) == 1


MEASURE = """
import sys, torch
from pathlib import Path
from stages.targets import load_target
def anonymous():
    return next(int(l.split()[1]) << 10 for l in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in l)
torch.set_num_threads(1)
torch.randn(64, 64) @ torch.randn(64, 64)
most, before = 0, anonymous()
def look(*_):
    global most
    most = max(most, anonymous())
target = load_target(Path(sys.argv[1]), stored=sys.argv[2] == "stored")
target.expect([], 1, look)
ids = torch.arange(3, 35)
target.packed(ids, [len(ids)], (1,), until=len(target.layers))
look()
print(most - before)
"""


def peak(folder: Path, how: str) -> int:
    """Bytes of memory of its own that a fresh process takes to run a row through the target."""
    told = subprocess.run(
        [sys.executable, "-c", MEASURE, str(folder), how],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"},
    )
    return int(told.stdout)


@pytest.mark.slow
def test_a_process_that_reads_layer_by_layer_takes_the_memory_of_a_layer_or_two_not_of_the_target(
    tmp_path: Path,
) -> None:
    """bfloat16 in the files and float32 in memory, so that no weight is merely mapped."""
    wide = {"hidden_size": 256, "intermediate_size": 1024, "moe_intermediate_size": 256, "num_hidden_layers": 12}
    folder = tmp_path / "t"
    tiny.make_target(folder)
    config = latent.text_config(**wide)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {n: t.bfloat16() for n, t in latent.make_tensors(config).items()}
    latent.shard(folder, tensors, 12)
    layers = [sum(t.numel() * 4 for n, t in tensors.items() if layers_of({n}) == {i}) for i in range(12)]
    whole, stored = peak(folder, "whole"), peak(folder, "stored")
    assert whole > sum(layers)
    assert stored < 2 * max(layers) < whole / 4
