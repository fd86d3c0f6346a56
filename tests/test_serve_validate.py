"""stages/serve_validate.py on the tiny line: parity by value, losslessness, accept length served and simulated, samples."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from stages import _serve_both_ways, _serve_sampling, extract, merge, serve_validate, train
from stages.contracts.draft import DRAFT, DRAFT_RECORD, DraftRecord
from stages.contracts.errors import DataError, EngineError, Refusal
from stages.contracts.evidence import SERVE_EVIDENCE, ServeEvidence
from stages.contracts.manifest import MERGED_MANIFEST, PREPARED, MergedManifest
from stages.engines import in_process
from stages.engines._choose import verify_greedy
from stages.engines.in_process import Answer, InProcess
from stages.targets import load_target
from tests import line, tiny


@pytest.fixture(scope="module")
def trained_line(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which everything up to train has run."""
    root = tmp_path_factory.mktemp("line")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        target = tiny.make_target(root / "target")
        line.write_params(root, target)
        prepared = line.write_prepared(root, target)
        line.write_gate_report(root, "extraction", prepared.digest())
        extract.main()
        merge.main()
        line.write_gate_report(root, "training", MergedManifest.read(MERGED_MANIFEST).digest())
        train.main()
    return root


@pytest.fixture
def here(trained_line: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the line, as the current folder; few draws."""
    shutil.copytree(trained_line, tmp_path / "line")
    monkeypatch.chdir(tmp_path / "line")
    monkeypatch.setattr(_serve_sampling, "SAMPLES", 128)
    set_params()
    threads = torch.get_num_threads()
    yield Path()
    torch.set_num_threads(threads)


def set_params(**values: object) -> None:
    serve = {"prompts_per_source": 3, "max_new_tokens": 24, "concurrency": 3, "parity_rows": 3} | values
    line.write_params(Path(), Path("target").absolute(), {"serve": serve})


def served() -> ServeEvidence:
    serve_validate.main()
    return ServeEvidence.read(SERVE_EVIDENCE)


def set_layer_ids(*ids: int) -> None:
    config = json.loads((DRAFT / "config.json").read_text())
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = list(ids)
    (DRAFT / "config.json").write_text(json.dumps(config))


def test_a_sound_draft_is_fed_its_points_stays_lossless_and_takes_as_many_verifications_as_simulated(
    here: Path,
) -> None:
    evidence = served()
    record = DraftRecord.read(DRAFT / DRAFT_RECORD)
    assert evidence.draft_digest == record.digest()
    assert [s.nearest_point for s in evidence.parity] == list(tiny.POINTS) == [s.claimed_point for s in evidence.parity]
    assert evidence.parity_words == "as claimed"
    for slot in evidence.parity:
        assert slot.claimed_distance < 1e-5 < 0.05 < slot.next_best_distance
    assert evidence.greedy.identical == evidence.greedy.requests == len(evidence.requests) > 4
    compared = [r for r in evidence.requests if r.simulated_verifications is not None]
    assert len(compared) == len(evidence.requests)
    assert [r.simulated_verifications for r in compared] == [r.verifications for r in compared]
    assert [sorted(r.simulated_accepted or ()) for r in compared] == [sorted(r.accepted) for r in compared]
    by_length = evidence.served_by_length
    assert sum(a.requests for a in by_length.values()) == len(evidence.requests)
    assert sum(a.verifications for a in by_length.values()) == evidence.served.verifications
    assert sum(g.requests for g in evidence.greedy_by_domain.values()) == evidence.greedy.requests
    (stops,) = evidence.stops
    assert (stops.condition, stops.differing_prompt_ids) == ("token", ()) and stops.inside_a_draft > 0
    assert stops.plain_right == stops.drafted_right == stops.requests > 4
    assert evidence.simulated == evidence.served and evidence.simulated_by_domain == evidence.served_by_domain
    assert set(evidence.served_by_domain) == {"agentic", "coding", "general"}
    for r in evidence.requests:
        assert len(r.accepted) == r.verifications and max(r.accepted) <= evidence.draft_steps
        assert r.tokens - 1 <= sum(r.accepted) + r.verifications <= r.tokens
    assert evidence.sampling is not None and evidence.sampling.prompts == 2 and evidence.sampling.draws == 128
    assert evidence.sampling.distance < 0.2


def test_equal_inputs_give_equal_evidence(here: Path) -> None:
    served()
    first = SERVE_EVIDENCE.read_bytes()
    served()
    assert SERVE_EVIDENCE.read_bytes() == first


def test_the_embedding_put_first_is_named_though_output_is_right(here: Path) -> None:
    """The fault seen in the field: trained on 1, 3, 5 and served with the embedding, 1 and 3."""
    set_layer_ids(-1, 0, 2)
    evidence = served()
    assert [s.nearest_point for s in evidence.parity] == [0, 1, 3]
    assert [s.claimed_point for s in evidence.parity] == [1, 3, 5]
    assert "the embedding was put first and the last point dropped" in evidence.parity_words
    assert "a slot holds the embedding (point 0)" in evidence.parity_words
    assert evidence.greedy.identical == evidence.greedy.requests  # losslessness cannot see it
    assert all(s.claimed_distance > s.distance for s in evidence.parity)


def test_a_shift_of_every_point_by_one_layer_is_named(here: Path) -> None:
    set_layer_ids(-1, 1, 3)
    assert served().parity_words.startswith("every slot is shifted by -1 layer")


def test_a_shift_onto_the_last_point_is_named_where_the_engine_cannot_give_it(here: Path) -> None:
    set_layer_ids(1, 3, 5)
    with pytest.raises(
        EngineError, match=r"every slot is shifted by \+1 layer; a slot holds the last point \(6\)"
    ) as error:
        serve_validate.main()
    assert "[1, 3, 5]" in error.value.got and "[0, 2, 4]" in error.value.expected


def test_one_request_fed_other_states_speaks_for_its_slots(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = serve_validate.serve_both_ways

    def one_swapped(*what):  # type: ignore[no-untyped-def]
        both = honest(*what)
        name = sorted(both.fed)[0]
        both.fed[name] = [torch.cat([*aux.chunk(3, -1)][::-1], -1) for aux in both.fed[name]]
        return both

    monkeypatch.setattr(serve_validate, "serve_both_ways", one_swapped)
    evidence = served()
    assert [s.nearest_point for s in evidence.parity] == [5, 3, 1] and "swapped" in evidence.parity_words
    assert {s.rows for s in evidence.parity} == {3}


def test_doubled_layer_ids_are_refused_before_anything_is_served(here: Path) -> None:
    set_layer_ids(0, 2, 2)
    with pytest.raises(EngineError, match=r"doubled ids count once"):
        serve_validate.main()
    assert not SERVE_EVIDENCE.exists()


def test_an_engine_that_takes_wrong_tokens_is_found_out(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A verification that keeps the first drafted token whatever it is."""

    def careless(logits: torch.Tensor, drafted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        emitted, accepted = verify_greedy(logits, drafted)
        emitted[:, 0] = drafted[:, 0]
        return emitted, accepted.clamp(min=1)

    monkeypatch.setattr(in_process, "verify_greedy", careless)
    greedy = served().greedy
    assert greedy.identical < greedy.requests
    assert len(greedy.differing_prompt_ids) == greedy.requests - greedy.identical - greedy.near_ties > 0


def test_answers_unlike_the_stored_ones_are_served_but_not_simulated(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = InProcess.generate

    def other(self: InProcess, requests: list[in_process.Request], **how: object) -> list[Answer]:
        answers = generate(self, requests, **how)  # type: ignore[arg-type]
        first = answers[0]
        return [Answer(first.prompt_id, (9, *first.ids[1:]), "length", first.accepted, 1.0, 1.0), *answers[1:]]

    monkeypatch.setattr(InProcess, "generate", other)
    evidence = served()
    assert [r.simulated_verifications is None for r in evidence.requests] == [True] + [False] * (
        len(evidence.requests) - 1
    )


def test_sampling_can_be_switched_off(here: Path) -> None:
    set_params(sampling_prompts=0)
    assert served().sampling is None


def test_a_draft_of_other_bytes_is_refused(here: Path) -> None:
    weights = DRAFT / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(Refusal, match="the draft's weights") as refusal:
        serve_validate.main()
    assert "dvc repro train" in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "what"),
    [("tokenizer_config.json", "the target's chat template"), ("tokenizer.json", "the target's tokenizer")],
)
def test_a_target_that_renders_otherwise_than_the_rows_were_prepared_is_refused(
    here: Path, name: str, what: str
) -> None:
    path = Path("target") / name
    path.write_text(path.read_text().replace("Be brief.", "Be kind.") + " ")
    with pytest.raises(Refusal, match=what) as refusal:
        serve_validate.main()
    assert "dvc repro prepare" in str(refusal.value)


def test_prepared_rows_that_were_edited_are_refused(here: Path) -> None:
    path = PREPARED / "code" / "rows.parquet"
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(DataError, match="not those that were written"):
        serve_validate.main()


def test_only_a_parting_at_equal_logits_is_a_near_tie(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = load_target(Path("target"))
    prompt = tuple(range(5, 15))
    logits = target.logits(target.packed(torch.tensor(prompt), [len(prompt)]).last[-1])
    one, other = logits.topk(2).indices.tolist()
    assert not _serve_both_ways.near_tie(target, prompt, [one, 5], [other, 5])
    assert not _serve_both_ways.near_tie(target, prompt, [one], [one, 5])  # one answer goes on: no parting of choices
    monkeypatch.setattr(target, "head_weight", target.head_weight)
    target.head.weight = target.head.weight.clone()
    target.head.weight[other] = target.head.weight[one]
    assert _serve_both_ways.near_tie(target, prompt, [one, 5], [other, 5])


def test_total_variation_counts_likely_tokens_apart_and_the_rest_as_one() -> None:
    exact = torch.tensor([0.4, 0.3, 0.1, 0.1, 0.06, 0.04])
    assert _serve_sampling.total_variation(Counter({0: 40, 1: 30, 2: 10, 3: 10, 5: 10}), exact) == pytest.approx(
        0, abs=1e-6
    )
    assert _serve_sampling.total_variation(Counter({0: 50, 1: 20, 2: 10, 3: 10, 5: 10}), exact) == pytest.approx(0.1)


def test_the_exact_second_token_is_the_average_over_first_tokens(here: Path) -> None:
    target = load_target(Path("target"))
    prompt, first = tuple(range(5, 15)), Counter({7: 3, 9: 1})
    expected = torch.zeros(target.config.vocab_size, dtype=torch.float64)
    for token, count in first.items():
        ids = torch.tensor([*prompt, token])
        last = target.packed(ids, [len(ids)]).last[-1]
        expected += count / 4 * torch.softmax(target.logits(last).double() / 0.7, -1)
    torch.testing.assert_close(_serve_sampling.exact_second(target, prompt, first, 0.7), expected, rtol=1e-4, atol=1e-7)
