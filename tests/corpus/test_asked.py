"""Prompts and answers on disk: the same as in memory, and next to nothing of it held."""

from __future__ import annotations

import pickle
import random
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from stages.corpus.answers import OnAnswer, Prompt, answer_all
from stages.corpus.asked import Kept, Prompts
from stages.corpus.split import prompt_id


def drawn(count: int, length: int) -> list[tuple[str, np.ndarray]]:
    draw = random.Random(3)
    prompts = [
        np.array([draw.randrange(50_000) for _ in range(draw.randrange(length))], np.int32) for _ in range(count)
    ]
    return [(prompt_id(ids), ids) for ids in prompts]


def test_prompts_read_from_disk_are_those_that_were_written(tmp_path: Path) -> None:
    told = [*drawn(200, 9), ("ab" * 11 + "00", np.array([7], np.int32)), ("00" * 12, np.array([8, 9], np.int32))]
    prompts = Prompts(tmp_path / "prompts", told)
    first = {name: tuple(ids.tolist()) for name, ids in reversed(told)}
    assert dict(prompts) == first and len(prompts) == len(first)
    assert dict(pickle.loads(pickle.dumps(prompts))) == first  # for the processes that generate
    with pytest.raises(KeyError):
        prompts["ff" * 12]
    assert "ff" * 12 not in prompts and dict(Prompts(tmp_path / "none", [])) == {}


def test_of_a_name_the_last_line_counts_and_what_is_given_counts_before_all(tmp_path: Path) -> None:
    for file, lines in {"a": [b"x one\n", b"y two\n", b"x three\n"], "b": [b"z four\n", b"y five"]}.items():
        (tmp_path / file).write_bytes(b"".join(lines))
    kept: Kept[bytes] = Kept(lambda line: line.split()[1])
    for file in ("a", "b"):
        for line, note in kept.lines(tmp_path / file):
            note(line[:1].decode())
    kept.give("z", b"six")
    kept.give("w", b"seven")
    assert kept == {"x": b"three", "y": b"five", "z": b"six", "w": b"seven"} and len(kept) == 4
    kept.keep(["x"])
    assert set(kept) == {"x", "z", "w"}


def test_answers_take_little_memory_however_many_tokens_they_have(tmp_path: Path) -> None:
    """300 prompts of 400 tokens and their answers are 8 MB as tuples."""
    told = [(prompt_id(ids), ids) for ids in (np.arange(i, i + 400, dtype=np.int32) for i in range(1000, 1300))]
    prompts = Prompts(tmp_path / "prompts", told)

    def answer(prompts: Sequence[Prompt], on_answer: OnAnswer) -> None:
        for name, ids in prompts:
            on_answer(name, ids, "stop")

    answer_all(prompts, answer, {}, tmp_path / "cache", 1)
    tracemalloc.start()
    answers = answer_all(prompts, answer, {}, tmp_path / "cache", 1)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 300_000 and len(answers) == 300
    assert all(answers[name].ids == tuple(ids.tolist()) for name, ids in told)
