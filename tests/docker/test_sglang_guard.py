"""The plug-in of the SGLang image: a draft that is not the one that was judged, or flags that make it inert, stop the server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stages.contracts.files import file_digest

ROOT = Path(__file__).resolve().parents[2]
GUARD = ROOT / "docker/sglang_guard"
sys.path.insert(0, str(GUARD))

from draftline_sglang_guard import VERSION, faults_of, refuse  # noqa: E402 - the image's own package, not installed here

SETTINGS: dict[str, Any] = {
    "speculative_algorithm": "EAGLE3",
    "speculative_eagle_topk": 1,
    "speculative_num_steps": 3,
    "speculative_num_draft_tokens": 4,
    "dtype": "bfloat16",
    "quantization": None,
    "context_length": 2048,
}


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    record = {
        "weights_digest": file_digest(tmp_path / "model.safetensors"),
        "config_digest": file_digest(tmp_path / "config.json"),
        "capture": {"compute_dtype": "bfloat16"},
    }
    (tmp_path / "draft_record.json").write_text(json.dumps(record))
    return tmp_path


def test_the_judged_draft_under_the_right_flags_is_let_through(draft: Path) -> None:
    assert faults_of(SETTINGS, draft, VERSION) == []
    adaptive = SETTINGS | {"speculative_num_draft_tokens": 8, "speculative_adaptive": True}
    assert faults_of(adaptive, draft, VERSION + "+local") == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"speculative_algorithm": "EAGLE"}, "speculative_algorithm EAGLE: an EAGLE-3 draft is inert"),
        ({"speculative_num_draft_tokens": 8}, "speculative_num_draft_tokens 8: a chain of 3 steps verifies 4 tokens"),
        ({"dtype": "float16"}, "dtype float16: the draft was trained on states computed in bfloat16"),
        ({"quantization": "fp8"}, "quantization fp8"),
        ({"context_length": 8192}, "context_length 8192: the draft's max_position_embeddings is 4096"),
    ],
)
def test_flags_under_which_it_cannot_work_are_named(draft: Path, change: dict[str, Any], words: str) -> None:
    (fault,) = faults_of(SETTINGS | change, draft, VERSION)
    assert words in fault


def test_other_layer_ids_other_weights_and_another_version_are_named(draft: Path) -> None:
    """The layer ids stand in config.json, so that an edited one is another file than was judged."""
    (draft / "config.json").write_text(json.dumps({"max_position_embeddings": 4096, "eagle_config": {}}))
    (draft / "model.safetensors").unlink()
    version, weights, config = faults_of(SETTINGS, draft, "0.5.24")
    assert (
        "0.5.24" in version
        and weights.startswith("model.safetensors is missing")
        and config.startswith("config.json is")
    )


class Arguments:
    """SGLang's ServerArgs, as far as the plug-in looks."""

    def __init__(self, draft: Path | None) -> None:
        self.draft = draft

    def resolved_dict(self) -> dict[str, Any]:
        return SETTINGS | {"speculative_draft_model_path": self.draft and str(self.draft), "dtype": "float16"}


def test_the_server_is_stopped_in_words_and_other_people_s_drafts_are_let_be(
    draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = type(sys)("sglang")
    fake.__version__ = VERSION  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang", fake)
    with pytest.raises(ValueError, match=r"would not be served as it was judged(.|\n)*dtype float16"):
        refuse(Arguments(draft))
    (draft / "draft_record.json").unlink()
    refuse(Arguments(draft))
    refuse(Arguments(None))


def test_the_image_installs_and_checks_it() -> None:
    text = (ROOT / "docker/sglang.Dockerfile").read_text()
    assert f"ARG SGLANG_VERSION=v{VERSION}" in text
    assert "pip install --no-cache-dir --no-deps /opt/sglang_guard && python3 -m draftline_sglang_guard" in text
    assert "COPY sglang_guard" in text and "sed -i" not in text


@pytest.mark.sglang
def test_sglang_itself_finds_the_plug_in_and_its_hook_has_a_place(tmp_path: Path) -> None:
    """What the image's build runs, in the CPU environment, the plug-in installed into a folder of its own."""
    python = ROOT / ".venv-sglang/bin/python"
    into = tmp_path / "plugin"
    install = [str(python), "-m", "pip", "install", "--no-deps", "--target", str(into), "--no-build-isolation"]
    copied = tmp_path / "guard"
    subprocess.run(["cp", "-r", str(GUARD), str(copied)], check=True)
    subprocess.run([*install, str(copied)], check=True, capture_output=True)
    env = {"PYTHONPATH": str(into), "SGLANG_USE_CPU_ENGINE": "1", "PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1"}
    told = subprocess.run([str(python), "-m", "draftline_sglang_guard"], env=env, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr[-2000:]
    assert f"draftline guard is in place in SGLang {VERSION}" in told.stdout
