"""export_draft on the tiny line: what stands there, what is refused, and what the peer's own reader and model make of it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from stages import export_draft, train
from stages.contracts.draft import DRAFT, DRAFT_RECORD, DraftRecord
from stages.contracts.errors import LineError, Refusal
from stages.contracts.files import file_digest
from stages.drafts.eagle3 import PackedBatch, look_ahead, read_draft, start_draft
from stages.targets import load_target
from tests import line, tiny
from tests.bridges.test_peers import ask
from tests.capture.conftest import bytes_of
from tests.test_train import merged_line  # noqa: F401


@pytest.fixture(scope="module")
def trained_line(merged_line: Path) -> Path:  # noqa: F811
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(merged_line)
        line.write_params(Path(), Path("target").absolute(), {"train": {"export_dtype": "bfloat16"}})
        threads = torch.get_num_threads()
        train.main()
        torch.set_num_threads(threads)
        Path("tiny").symlink_to("target")  # what the draft's record calls its target
    return merged_line


@pytest.fixture
def here(trained_line: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    shutil.copytree(trained_line, tmp_path / "line", symlinks=True)
    monkeypatch.chdir(tmp_path / "line")
    threads = torch.get_num_threads()
    yield Path()
    torch.set_num_threads(threads)


def export(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["export_draft", *arguments])
    export_draft.main()


@pytest.mark.parametrize("name", ["vllm", "speculators"])
def test_an_export_is_described_by_a_record_of_its_own_and_has_the_drafts_points(
    here: Path, monkeypatch: pytest.MonkeyPatch, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    export(monkeypatch, name, "out")
    record, own = DraftRecord.read(Path("out") / DRAFT_RECORD), DraftRecord.read(DRAFT / DRAFT_RECORD)
    assert record.exported_for == name and record.layer_ids == tiny.POINTS == record.points
    assert own.layer_ids == tuple(p - 1 for p in tiny.POINTS), "SGLang numbers the same places otherwise"
    assert record.weights_digest == file_digest(Path("out/model.safetensors"))
    assert record.config_digest == file_digest(Path("out/config.json")) and record.merged_digest == own.merged_digest
    assert load_file("out/model.safetensors")["fc.weight"].dtype == torch.bfloat16
    assert "layer ids [1, 3, 5] for points [1, 3, 5]; read back, all equal" in capsys.readouterr().out
    export(monkeypatch, name, "out")


def test_what_was_measured_while_training_is_what_the_bfloat16_files_say(here: Path) -> None:
    from stages._train_judge import evaluate
    from stages.contracts.evidence import TRAIN_METRICS, TrainMetrics

    inputs = train.read_inputs(train.load_params(), "cpu")
    again = read_draft(DRAFT).module(inputs.draft.embedding)
    found = evaluate(again, inputs.teacher, inputs.rows, inputs.params)
    assert found.overall == TrainMetrics.read(TRAIN_METRICS).overall


def test_other_files_are_not_replaced_and_other_words_are_told(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("mine").mkdir()
    Path("mine/notes.txt").write_text("mine")
    with pytest.raises(Refusal, match="Something else stands where the export is to go"):
        export(monkeypatch, "vllm", "mine")
    for kept in (DRAFT, DRAFT / "vllm", Path("releases/one/vllm")):
        with pytest.raises(Refusal, match=f"a place in {kept.parts[0]}"):
            export(monkeypatch, "vllm", str(kept))
    with pytest.raises(LineError, match=r"speculators \| vllm, then a folder"):
        export(monkeypatch, "onnx", "out")
    assert Path("mine/notes.txt").read_text() == "mine"


def test_a_draft_of_the_line_is_no_earlier_export_wherever_it_is(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(DRAFT, "last_week")
    before = bytes_of(Path("last_week"))
    with pytest.raises(Refusal, match="files of another origin"):
        export(monkeypatch, "speculators", "last_week")
    assert bytes_of(Path("last_week")) == before


def test_a_draft_that_is_not_its_records_is_not_exported(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = load_file(DRAFT / "model.safetensors")
    (DRAFT / "model.safetensors").unlink()
    save_file(tensors | {"norm.weight": tensors["norm.weight"] * 2}, DRAFT / "model.safetensors")
    with pytest.raises(Refusal, match="The draft's record is of other bytes: its weights"):
        export(monkeypatch, "vllm", "out")
    assert not Path("out").exists()


THEIRS = """
import sys, json, torch
from speculators.config import SpeculatorModelConfig
from speculators.models.eagle3 import Eagle3DraftModel
config = SpeculatorModelConfig.from_pretrained(sys.argv[1])
config.transformer_layer_config._attn_implementation = 'eager'
model = Eagle3DraftModel.from_pretrained(sys.argv[1], config=config).float().eval()
given = torch.load(sys.argv[2], weights_only=True)
sums = {n: float(t.detach().double().abs().sum()) for n, t in model.named_parameters() if not n.startswith('verifier')}
with torch.no_grad():
    said = model(given['aux'][None], given['ids'][None], torch.zeros_like(given['ids'])[None], ttt_steps=3)
ids = model.d2t + torch.arange(len(model.d2t)) if model.d2t is not None else torch.arange(model.draft_vocab_size)
print(json.dumps({'sums': sums, 'ids': list(model.target_layer_ids), 'drafted': [ids[step[0].long()].tolist() for step in said]}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("norms", [(), ("fc_norm", "norm_output"), ("norm_before_fc",)], ids=" ".join)
def test_the_speculators_model_of_these_files_drafts_what_ours_does(
    here: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, norms: tuple[str, ...]
) -> None:
    if norms:
        told = {"export_dtype": "bfloat16", "norms": list(norms), "learning_rate": 0.05}
        line.write_params(Path(), Path("target").absolute(), {"train": told})
        train.main()
    export(monkeypatch, "speculators", "out")
    target, own = load_target(Path("target")), read_draft(DRAFT)
    tokens = torch.randint(0, target.config.vocab_size, (24,), generator=torch.Generator().manual_seed(5))
    stream = target.packed(tokens, [24], tiny.POINTS)
    aux = stream.aux(tiny.POINTS)
    torch.save({"aux": aux[:-1].clone(), "ids": tokens[1:].clone()}, tmp_path / "given.pt")
    theirs = ask("speculators-0.9.0", THEIRS, "out", str(tmp_path / "given.pt"))
    ours = {n.replace("midlayer.", "layers.0."): float(t.double().abs().sum()) for n, t in own.tensors.items()}
    ours["embed_tokens.weight"] = float(target.embedding.bfloat16().double().abs().sum())
    assert theirs["sums"] == pytest.approx(ours) and theirs["ids"] == list(tiny.POINTS)
    sizes = {"heads": tiny.HEADS, "kv_heads": tiny.KV_HEADS, "head_dim": tiny.HEAD_DIM, "intermediate_size": tiny.INTER}
    _, teacher = start_draft(target, own.target_ids(), seed=1, **sizes)
    draft = own.module(target.embedding.bfloat16().float())
    batch = PackedBatch(("row",), (24,), tokens, torch.ones(24, dtype=torch.bool), aux, stream.last)
    with torch.no_grad():
        ahead = look_ahead(draft, teacher, batch, 3, 1.0)
    assert len(ahead.roots) == 22 and ahead.tried == (22, 21, 20)
    for i, tried in enumerate(ahead.tried):
        assert theirs["drafted"][i][:tried] == ahead.drafted[:tried, i].tolist()
