"""The tree of drafted tokens: built from candidates, seen by ancestors alone, verified along the target's own choices."""

from __future__ import annotations

import pytest
import torch
from draftline_sglang_cpu.tree import DRAFT_MASK, FULL_MASK, build_tree, node_parents, verify_greedy, visible
from torch import Tensor


class Tree:
    """What SGLang hands to the kernel, and what it gets back."""

    def __init__(
        self, chosen: list[list[int]], parents: list[list[int]], lengths: list[int], topk: int, mode: int
    ) -> None:
        requests, nodes = len(chosen), len(chosen[0]) + 1
        size = requests * nodes * nodes + (sum(lengths) * nodes if mode == FULL_MASK else 0)
        self.mask = torch.ones(size, dtype=torch.bool)
        self.positions = torch.zeros(requests * nodes, dtype=torch.long)
        self.index, self.child, self.sibling = torch.full((3, requests, nodes), -1)
        build_tree(
            torch.tensor(parents), torch.tensor(chosen), torch.tensor(lengths), self.mask, self.positions, self.index,
            self.child, self.sibling, topk, 3, nodes, mode,
        )  # fmt: skip


def test_a_chain_is_causal_and_links_each_node_to_the_next() -> None:
    tree = Tree([[0, 1, 2]], [[-1, 0, 1]], [5], 1, DRAFT_MASK)
    assert torch.equal(tree.mask.view(4, 4), torch.ones(4, 4, dtype=torch.bool).tril())
    assert tree.positions.tolist() == [5, 6, 7, 8]
    assert tree.child.tolist() == [[1, 2, 3, -1]] and tree.sibling.tolist() == [[-1] * 4]
    assert tree.index.tolist() == [[0, 1, 2, 3]]


# Two candidates a table: 0 and 1 below the root, 2 and 3 below candidate 1, 4 and 5 below candidate 3.
PARENTS = [-1, 1, 3]


def test_branches_hang_below_the_candidate_that_drafted_them() -> None:
    assert node_parents([0, 1, 2, 3, 4], PARENTS, topk=2) == [None, 0, 0, 2, 2, 4]
    tree = Tree([[0, 1, 2, 3, 4]], [PARENTS], [7], 2, DRAFT_MASK)
    assert tree.child.tolist() == [[1, -1, 3, -1, 5, -1]]
    assert tree.sibling.tolist() == [[-1, 2, -1, 4, -1, -1]]
    assert tree.positions.tolist() == [7, 8, 8, 9, 9, 10]
    assert tree.mask.view(6, 6)[5].tolist() == [True, False, True, False, True, True]


def test_a_full_mask_leaves_the_verified_positions_as_they_were() -> None:
    lengths = [3, 2]
    tree = Tree([[0, 1, 2, 3, 4]] * 2, [PARENTS] * 2, lengths, 2, FULL_MASK)
    sees = visible(node_parents([0, 1, 2, 3, 4], PARENTS, 2))
    at = 0
    for length in lengths:
        block = tree.mask[at : at + 6 * (length + 6)].view(6, length + 6)
        assert block[:, :length].all() and torch.equal(block[:, length:], sees)
        at += block.numel()
    assert tree.index.tolist() == [list(range(6)), list(range(6, 12))]


def test_an_unknown_kind_of_mask_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="mask mode 2"):
        Tree([[0]], [[-1]], [1], 1, 2)


def verified(tree: Tree, tokens: Tensor, choices: Tensor, steps: int) -> tuple[list[list[int]], list[int], list[int]]:
    predicts = torch.zeros(tokens.numel(), dtype=torch.int32)
    index = torch.full((len(tokens), steps + 1), -1)
    count = torch.zeros(len(tokens), dtype=torch.int32)
    verify_greedy(predicts, index, count, tokens, tree.index, tree.child, tree.sibling, choices)
    return index.tolist(), count.tolist(), predicts.tolist()


def test_the_walk_follows_the_targets_choices_and_ends_with_its_own_token() -> None:
    tree = Tree([[0, 1, 2, 3, 4]], [PARENTS], [7], 2, DRAFT_MASK)
    tokens = torch.tensor([[9, 10, 11, 12, 13, 14]])
    choices = torch.tensor([[11, 0, 13, 0, 77, 0]])  # root wants node 2, that wants node 4, that wants none there is
    index, count, predicts = verified(tree, tokens, choices, 3)
    assert index == [[0, 2, 4, -1]] and count == [2]
    assert [predicts[i] for i in (0, 2, 4)] == [11, 13, 77]


def test_a_wholly_accepted_chain_yields_the_bonus_too() -> None:
    tree = Tree([[0, 1]] * 2, [[-1, 0]] * 2, [4, 4], 1, DRAFT_MASK)
    tokens = torch.tensor([[1, 2, 3], [1, 2, 3]])
    index, count, predicts = verified(tree, tokens, torch.tensor([[2, 3, 4], [5, 3, 4]]), 2)
    assert count == [2, 0] and index == [[0, 1, 2], [3, -1, -1]]
    assert predicts[:3] == [2, 3, 4] and predicts[3] == 5


@pytest.mark.parametrize("seed", range(5))
def test_the_walk_is_that_of_a_search_over_all_paths(seed: int) -> None:
    """Random trees over a small vocabulary, siblings distinct: exactly one path agrees with the target."""
    g = torch.Generator().manual_seed(seed)
    tree = Tree([[0, 1, 2, 3, 4, 5]], [PARENTS], [2], 2, DRAFT_MASK)
    parent = node_parents([0, 1, 2, 3, 4, 5], PARENTS, 2)
    tokens = torch.tensor([[9, 0, 1, 0, 1, 0, 1]])
    choices = torch.randint(0, 3, (1, 7), generator=g)
    (index,), (count,), _ = verified(tree, tokens, choices, 3)
    good = [0]
    for node in range(1, 7):
        if parent[node] in good and tokens[0, node] == choices[0, parent[node]]:
            good.append(node)
    assert index[: count + 1] == good and count == len(good) - 1
