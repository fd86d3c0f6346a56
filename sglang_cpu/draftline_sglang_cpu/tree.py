"""The tree of drafted tokens, and the greedy walk that verifies it.

Of R requests each has a tree of D nodes: node 0 is the newest verified token, the others are the drafted ones that were chosen,
best first. A chain (topk 1) is the tree without branches. `next_token[r, i]` is node i's first child and `next_sibling[r, i]` the
next child of node i's parent, -1 where there is none.

    drafting     step 0 gives topk candidates of the root, each later step topk of each of the topk best so far:
                 candidate c of the flat list belongs to table c // topk, and table t > 0 hangs below candidate parents[t]
"""

from __future__ import annotations

import torch
from torch import Tensor

FULL_MASK, DRAFT_MASK = (
    0,
    1,
)  # SGLang's TreeMaskMode: the drafted nodes behind all verified positions, or the nodes alone


def build_tree(
    parents: Tensor,
    chosen: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    next_token: Tensor,
    next_sibling: Tensor,
    topk: int,
    depth: int,
    nodes: int,
    mask_mode: int,
) -> None:
    """Fill mask, positions and links of every request's tree, in place.

    Args:
        parents: [R, tables] the candidate below which each table of topk candidates hangs.
        chosen: [R, nodes - 1] candidates in the tree, ascending.
        seq_lens: [R] verified positions.
        tree_mask: flat bool; by mask_mode of each request in turn [nodes, seq_len + nodes] or [nodes, nodes].
        positions: [R·nodes] sequence positions.

    Raises:
        NotImplementedError: a packed mask.
    """
    if mask_mode not in (FULL_MASK, DRAFT_MASK):
        raise NotImplementedError(f"tree mask mode {mask_mode}: only full and draft-only masks are known here")
    mask, position, written = tree_mask.reshape(-1), positions.reshape(-1), 0
    for r, length in enumerate(seq_lens.tolist()):
        parent = node_parents(chosen[r].tolist(), parents[r].tolist(), topk)
        sees = visible(parent)
        width = nodes if mask_mode == DRAFT_MASK else length + nodes
        rows = mask[written : written + nodes * width].view(nodes, width)
        rows[:, width - nodes :] = sees.to(mask.dtype)
        written += nodes * width
        position[r * nodes : (r + 1) * nodes] = (length + sees.sum(1) - 1).to(position.dtype)
        retrieve_index[r] = torch.arange(r * nodes, (r + 1) * nodes)
        _link(parent, next_token[r], next_sibling[r])


def node_parents(chosen: list[int], parents: list[int], topk: int) -> list[int | None]:
    """The parent node of every node; None for the root, and for a candidate whose own parent was not chosen."""
    node_of = {candidate: node for node, candidate in enumerate(chosen, start=1)}
    found: list[int | None] = [None]
    for candidate in chosen:
        table = candidate // topk
        found.append(0 if table == 0 else node_of.get(parents[table]))
    return found


def visible(parent: list[int | None]) -> Tensor:
    """[nodes, nodes] bool: a node sees itself and its ancestors; one without a parent sees the root."""
    sees = torch.eye(len(parent), dtype=torch.bool)
    sees[:, 0] = True
    for node in range(1, len(parent)):
        above = parent[node]
        if above is not None:
            sees[node] |= sees[above]
    return sees


def _link(parent: list[int | None], next_token: Tensor, next_sibling: Tensor) -> None:
    last_child: dict[int, int] = {}
    for node, above in enumerate(parent):
        if above is None:
            continue
        if above in last_child:
            next_sibling[last_child[above]] = node
        else:
            next_token[above] = node
        last_child[above] = node


def verify_greedy(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Walk each tree from its root along the target's own choices, in place.

    Args:
        predicts: [R·nodes] the target's choice at each node of the way, the bonus at its end.
        accept_index: [R, steps + 1] flat indices of the nodes of the way; -1 stays where it ended.
        accept_token_num: [R] drafted tokens accepted.
        candidates: [R, nodes] token of each node.
        target_predict: [R, nodes] the target's choice after each node.
    """
    best = target_predict.reshape(-1).tolist()
    told = (candidates, retrive_index, retrive_next_token, retrive_next_sibling)
    for r, (token, flat, child, sibling) in enumerate(zip(*(x.tolist() for x in told), strict=True)):
        node, accepted = 0, 0
        accept_index[r, 0] = flat[0]
        while True:
            choice = best[flat[node]]
            predicts[flat[node]] = choice
            follower = child[node] if accepted + 1 < accept_index.shape[1] else -1
            while follower != -1 and token[follower] != choice:
                follower = sibling[follower]
            if follower == -1:
                break
            node, accepted = follower, accepted + 1
            accept_index[r, accepted] = flat[node]
        accept_token_num[r] = accepted
