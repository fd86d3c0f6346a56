"""The parts of a glance by themselves: spans, contents of a file, the sample a deep look takes, rendering."""

from __future__ import annotations

import gzip
import io
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from rich.console import Console

from stages.glancing.contents import Contents, Shape, contents_of
from stages.glancing.deep import choose, neighbours, tell_findings
from stages.glancing.faults import displaced, numbers_of
from stages.glancing.lines import say, size
from stages.glancing.rendering import show
from stages.glancing.spans import between, in_words, overlaps, spans_of, union
from stages.glancing.told import Told
from tests.glancing import stores


def test_spans_hold_exactly_the_numbers_they_are_made_of() -> None:
    assert spans_of([5, 1, 2, 2, 9, 8]) == [(1, 3), (5, 6), (8, 10)]
    assert union([(0, 2), (2, 4), (10, 12), (11, 15), (3, 3)]) == [(0, 4), (10, 15)]
    assert between([(10, 12), (0, 4), (4, 6)]) == [(6, 10)]
    assert overlaps([("c", (5, 9)), ("a", (0, 6)), ("b", (6, 8))]) == [("a", "c", (5, 6)), ("c", "b", (6, 8))]
    assert in_words([(3, 4), (7, 10)]) == "3, 7–9" and in_words([(i, i + 1) for i in range(0, 18, 2)]).endswith(
        "(3 more)"
    )


def test_text_order_displaces_rows_only_above_ten() -> None:
    assert [displaced(n) for n in (1, 8, 10, 11, 12, 16)] == [0, 0, 0, 9, 10, 14]
    assert numbers_of("0.4.0.1") == (0, 4, 0, 1) and numbers_of("0.4.0.dev32") == (0, 4, 0) and numbers_of("x") == ()


@pytest.mark.parametrize("old_form", [False, True])
def test_shapes_are_read_without_unpickling(tmp_path: Path, old_form: bool) -> None:
    value = {
        "ids": torch.arange(5),
        "states": [torch.zeros(5, 8, dtype=torch.bfloat16), torch.zeros(5, 8, dtype=torch.float8_e4m3fn)],
        "name": "abc",
    }
    torch.save(value, tmp_path / "a.pt", _use_new_zipfile_serialization=not old_form)
    contents = contents_of(tmp_path / "a.pt")
    assert contents.fault == "" and contents.tensors == {
        "ids": Shape("int64", (5,)),
        "states": [Shape("bfloat16", (5, 8)), Shape("float8_e4m3fn", (5, 8))],
        "name": "abc",
    }
    with gzip.open(tmp_path / "a.ckpt.gz", "wb") as file:
        torch.save(value, file)
    assert contents_of(tmp_path / "a.ckpt.gz") == contents if not old_form else True


class Runs:
    """What a hostile file would have run."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (Path.touch, (Path("ran"),))  # type: ignore[return-value]


def test_code_in_a_file_is_kept_as_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"ids": Runs()}, tmp_path / "a.pt")
    contents_of(tmp_path / "a.pt")
    assert not (tmp_path / "ran").exists()
    torch.save(torch.nn.Linear(2, 2), tmp_path / "b.pt")
    assert "opcode NEWOBJ" in contents_of(tmp_path / "b.pt").fault


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("a.pt", b"", "zero bytes"),
        ("a.pt", b"hello", "no file of torch.save"),
        ("a.pt", b"PK\x03\x04 and nothing", "an archive without its end: cut off"),
        ("a.safetensors", b"\x05", "no safetensors header in its 1 bytes"),
        ("a.safetensors", b"\x02\0\0\0\0\0\0\0{}xx", "12 bytes where its header says 10: too long"),
        ("a.safetensors", b"\x02\0\0\0\0\0\0\0[]", "a safetensors header that cannot be parsed"),
        ("a.ckpt.gz", b"\x1f\x8b", "Compressed file ended before the end-of-stream marker was reached"),
    ],
)
def test_a_damaged_file_is_a_fault_in_words(tmp_path: Path, name: str, content: bytes, fault: str) -> None:
    (tmp_path / name).write_bytes(content)
    assert contents_of(tmp_path / name) == Contents({}, fault) or contents_of(tmp_path / name).fault == fault


def test_every_cut_of_a_file_is_a_fault_and_no_traceback(tmp_path: Path) -> None:
    stores.legacy_sample(tmp_path / "whole.pt", tokens=3)
    whole = (tmp_path / "whole.pt").read_bytes()
    for length in range(0, len(whole) - 1, 41):
        (tmp_path / "cut.pt").write_bytes(whole[:length])
        assert contents_of(tmp_path / "cut.pt").fault, f"cut to {length} bytes"


@dataclass(frozen=True)
class File:
    folder: str
    name: str
    index: int
    bytes: int


def test_a_deep_look_takes_the_odd_sizes_of_every_folder_first() -> None:
    files = [
        File(f"rows_{k}", f"data_{i}.pt", i, 100 + (i == 7) - 50 * (i == 13)) for k in range(5) for i in range(100)
    ]
    chosen = choose(files, most=20)
    assert len(chosen) == 20 and chosen == sorted(chosen, key=files.index)
    assert {(f.folder, f.index) for f in chosen} >= {(f"rows_{k}", i) for k in range(5) for i in (7, 13)}
    assert choose(files[:9], most=20) == files[:9]
    beside = neighbours(files, chosen, most=50)
    assert (
        len(beside) == 50
        and {f.folder for f in beside} == {"rows_0"}
        and not {id(f) for f in beside} & {id(f) for f in chosen}
    )


@dataclass(frozen=True)
class Finding:
    kind: str
    file: str
    what: str
    expected: str = ""
    found: str = ""
    do: str = ""
    note: bool = False


def test_findings_of_one_kind_are_told_a_few_and_counted() -> None:
    told = Told("s", "hidden_states", "x")
    tell_findings(told, [Finding("nan", f"f{i}", "NaN", "none", str(i)) for i in range(20)], 20, 100)
    assert len(told.faults) == 9 and told.faults[0].words == "NaN; expected none; found 0"
    assert told.faults[-1].words == "NaN: 12 more" and told.facts["deep"]["kinds"] == {"nan": 20}
    assert told.notes[-1].words == "Values were looked at in 20 of 100 files"


def test_numbers_sizes_and_lists_are_said_for_people() -> None:
    assert size(999) == "999 B" and size(1_410_000_000_000) == "1.41 TB" and say("bytes", 2000) == "2 kB"
    assert say("rows", 12000) == "12\u202f000" and say("rows", None) == "–" and say("d2t", False) == "no"
    assert say("ranges", [[0, 5], [7, 9]]) == "0–4, 7–8" and say("failed", []) == "none"


def test_no_line_is_wider_than_the_terminal_but_commands_which_are_copied(tmp_path: Path) -> None:
    told = Told("/a/[b]/" + "long" * 12, "hidden_states", "hidden states of " + "x" * 30)
    told.facts |= {"tool": "draftline", "rows_digest": "sha256:" + "0" * 64, "rows": 3}
    told.facts["by_folder"] = [
        {"folder": f"rows_{i}-{i + 1}", "rows": i, "bytes": 5, "state": "whole"} for i in range(40)
    ]
    told.add("fault", "What " * 40, "do " * 40, "where[x]")
    told.next = ["python -m stages.glance " + "p" * 90]
    out = io.StringIO()
    show(told, Console(file=out, width=80, highlight=False))
    lines = out.getvalue().splitlines()
    assert max(len(line) for line in lines if "python -m" not in line) <= 80
    assert any(line.endswith("p" * 90) for line in lines) and "where[x]" in out.getvalue()
    assert "… and 34 more, all whole" in out.getvalue() and "sha256:000000000000…" in out.getvalue()
