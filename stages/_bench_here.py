"""The engine in this process, ready to be timed: target with the draft, and target alone, over the same weights."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from stages._bench import Way
from stages._served import packed_linear, read_recorded
from stages.acceptance.prompts import Prompt
from stages.contracts.draft import DRAFT
from stages.contracts.loads import Conditions
from stages.contracts.params import Params
from stages.drafts._decode import DraftDecoder
from stages.engines import in_process
from stages.targets import load_target, locate_target
from stages.targets._decoder import Decoder


class BenchHere:
    """`loaded` has the draft in `folder`; `never_on` is the engine that never had one. A target that is loaded may be shared."""

    switches = True
    opened_here = True

    def __init__(self, params: Params, positions: int, folder: Path = DRAFT, target: Decoder | None = None) -> None:
        if target is None:
            target = load_target(locate_target(params.target.origin), params.target.device, params.target.dtype).pack()
        checkpoint = read_recorded(folder)
        points = in_process.served_points(checkpoint.layer_ids, target.config.layers)
        draft = DraftDecoder(checkpoint, points=points, embedding=target.embedding, linear=packed_linear)
        self.engine, self.engine_version = in_process.NAME, in_process.version()
        self.device, self.at_once = describe_device(params), max(params.benchmark.concurrencies)
        self.loaded = in_process.Engine(target, draft, slots=self.at_once, positions=positions)
        self.never_on = in_process.Engine(target, slots=self.at_once, positions=positions)

    def request(self, prompt: Prompt, max_new_tokens: int, ignore_eos: bool) -> in_process.Request:
        return in_process.Request(prompt.prompt_id, prompt.ids, max_new_tokens, ignore_eos=ignore_eos)

    def serve(
        self,
        way: Way,
        requests: Sequence[in_process.Request],
        *,
        concurrency: int,
        arrivals: Sequence[float] = (),
        on_answer: Callable[[Any], None] | None = None,
    ) -> list[in_process.Answer]:
        assert not arrivals, "params refuse arrivals for this engine"
        engine = self.never_on if way.alone else self.loaded
        return engine.generate(requests, concurrency=concurrency, draft_steps=way.told, on_answer=on_answer)

    def conditions(self) -> Conditions:
        return Conditions(
            engines="in this process",
            cache="none",
            temperature=0.0,
            ignore_end_of_turn=True,
            settings_compared=0,
            cached_prompt_tokens=0,
            policy_served_by="one engine",
            warnings=(),
        )


def describe_device(params: Params) -> str:
    """The kind of device, for a policy holds for no other: no host's name."""
    if params.target.device == "cuda":
        return torch.cuda.get_device_name()
    return f"cpu {platform.machine()}, {params.target.threads} threads"
