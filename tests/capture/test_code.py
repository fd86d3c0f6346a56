"""The name of captured states follows the code that made them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from stages.capture import code
from stages.capture.code import STAGES, code_digest
from stages.capture.work import WorkCache
from tests.capture.conftest import SPEC


@pytest.mark.parametrize(
    "file",
    ["capture/spill.py", "capture/forms.py", "targets/llama.py"] + [f"targets/{name}.py" for name in code._SHARED],
)
def test_a_changed_line_of_capture_code_makes_another_digest_and_another_work_cache(tmp_path: Path, file: str) -> None:
    stages = tmp_path / "stages"
    for room in ("capture", "targets"):
        shutil.copytree(STAGES / room, stages / room)
    before = code_digest("llama", stages)
    assert before == code_digest("llama")
    with (stages / file).open("a") as source:
        source.write("# mended\n")
    after = code_digest("llama", stages)
    assert after != before
    old, new = (WorkCache(SPEC.model_copy(update={"code_digest": d}), tmp_path) for d in (before, after))
    assert old.root != new.root and not new.has(("row",))


def test_every_file_that_a_family_imports_from_its_room_is_in_the_digest() -> None:
    seen, waiting = set[str](), ["llama", "kimi_k25"]
    while waiting:
        text = (STAGES / f"targets/{waiting.pop()}.py").read_text()
        new = set(re.findall(r"from stages\.targets\.(\w+) import", text)) - seen
        seen |= new
        waiting += new
    assert seen - {"_ahead"} == set(code._SHARED), "_ahead only says which rows run together"


def test_another_family_and_code_that_makes_no_state_leave_the_name_alone(tmp_path: Path) -> None:
    stages = tmp_path / "stages"
    for room in ("capture", "targets"):
        shutil.copytree(STAGES / room, stages / room)
    before = code_digest("llama", stages)
    for file in ("targets/qwen3.py", "targets/_ahead.py", "targets/_room.py", "capture/probe.py"):
        (stages / file).write_text("")
    assert code_digest("llama", stages) == before != code_digest("qwen3", stages)
