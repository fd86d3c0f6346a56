"""What the data folders say of themselves: prepared rows, hidden states, and the merged set that joins them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from stages.contracts.files import Fact

PREPARED = Path("data/prepared")
HIDDEN_STATES = Path("data/hidden_states")
MERGED = Path("data/merged")
WORK = Path(".cache/states")  # finished folders by what they were captured with; DVC knows nothing of it
PREPARED_MANIFEST = PREPARED / "prepared.json"
CAPTURE_MANIFEST = HIDDEN_STATES / "data_config.json"
MERGED_MANIFEST = MERGED / "manifest.json"


def renewal(path: Path, stage: str) -> str:
    """What to do about a damaged file below data/: DVC links its cache's copy, so that goes too, or it would come back."""
    return f"`find .dvc/cache -samefile {path} -delete; rm {path}`, then `dvc repro {stage}`"


class TargetIdentity(Fact):
    """Which model: equal digests mean equal weights, equal token ids, equal rendering."""

    name: str
    model_type: str
    layers: int
    hidden_size: int
    vocab_size: int
    weights_digest: str
    tokenizer_digest: str
    template_digest: str


class PreparedSource(Fact):
    """One folder data/prepared/<name>/rows.parquet.

    `rows_read == rows + sum(rejects.values())`: nothing is dropped without a reason counted here.
    """

    name: str
    domain: str
    licence: str
    kind: str
    answers: Literal["regenerate", "given"]
    origin_digest: str
    rows_read: int
    rows: int
    train_rows: int
    held_out_rows: int
    tokens: int
    supervised_tokens: int
    capped: int
    repetitive: int
    rejects: dict[str, int]
    rows_digest: str


class PreparedManifest(Fact):
    """data/prepared/prepared.json."""

    version: Literal[1] = 1
    target: TargetIdentity
    seed: int
    temperature: float
    max_new_tokens: int
    sources: tuple[PreparedSource, ...]
    out_of_distribution_prompts: int
    out_of_distribution_digest: str
    rejects_digest: str


class CaptureSpec(Fact):
    """All that decides the bytes of a stored state, beside the row itself. code_digest: of the code that runs the target
    and lays its states out; states that an old fault in it made wrong are not served to its mended successor.

    Of states adopted from another tool's store (`engine` says so) it digests that store and the code that reads it;
    weights_digest and compute_dtype are then what they are held to, which gate-training proves by value."""

    weights_digest: str
    code_digest: str
    points: tuple[int, ...]
    layers: int
    hidden_size: int
    compute_dtype: str
    stored_dtype: Literal["bfloat16"] = "bfloat16"
    last_state: Literal["before_final_norm"] = "before_final_norm"
    engine: str = "in_process"

    @property
    def key(self) -> str:
        """The name of its folder in the work cache."""
        return self.digest().removeprefix("sha256:")[:24]


class FolderConfig(Fact):
    """rows_{start}-{end}/data_config.json: one folder, complete in itself. `end` is exclusive.

    rows.safetensors beside it holds `states` bf16 [T, points+1, H] (slots: the points ascending, then the last state),
    `input_ids` i32 [T], `loss_mask` u8 [T], `offsets` i64 [rows+1].
    """

    version: Literal[1] = 1
    capture: CaptureSpec
    source: str
    start: int
    end: int
    row_ids: tuple[str, ...]
    tokens: int
    bytes: int
    rows_digest: str

    @property
    def name(self) -> str:
        return f"rows_{self.start}-{self.end}"


class CapturedFolder(Fact):
    name: str
    source: str
    start: int
    end: int
    tokens: int
    config_digest: str
    rows_digest: str


class CaptureManifest(Fact):
    """data/hidden_states/data_config.json."""

    version: Literal[1] = 1
    prepared_digest: str
    capture: CaptureSpec
    slots: tuple[str, ...]
    folders: tuple[CapturedFolder, ...]
    rows: int
    tokens: int


class Coverage(Fact):
    """Share of supervised answer tokens whose id is in the draft vocabulary."""

    train: float
    held_out: float
    by_domain_held_out: dict[str, float]


class MergedManifest(Fact):
    """data/merged/manifest.json. index.parquet has a row a prepared row; vocabulary.safetensors has d2t and t2d."""

    version: Literal[1] = 1
    prepared_digest: str
    capture_digest: str
    target: TargetIdentity
    capture: CaptureSpec
    folders: tuple[CapturedFolder, ...]
    rows: int
    train_rows: int
    held_out_rows: int
    tokens: int
    supervised_tokens: int
    draft_vocab_size: int
    coverage: Coverage
    index_digest: str
    vocabulary_digest: str
