"""Answers are kept as they come: a run that was killed generates only what is missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from stages.contracts.errors import EngineError
from stages.corpus.answers import Bounds, Generated, OnAnswer, Prompt, answer_all

SETTINGS = {"weights_digest": "sha256:0", "max_new_tokens": 4}
PROMPTS = {f"p{i}": tuple(range(i + 1)) for i in range(6)}


@dataclass
class Echo:
    """Answers with the prompt backwards; stops before the prompt named."""

    breaks_at: str = ""
    skips: str = ""
    asked: list[str] = field(default_factory=list)

    def __call__(self, prompts: Sequence[Prompt], on_answer: OnAnswer) -> None:
        for prompt, ids in prompts:
            if prompt == self.breaks_at:
                raise EngineError("The engine broke", where=prompt)
            if prompt != self.skips:
                self.asked.append(prompt)
                on_answer(prompt, ids[::-1], "stop" if len(ids) % 2 else "length")


def expected() -> dict[str, Generated]:
    return {p: Generated(ids[::-1], "stop" if len(ids) % 2 else "length") for p, ids in PROMPTS.items()}


def test_a_second_run_asks_for_nothing(tmp_path: Path) -> None:
    assert answer_all(PROMPTS, Echo(), SETTINGS, tmp_path, 1) == expected()
    again = Echo()
    assert answer_all(PROMPTS, again, SETTINGS, tmp_path, 1) == expected()
    assert again.asked == []


def test_a_run_that_broke_resumes_with_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="The engine broke"):
        answer_all(PROMPTS, Echo(breaks_at="p2"), SETTINGS, tmp_path, 1)
    again = Echo()
    assert answer_all(PROMPTS, again, SETTINGS, tmp_path, 1) == expected()
    assert again.asked == ["p2", "p1", "p0"]


def test_a_line_that_was_cut_off_is_generated_again(tmp_path: Path) -> None:
    answer_all(PROMPTS, Echo(), SETTINGS, tmp_path, 1)
    (path,) = tmp_path.glob("*/worker-0.jsonl")
    path.write_bytes(path.read_bytes()[:-4])
    again = Echo()
    assert answer_all(PROMPTS, again, SETTINGS, tmp_path, 1) == expected()
    assert again.asked == ["p0"]
    assert answer_all(PROMPTS, Echo(), SETTINGS, tmp_path, 1) == expected()


def test_a_changed_token_is_generated_again_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer_all(PROMPTS, Echo(), SETTINGS, tmp_path, 1)
    assert "passed over" not in capsys.readouterr().err
    (path,) = tmp_path.glob("*/worker-0.jsonl")
    sound = path.read_text()
    path.write_text(sound.replace("[5,4,3,", "[5,4,2,"))
    assert path.read_text() != sound
    again = Echo()
    assert answer_all(PROMPTS, again, SETTINGS, tmp_path, 1) == expected()
    assert again.asked == ["p5"]
    assert "lines cut off, changed or out of bounds: 1 passed over; answers to generate: 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        b"5",
        b"null",
        b'["p0","stop",5]',
        b'["p0","stop",[0]]',
        b'["p0","stop",[0.0],"0123456789abcdef"]',
        b'["p0","stop",[NaN],"0123456789abcdef"]',
        b'["p0","stop",[true],"0123456789abcdef"]',
        b'[["p0"],"stop",[0],"0123456789abcdef"]',
        b'["p0","stop",[0],16]',
        b"\xff\xfe",
        b"[" * 100_000,
    ],
    ids=lambda line: line[:30].decode("latin-1"),
)
def test_a_line_of_another_shape_is_passed_over(tmp_path: Path, line: bytes) -> None:
    answer_all(PROMPTS, Echo(), SETTINGS, tmp_path, 1)
    (path,) = tmp_path.glob("*/worker-0.jsonl")
    path.write_bytes(path.read_bytes() + line + b"\n")
    again = Echo()
    assert answer_all(PROMPTS, again, SETTINGS, tmp_path, 1) == expected()
    assert again.asked == []


def test_a_kept_answer_with_ids_that_the_target_has_not_or_too_many_is_generated_again(tmp_path: Path) -> None:
    answer_all(PROMPTS, Echo(), SETTINGS, tmp_path, 1)
    for bounds, missing in ((Bounds(5, 9), ["p5"]), (Bounds(9, 4), ["p5", "p4"])):
        again = Echo()
        with pytest.raises(EngineError, match="without an answer"):  # for it says the same again
            answer_all(PROMPTS, again, SETTINGS, tmp_path, 1, bounds=bounds)
        assert again.asked == missing
    assert answer_all(PROMPTS, Echo(skips="p0"), SETTINGS, tmp_path, 1, bounds=Bounds(6, 6)) == expected()


def test_other_settings_are_other_answers(tmp_path: Path) -> None:
    answer_all(PROMPTS, Echo(), SETTINGS, tmp_path, 1)
    other = Echo()
    answer_all(PROMPTS, other, {**SETTINGS, "max_new_tokens": 5}, tmp_path, 1)
    assert len(other.asked) == len(PROMPTS) and len(list(tmp_path.iterdir())) == 2


def test_an_answer_left_out_is_told(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"without an answer[\s\S]*1 missing, the first p3"):
        answer_all(PROMPTS, Echo(skips="p3"), SETTINGS, tmp_path, 1)


def test_two_processes_give_the_same_answers_and_a_fault_in_one_is_told(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"ended early[\s\S]*The engine broke"):
        answer_all(PROMPTS, Echo(breaks_at="p2"), SETTINGS, tmp_path, 2)
    assert answer_all(PROMPTS, Echo(), SETTINGS, tmp_path, 2) == expected()
