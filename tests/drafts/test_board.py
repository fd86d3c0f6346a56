"""Event files as TensorBoard's own reader finds them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from stages import train
from stages.contracts.errors import DataError, ParamsError
from stages.drafts._board import Board, demand_tensorboard
from stages.drafts.eagle3 import Ahead, Curves
from tests.test_train import here, interrupted, merged_line, set_params, stop_after  # noqa: F401

installed = importlib.util.find_spec("tensorboard") is not None
needs_it = pytest.mark.skipif(
    not installed, reason="the package tensorboard is not installed (pip install '.[tensorboard]')"
)


def scalars(folder: Path, purge: bool = False) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard's reader finds, by name: step and value; nothing that the files hold is left out unless told."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0}, purge_orphaned_data=purge).Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def of_curves(curves: Curves) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for name in ("training", "held_out", "speed"):
        for line in getattr(curves, name):
            for what in line.keys() - {"step"}:
                found.setdefault(f"{name}/{what}", []).append((line["step"], line[what]))
    return found


def trained(curves: Curves, steps: range) -> None:
    for step in steps:
        ahead = Ahead(None, None, None, (step, 1), (100, 50))  # type: ignore[arg-type]
        curves.trained(step, 1e-3 / step, 2.0 / step, ahead, 0.1, 0.5)


@needs_it
def test_what_is_shown_is_read_back_and_each_line_is_written_once(tmp_path: Path) -> None:
    curves, board = Curves(2), Board(tmp_path / "run")
    for at in range(1, 41, 5):
        trained(curves, range(at, at + 5))
        board.show(curves)
        assert {k: [s for s, _ in v] for k, v in scalars(tmp_path / "run").items()} == {
            k: [s for s, _ in v] for k, v in of_curves(curves).items()
        }, "on the disk at once"
    found, wanted = scalars(tmp_path / "run"), of_curves(curves)
    assert [step for step, _ in found["training/loss"]] == [10, 20, 30, 40] and found.keys() == wanted.keys()
    for name, line in wanted.items():
        assert [value for _, value in found[name]] == pytest.approx([value for _, value in line], rel=1e-6)


@needs_it
@pytest.mark.parametrize("purge", [False, True])
def test_a_run_that_goes_on_repeats_no_step_and_leaves_none_out(
    here: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    purge: bool,
) -> None:
    told = {"optimizer_steps": 30, "checkpoint_every": 7, "evaluate_every": 4}
    set_params(here, **told, tensorboard=True)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_after(13, patch)
        train.main()
    (run,) = train.BOARD.iterdir()
    before = scalars(run, purge)
    assert [step for step, _ in before["held_out/accept_length"]] == [4, 8, 12], "the last is beyond the resume point"
    train.main()
    assert list(train.BOARD.iterdir()) == [run]
    found = scalars(run, purge)
    assert [step for step, _ in found["training/loss"]] == [10, 20, 30]
    assert [step for step, _ in found["held_out/accept_length"]] == [4, 8, 12, 16, 20, 24, 28, 30]
    for name, line in before.items():
        if not name.startswith("speed"):  # measured, so no two runs agree
            assert found[name][: len(line)] == line


@needs_it
def test_the_draft_is_the_same_with_and_without(here: Path) -> None:  # noqa: F811
    train.main()
    without = (train.DRAFT / "model.safetensors").read_bytes()
    assert not train.BOARD.exists(), "off, nothing is written"
    set_params(here, tensorboard=True)
    train.main()
    assert (train.DRAFT / "model.safetensors").read_bytes() == without and list(train.BOARD.glob("*/events.*"))


@needs_it
def test_a_resume_point_that_is_refused_leaves_the_runs_files(
    here: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_params(here, tensorboard=True)
    point = interrupted(monkeypatch)
    (run,) = train.BOARD.iterdir()
    before = scalars(run)
    (point / "tensors.safetensors").write_bytes(b"damaged")
    with pytest.raises(DataError):
        train.main()
    assert scalars(run) == before and before


@needs_it
@pytest.mark.parametrize("there", ["logs", "logs/tensorboard"])
def test_a_file_where_the_folder_goes_is_told_before_any_work(here: Path, there: str) -> None:  # noqa: F811
    set_params(here, tensorboard=True)
    Path(there).parent.mkdir(exist_ok=True)
    Path(there).write_text("mine")
    with pytest.raises(ParamsError, match="TensorBoard's files cannot be written"):
        train.main()
    assert Path(there).read_text() == "mine" and not train.WORK.exists()


@needs_it
def test_a_file_where_a_runs_folder_goes_is_told(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    with pytest.raises(ParamsError, match="TensorBoard's files cannot be written"):
        Board(tmp_path / "run")
    assert (tmp_path / "run").read_text() == "mine"


def test_without_the_package_the_command_that_brings_it_is_named(
    here: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "tensorboard" else find(name, *a))
    with pytest.raises(ParamsError, match=r"train.tensorboard[\s\S]*pip install '\.\[tensorboard\]'"):
        demand_tensorboard(train.BOARD)
    set_params(here, tensorboard=True)
    with pytest.raises(ParamsError, match="TensorBoard is not installed"):
        train.main()
    assert not train.DRAFT.exists() and not train.WORK.exists()
