"""A source's file shuffled or grown: what did not change keeps its rows, and extract takes their states as they are."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from stages import extract, prepare
from stages.capture.rows import Row
from stages.contracts.manifest import PREPARED_MANIFEST, PreparedManifest
from tests.corpus.test_prepare import chat, line, write  # noqa: F401
from tests.line import write_gate_report

_COMPARED = ("row_id", "prompt_id", "split", "input_ids", "loss_mask", "prompt_tokens", "finish", "messages")


@pytest.fixture
def through(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the rows that go through the target."""
    rows_through: list[str] = []
    capture_rows = extract.capture_rows

    def noted(target: object, rows: list[Row], *rest: object) -> Iterator[torch.Tensor]:
        rows_through.extend(row.row_id for row in rows)
        yield from capture_rows(target, rows, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(extract, "capture_rows", noted)
    return rows_through


def run() -> dict[str, dict]:
    """Prepare and extract; the rows by their names."""
    prepare.main()
    write_gate_report(Path(), "extraction", PreparedManifest.read(PREPARED_MANIFEST).digest())
    extract.main()
    files = sorted(Path("data/prepared").glob("*/rows.parquet"))
    rows = [row for file in files for row in pq.read_table(file, columns=list(_COMPARED)).to_pylist()]
    assert len({row["row_id"] for row in rows}) == len(rows)
    return {row["row_id"]: row for row in rows}


@pytest.fixture
def sources(line: dict) -> dict[str, list[str]]:  # noqa: F811
    """Lines of the two sources, one asked and one with its answers; all rows fit several folders."""
    write({**line, "capture": {**line["capture"], "rows_per_folder": 5}})
    draw = random.Random(4)
    words = [" ".join(draw.choices(["red", "green", "blue", "one", "two", "six", "up", "on"], k=9)) for _ in range(60)]
    asked = [json.dumps(chat(f"Ask {i} {w}")) for i, w in enumerate(words[:24])]
    given = [json.dumps(chat(f"Say {i} {w}", f"It is {w}", "And?", "That is all.")) for i, w in enumerate(words[24:44])]
    return {"asked": asked, "given": given}


def save(sources: dict[str, list[str]]) -> None:
    for name, lines in sources.items():
        Path(f"{name}.jsonl").write_text("".join(text + "\n" for text in lines))


def test_a_shuffled_source_sends_no_row_through_the_target_again(
    sources: dict[str, list[str]], through: list[str]
) -> None:
    save(sources)
    first = run()
    assert sorted(through) == sorted(first) and len(first) == 44
    through.clear()
    for lines in sources.values():
        random.Random(1).shuffle(lines)
    save(sources)
    assert run() == first and through == []


def test_a_grown_source_sends_its_new_rows_alone_through_the_target(
    sources: dict[str, list[str]], through: list[str]
) -> None:
    save(sources)
    first = run()
    through.clear()
    sources["given"].insert(3, json.dumps(chat("Say something new", "Here it is.")))
    sources["asked"].append(json.dumps(chat("Ask for what was never asked before")))
    save(sources)
    grown = run()
    assert {name: grown[name] for name in first} == first
    assert sorted(through) == sorted(grown.keys() - first.keys()) and len(through) == 2
