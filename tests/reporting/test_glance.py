"""Glance: the state of the line from its facts alone, fast, for people and for programs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from stages import glance
from stages.contracts.errors import DataError, LineError
from stages.contracts.manifest import FolderConfig
from stages.contracts.report import report_path
from stages.glancing.changed import changed_params
from stages.glancing.standing import still_to_do, to_do
from stages.reporting.facts import read_line
from tests.reporting import evidence


def states(root: Path) -> dict[str, str]:
    return {r["stage"]: r["state"] for r in glance.stand(read_line(root))}


def test_an_empty_folder_is_all_missing(tmp_path: Path) -> None:
    assert set(states(tmp_path).values()) == {"missing"}


def test_a_finished_line_is_done_and_passed_in_the_graphs_order(tmp_path: Path) -> None:
    evidence.write_whole_line(tmp_path)
    assert states(tmp_path) == {
        "prepare": "done",
        "gate-extraction": "passed",
        "extract": "done",
        "merge": "done",
        "gate-training": "passed",
        "train": "done",
        "serve-validate": "done",
        "benchmark": "done",
        "gate-deployment": "passed",
    }


def test_what_follows_changed_rows_is_stale_and_a_refusal_is_named(tmp_path: Path) -> None:
    evidence.write_whole_line(tmp_path)
    evidence.merged().model_copy(update={"tokens": 1}).write(tmp_path / "data/merged/manifest.json")
    assert states(tmp_path)["gate-training"] == states(tmp_path)["train"] == "stale"
    evidence.write_whole_line(tmp_path)
    evidence.report("training", "x", evidence.merged().digest(), evidence.shifted()).write(
        tmp_path / report_path("training")
    )
    record = next(r for r in glance.stand(read_line(tmp_path)) if r["stage"] == "gate-training")
    assert record["state"] == "refused" and record["failed"] == [
        "of all the target's points, the nearest is the claimed one"
    ]


LOCK = """stages:
  merge:
    params: {params.yaml: {merge: {draft_vocab_size: 8}, target: {name: tiny, threads: 2}}}
  train:
    params: {params.yaml: {train: {seed: 1, gone: 2, steps: [1, 2]}}}
"""
NOW = "target: {name: tiny, threads: 2}\nmerge: {draft_vocab_size: 8}\ntrain: {seed: 2, steps: [1, 2], fresh: true}\n"


def test_a_stage_that_ran_with_other_parameters_is_stale_and_says_which(tmp_path: Path) -> None:
    evidence.write_whole_line(tmp_path)
    (tmp_path / "dvc.lock").write_text(LOCK)
    (tmp_path / "params.yaml").write_text(NOW)
    changed = changed_params(tmp_path)
    assert changed == {"train": ["train.seed 1, now 2", "train.gone 2, now null", "train.fresh null, now true"]}
    records = {r["stage"]: r for r in glance.stand(read_line(tmp_path), changed)}
    assert records["merge"]["state"] == "done" and records["gate-training"]["state"] == "passed"
    assert records["train"]["state"] == records["gate-deployment"]["state"] == "stale"
    assert records["train"]["params_changed"] == changed["train"]


@pytest.mark.parametrize("lock", [None, "stages: [", "[]", "stages: {train: 3}", b"\xff"])
def test_a_lock_that_says_nothing_changes_nothing(tmp_path: Path, lock: str | bytes | None) -> None:
    (tmp_path / "params.yaml").write_text(NOW)
    if lock is not None:
        (tmp_path / "dvc.lock").write_bytes(lock if isinstance(lock, bytes) else lock.encode())
    assert changed_params(tmp_path) == {}


def test_next_is_what_is_left_to_do(tmp_path: Path) -> None:
    assert to_do(glance.stand(read_line(tmp_path))) == "dvc repro"
    evidence.write_whole_line(tmp_path)
    records = glance.stand(read_line(tmp_path))
    assert to_do(records) is None
    steps = ["dvc repro extract merge", "python -m stages.glance x --verify"]
    assert still_to_do(steps, records) == steps[1:]
    records[3]["state"] = "stale"
    assert still_to_do(steps, records) == ["dvc repro merge", steps[1]]
    records[1]["state"] = "refused"
    assert to_do(records) == "do what reports/gates/extraction.json says, then dvc repro"


def test_a_file_that_says_nothing_of_its_folder_is_not_taken_for_the_line(tmp_path: Path) -> None:
    evidence.write_whole_line(tmp_path)
    (tmp_path / "README.md").write_text("# x")
    with pytest.raises(LineError, match=r"Nothing here says what it is[\s\S]*README.md"):
        glance.look(tmp_path / "README.md")


def test_help_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["glance", "--help"])
    glance.main()
    assert "python -m stages.glance [PATH]" in capsys.readouterr().out


def test_a_program_gets_json_and_no_heavy_library_is_loaded(tmp_path: Path, repo_root: Path) -> None:
    evidence.write_whole_line(tmp_path)
    (tmp_path / "dvc.yaml").write_text("stages: {}\n")
    code = (
        "import sys; sys.argv = ['glance', '--json']; from stages import glance; glance.main(); "
        "heavy = {'torch', 'pandas', 'great_expectations', 'transformers', 'numpy', 'pyarrow'} & set(sys.modules); "
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(repo_root)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    served = next(s for s in json.loads(done.stdout)["stages"] if s["stage"] == "serve-validate")
    assert served["accept_length"] == 1.62 and served["accept_length_by_domain"]["coding"] == 1.81


@pytest.mark.parametrize(
    ("path", "what", "words"),
    [
        ("data/prepared", "prepared rows", "smollm2"),
        ("data/prepared/stdlib", "prepared rows", "smollm2"),
        ("data/hidden_states", "hidden states of this line", "after 3, after 16, after 28 of 30 layers"),
        ("data/hidden_states/rows_0-2", "folder of hidden states of this line", "human_eval"),
        ("data/merged/manifest.json", "merged rows and states", "after 16"),
        ("models/draft", "draft checkpoint (architecture not named)", "in_process"),
    ],
)
def test_a_path_says_what_it_is(tmp_path: Path, path: str, what: str, words: str) -> None:
    evidence.write_whole_line(tmp_path)
    (tmp_path / "data/prepared/stdlib").mkdir()
    FolderConfig(
        capture=evidence.capture_spec(),
        source="human_eval",
        start=0,
        end=2,
        row_ids=("a", "b"),
        tokens=9,
        bytes=99,
        head_digest="sha256:0",
        groups=(),
        rows_digest="sha256:0",
    ).write(tmp_path / "data/hidden_states/rows_0-2/data_config.json")
    told = glance.look(tmp_path / path)
    assert told.what == what and words in json.dumps(told.as_json())


def test_square_brackets_in_names_are_shown_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    evidence.write_whole_line(tmp_path)
    prepared = evidence.prepared()
    odd = prepared.model_copy(update={"target": prepared.target.model_copy(update={"name": "odd[/b]"})})
    odd.write(tmp_path / "data/prepared/prepared.json")
    line = read_line(tmp_path)
    line.unreadable.append("models/draft/draft_record.json: no valid DraftRecord. [/i]: not permitted")
    monkeypatch.setattr(glance, "read_line", lambda: line)
    glance.show_line(as_json=False)
    shown = "".join(capsys.readouterr().out.split())
    assert "targetodd[/b]" in shown and "[/i]:" in shown


@pytest.mark.parametrize(
    ("path", "content", "words"),
    [
        ("reports/curves/training.csv", b"step,loss\n1,\xff\n", "These curves cannot be read. 'utf-8' codec"),
        (
            "reports/curves/held_out.csv",
            b'step,loss\n1,"' + b"9" * 200_000,
            "These curves cannot be read. field larger",
        ),
        ("reports/curves/training.csv", None, "These curves cannot be read. [Errno 21] Is a directory"),
        ("models/draft/draft_record.json", None, "The DraftRecord here cannot be read. Is a directory"),
    ],
)
def test_what_cannot_be_read_is_named_and_the_rest_is_told(
    tmp_path: Path, path: str, content: bytes | None, words: str
) -> None:
    evidence.write_whole_line(tmp_path)
    (tmp_path / path).unlink(missing_ok=True)
    if content is None:
        (tmp_path / path).mkdir(parents=True)
    else:
        (tmp_path / path).write_bytes(content)
    line = read_line(tmp_path)
    assert len(line.unreadable) == 1 and line.unreadable[0].startswith(f"{path}: {words}")
    assert {r["stage"]: r["state"] for r in glance.stand(line)}["merge"] == "done"


def test_a_record_that_is_a_folder_is_an_error_with_words(tmp_path: Path) -> None:
    (tmp_path / "draft_record.json").mkdir()
    with pytest.raises(DataError, match=r"DraftRecord here cannot be read(.|\n)*Is a directory(.|\n)*ls -ld"):
        glance.look(tmp_path)


def test_outside_the_repository_a_glance_says_so_and_exits_with_2(tmp_path: Path, repo_root: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "stages.glance"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(repo_root)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and not done.stdout
    assert "This is not the root of the repository" in done.stderr and f"where: {tmp_path}" in done.stderr
    assert "dvc.yaml" in done.stderr
