"""Loss masks from tokens, and masks that another row's tokens stand beside: found, explained by a batch size, mended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from stages.bridges.stores import open_store
from stages.capture.adopted import match
from stages.capture.findings import Finding, RowHead
from stages.capture.mask_order import MaskFacts, MaskOrder, find_order, text_order, text_rank
from stages.capture.mask_repair import explain, mask_facts, own_masks
from stages.capture.masks import MaskRule, choose_rule, rules_of, template_rules
from stages.capture.rows import Row, row_id
from stages.capture.values import check_values, read_each
from stages.contracts.errors import DataError
from tests import line, tiny
from tests.bridges import samples as make
from tests.bridges.samples import Sample
from tests.capture.stores import IDS, faults, look

END = 2  # <|im_end|>


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def rule(folder: Path) -> MaskRule:
    return template_rules(folder)[0]


def chats(folder: Path, count: int, length: int = 0) -> list[Sample]:
    """Rows of a question and an answer of their own lengths, or of `length` tokens; states are noise."""
    prompts = line.encode_prompts(folder, [line.text_of("code", i) for i in range(count)])
    g = torch.Generator().manual_seed(0)
    rows = []
    for i, prompt in enumerate(prompts):
        answer = length - len(prompt) - 1 if length else 5 + i * 7 % 23
        ids = torch.tensor([*prompt, *torch.randint(20, 250, (answer,), generator=g).tolist(), END])
        mask = (torch.arange(len(ids)) >= len(prompt)).long()
        rows.append(Sample(ids, mask, torch.randn(len(ids), 4, make.HIDDEN, generator=g).bfloat16()))
    return rows


def as_0_4_0(rows: Sequence[Sample], batch: int) -> list[Sample]:
    """What speculators 0.4.0 wrote of a run: results sorted as text, masks in list order and cut to the row beside them."""
    files = []
    for at in range(0, len(rows), batch):
        part = rows[at : at + batch]
        for k, item in enumerate(sorted(range(len(part)), key=str)):
            files.append(part[item]._replace(mask=part[k].mask[: len(part[item].ids)]))
    return files


def store(root: Path, files: Sequence[Sample], first: int = 0) -> Path:
    make.legacy(root / f"rows_{first}-{first + len(files)}", files, IDS, first)
    return root


def found_order(found: list[Finding]) -> Finding:
    assert [f.kind for f in faults(found)] == ["mask_order"], [f.words for f in faults(found)]
    return faults(found)[0]


@pytest.mark.parametrize("template", [True, False], ids=["by tokens", "by lengths"])
@pytest.mark.parametrize(("batch", "first"), [(11, 0), (16, 2000), (32, 0)])
def test_masks_in_list_order_beside_results_in_text_order_are_found_with_the_batch_size(
    tmp_path: Path, folder: Path, rule: MaskRule, batch: int, first: int, template: bool
) -> None:
    root = store(tmp_path, as_0_4_0(chats(folder, 40), batch), first)
    fault = found_order(look(root, points=None, masks_of=rule if template else None))
    assert fault.file == f"rows_{first}-{first + 40}" and fault.detail["batch"] == batch
    assert fault.detail["starts"] == tuple(range(first, first + 40, batch))
    assert f"in batches of {batch} rows" in fault.found and '"10" before "2"' in fault.found and "0.4.0" in fault.found
    assert "nothing is extracted again" in fault.do


def test_a_folder_smaller_than_its_batch_is_explained_too(tmp_path: Path, folder: Path, rule: MaskRule) -> None:
    fault = found_order(look(store(tmp_path, as_0_4_0(chats(folder, 40), 64)), points=None, masks_of=rule))
    assert fault.detail["batch"] == 0 and "as large as the folder or larger" in fault.found


@pytest.mark.parametrize("batch", [1, 8, 10])
def test_a_batch_of_ten_rows_or_fewer_sorts_the_same_either_way(
    tmp_path: Path, folder: Path, rule: MaskRule, batch: int
) -> None:
    assert faults(look(store(tmp_path, as_0_4_0(chats(folder, 40), batch)), points=None, masks_of=rule)) == []


def test_a_run_that_crashed_within_a_batch_and_was_resumed_is_explained(
    tmp_path: Path, folder: Path, rule: MaskRule
) -> None:
    rows = chats(folder, 60)
    written = as_0_4_0(rows, 16)[:39]  # seven files of the third batch
    files = [*written, *as_0_4_0(rows[39:], 16)]
    found = look(store(tmp_path, files), points=None, masks_of=rule)
    fault = next(f for f in found if f.kind == "mask_order")
    assert fault.detail["batch"] == 16 and fault.detail["starts"] == (0, 16, 32, 39, 55)
    assert {f.kind for f in faults(found)} <= {"mask_order", "duplicate"}, "a resumed run repeats rows"


def test_masks_are_taken_from_where_they_stand_whole_and_made_from_the_tokens_elsewhere(
    tmp_path: Path, folder: Path, rule: MaskRule
) -> None:
    rows = chats(folder, 40)
    right = {tuple(s.ids.tolist()): bytes(s.mask.tolist()) for s in rows}
    stored = list(open_store(store(tmp_path, as_0_4_0(rows, 16))).rows())
    facts = {f.number: f for row in stored if (f := mask_facts(row, rule))}
    explained = explain(facts)
    assert explained is not None
    masks, made = own_masks({n: f"data_{n}.pt" for n in facts}, explained[1], explained[0])
    own = {int(row.index): right[tuple(row.input_ids.tolist())] for row in stored}
    assert masks == {n: own[n] for n in explained[0].misplaced} and 0 < len(made) < len(masks)
    again = [replace(f, mask=masks.get(n, f.mask)) for n, f in facts.items()]
    assert find_order(again) is None and all(f.in_place for f in again)


def test_masks_that_were_not_cut_are_put_back_without_a_template(tmp_path: Path, folder: Path) -> None:
    rows = chats(folder, 24, length=150)
    right = {tuple(s.ids.tolist()): bytes(s.mask.tolist()) for s in rows}
    stored = list(open_store(store(tmp_path, as_0_4_0(rows, 12))).rows())
    facts = {f.number: f for row in stored if (f := mask_facts(row, None))}
    source = {12 * b + k: 12 * b + item for b in range(2) for k, item in enumerate(text_order(12))}
    order = MaskOrder(12, (0, 12), source, tuple(range(24)))
    masks, made = own_masks({n: "data" for n in facts}, facts, order)
    assert not made and all(masks[int(r.index)] == right[tuple(r.input_ids.tolist())] for r in stored)
    cut = {n: replace(f, mask=f.mask[:100]) for n, f in facts.items()}
    with pytest.raises(DataError, match=r"own mask is not whole(.|\n)*100, cut to that row's length(.|\n)*template"):
        own_masks({n: "data" for n in cut}, cut, order)
    blank = {n: replace(f, right=bytes(150)) for n, f in cut.items()}
    with pytest.raises(DataError, match=r"No loss mask can be rebuilt for a row(.|\n)*data: its mask(.|\n)*header"):
        own_masks({n: "data" for n in blank}, blank, order)


def test_a_single_wrong_mask_is_named_with_the_token_where_it_departs(
    tmp_path: Path, folder: Path, rule: MaskRule
) -> None:
    rows = chats(folder, 12)
    at = int(rows[4].mask.nonzero()[0])
    rows[4].mask[at] = 0
    (fault,) = faults(look(store(tmp_path, rows), points=None, masks_of=rule))
    assert (fault.kind, fault.index) == ("mask", 4)
    assert f"1 of {len(rows[4].ids)} tokens differ, the first is token {at}" in fault.found


def test_a_sample_of_rows_with_their_neighbours_shows_the_order_and_each_damaged_file_once(
    tmp_path: Path, folder: Path, rule: MaskRule
) -> None:
    opened = open_store(store(tmp_path, as_0_4_0(chats(folder, 40), 16)))
    (opened.root / opened.files[30].path).write_bytes(b"")
    found = check_values(
        read_each(opened.row, opened.files[::10]),
        target=None,
        points=None,
        last_state="unknown",
        masks_of=rule,
        others=read_each(opened.row, opened.files),
    )
    by_kind = {f.kind: f for f in faults(found)}
    assert by_kind["mask_order"].detail["batch"] == 16 and set(by_kind) == {"mask_order", "unreadable"}
    assert sum(f.kind == "unreadable" for f in found) == 1


def test_a_few_scattered_rows_are_no_evidence_of_an_order(folder: Path, rule: MaskRule) -> None:
    files = as_0_4_0(chats(folder, 40), 16)
    facts = []
    for number in (3, 9, 20, 30, 37):
        s = files[number]
        right = bytes(rule(s.ids).tolist())
        facts.append(MaskFacts(number, len(s.ids), bytes(s.mask.tolist()), right))
    assert find_order(facts) is None


def test_masks_that_are_wrong_for_another_reason_are_not_explained_away() -> None:
    g = torch.Generator().manual_seed(1)
    facts = []
    for number in range(300):
        right = bytes(torch.randint(0, 2, (30,), generator=g).tolist())
        stored = right if number % 10 else bytes(30)  # a tenth: too few for an order
        if number % 3 == 0:
            stored = right[1:] + b"\1"  # a third off by one: enough to be looked into, and no order
        facts.append(MaskFacts(number, 30, stored, right))
    assert find_order(facts) is None
    assert find_order([f for f in facts if f.number % 3]) is None


def test_a_permuted_store_is_adopted_with_the_prepared_masks_and_loses_no_row(tmp_path: Path, folder: Path) -> None:
    rows = chats(folder, 24)
    wanted = []
    for s in rows:
        ids, mask = s.ids.numpy().astype(np.int32), s.mask.numpy().astype(np.uint8)
        wanted.append(Row(row_id(ids, mask), ids, mask))
    found = match(open_store(store(tmp_path, as_0_4_0(rows, 12))), wanted, 3, make.HIDDEN)
    assert len(found.home) == 24 and found.faulty == {} and found.counts["differing_masks"] == 2 * 10


def test_an_id_beyond_32_bits_is_not_taken_for_the_token_that_its_lower_half_names(
    tmp_path: Path, folder: Path
) -> None:
    rows = chats(folder, 2)
    wanted = [s.ids.numpy().astype(np.int32) for s in rows]
    masks = [s.mask.numpy().astype(np.uint8) for s in rows]
    rows[0].ids[3] += 1 << 32
    found = match(
        open_store(store(tmp_path, rows)),
        [Row(row_id(i, m), i, m) for i, m in zip(wanted, masks, strict=True)],
        3,
        make.HIDDEN,
    )
    assert list(found.home) == [row_id(wanted[1], masks[1])] and found.counts["unused"] == 1


def test_numbers_sorted_as_text() -> None:
    assert text_order(12) == [0, 1, 10, 11, 2, 3, 4, 5, 6, 7, 8, 9] and text_order(10) == list(range(10))
    for count in (1, 9, 10, 11, 12, 99, 100, 101, 1234):
        assert [text_rank(number, count) for number in text_order(count)] == list(range(count))


def test_rules_follow_the_template_and_the_one_the_masks_follow_is_chosen(folder: Path) -> None:
    rows = chats(folder, 6)
    with_end, without_end = template_rules(folder)
    assert (with_end.kept, without_end.kept, with_end.closing) == (1, 0, (END,))
    assert all(torch.equal(with_end(s.ids).long(), s.mask) for s in rows)
    plain = [RowHead(i, f"data_{i}.pt", s.ids, s.mask, (), None) for i, s in enumerate(rows)]
    assert choose_rule(plain, (with_end, without_end)) is with_end
    content = [RowHead(i, f"data_{i}.pt", s.ids, without_end(s.ids), (), None) for i, s in enumerate(rows)]
    assert choose_rule(content, (with_end, without_end)) is without_end


def test_several_turns_a_cut_answer_and_a_header_that_a_user_wrote_as_text(folder: Path, rule: MaskRule) -> None:
    from tokenizers import Tokenizer

    encode = Tokenizer.from_file(str(folder / "tokenizer.json")).encode
    header, question = (
        encode(t, add_special_tokens=False).ids for t in ("<|im_start|>assistant\n", "<|im_start|>user\nhi")
    )
    typed = [
        encode(c, add_special_tokens=False).ids[0] for c in "<|im_start|>assistant"
    ]  # byte by byte: no control token
    ids = [*question, *typed, END, *header, 77, 78, END, *question, END, *header, 79]
    mask = (
        [0] * (len(question) + len(typed) + 1 + len(header)) + [1, 1, 1] + [0] * (len(question) + 1 + len(header)) + [1]
    )
    assert rule(torch.tensor(ids)).tolist() == mask


def test_a_template_that_hides_where_an_answer_begins_gives_no_rule() -> None:
    with pytest.raises(DataError, match=r"cannot be recomputed from this chat template(.|\n)*none is made up"):
        rules_of(lambda messages, prompt: [ord(c) for m in messages for c in m["content"]])
