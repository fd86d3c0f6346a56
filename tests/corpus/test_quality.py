"""Loops, doubles and leaks."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from datasketch import MinHash

from stages.corpus.candidates import given_rows
from stages.corpus.grams import (
    LEAK_WORDS,
    Grams,
    KeptApart,
    LeakIndex,
    grams,
    grams_of_rows,
    joined,
    word_hashes,
    words_of,
)
from stages.corpus.items import Item
from stages.corpus.near import NEAR_WORDS, Signatures, sketched
from stages.corpus.quality import has_supervised_pair, later_words, prompt_words, repeats_itself, system_words
from stages.corpus.rendering import GivenRow
from stages.corpus.split import prompt_id, row_id, split_of
from stages.corpus.spool import Candidate


def words(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(5000), k=n)


@pytest.mark.parametrize("period", [1, 3, 10, 30])
def test_an_answer_that_runs_into_a_loop_is_repetitive(period: int) -> None:
    assert repeats_itself(words(20) + (words(period, 1) * 100)[: max(24, 3 * period)])


def test_a_loop_may_end_within_its_block() -> None:
    block = words(10, 1)
    assert repeats_itself(words(20) + block * 3 + block[:4])


def test_a_loop_with_a_counter_is_seen_by_its_few_distinct_n_grams() -> None:
    line = words(12, 2)
    assert repeats_itself([token for i in range(9) for token in [*line, 9000 + i]])


def test_plain_text_short_repeats_and_code_that_closes_brackets_are_not_repetitive() -> None:
    assert not repeats_itself(words(200))
    assert not repeats_itself([*words(40), 7, 7, 7, 7])
    assert not repeats_itself([*words(40), *words(5, 3) * 2])
    assert not repeats_itself([])


@pytest.mark.parametrize(("lengths", "loops"), [((30, 60), True), ((60, 30), True), ((30, 30), False), ((5, 5), False)])
def test_a_loop_in_any_answer_of_a_row_makes_it_repetitive(lengths: tuple[int, int], loops: bool) -> None:
    answers = [[7, 8] * 30 if n == 60 else words(n, n) for n in lengths]
    ids = np.array([1, 2, *answers[0], 9, 3, 4, *answers[1], 9], np.int32)
    mask = b"\0\0" + b"\1" * (lengths[0] + 1) + b"\0\0" + b"\1" * (lengths[1] + 1)
    prepare: Any = SimpleNamespace(max_row_tokens=999, seed=7, held_out_share=0.1)
    (row,) = given_rows(Item("i", ()), [GivenRow(ids, mask, 4)], prepare, frozenset({9}))
    assert isinstance(row, Candidate) and row.given and row.given.loops == loops


@pytest.mark.parametrize(("mask", "cut"), [(b"\0\1\1\0\0", False), (b"\0\1\1\1\1", True), (b"\0\1\1\0\1", True)])
def test_a_row_is_capped_where_an_answer_was_cut_and_not_where_what_follows_it_was(mask: bytes, cut: bool) -> None:
    prepare: Any = SimpleNamespace(max_row_tokens=3, seed=7, held_out_share=0.1)
    (row,) = given_rows(Item("i", ()), [GivenRow(np.arange(5, dtype=np.int32), mask, 4)], prepare, frozenset())
    assert isinstance(row, Candidate) and row.given and row.given.cut == cut and row.given.ids.tolist() == [0, 1, 2]


def test_a_pair_needs_two_neighbours() -> None:
    assert not has_supervised_pair([0, 1, 0, 1])
    assert not has_supervised_pair([])
    assert has_supervised_pair([0, 1, 1])


def leak(tmp_path: Path, held: dict[str, str], *train: str) -> dict[int, tuple[str, float]]:
    apart = KeptApart(tmp_path / "grams")
    for name, text in held.items():
        apart.add(name, of(text))
    return LeakIndex(apart).shared(*joined(of(text) for text in train))


def of(text: str, n: int = LEAK_WORDS) -> Grams:
    return grams(word_hashes(words_of(text)), n)


def test_equal_prompts_leak_whatever_their_case_spacing_and_punctuation(tmp_path: Path) -> None:
    assert leak(tmp_path, {"h": "Why is\n the sky BLUE?"}, "why is the sky  blue") == {0: ("h", 1.0)}


def test_a_prompt_held_within_a_longer_one_leaks_and_an_unlike_one_does_not(tmp_path: Path) -> None:
    held = "write a function that returns the sum of all even numbers in a list"
    unlike = "write a function that reverses every word of a given text"
    assert leak(tmp_path, {"h": held}, unlike, f"please {held} and test it") == {1: ("h", 1.0)}


def test_the_prompt_given_away_most_is_named_and_below_four_fifths_none(tmp_path: Path) -> None:
    held = " ".join(f"w{i}" for i in range(20))
    most = " ".join(f"w{i}" for i in range(18)) + " something else"
    half = " ".join(f"w{i}" for i in range(12)) + " something else"
    found = leak(tmp_path, {"most": most, "all": held}, held, half, most)
    assert found == {0: ("all", 1.0), 2: ("most", 1.0)}


def test_the_index_finds_what_counting_every_pair_finds(tmp_path: Path) -> None:
    draw = random.Random(3)
    base = [[draw.choice("abcdefghijklmnop") * 2 + str(draw.randrange(30)) for _ in range(40)] for _ in range(40)]

    def near(text: list[str]) -> str:
        changed = list(text)
        for _ in range(draw.randrange(4)):
            changed[draw.randrange(40)] = "new"
        return " ".join(changed)

    held = {f"h{i}": " ".join(text) for i, text in enumerate(base)}
    train = [near(text) for text in base]
    found = leak(tmp_path, held, *train)
    sets = [set(of(text).tolist()) for text in held.values()]
    for row, text in enumerate(train):
        own = set(of(text).tolist())
        best = max(len(s & own) / len(s) for s in sets)
        assert found.get(row, ("", 0.0))[1] == (best if best >= 0.8 else 0.0)
    assert 5 < len(found) < 40


def test_grams_of_many_texts_are_those_of_each() -> None:
    draw = random.Random(5)
    texts = [" ".join(draw.choices("abcdef", k=draw.choice([0, 1, 4, 8, 9, 40]))) for _ in range(60)]
    for n in (LEAK_WORDS, NEAR_WORDS):
        together = grams_of_rows([word_hashes(words_of(t)) for t in texts], n)
        assert [g.tolist() for g in together] == [of(t, n).tolist() for t in texts]
    assert [len(g) for g in grams_of_rows([word_hashes([]), word_hashes(["a"])], 8)] == [0, 1]
    assert grams_of_rows([], 8) == []


def test_text_without_spaces_is_compared_by_character() -> None:
    assert words_of("天空为什么是蓝色的？Why") == [*"天空为什么是蓝色的", "why"]
    assert len(of("天空为什么是蓝色的")) == 2 and not len(of("?!")) and len(of("one word")) == 1


def test_near_duplicates_fall_behind_the_first_in_rank_and_chains_keep_their_third(tmp_path: Path) -> None:
    words = [f"w{i}" for i in range(80)]
    one_changed = [*words[:40], "x", *words[41:]]
    texts = [" ".join(words), "entirely different words stand here in this text of some length", " ".join(one_changed)]
    signatures = Signatures(tmp_path / "signatures")
    signatures.add(sketched([of(text, NEAR_WORDS) for text in texts], range(3)))
    signatures.add(sketched([of("?"), of("!")], [4, 5]))  # without words, and like nothing
    (near,) = signatures.near(np.array([9, 1, 2, 3, 4], np.uint64), 0.7)
    assert (near.row, near.other) == (0, 2) and 0.7 <= near.similarity <= 1
    assert signatures.near(np.arange(5, dtype=np.uint64), 0.7, np.array([True, True, False, True, True])) == []


def test_the_words_of_a_prompt_are_what_the_user_says_before_the_first_answer() -> None:
    turns = [("system", "Be kind."), ("user", "One?"), ("assistant", "1"), ("user", "Two?"), ("tool", "3")]
    messages = [{"role": r, "content": c} for r, c in turns]
    assert prompt_words(messages) == ["one"]
    assert (later_words(messages), system_words(messages)) == ([["two"]], [["be", "kind"]])


def test_sketches_of_many_prompts_are_those_that_datasketch_makes_of_each() -> None:
    draw = random.Random(11)
    prompts = [np.array([draw.getrandbits(64) for _ in range(n)], np.uint64) for n in (1, 40, 0, 7)]
    permutations = MinHash(64, seed=1, scheme="affine32").permutations
    for prompt, otherwise, row in zip(prompts, range(4), sketched(prompts, range(4)), strict=True):
        sketch = MinHash(64, hashfunc=int, permutations=permutations, scheme="affine32")
        sketch.update_batch([int(g) & 0xFFFFFFFF for g in prompt] or [otherwise])
        assert row.tolist() == sketch.hashvalues.tolist()
    assert sketched([], []).shape == (0, 64)


def test_a_prompt_stays_on_its_side_and_the_share_is_kept() -> None:
    ids = [prompt_id([i, i + 1]) for i in range(4000)]
    sides = [split_of(p, 7, 0.12) for p in ids]
    assert sides == [split_of(p, 7, 0.12) for p in ids]
    assert 0.10 < sides.count("held_out") / len(sides) < 0.14
    assert {p for p in ids if split_of(p, 7, 0.05) == "held_out"} < {
        p for p in ids if split_of(p, 7, 0.12) == "held_out"
    }
    assert sides != [split_of(p, 8, 0.12) for p in ids]


def test_ids_are_of_content() -> None:
    assert len(prompt_id([1, 2])) == 24 and prompt_id([1, 2]) != prompt_id([2, 1])
    assert row_id([1, 2], [0, 1]) != row_id([1, 2], [1, 1])
