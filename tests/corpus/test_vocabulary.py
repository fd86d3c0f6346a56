"""The draft vocabulary: by frequency, with what must never be lost, the same from equal data."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from stages.contracts.errors import DataError, ParamsError
from stages.corpus.vocabulary import always_in, choose_vocabulary, covered, mapping
from stages.merge import write_vocabulary
from tests import tiny


def counts_of(ids: list[int], vocab_size: int = 64) -> np.ndarray:
    return np.bincount(np.asarray(ids), minlength=vocab_size).astype(np.int64)


def test_the_most_frequent_tokens_are_in() -> None:
    counts = counts_of([40] * 5 + [41] * 4 + [42] * 3 + [43] * 2 + [44])
    assert choose_vocabulary(counts, 3, frozenset()).tolist() == [40, 41, 42]


def test_equal_counts_go_by_rising_id() -> None:
    assert choose_vocabulary(counts_of([50, 20, 30, 10]), 2, frozenset()).tolist() == [10, 20]


def test_what_is_always_in_displaces_the_frequent() -> None:
    chosen = choose_vocabulary(counts_of([40] * 5 + [41] * 4), 2, frozenset({7}))
    assert chosen.tolist() == [7, 40]


def test_six_distinct_tokens_are_filled_up_to_sixteen_distinct_ids_always_the_same() -> None:
    """D11."""
    counts = counts_of([60, 50, 40, 30, 20, 10] * 3)
    chosen = choose_vocabulary(counts, 16, frozenset({63, 2}))
    assert len(set(chosen.tolist())) == 16 and {63, 2, 60, 50, 40, 30, 20, 10} <= set(chosen.tolist())
    assert chosen.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 20, 30, 40, 50, 60, 63]
    assert np.array_equal(chosen, choose_vocabulary(counts, 16, frozenset({2, 63})))


def test_another_size_or_other_data_give_another_vocabulary() -> None:
    """D10."""
    counts = counts_of(list(range(30)))
    small, large = (choose_vocabulary(counts, size, frozenset()) for size in (8, 16))
    other = choose_vocabulary(counts_of(list(range(30, 60))), 8, frozenset())
    assert len(small) == 8 and len(large) == 16 and set(other.tolist()).isdisjoint(small.tolist())


def test_offsets_lead_back_to_the_ids() -> None:
    ids = np.array([2, 3, 10, 63])
    d2t, t2d = mapping(ids, 64)
    assert d2t.tolist() == [2, 2, 8, 60] and (np.arange(4) + d2t).tolist() == ids.tolist()
    assert np.flatnonzero(t2d).tolist() == ids.tolist() and t2d.shape == (64,)


def test_coverage_is_a_share_of_tokens_and_zero_of_none() -> None:
    _, t2d = mapping(np.array([1, 2]), 8)
    assert covered(counts_of([1, 1, 2, 5], 8), t2d) == 0.75
    assert covered(np.zeros(8, np.int64), t2d) == 0.0


@pytest.mark.parametrize("size", [2, 65])
def test_a_size_that_cannot_be_is_refused(size: int) -> None:
    with pytest.raises(ParamsError, match="No draft vocabulary of this size") as error:
        choose_vocabulary(counts_of([1]), size, frozenset({1, 2, 3}))
    assert error.value.got == str(size) and error.value.expected.startswith("3 (special and byte tokens")


def write_tokenizer(folder: Path, vocab: object, added: list[int], **config: object) -> Path:
    folder.mkdir(exist_ok=True)
    tokenizer = {"model": {"vocab": vocab}, "added_tokens": [{"id": i, "content": f"<|{i}|>"} for i in added]}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "config.json").write_text(json.dumps({"vocab_size": 64, **config}))
    return folder


def test_byte_level_special_and_end_of_turn_tokens_are_always_in(tmp_path: Path) -> None:
    assert always_in(tiny.make_target(tmp_path)) == frozenset(range(259))


def test_words_are_not_always_in_but_fallback_bytes_and_tool_markers_are(tmp_path: Path) -> None:
    vocab = {"Ġ": 0, "é": 1, "the": 2, "<0x0A>": 3, "<0xZZ>": 4, "Ċ": 5, "中": 6}
    folder = write_tokenizer(tmp_path / "a", vocab, [30, 31], eos_token_id=[40, 41], bos_token_id=None)
    assert always_in(folder) == frozenset({0, 1, 3, 5, 30, 31, 40, 41})


def test_a_unigram_vocabulary_is_read_too_and_ids_beyond_the_model_are_left_out(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "a", [["<unk>", 0.0], ["<0x41>", -1.0], ["▁a", -2.0]], [64, 9])
    assert always_in(folder) == frozenset({1, 9})


def test_a_tokenizer_without_a_vocabulary_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="The tokenizer has no vocabulary"):
        always_in(write_tokenizer(tmp_path / "a", {}, []))


def test_a_vocabulary_file_is_made_anew_for_another_size_tokenizer_or_data_and_is_the_same_for_the_same(
    tmp_path: Path,
) -> None:
    """D10."""
    words = {f"word{i}": i for i in range(40)}
    one = write_tokenizer(tmp_path / "one", {**words, "<0x0A>": 50}, [60])
    other = write_tokenizer(tmp_path / "other", {**words, "<0x41>": 51}, [60, 61])
    counts, later = counts_of(list(range(30)) * 2), counts_of(list(range(10, 40)) * 2)
    path, made = tmp_path / "vocabulary.safetensors", []
    for folder, data, size in ((one, counts, 8), (one, counts, 16), (other, counts, 16), (other, later, 16)):
        t2d = write_vocabulary(path, folder, data, size)
        assert int(t2d.sum()) == size and t2d[sorted(always_in(folder))].all()
        made.append(path.read_bytes())
    assert len(set(made)) == 4
    write_vocabulary(path, one, counts, 8)
    assert path.read_bytes() == made[0]
