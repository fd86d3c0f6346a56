"""Faults that a stored row shows without the target."""

from __future__ import annotations

import torch

from stages.capture.probe import ProbeRow
from stages.capture.row_faults import row_faults


def row(name: str, ids: torch.Tensor, states: torch.Tensor) -> ProbeRow:
    return ProbeRow(name, ids, torch.ones(len(ids), dtype=torch.uint8), states)


def test_a_prefix_of_another_rows_states_is_found_and_a_shared_prompt_is_not() -> None:
    noise = torch.Generator().manual_seed(1)
    states = [torch.randn(40, 4, 8, generator=noise).bfloat16() for _ in range(3)]
    ids = [torch.randint(0, 100, (40,), generator=noise) for _ in range(3)]
    ids[1][:20], states[1][:20] = ids[0][:20], states[0][:20]  # the same prompt, so the same states
    honest = row_faults("rows_0-3", [row(str(i), *pair) for i, pair in enumerate(zip(ids, states, strict=True))], {})
    assert [f.copy_of for f in honest] == ["none"] * 3
    states[2][:20] = states[0][:20]  # another prompt, and the first row's states all the same
    torn = row_faults("rows_0-3", [row(str(i), *pair) for i, pair in enumerate(zip(ids, states, strict=True))], {})
    assert [f.copy_of for f in torn] == ["none", "none", "0"]
