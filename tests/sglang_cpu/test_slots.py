"""Cache slots are noted, read, packed and copied for each request by itself."""

from __future__ import annotations

import torch
from draftline_sglang_cpu import slots

ROWS = torch.tensor([2, 0])


def test_slots_written_for_positions_are_read_back() -> None:
    table = torch.zeros(3, 8, dtype=torch.int32)
    start, end = torch.tensor([1, 4]), torch.tensor([4, 4])
    slots.assign_req_to_token_pool(ROWS, table, start, end, torch.tensor([11, 12, 13]), 8)
    assert table[2].tolist() == [0, 11, 12, 13, 0, 0, 0, 0] and not table[0].any()
    out = torch.zeros(3, dtype=torch.long)
    slots.assign_extend_cache_locs(ROWS, table, start, end, out, 8)
    assert out.tolist() == [11, 12, 13]


def test_a_branch_has_the_verified_positions_and_its_own_slots() -> None:
    table = torch.arange(24, dtype=torch.int32).view(3, 8)
    lengths = torch.tensor([2, 3])
    out = torch.zeros(8, dtype=torch.long)
    slots.assign_draft_cache_locs_contiguous(ROWS, table, lengths, out, 8, 2, 2)
    assert out.tolist() == [18, 19, 20, 21, 3, 4, 5, 6]
    branches = slots.build_draft_decode_metadata(table, ROWS, lengths, 2, 2, 8)
    assert branches[:2, :4].tolist() == [[16, 17, 18, 19], [16, 17, 20, 21]]
    assert branches[2:, :5].tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 5, 6]]


def test_accepted_tokens_are_packed_and_the_bonus_is_the_last_of_each() -> None:
    bonus = torch.zeros(2, dtype=torch.long)
    slots.fill_bonus_tokens(torch.tensor([1, 2, 3, 4, 5, 6]), torch.tensor([3, 1]), bonus, 3)
    assert bonus.tolist() == [3, 4]
    out = torch.zeros(4, dtype=torch.long)
    slots.fill_accept_out_cache_loc(torch.tensor([[0, 2, -1], [3, -1, -1]]), torch.tensor([10, 11, 12, 13]), out)
    assert out.tolist() == [10, 12, 13, 0]


def test_overlapping_slots_are_copied_as_they_were_before() -> None:
    layers = [torch.arange(8.0).view(4, 2), torch.arange(8.0, 16.0).view(4, 2)]
    before = [layer.clone() for layer in layers]
    pointers = torch.tensor([layer.data_ptr() for layer in layers])
    slots.copy_all_layer_kv_cache(pointers, torch.tensor([8, 8]), torch.tensor([1, 2]), torch.tensor([0, 1]))
    for layer, old in zip(layers, before, strict=True):
        assert torch.equal(layer, old[[0, 0, 1, 3]])


def test_ids_move_one_to_the_left_and_the_new_one_comes_last() -> None:
    ids = torch.tensor([1, 2, 3, 4, 5])
    starts, lengths = torch.tensor([0, 3]), torch.tensor([3, 2])
    slots.rotate_input_ids(ids, starts, lengths, torch.tensor([[8], [9]]))
    assert ids.tolist() == [2, 3, 8, 5, 9]
    slots.rotate_input_ids(ids, starts, lengths, torch.tensor([[6], [7]]), torch.tensor([1, 3]))
    assert ids.tolist() == [3, 6, 8, 7, 9]
