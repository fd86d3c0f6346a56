"""What goes into an engine and what comes out: plain values."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal

import numpy as np


@dataclass(frozen=True)
class Request:
    """A prompt to answer. Temperature 0 is greedy; above it tokens are drawn from the whole distribution, by `seed`.

    An answer ends behind the first of `stop_ids`, or, in an engine that knows text, where a string of `stop` is complete.
    """

    prompt_id: str
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Answer:
    """An answer and what it took.

    `ids` ends with the end-of-turn token when `finish` is "stop". `accepted` has an entry for each forward pass of the
    target after the prompt's: the drafted tokens it kept in the answer (0 for a plain step). Times count from the moment
    the request got a slot, from a server from the moment it was sent or was due. `text` (a stop string cut off), cached prompt
    tokens and how late a request was sent are a server's.
    """

    prompt_id: str
    ids: tuple[int, ...]
    finish: Literal["stop", "length"]
    accepted: tuple[int, ...]
    first_token_ms: float
    latency_ms: float
    text: str = ""
    cached_tokens: int = 0
    late_ms: float = 0.0


@dataclass
class Running:
    """A request in a slot: `tokens` are prompt and answer; the last of them is not in the target's cache yet."""

    request: Request
    eos_ids: frozenset[int]
    tokens: list[int]
    order: int
    admitted_s: float = field(default_factory=time.perf_counter)
    accepted: list[int] = field(default_factory=list)
    first_token_ms: float = 0.0
    finish: Literal["stop", "length"] | None = None
    fed: int = 0  # positions whose pair (state, next token) the draft has seen
    random: np.random.Generator | None = None

    def __post_init__(self) -> None:
        if self.request.temperature > 0:
            self.random = np.random.Generator(np.random.Philox(self.request.seed))

    @property
    def answered(self) -> int:
        return len(self.tokens) - len(self.request.prompt_ids)

    def uniforms(self, count: int) -> list[float]:
        """`count` numbers in [0, 1) of this request's own stream; zeros for a greedy request, which has no use for them."""
        return [0.0] * count if self.random is None else self.random.random(count).tolist()

    def take(self, emitted: list[int]) -> int:
        """Append tokens up to the end of turn or the answer's budget; return how many were taken."""
        for taken, token in enumerate(emitted, start=1):
            self.tokens.append(token)
            if token in self.request.stop_ids or (token in self.eos_ids and not self.request.ignore_eos):
                self.finish = "stop"
                return taken
            if self.answered == self.request.max_new_tokens:
                self.finish = "length"
                return taken
        return len(emitted)

    def answer(self) -> Answer:
        assert self.finish is not None
        return Answer(
            self.request.prompt_id,
            tuple(self.tokens[len(self.request.prompt_ids) :]),
            self.finish,
            tuple(self.accepted),
            self.first_token_ms,
            (time.perf_counter() - self.admitted_s) * 1e3,
        )
