from __future__ import annotations

from pathlib import Path

import pytest

from stages.acceptance.prompts import Prompt, held_out_prompts, out_of_distribution_prompts, take
from stages.contracts.errors import DataError
from stages.contracts.manifest import PREPARED, PreparedManifest
from tests import line, tiny


@pytest.fixture(scope="module")
def prepared_line(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreparedManifest]:
    root = tmp_path_factory.mktemp("line")
    return root, line.write_prepared(root, tiny.make_target(root / "target"))


@pytest.fixture
def prepared(prepared_line: tuple[Path, PreparedManifest], monkeypatch: pytest.MonkeyPatch) -> PreparedManifest:
    monkeypatch.chdir(prepared_line[0])
    return prepared_line[1]


def test_sources_take_turns_and_only_held_out_rows_come(prepared: PreparedManifest) -> None:
    prompts = held_out_prompts(prepared)
    assert len(prompts) == sum(s.held_out_rows for s in prepared.sources)
    assert [p.source for p in prompts[:4]] == ["code", "tools", "talk", "code"]
    for source in ("code", "tools"):
        ids = [p.prompt_id for p in prompts if p.source == source]
        assert ids == sorted(ids)
    assert len(held_out_prompts(prepared, per_source=1)) == 3


def test_a_prompt_is_the_row_up_to_its_answer_and_the_answer_is_the_rest(prepared: PreparedManifest) -> None:
    for prompt in held_out_prompts(prepared):
        assert line.prompt_id(list(prompt.ids)) == prompt.prompt_id
        mask = [0] * len(prompt.ids) + [1] * len(prompt.answer)
        assert line.row_id([*prompt.ids, *prompt.answer], mask) == prompt.row_id
        assert prompt.finish == ("stop" if prompt.answer[-1] == 2 else "capped")


def test_out_of_distribution_prompts_have_no_answer(prepared: PreparedManifest) -> None:
    prompts = out_of_distribution_prompts(prepared, 3)
    assert len(prompts) == 3 and {p.domain for p in prompts} == {"out_of_distribution"}
    assert all(p.ids and not p.answer for p in prompts)


def test_too_few_prompts_go_round_again() -> None:
    prompts = [Prompt(x, "s", "d", (1,)) for x in "abc"]
    assert [p.prompt_id for p in take(prompts, 5)] == list("abcab")


def test_a_line_without_held_out_rows_cannot_be_measured(prepared: PreparedManifest) -> None:
    with pytest.raises(DataError, match="No held-out prompts"):
        held_out_prompts(prepared.model_copy(update={"sources": ()}))


def test_rows_of_another_run_are_refused(prepared: PreparedManifest) -> None:
    other = prepared.model_copy(update={"out_of_distribution_digest": "sha256:0"})
    with pytest.raises(DataError, match="not those that were written") as error:
        out_of_distribution_prompts(other, 1)
    assert str(PREPARED) in str(error.value)
