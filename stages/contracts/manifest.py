"""What the data folders say of themselves: prepared rows, hidden states, and the merged set that joins them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from stages.contracts.files import Fact

PREPARED = Path("data/prepared")
HIDDEN_STATES = Path("data/hidden_states")
MERGED = Path("data/merged")
WORK = Path(".cache/states")  # finished folders by what they were captured with; DVC knows nothing of it
QUARANTINE = Path(".cache/quarantine")  # bytes found damaged, each with its reason
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

    `rows_read == rows + sum(rejects.values()) - extra_rows`: nothing is dropped without a reason counted here. extra_rows
    are those beyond the first of conversations whose history the template rewrites; shapes counts what the rows of files
    were. Both are left out where there are none.
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
    extra_rows: int = Field(default=0, exclude_if=lambda rows: rows == 0)
    shapes: dict[str, int] = Field(default_factory=dict, exclude_if=lambda shapes: not shapes)


class PreparedManifest(Fact):
    """data/prepared/prepared.json. answered_by: the engine of the regenerated answers, and under which name a server knew the
    target; template_arguments: what the server has to give the template, beside the date if it writes one; both left out
    where they say nothing."""

    version: Literal[1] = 1
    target: TargetIdentity
    seed: int
    temperature: float
    max_new_tokens: int
    answered_by: str = Field(default="in_process", exclude_if=lambda engine: engine == "in_process")
    template_arguments: dict[str, Any] = Field(default_factory=dict, exclude_if=lambda arguments: not arguments)
    sources: tuple[PreparedSource, ...]
    out_of_distribution_prompts: int
    out_of_distribution_digest: str
    rejects_digest: str


class StoredForm(Fact):
    """Which states a row keeps, and how. The default keeps all of them in bfloat16; see stages/capture/forms.py.

    tokens: `to_last_supervised` keeps nothing behind a row's last supervised token. last: `before_supervised` keeps the
    last state only where the next token is supervised. aux_dtype: `float8_e4m3` has a float32 scale a token and point.
    """

    tokens: Literal["all", "to_last_supervised"] = "all"
    last: Literal["all", "before_supervised"] = "all"
    aux_dtype: Literal["bfloat16", "float8_e4m3"] = "bfloat16"


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
    form: StoredForm = StoredForm()

    @model_serializer(mode="wrap")
    def _without_the_default_form(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Nothing is said of the default form, so that digests made before there were others still hold."""
        told: dict[str, Any] = handler(self)
        if self.form == StoredForm():
            del told["form"]
        return told

    @property
    def key(self) -> str:
        """The name of its folder in the work cache."""
        return self.digest().removeprefix("sha256:")[:24]


class RowGroup(Fact):
    """Rows start..end of a folder (end exclusive, counted from the folder's first), which went through the target together.

    bytes_digest: sha256 over their slices of every tensor, in file order. aux_tokens, last_tokens: how many of their tokens
    keep auxiliary and last states; less than `tokens` in smaller forms only.
    """

    start: int
    end: int
    tokens: int
    aux_tokens: int
    last_tokens: int
    bytes_digest: str


class FolderConfig(Fact):
    """rows_{start}-{end}/data_config.json: one folder, complete in itself. `end` is exclusive.

    rows.safetensors beside it holds `states` bf16 [T, points+1, H] (slots: the points ascending, then the last state),
    `input_ids` i32 [T], `loss_mask` u8 [T], `offsets` i64 [rows+1]; smaller forms are laid out in stages/capture/layout.py.
    head_digest: sha256 of everything before the first row's bytes, which is the header and the offsets. rows_digest:
    digest of head_digest and the groups' digests, so that one pass over the bytes serves both.
    """

    version: Literal[2] = 2
    capture: CaptureSpec
    source: str
    start: int
    end: int
    row_ids: tuple[str, ...]
    tokens: int
    bytes: int
    head_digest: str
    groups: tuple[RowGroup, ...]
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
