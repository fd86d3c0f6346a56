"""What the watch remembers from one look to the next: logs/drift.json, a ledger with times, no fact of the line."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flows.drifting.metrics import Window
from stages.contracts.errors import DataError
from stages.contracts.files import canonical, write_whole

STATE = Path("logs/drift.json")
KEPT_WINDOWS = 24 * 28


class Judged(BaseModel):
    """One window as it was judged."""

    at: str
    accept_length: float
    verifications: float
    requests: float
    prompt_tokens: float
    lengths: dict[float, float]
    statistic: float
    threshold: float
    changed: list[str] = Field(default_factory=list[str])

    @property
    def prompt_length(self) -> float:
        """Tokens a prompt, mean."""
        return self.prompt_tokens / self.requests if self.requests else 0.0


class Watch(BaseModel):
    """`release` is what is compared with: another one begins anew. `counters` are the last pages', by endpoint; `open` is what
    was served since the last window that was large enough; `quiet_until` counts windows."""

    model_config = ConfigDict(extra="forbid")

    release: str = ""
    counters: dict[str, dict[str, float]] = Field(default_factory=dict[str, dict[str, float]])
    identity: dict[str, dict[str, str]] = Field(default_factory=dict[str, dict[str, str]])
    open: Window = Field(default_factory=Window)
    changed: list[str] = Field(default_factory=list[str])
    reference: list[Judged] = Field(default_factory=list[Judged])
    windows: list[Judged] = Field(default_factory=list[Judged])
    statistic: float = 0.0
    seen: int = 0
    quiet_until: int = 0

    def of(self, release: str) -> Watch:
        """This watch, or a new one when another release is served; the counters go on."""
        if release == self.release:
            return self
        return Watch(release=release, counters=self.counters, identity=self.identity)


def read(root: Path) -> Watch:
    """Raises: DataError: the file is damaged."""
    path = root / STATE
    if not path.exists():
        return Watch()
    try:
        return Watch.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise DataError(
            "The watch's memory cannot be read",
            where=str(path),
            expected="what `python -m flows.drift` writes",
            got=str(error.errors()[0]["msg"]),
            do="remove it: the watch then learns again what is normal",
        ) from error


def write(root: Path, watch: Watch) -> None:
    watch.windows = watch.windows[-KEPT_WINDOWS:]
    write_whole(root / STATE, canonical(watch.model_dump(mode="json")))
