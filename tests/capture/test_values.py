"""Value checks over real stores of a tiny target: each way in which stored states go wrong is named, with file and words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stages.capture.findings import Finding, RowHead
from stages.capture.masks import template_rules
from stages.capture.own_rows import own_rows
from stages.capture.spill import capture_rows
from stages.capture.store import RowStore, write_folder
from stages.capture.values import check_values
from stages.targets import load_target
from stages.targets._decoder import Decoder
from tests import tiny
from tests.capture import stores
from tests.capture.conftest import SPEC, make_plan
from tests.capture.stores import LAST, POINTS, Sample, answered, faults, look, states_of, write

Change = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(folder: Path) -> Decoder:
    torch.set_num_threads(1)
    return load_target(folder)


@pytest.fixture(scope="module")
def samples(target: Decoder, folder: Path) -> list[Sample]:
    return answered(target, folder)


def only(found: list[Finding], kind: str, number: int = 3) -> Finding:
    """The one fault of `found`, of `kind`, in data_{number}.pt."""
    assert [f.kind for f in faults(found)] == [kind], [f.words for f in found]
    (fault,) = faults(found)
    assert fault.file == f"rows_0-8/data_{number}.pt" and fault.index == number
    assert fault.what and fault.expected and fault.found and fault.do
    return fault


def test_a_sound_store_gives_notes_and_no_fault(
    tmp_path: Path, target: Decoder, folder: Path, samples: list[Sample]
) -> None:
    rule = template_rules(folder)[0]
    prepared = {i: s.ids for i, s in enumerate(samples)}
    found = look(write(tmp_path, samples, {}), target, masks_of=rule, prepared=lambda row: prepared[row.index])
    assert [f.kind for f in found] == ["probed"]
    assert found[0].note and found[0].detail["rows"] == 8 and float(str(found[0].detail["distance"])) < 3e-3


def put(slot: int, place: Any, value: float) -> Change:
    def change(sample: dict[str, Any]) -> None:
        sample["hidden_states"][slot][place] = value

    return change


def each(change: Callable[[Tensor], Tensor]) -> Change:
    def all_slots(sample: dict[str, Any]) -> None:
        sample["hidden_states"] = [change(s) for s in sample["hidden_states"]]

    return all_slots


def no_mask(sample: dict[str, Any]) -> None:
    sample["loss_mask"] = torch.zeros_like(sample["loss_mask"])


def full_mask(sample: dict[str, Any]) -> None:
    sample["loss_mask"] = torch.ones_like(sample["loss_mask"])


def twice(sample: dict[str, Any]) -> None:
    sample["hidden_states"][1] = sample["hidden_states"][0].clone()


def overflow(sample: dict[str, Any]) -> None:
    """70 000 in float16 is infinity, and a cast keeps it."""
    sample["hidden_states"][2][5, 7] = torch.tensor(70_000.0).half().bfloat16()


BY_THEMSELVES = [
    (put(1, (4, 7), torch.nan), "nan", "1 values: slot 1 tokens 4"),
    (overflow, "inf", "1 values: slot 2 tokens 5"),
    (each(torch.zeros_like), "all_zero", "zeros"),
    (put(0, slice(6, 9), 0.0), "zero_states", "slot 0 tokens 6, 7, 8"),
    (each(lambda s: torch.cat([s[:-4], torch.zeros_like(s[:4])])), "zero_states", "the last 4 tokens: padding"),
    (put(2, slice(None), 3.0), "constant", "slot 2 holds one state throughout"),
    (twice, "equal_slots", "slot 1 holds what an earlier slot holds"),
    (each(Tensor.float), "dtype", "float32"),
    (each(Tensor.half), "dtype", "float16"),
    (lambda s: s["hidden_states"].__setitem__(2, s["hidden_states"][2].float()), "mixed_dtype", "bfloat16, float32"),
    (each(lambda s: s[:, :32].contiguous()), "shape", "4 states of 32 values"),
    (lambda s: s["hidden_states"].pop(), "shape", "3 states of 64 values"),
    (each(lambda s: torch.cat([s, s[-2:]])), "more_states", "states for"),
    (lambda s: s["hidden_states"].__setitem__(0, s["hidden_states"][0][1:]), "slot_lengths", "states a slot"),
    (no_mask, "mask_empty", "zeros"),
    (full_mask, "mask_full", "ones"),
    (lambda s: s.update(loss_mask=s["loss_mask"][:-2]), "mask_length", "for"),
    (lambda s: s.update(loss_mask=s["loss_mask"] * 2), "unreadable", "[0, 2]"),
    (lambda s: s.update(input_ids=s["input_ids"][:0]), "unreadable", "0 tokens"),
]


@pytest.mark.parametrize(("change", "kind", "words"), BY_THEMSELVES)
def test_what_is_wrong_with_a_row_is_told_without_the_target(
    tmp_path: Path, samples: list[Sample], change: Change, kind: str, words: str
) -> None:
    found = [f for f in faults(look(write(tmp_path, samples, {3: change})))]
    # a slot of another dtype is also a set of two dtypes; a shape is also seen in the row's own lengths
    assert kind in [f.kind for f in found] and len(found) <= 2, [f.words for f in found]
    fault = next(f for f in found if f.kind == kind)
    assert fault.file.endswith("rows_0-8/data_3.pt") and words in fault.words and fault.do


def test_a_dtype_apart_is_refused_in_words_and_nothing_is_converted(tmp_path: Path, samples: list[Sample]) -> None:
    fault = only(look(write(tmp_path, samples, {3: each(Tensor.float)})), "dtype")
    assert fault.expected.startswith("bfloat16") and "refused, not converted" in fault.do


@pytest.mark.parametrize(
    "damage", [lambda b: b[: len(b) * 6 // 10], lambda b: b"", lambda b: b"PK\x03\x04" + b"\0" * 200]
)
def test_a_damaged_file_is_named_and_the_others_are_looked_at(
    tmp_path: Path, target: Decoder, samples: list[Sample], damage: Callable[[bytes], bytes]
) -> None:
    path = write(tmp_path, samples, {}) / "rows_0-8/data_3.pt"
    path.write_bytes(damage(path.read_bytes()))
    found = look(tmp_path, target)
    (fault,) = faults(found)
    assert fault.kind == "unreadable" and fault.file.endswith("data_3.pt")
    assert found[-1].kind == "probed" and found[-1].detail["rows"] == 7


def test_a_safetensors_store_with_short_data_is_named(tmp_path: Path, target: Decoder, samples: list[Sample]) -> None:
    stores.make.speculators(tmp_path, samples)
    path = tmp_path / "hs_3.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    (fault,) = faults(look(tmp_path, target))
    assert fault.kind == "unreadable" and fault.file.endswith("hs_3.safetensors")


def recaptured(target: Decoder, *points: int) -> Change:
    def change(sample: dict[str, Any]) -> None:
        sample["hidden_states"] = list(states_of(target, sample["input_ids"], points).unbind(1))

    return change


def after_norm(target: Decoder, state: Tensor) -> Tensor:
    return F.rms_norm(state.float(), (tiny.HIDDEN,), target.norm, target.config.eps).to(state)


@pytest.mark.parametrize(
    ("points", "kind", "words"),
    [
        (
            (2, 4, 6, 6),
            "layers",
            "points [2, 4, 6]: every slot is shifted by +1 layer; a slot holds the last point (6)",
        ),
        ((0, 2, 4, 6), "layers", "every slot is shifted by -1 layer; a slot holds the embedding (point 0)"),
        ((0, 1, 3, 6), "layers", "the embedding was put first and the last point dropped"),
        ((3, 1, 5, 6), "layers", "points [3, 1, 5]: the slots are swapped"),
        ((1, 3, 4, 6), "layers", "slots hold [1, 3, 4]"),
        ((1, 3, 5, 4), "last_slot", "point 4"),
    ],
)
def test_slots_that_hold_other_points_are_named(
    tmp_path: Path, target: Decoder, samples: list[Sample], points: tuple[int, ...], kind: str, words: str
) -> None:
    found = look(write(tmp_path, samples, {3: recaptured(target, *points)}), target)
    kinds = {f.kind for f in faults(found)}
    assert kind in kinds and kinds <= {kind, "equal_slots"}
    fault = next(f for f in faults(found) if f.kind == kind)
    assert fault.file == "rows_0-8/data_3.pt" and words in fault.words
    if kind == "layers":
        assert fault.detail["points"] == list(points[:3])


def test_what_the_slots_hold_is_noted_where_nothing_says_it(
    tmp_path: Path, target: Decoder, samples: list[Sample]
) -> None:
    found = look(write(tmp_path, samples, {}), target, points=None, last_state="unknown")
    assert faults(found) == []
    by_kind = {f.kind: f for f in found}
    assert by_kind["points"].detail["points"] == list(POINTS)
    assert by_kind["last_state"].detail["reading"] == "before_final_norm"
    mixed = look(write(tmp_path, samples, {3: recaptured(target, 2, 4, 5, 6)}), target, points=None)
    assert {f.kind for f in faults(mixed)} == {"mixed_points"}


def test_an_auxiliary_slot_after_the_final_norm_is_no_point(
    tmp_path: Path, target: Decoder, samples: list[Sample]
) -> None:
    def change(sample: dict[str, Any]) -> None:
        sample["hidden_states"][2] = after_norm(target, sample["hidden_states"][3])

    fault = only(look(write(tmp_path, samples, {3: change}), target), "post_norm_slot")
    assert "slot 2" in fault.found and "after the final norm" in fault.what


def normed_last(target: Decoder) -> Change:
    def change(sample: dict[str, Any]) -> None:
        sample["hidden_states"][3] = after_norm(target, sample["hidden_states"][3])

    return change


def test_a_normed_last_state_is_told_by_distance_argmax_and_likelihood(
    tmp_path: Path, target: Decoder, samples: list[Sample]
) -> None:
    root = write(tmp_path, samples, {3: normed_last(target)})
    fault = only(look(root, target), "norm")
    assert fault.what == "The last state was stored after the final norm" and fault.expected == "before the final norm"
    assert "nats a token, argmax" in fault.found and "the target run again" in fault.found
    everywhere = write(tmp_path / "all", samples, dict.fromkeys(range(8), normed_last(target)))
    (note,) = [f for f in look(everywhere, target, last_state="unknown") if f.kind == "last_state"]
    assert note.note and note.detail["reading"] == "after_final_norm"
    assert faults(look(everywhere, target, last_state="after_final_norm")) == []


def test_another_rows_states_are_named_with_their_owner(tmp_path: Path, target: Decoder, samples: list[Sample]) -> None:
    victim = min(range(8), key=lambda i: len(samples[i].ids))
    owner = max(range(8), key=lambda i: len(samples[i].ids))

    def change(sample: dict[str, Any]) -> None:
        other = samples[owner].states[: len(sample["input_ids"])]
        sample["hidden_states"] = list(other.contiguous().unbind(1))

    fault = only(look(write(tmp_path, samples, {victim: change}), target), "wrong_row", victim)
    assert fault.detail["owner"] == owner
    assert f"the states of rows_0-8/data_{owner}.pt ({owner})" in fault.found


def test_two_rows_with_the_same_states_are_told_without_the_target(tmp_path: Path, samples: list[Sample]) -> None:
    def change(sample: dict[str, Any]) -> None:
        sample["hidden_states"] = list(samples[5].states.unbind(1))
        sample["input_ids"] = samples[5].ids.flip(0)
        sample["loss_mask"] = samples[5].mask

    fault = only(look(write(tmp_path, samples, {3: change})), "copied_states", 5)
    assert "the states of rows_0-8/data_3.pt (3)" in fault.found


def test_a_row_stored_twice_in_two_folders_is_named(tmp_path: Path, samples: list[Sample]) -> None:
    stores.make.legacy_rows(tmp_path, [*samples[:4], samples[1], *samples[4:7]], 4, stores.IDS)
    (fault,) = faults(look(tmp_path))
    assert (fault.kind, fault.file) == ("duplicate", "rows_4-8/data_4.pt")
    assert "the tokens of rows_0-4/data_1.pt (1)" in fault.found


def torn(samples: list[Sample], share: float) -> Change:
    """From some token on, states of another row, at other places than its own: a prefill cut in two."""

    def change(sample: dict[str, Any]) -> None:
        own = torch.stack(sample["hidden_states"], 1)
        start = int(len(own) * (1 - share))
        own[start:] = torch.cat([samples[5].states, samples[6].states]).flip(0)[: len(own) - start]
        sample["hidden_states"] = list(own.unbind(1))

    return change


@pytest.mark.parametrize("share", [0.1, 0.4, 0.8])
def test_a_row_of_which_a_part_is_another_rows_is_told_with_its_tokens(
    tmp_path: Path, target: Decoder, samples: list[Sample], share: float
) -> None:
    fault = only(look(write(tmp_path, samples, {3: torn(samples, share)}), target), "torn")
    tokens = fault.detail["tokens"]
    start = int(len(samples[3].ids) * (1 - share))
    assert isinstance(tokens, list) and tokens[-1] == len(samples[3].ids) - 1 and abs(tokens[0] - start) <= 1
    assert f"{tokens[0]} to {tokens[-1]}" in fault.found


def test_states_one_token_late_or_early_are_named(tmp_path: Path, target: Decoder, samples: list[Sample]) -> None:
    late = each(lambda s: torch.cat([s[:1], s[:-1]]))
    early = each(lambda s: torch.cat([s[1:], s[-1:]]))
    found = {f.index: f for f in faults(look(write(tmp_path, samples, {3: late, 4: early}), target))}
    assert {f.kind for f in found.values()} == {"shifted_tokens"}
    assert "too late" in found[3].what and "too early" in found[4].what


def test_states_of_another_target_fit_no_point(tmp_path: Path, target: Decoder, samples: list[Sample]) -> None:
    other = load_target(tiny.make_target(tmp_path / "other", seed=1))
    found = look(write(tmp_path, samples, {3: recaptured(other, *POINTS, LAST)}), target)
    assert "check that the target is the one that was captured" in only(found, "no_point").do


def test_states_of_quantised_weights_are_told_apart_from_rounding(
    tmp_path: Path, target: Decoder, samples: list[Sample]
) -> None:
    noise = torch.Generator().manual_seed(0)
    rough = each(lambda s: (s.float() * (1 + 0.05 * torch.randn(s.shape, generator=noise))).bfloat16())
    fault = only(look(write(tmp_path, samples, {3: rough}), target), "imprecise")
    assert "median 0.003" in fault.expected and "quantisation" in fault.do


def test_ids_outside_the_targets_vocabulary_are_told(tmp_path: Path, target: Decoder, samples: list[Sample]) -> None:
    def change(sample: dict[str, Any]) -> None:
        sample["input_ids"][4] = 5000

    assert "0 to 258" in only(look(write(tmp_path, samples, {3: change}), target), "foreign_ids").expected


@pytest.mark.parametrize(
    ("cut", "kind", "without", "words"),
    [
        (lambda s: s[:-1], "truncated", "loses its last token", "the last 1"),
        (lambda s: s[16:], "prefix_hole", "a multiple of 16", "the first 16 missing"),
        (lambda s: torch.cat([s[:20], s[36:]]), "prefix_hole", "a multiple of 16", "tokens 20 to 35 missing"),
    ],
)
def test_fewer_states_than_tokens_are_told_and_with_the_target_where(
    tmp_path: Path,
    target: Decoder,
    samples: list[Sample],
    cut: Callable[[Tensor], Tensor],
    kind: str,
    without: str,
    words: str,
) -> None:
    root = write(tmp_path, samples, {3: each(cut)})
    assert without in only(look(root), "fewer_states").found
    assert words in only(look(root, target), kind).found


def test_stored_tokens_are_held_against_the_prepared_ones(tmp_path: Path, samples: list[Sample]) -> None:
    def cut(sample: dict[str, Any]) -> None:
        sample |= {k: sample[k][:-1] for k in ("input_ids", "loss_mask")}
        sample["hidden_states"] = [s[:-1] for s in sample["hidden_states"]]

    prepared: dict[Any, Tensor] = {i: s.ids for i, s in enumerate(samples)}
    root = write(tmp_path, samples, {3: cut})
    fault = only(look(root, prepared=lambda row: prepared[row.index]), "truncated")
    assert "its last token is missing" in fault.what and fault.detail["missing"] == 1
    changed = prepared | {5: samples[5].ids.clone().index_fill_(0, torch.tensor([7, 9]), 40)}
    found = look(write(tmp_path / "b", samples, {}), prepared=lambda row: changed[row.index])
    assert "id 40 at token 7" in only(found, "ids", 5).expected
    found = look(
        write(tmp_path / "c", samples, {}), prepared=lambda row: prepared[row.index] if row.index != 2 else None
    )
    assert only(found, "unprepared", 2)
    longer = prepared | {2: samples[2].ids[:-3]}
    found = look(write(tmp_path / "d", samples, {}), prepared=lambda row: longer[row.index])
    assert only(found, "padded", 2)


def test_a_long_row_is_judged_by_its_first_tokens(tmp_path: Path, target: Decoder, samples: list[Sample]) -> None:
    found = look(write(tmp_path, samples, {3: recaptured(target, 2, 4, 5, 6)}), target, max_tokens=12)
    assert only(found, "layers").detail["points"] == [2, 4, 5]


def test_a_row_without_tokens_is_named() -> None:
    none = torch.zeros(0, dtype=torch.long)
    row = RowHead(7, "data_7.pt", none, none, (torch.zeros(0, 64),) * 3, torch.zeros(0, 64))
    (fault,) = check_values([row], target=None, points=POINTS, last_state="unknown")
    assert (fault.kind, fault.index) == ("no_tokens", 7) and "drop the row at its source" in fault.do


def test_our_own_store_goes_through_the_same_checks(tmp_path: Path, target: Decoder) -> None:
    plan = make_plan(range(6))
    spec = SPEC.model_copy(update={"points": POINTS})
    states = list(capture_rows(target, plan.rows, POINTS, 64))
    asked: dict[str, Any] = {
        "target": target,
        "points": POINTS,
        "last_state": "before_final_norm",
        "computed": "float32",
    }
    write_folder(tmp_path / plan.name, plan, spec, states)
    assert faults(check_values(own_rows(RowStore(tmp_path), plan.name), **asked)) == []
    states[2][3, 1, 4] = torch.inf
    states[4] = states[4].roll(1, 0)
    write_folder(tmp_path / "torn" / plan.name, plan, spec, states)
    found = faults(check_values(own_rows(RowStore(tmp_path / "torn"), plan.name), **asked))
    assert {(f.kind, f.index) for f in found} == {("inf", plan.row_ids[2]), ("shifted_tokens", plan.row_ids[4])}
    assert {f.file for f in found} == {plan.name}


def test_a_finding_reads_as_an_error_does_and_names_its_file_first(tmp_path: Path, samples: list[Sample]) -> None:
    fault = only(look(write(tmp_path, samples, {3: put(1, (4, 7), torch.nan)})), "nan")
    first, *rest = fault.words.split("\n")
    assert first == "rows_0-8/data_3.pt: States hold NaN"
    assert [line.split(":")[0].strip() for line in rest] == ["expected", "found", "what to do"]


def test_rows_too_odd_to_compare_are_said_to_be_unprobed(
    tmp_path: Path, target: Decoder, samples: list[Sample]
) -> None:
    found = look(write(tmp_path, samples, dict.fromkeys(range(8), each(torch.zeros_like))), target)
    assert found[-1].kind == "unprobed"
