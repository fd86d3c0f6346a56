"""When the flow measures a draft beside production's, and what it makes of a measurement that failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows import beside, line, release
from flows.child import Ended
from flows.judged import contents
from stages.contracts.beside import BESIDE, AcceptDifference, BesideProduction
from stages.contracts.errors import Refusal
from tests.flows.samples import ZERO, write_draft


def _told(root: Path, draft: str, production: str, version: str = "1") -> None:
    one = AcceptDifference(requests=9, new=1.6, production=1.6, low=-0.1, high=0.1)
    BesideProduction(
        draft_digest=draft,
        production_draft_digest=production,
        engine="in_process",
        engine_version=version,
        device="cpu",
        accept_length={"overall": one},
        throughput=(),
    ).write(root / BESIDE)


def test_it_is_due_for_another_draft_than_productions_until_these_two_were_measured(tmp_path: Path) -> None:
    write_draft(tmp_path, b"a")
    assert not beside.is_due(tmp_path), "nothing is production yet"
    production = release.promote(tmp_path).record.draft_digest
    assert not beside.is_due(tmp_path), "it is production's own draft"
    new = write_draft(tmp_path, b"b").digest()
    assert beside.is_due(tmp_path)
    _told(tmp_path, new, ZERO)
    assert beside.is_due(tmp_path), "of another production"
    _told(tmp_path, new, production, version="0")
    assert beside.is_due(tmp_path), "of another version of the engine"
    _told(tmp_path, new, production)
    assert not beside.is_due(tmp_path)
    (tmp_path / BESIDE).write_text("{")
    assert beside.is_due(tmp_path), "a damaged file is measured anew"
    params = tmp_path / "params.yaml"
    params.write_text(params.read_text().replace("if_measured", "ignore"))
    assert not beside.is_due(tmp_path)


def test_a_release_carries_no_comparison_of_another_draft(tmp_path: Path) -> None:
    draft = write_draft(tmp_path).digest()
    _told(tmp_path, ZERO, ZERO)
    assert f"evidence/{BESIDE.name}" not in contents(tmp_path).files
    _told(tmp_path, draft, ZERO)
    assert f"evidence/{BESIDE.name}" in contents(tmp_path).files


def test_what_the_measurement_says_is_told_and_a_crash_is_told_apart() -> None:
    said = line.told_failure(beside.TASK, "-m stages.beside", Ended(1, ("refused: No.", "  do: something", "more")))
    assert isinstance(said, Refusal) and said.what == "beside production: No.\n  do: something"
    crash = line.told_failure(beside.TASK, "-m stages.beside", Ended(-9, ("begun",)))
    assert isinstance(crash, line.StageCrash) and "exit code -9; last lines: begun" in crash.text()


def test_the_command_is_run_where_the_line_is_and_its_refusal_comes_back(tmp_path: Path, repo_root: Path) -> None:
    (tmp_path / "stages").mkdir()
    (tmp_path / "stages/beside.py").write_text("import sys\nprint('refused: here')\nsys.exit(1)\n")
    said: list[str] = []
    with pytest.raises(Refusal, match="beside production: here"):
        beside.measure(tmp_path, 30, said.append)
    assert said == ["refused: here"]
