"""extract over a tiny target: the layout, resume after a kill, growth, and what stops it before it spends."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from stages import extract
from stages.capture import forecast
from stages.capture.rows import Row
from stages.capture.store import ROWS, RowFolder, RowStore, verify_store
from stages.contracts.errors import ParamsError, Refusal
from stages.contracts.files import canonical
from stages.contracts.manifest import HIDDEN_STATES, PREPARED_MANIFEST, PreparedManifest
from tests import line, tiny
from tests.capture.conftest import bytes_of

REPO = Path(__file__).parent.parent
SOURCES = (line.TinySource("code", "coding", 20), line.TinySource("talk", "general", 10))
GROWN = (line.TinySource("code", "coding", 21), line.TinySource("talk", "general", 10))


def lay(root: Path, sources: tuple[line.TinySource, ...] = SOURCES) -> PreparedManifest:
    """Everything that extract reads, below `root`."""
    target = root / "target" if (root / "target").exists() else tiny.make_target(root / "target")
    manifest = line.write_prepared(root, target, sources)
    line.write_gate_report(root, "extraction", manifest.digest())
    line.write_params(root, target)
    return manifest


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    lay(tmp_path)
    return tmp_path


@pytest.fixture
def through(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the rows that go through the target."""
    names: list[str] = []
    capture_rows = extract.capture_rows

    def noted(target: object, rows: list[Row], *rest: object) -> Iterator[torch.Tensor]:
        names.extend(row.row_id for row in rows)
        yield from capture_rows(target, rows, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(extract, "capture_rows", noted)
    return names


def test_every_row_is_stored_once_in_folders_named_after_their_rows(here: Path) -> None:
    extract.main()
    store = RowStore()
    manifest = store.manifest()
    names = [folder.name for folder in manifest.folders]
    assert names == ["rows_0-6", "rows_6-12", "rows_12-18", "rows_18-20", "rows_20-26", "rows_26-30"]
    assert sorted(p.name for p in HIDDEN_STATES.iterdir()) == sorted([*names, "data_config.json"])
    assert manifest.prepared_digest == PreparedManifest.read(PREPARED_MANIFEST).digest()
    assert manifest.slots == ("point 1", "point 3", "point 5", "point 6, before the final norm")
    assert (manifest.rows, manifest.tokens) == (30, sum(f.tokens for f in manifest.folders))
    for folder in manifest.folders:
        store.verify(folder.name)
        assert store.folder(folder.name).config.digest() == folder.config_digest


def test_a_second_run_computes_nothing_and_writes_the_same_bytes(here: Path, through: list[str]) -> None:
    extract.main()
    first = bytes_of(HIDDEN_STATES)
    assert len(through) == 30
    extract.main()
    assert len(through) == 30 and bytes_of(HIDDEN_STATES) == first


def test_a_run_killed_in_a_folder_resumes_to_the_same_bytes(here: Path, through: list[str]) -> None:
    killed = """
import os, signal
from stages import extract
whole = extract.capture_rows
seen = 0
def dies(*args):
    global seen
    for states in whole(*args):
        if seen == 15:
            os.kill(os.getpid(), signal.SIGKILL)
        seen += 1
        yield states
extract.capture_rows = dies
extract.main()
"""
    done = subprocess.run([sys.executable, "-c", killed], cwd=here, env=_env(), capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert not HIDDEN_STATES.exists() or not any(HIDDEN_STATES.iterdir())
    assert len(list(Path(".cache/states").glob("*/*/data_config.json"))) == 2
    extract.main()
    assert len(through) == 30 - 12 and not list(Path(".cache/states").glob("*/.*"))
    resumed = bytes_of(HIDDEN_STATES)
    shutil.rmtree(".cache")
    shutil.rmtree(HIDDEN_STATES)
    extract.main()
    assert len(through) == 30 - 12 + 30 and bytes_of(HIDDEN_STATES) == resumed


def test_five_per_cent_new_rows_cost_five_per_cent(here: Path, through: list[str]) -> None:
    extract.main()
    old = bytes_of(HIDDEN_STATES)
    del through[:]
    lay(here, GROWN)
    extract.main()
    assert len(through) == 1
    assert RowStore().manifest().rows == 31
    new = bytes_of(HIDDEN_STATES)
    assert new[f"rows_21-27/{ROWS}"] == old[f"rows_20-26/{ROWS}"]


def test_five_per_cent_new_rows_cost_no_more_than_eight_per_cent_of_the_tokens(here: Path, through: list[str]) -> None:
    def sources(code: int, talk: int) -> tuple[line.TinySource, ...]:
        return (line.TinySource("code", "coding", code), line.TinySource("talk", "general", talk))

    def tokens() -> int:
        store, wanted = RowStore(), set(through)
        configs = [store.folder(f.name) for f in store.manifest().folders]
        return sum(
            int(n) for c in configs for r, n in zip(c.config.row_ids, c.offsets.diff(), strict=True) if r in wanted
        )

    lay(here, sources(40, 20))
    extract.main()
    full = tokens()
    assert full == RowStore().manifest().tokens
    del through[:]
    lay(here, sources(42, 21))
    extract.main()
    assert RowStore().manifest().rows == 63 and 0.03 < tokens() / full <= 0.08


def test_another_folder_size_moves_rows_and_computes_none(here: Path, through: list[str]) -> None:
    extract.main()
    del through[:]
    line.write_params(here, here / "target", {"capture": {"rows_per_folder": 7}})
    extract.main()
    assert through == [] and RowStore().manifest().folders[0].name == "rows_0-7"


def test_other_points_are_computed_anew(here: Path, through: list[str]) -> None:
    extract.main()
    line.write_params(here, here / "target", {"capture": {"points": [2, 3, 4]}})
    extract.main()
    assert len(through) == 60 and RowStore().manifest().capture.points == (2, 3, 4)


def test_a_flipped_byte_in_a_finished_folder_costs_its_row_group_and_is_told(
    here: Path, through: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    extract.main()
    good = bytes_of(HIDDEN_STATES)
    file = sorted(Path(".cache/states").glob(f"*/*/{ROWS}"))[2]
    config = RowFolder(file.parent).config
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 1
    with file.open("r+b") as handle:
        handle.write(data)
    (damage,) = verify_store(HIDDEN_STATES)
    del through[:]
    extract.main()
    assert tuple(through) == damage.row_ids and 0 < len(through) < len(config.row_ids)
    assert bytes_of(HIDDEN_STATES) == good and not verify_store(HIDDEN_STATES)
    told = capsys.readouterr().err
    assert f"damaged: {file.parent.name}/{ROWS}: row" in told and "kept in .cache/quarantine" in told
    (kept,) = Path(".cache/quarantine").glob(f"*/{ROWS}")
    assert kept.read_bytes() == bytes(data)
    extract.main()
    assert "damaged" not in capsys.readouterr().err


def test_a_manifest_that_cannot_be_read_is_kept_before_it_is_written_again(here: Path) -> None:
    extract.main()
    manifest = HIDDEN_STATES / "data_config.json"
    good = manifest.read_bytes()
    manifest.chmod(0o644)
    manifest.write_bytes(b"#" + good[1:])
    extract.main()
    (kept,) = Path(".cache/quarantine").glob("data_config.json-*")
    assert manifest.read_bytes() == good and (kept / "data_config.json").read_bytes()[:1] == b"#"
    assert json.loads((kept / "reason.json").read_text())[0]["file"] == "data_config.json"


def test_a_removed_work_cache_is_filled_from_the_output(here: Path, through: list[str]) -> None:
    extract.main()
    shutil.rmtree(".cache")
    lay(here, GROWN)
    del through[:]
    extract.main()
    assert len(through) == 1 and RowStore().manifest().rows == 31


def test_no_report_no_spend(here: Path, through: list[str]) -> None:
    for fault, words in (("failed", "gate-extraction refused this"), ("stale", "judged something else")):
        digest = PreparedManifest.read(PREPARED_MANIFEST).digest() if fault == "failed" else "sha256:other"
        line.write_gate_report(here, "extraction", digest, success=False)
        with pytest.raises(Refusal, match=words):
            extract.main()
    assert through == []


@pytest.mark.parametrize(
    ("file", "what"),
    [("weights", "weights"), ("tokenizer.json", "tokenizer"), ("tokenizer_config.json", "chat template")],
)
def test_a_target_that_changed_since_prepare_is_refused(here: Path, file: str, what: str) -> None:
    if file == "weights":
        tiny.make_target(here / "target", seed=1)
    else:
        text = (here / "target" / file).read_text()
        (here / "target" / file).write_text(text.replace("Be brief.", "Be long.") if "brief" in text else text + " ")
    with pytest.raises(Refusal, match=f"The target's {what} changed since the rows were prepared") as error:
        extract.main()
    assert "dvc repro prepare" in error.value.do


def test_params_that_describe_another_model_are_refused(here: Path) -> None:
    params = json.loads((here / "params.yaml").read_text())
    params["target"]["layers"] = 7
    (here / "params.yaml").write_text(json.dumps(params))
    with pytest.raises(ParamsError, match="The target has another layers than params") as error:
        extract.main()
    assert error.value.got == "7" and error.value.expected.startswith("6")


def test_a_full_disk_is_told_before_anything_is_computed(
    here: Path, through: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(forecast.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(Refusal, match="do not fit on this disk"):
        extract.main()
    assert through == [] and "30 rows (" in capsys.readouterr().err


def test_the_forecast_says_what_will_be_computed_and_written(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    extract.main()
    tokens = RowStore().manifest().tokens
    told = capsys.readouterr().err
    assert f"30 rows, {tokens} tokens" in told and "in 6 folders" in told and "GB free" in told
    extract.main()
    assert "6 folders stand in the work cache, 0 rows (0 tokens) go through the target" in capsys.readouterr().err


def test_hours_are_told_from_a_sample_and_later_from_what_this_machine_made(
    here: Path, through: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(forecast, "_WORTH_A_SAMPLE", 2)
    monkeypatch.setattr(extract, "_WORTH_REMEMBERING_S", 0.0)
    extract.main()
    told = capsys.readouterr().err
    assert re.search(r"about \d+\.\d min at \d+ tokens/s \(measured on the first rows\)", told)
    assert len(through) == 30, "the sample is not part of the work"
    facts = b"".join(bytes_of(HIDDEN_STATES).values())
    assert b"tokens/s" not in facts and b"rate" not in facts
    (rate,) = Path(".cache/states").glob("*/rate.json")
    rate.write_bytes(canonical({"cpu, 1 threads": 0.5}))
    for folder in (HIDDEN_STATES, *Path(".cache/states").glob("*/*/")):
        shutil.rmtree(folder)
    extract.main()
    assert re.search(r"about \d\.\d h at 0 tokens/s \(as measured here before\)", capsys.readouterr().err)
    extract.main()
    assert "tokens/s" not in capsys.readouterr().err, "nothing goes through the target, so nothing takes hours"


def test_a_smaller_form_is_another_capture_and_half_the_bytes(here: Path, through: list[str]) -> None:
    extract.main()
    before = sum(f.stat().st_size for f in HIDDEN_STATES.glob(f"*/{ROWS}"))
    small = {"store_aux": "float8_e4m3", "store_last": "before_supervised", "store_tokens": "to_last_supervised"}
    line.write_params(here, here / "target", {"capture": small})
    extract.main()
    assert len(through) == 60 and RowStore().manifest().capture.form.aux_dtype == "float8_e4m3"
    assert sum(f.stat().st_size for f in HIDDEN_STATES.glob(f"*/{ROWS}")) < 0.6 * before
    line.write_params(here, here / "target")
    extract.main()
    assert len(through) == 60, "the default form still stands in the work cache"


def test_strange_folders_in_the_output_go(here: Path) -> None:
    (HIDDEN_STATES / "rows_900-901").mkdir(parents=True)
    extract.main()
    assert not (HIDDEN_STATES / "rows_900-901").exists()


def _env() -> dict[str, str]:

    return {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
