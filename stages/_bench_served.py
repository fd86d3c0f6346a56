"""SGLang, ready to be timed: a server without a draft and one for each draft length, side by side and alike but for speculation.

A server's draft length cannot be changed while it runs, so an arm is a server, and the policy's arm goes at every load to the server
of the length that the policy says, as a router before replicas would.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from stages._bench import Way
from stages._bench_here import describe_device
from stages._served import facts_for_server, open_server, read_recorded, served_points
from stages.acceptance.prompts import Prompt
from stages.contracts.draft import DraftRecord
from stages.contracts.errors import EngineError
from stages.contracts.loads import Conditions
from stages.contracts.params import Params
from stages.engines import sglang
from stages.targets import locate_target

_ALL_MEMORY = 0.95  # of a GPU that servers side by side may share out


class ServedBench:
    """Servers by draft length, 0 being plain decoding."""

    switches = False

    def __init__(self, params: Params, servers: Mapping[int, sglang.Server]) -> None:
        self.servers = servers
        self.settings_compared = sglang.demand_equal_settings(list(servers.values()))
        plain = servers[0]
        self.engine, self.engine_version = sglang.NAME, plain.version
        self.opened_here = not params.serve.sglang.url
        on = str(plain.info.get("device"))
        self.device = describe_device(params) if self.opened_here else f"{on}, a server that was running"
        self.at_once = max(params.benchmark.concurrencies)
        self.flushes = plain.caches_prefixes
        self.cached_tokens = 0
        self.warnings = _warnings(on)

    def request(self, prompt: Prompt, max_new_tokens: int, ignore_eos: bool) -> sglang.Request:
        return sglang.Request(prompt.prompt_id, prompt.ids, max_new_tokens, ignore_eos=ignore_eos)

    def serve(
        self,
        way: Way,
        requests: Sequence[sglang.Request],
        *,
        concurrency: int,
        arrivals: Sequence[float] = (),
        on_answer: Callable[[Any], None] | None = None,
    ) -> list[sglang.Answer]:
        """Raises EngineError as the server does, and when tokens came from a prefix cache that is off."""
        server = self.servers[way.draft_steps]
        if self.flushes:
            server.forget()
        how = {"concurrency": concurrency, "draft_steps": way.draft_steps, "arrivals": arrivals}
        answers = server.generate(requests, on_answer=on_answer, **how)
        cached = sum(a.cached_tokens for a in answers)
        if cached and not self.flushes:
            raise EngineError(
                "Prompt tokens came from a prefix cache that is said to be off",
                where=server.client.url,
                expected="0 cached tokens with disable_radix_cache: a prompt asked again must cost what it cost first",
                got=str(cached),
                do="start the server with --disable-radix-cache and without a hierarchical cache",
            )
        self.cached_tokens += cached
        return answers

    def conditions(self) -> Conditions:
        return Conditions(
            engines="servers started" if self.opened_here else "servers attached",
            cache="flushed before each repeat" if self.flushes else "off",
            temperature=0.0,
            ignore_end_of_turn=True,
            settings_compared=self.settings_compared,
            cached_prompt_tokens=self.cached_tokens,
            policy_served_by="an engine for each draft length",
            warnings=self.warnings,
        )


def _warnings(device: str) -> tuple[str, ...]:
    if device != "cpu":
        return ()
    said = (
        "these figures are of SGLang on a CPU: they show that speculation works there and is counted right, not what it is worth on a "
        "GPU, where a verification costs far less beside a single token; take no serving policy for a GPU from them"
    )
    print(f"warning: {said}", file=sys.stderr, flush=True)
    return (said,)


@contextmanager
def open_servers(params: Params, record: DraftRecord, positions: int) -> Generator[ServedBench, None, None]:
    """Start the servers, or find those that params.yaml says run already; end what was started.

    Raises:
        EngineError: a draft that does not fit its launch, servers that do not start or are not alike, or too little of a GPU's
            memory told for servers side by side.
    """
    checkpoint, told = read_recorded(), params.benchmark
    facts = facts_for_server(checkpoint, record, served_points(sglang, checkpoint, record, params.target.layers))
    opener = open_server(params, locate_target(params.target.origin), facts)
    lengths = (0, *told.draft_steps)
    apart = _gpus_apart(params, len(lengths))
    with ExitStack() as stack:
        servers = {
            steps: stack.enter_context(opener(max(told.concurrencies), positions, steps, first_gpu=i * apart))
            for i, steps in enumerate(lengths)
        }
        yield ServedBench(params, servers)


def _gpus_apart(params: Params, servers: int) -> int:
    """How many GPUs lie between the first of one server and of the next; 0 when they share, or there is none."""
    told = params.serve.sglang
    if params.target.device != "cuda" or told.url:
        return 0
    import torch

    each = told.tensor_parallel * told.data_parallel
    if servers * each <= torch.cuda.device_count() and told.nodes == 1:
        return each
    if told.nodes > 1 or not told.memory_fraction or servers * told.memory_fraction > _ALL_MEMORY:
        raise EngineError(
            "The servers to compare do not fit on these GPUs side by side",
            where="params.yaml: serve.sglang and benchmark.draft_steps",
            expected=f"{servers} servers of {each} GPUs each, or memory_fraction at most {_ALL_MEMORY / servers:.2f} on shared ones",
            got=f"{torch.cuda.device_count()} GPUs, memory_fraction {told.memory_fraction:g}, {told.nodes} nodes",
            do="set memory_fraction, try fewer draft_steps, or start the servers yourself and name them (url, plain_url)",
        )
    return 0
