"""The engine in this process: batched decoding on a torch target, with an EAGLE-3 chain when there is a draft.

Requests join and leave the running batch as slots get free. Slots are kept compact, so a batch of B requests is the first
B rows of every cache. Shapes: B requests, Q = k+1 tokens of a verification, k drafted tokens, T ragged rows laid end to
end, F = points · H, V and D the vocabularies of target and draft.

Position p of the draft has input token t[p+1] and the target's states at p, and proposes t[p+2]:

    tokens            t0   t1   t2   t3        t3 is the newest, not in the target's cache yet
    target states     s0   s1   s2
    draft positions   0    1    2              fed (s0,t1) (s1,t2) (s2,t3); the last proposes d1 for t4
                                               then (own state, d1) at position 3 proposes d2, …
    verification      t3 d1 d2 … in one pass of the target; the longest prefix it would have chosen itself stays
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from stages.contracts.errors import EngineError
from stages.contracts.points import default_points
from stages.engines._choose import distribution, draw, verify_greedy, verify_sampled
from stages.engines._requests import Answer, Request, Running

if TYPE_CHECKING:
    from stages.targets._decoder import Decoder

__all__ = ["NAME", "Answer", "Draft", "Engine", "InProcess", "Request", "served_points", "version"]

NAME = "in_process"
MAX_DRAFT_STEPS = 16
_PREFILL_TOKENS = 2048  # prompt tokens in one pass

Steps = int | Callable[[int], int]  # or one that also says the `most` it may ask for; see _most
Observe = Callable[[str, int, Tensor], None]


def version() -> str:
    """The engine's own numerics are torch's."""
    return f"torch {torch.__version__}"


def served_points(layer_ids: Sequence[int], layers: int) -> tuple[int, ...]:
    """The points this engine really feeds a draft whose config.json has these layer ids, ascending.

    It reads `eagle_config.eagle_aux_hidden_state_layer_ids` as SGLang does for Llama and Qwen targets: id i means the
    output of 0-based layer i, which is point i+1; -1 means the embedding; doubles are dropped; none given means EAGLE's
    default points.

    Raises:
        EngineError: ids that no point of the target answers to.
    """
    points = tuple(sorted({i + 1 for i in layer_ids})) if layer_ids else default_points(layers)
    if points[0] < 0 or points[-1] >= layers:
        raise EngineError(
            "The draft asks for states that this engine cannot give",
            where="config.json: eagle_config.eagle_aux_hidden_state_layer_ids",
            expected=f"ids -1 (embedding) to {layers - 2}: point = id+1, below the target's last point {layers}",
            got=str(list(layer_ids)),
            do="export the draft for this engine again",
        )
    return points


class Draft(Protocol):
    """What the engine asks of a draft. Implemented by stages/drafts/_decode.py."""

    points: tuple[int, ...]
    target_ids: Tensor  # [D] target id of each draft id

    def open(self, slots: int, positions: int) -> None:
        """Make room for keys and values; called once."""
        ...

    def feed(self, ids_T: Tensor, aux_TF: Tensor, slot_T: Tensor, position_T: Tensor, last_B: Tensor) -> Any:
        """Take verified pairs, ragged over slots 0..B-1; propose from the rows `last_B`: (logits [B, D], state [B, H])."""
        ...

    def step(self, ids_B: Tensor, state_BH: Tensor, position_B: Tensor) -> Any:
        """Go on from the draft's own state at position_B: (logits [B, D], state [B, H])."""
        ...

    def move(self, source: int, to: int) -> None: ...


class Load(Protocol):
    """A load that changes while requests run. Implemented by benchmarks/stepped_load.py."""

    def at_once(self, running: int) -> int:
        """How many requests may run now that so many do; asked before each decode step. More that already run end as they
        would; at 0, those that wait are not served."""
        ...

    def passed(self, batch: int, draft_steps: int, tokens: int) -> None:
        """`batch` requests decoded with `draft_steps`, or prompts were run (0 and 0), and so many answer tokens came out."""
        ...


class InProcess:
    """A target, maybe a draft, and room for `slots` requests of at most `positions` tokens each."""

    def __init__(self, target: Decoder, draft: Draft | None = None, *, slots: int, positions: int) -> None:
        self.target, self.draft, self.slots, self.positions = target, draft, slots, positions
        room = positions + MAX_DRAFT_STEPS + 1  # a draft may run past the answer's end
        self._cache = target.new_cache(slots, room)
        self._eos = frozenset(target.config.eos_ids)
        self._running: list[Running] = []
        self._watch: Collection[str] | None = None
        self._aux: Tensor | None = None
        self._room = room
        if draft is not None:
            draft.open(slots, room)

    @torch.inference_mode()
    def generate(
        self,
        requests: Iterable[Request],
        *,
        concurrency: int,
        draft_steps: Steps = 0,
        on_answer: Callable[[Answer], None] | None = None,
        observe: Observe | None = None,
        watch: Collection[str] | None = None,
        load: Load | None = None,
    ) -> list[Answer]:
        """Answer all requests, at most `concurrency` at once; answers come in the requests' order.

        Args:
            draft_steps: tokens drafted a verification, or a function of the running batch's size that gives them, called
                once a pass and free to remember; with 0 the draft does nothing at all. The target's states are kept
                meanwhile if it may be wanted later: it then first takes in all that it has not seen, and answers stay as
                they are.
            on_answer: called as each answer ends.
            observe: called with (prompt_id, first position, states [n, F]) for all that is fed to the draft, of the prompts in
                `watch` (None: all).
            load: how many run at once, up to `concurrency`, as it changes.

        Raises:
            EngineError: a request that does not fit, more concurrency than slots, or drafting without a draft.
        """
        waiting = list(enumerate(requests))
        self._check([r for _, r in waiting], concurrency)
        steps_for = draft_steps if callable(draft_steps) else lambda batch: draft_steps
        keep = self._most(draft_steps, concurrency) > 0
        passed = load.passed if load is not None else lambda batch, draft_steps, tokens: None
        waiting.reverse()
        self._running, self._watch, answers = [], watch, {}
        while waiting or self._running:
            room = concurrency if load is None else min(concurrency, load.at_once(len(self._running)))
            if not room:
                waiting.clear()
            while waiting and len(self._running) < room:
                passed(0, 0, self._prefill(waiting, room, keep))
            self._retire(answers, on_answer)
            if batch := len(self._running):
                steps = steps_for(batch)
                passed(batch, steps, self._decode(steps, keep, observe))
                self._retire(answers, on_answer)
        return [answers[i] for i in sorted(answers)]

    def _check(self, requests: Sequence[Request], concurrency: int) -> None:
        if not 1 <= concurrency <= self.slots:
            raise EngineError(
                "The engine has no room for this concurrency",
                expected=f"1 to {self.slots}, the slots it was opened with",
                got=str(concurrency),
                do="open it with more slots",
            )
        for r in requests:
            need = len(r.prompt_ids) + r.max_new_tokens
            if not r.prompt_ids or r.max_new_tokens < 1 or need > self.positions:
                raise EngineError(
                    "A request does not fit the engine",
                    where=f"prompt {r.prompt_id}",
                    expected=f"a prompt, and prompt and answer within {self.positions} tokens",
                    got=f"{len(r.prompt_ids)} prompt tokens and {r.max_new_tokens} to answer",
                    do="open the engine with more positions, or shorten the request",
                )

    def _most(self, draft_steps: Steps, concurrency: int) -> int:
        """The longest draft that may be asked for: what the engine gets ready for. One that remembers what it was asked is
        not called to find out, but says it itself (`most`)."""
        if not callable(draft_steps):
            most = draft_steps
        elif hasattr(draft_steps, "most"):
            most = draft_steps.most(concurrency)  # type: ignore[reportFunctionMemberAccess]
        else:
            most = max(draft_steps(batch) for batch in range(1, concurrency + 1))
        if most > MAX_DRAFT_STEPS or (most and self.draft is None):
            raise EngineError(
                "The engine cannot draft this far" if self.draft else "Drafting without a draft",
                where="draft_steps",
                expected=f"0 to {MAX_DRAFT_STEPS if self.draft else 0}",
                got=str(most),
                do="lower serve.draft_steps" if self.draft else "open the engine with a draft, or ask for 0 steps",
            )
        return most

    def _prefill(self, waiting: list[tuple[int, Request]], concurrency: int, keep: bool) -> int:
        """Give slots to waiting requests, run their prompts in one pass, choose their first tokens and count them."""
        batch: list[Running] = []
        first_of: dict[tuple[int, ...], int] = {}  # equal prompts are run once, in the slot of the first of them
        tokens, free = 0, len(self._running)
        while waiting and free + len(batch) < concurrency:
            order, request = waiting[-1]
            new = 0 if request.prompt_ids in first_of else len(request.prompt_ids)
            if batch and tokens + new > _PREFILL_TOKENS:
                break
            tokens += new
            first_of.setdefault(request.prompt_ids, free + len(batch))
            batch.append(Running(request, self._eos, list(request.prompt_ids), order))
            waiting.pop()
        lengths = [len(prompt) for prompt in first_of]
        ids_T = self._tensor([t for prompt in first_of for t in prompt])
        points = self.draft.points if keep and self.draft else ()
        stream = self.target.packed(ids_T, lengths, points, self._cache, list(first_of.values()))
        ends = self._tensor(lengths).cumsum(0)
        if points:
            for slot, aux in zip(first_of.values(), stream.aux(points).split(lengths), strict=True):
                self._states(aux.shape[-1])[slot, : len(aux)] = aux
        for slot, r in enumerate(batch, start=free):
            if slot != (source := first_of[r.request.prompt_ids]):
                self._copy(source, slot)
        row_of = {prompt: row for row, prompt in enumerate(first_of)}
        rows = self._tensor([row_of[r.request.prompt_ids] for r in batch])
        self._running += batch
        chosen = self._choose(self.target.logits(stream.last[ends - 1])[rows], batch)
        for r, token in zip(batch, chosen, strict=True):
            r.take([token])
            r.first_token_ms = (time.perf_counter() - r.admitted_s) * 1e3
        return len(batch)

    def _decode(self, steps: int, keep: bool, observe: Observe | None) -> int:
        """One pass of the target over the running batch: the newest token of each request and its draft. Counts what came
        out of it."""
        running, draft = self._running, self.draft
        lengths_B = self._tensor([len(r.tokens) - 1 for r in running])
        ids_BQ = self._tensor([r.tokens[-1:] for r in running])
        if not steps:
            stream = self._pass(ids_BQ, lengths_B, keep)
            chosen = self._choose(self.target.logits(stream[:, 0]), running)
            for r, token in zip(running, chosen, strict=True):
                r.take([token])
                r.accepted.append(0)
            return len(running)
        assert draft is not None
        sampled = any(r.random is not None for r in running)
        uniform = self._tensor([r.uniforms(2 * steps + 1) for r in running], torch.float64) if sampled else None
        index_Bk, q = self._propose(steps, lengths_B, uniform, observe)
        drafted_Bk = draft.target_ids[index_Bk]
        logits = self.target.logits(self._pass(torch.cat([ids_BQ, drafted_Bk], 1), lengths_B, keep))
        if uniform is None or q is None:
            emitted, kept = verify_greedy(logits, drafted_Bk)
        else:
            p = distribution(logits, self._temperatures(running))
            emitted, kept = verify_sampled(p, drafted_Bk, index_Bk, q, draft.target_ids, uniform[:, steps:])
        taken = 0
        for r, tokens, count in zip(running, emitted.tolist(), kept.tolist(), strict=True):
            taken += (came := r.take(tokens[: count + 1]))
            r.accepted.append(min(count, came))
        return taken

    def _pass(self, ids_BQ: Tensor, lengths_B: Tensor, keep: bool) -> Tensor:
        """Run the target; keep the states that the draft may want (those of refused tokens are written over later)."""
        points = self.draft.points if keep and self.draft else ()
        stream = self.target.decode(ids_BQ, lengths_B, self._cache, points)
        if points:
            aux = stream.aux(points)
            B, Q = ids_BQ.shape
            row_B = torch.arange(B, device=aux.device)
            position_BQ = lengths_B[:, None] + torch.arange(Q, device=aux.device)
            self._states(aux.shape[-1])[row_B[:, None], position_BQ] = aux
        return stream.last

    def _propose(
        self, steps: int, lengths_B: Tensor, uniform: Tensor | None, observe: Observe | None
    ) -> tuple[Tensor, Tensor | None]:
        """Draft `steps` tokens for each request; first the draft catches up with what was verified since it last ran.

        Returns:
            draft ids [B, steps], and the distributions they were drawn from [B, steps, D] when requests sample.
        """
        draft, running = self.draft, self._running
        assert draft is not None and self._aux is not None
        spans = [(r.fed, len(r.tokens) - 1) for r in running]
        ids_T = self._tensor([t for r in running for t in r.tokens[r.fed + 1 :]])
        slot_T = self._tensor([slot for slot, (a, b) in enumerate(spans) for _ in range(a, b)])
        position_T = self._tensor([p for a, b in spans for p in range(a, b)])
        last_B = self._tensor([b - a for a, b in spans]).cumsum(0) - 1
        aux_TF = self._aux[slot_T, position_T]
        if observe is not None:
            for r, part in zip(running, aux_TF.split([b - a for a, b in spans]), strict=True):
                if self._watch is None or r.request.prompt_id in self._watch:
                    observe(r.request.prompt_id, r.fed, part.clone())
        logits, state = draft.feed(ids_T, aux_TF, slot_T, position_T, last_B)
        for r, (_, end) in zip(running, spans, strict=True):
            r.fed = end
        chosen: list[Tensor] = []
        weights: list[Tensor] = []
        for i in range(steps):
            if i:
                logits, state = draft.step(draft.target_ids[chosen[-1]], state, lengths_B + (i - 1))
            if uniform is None:
                chosen.append(logits.argmax(-1))
            else:
                weights.append(distribution(logits, self._temperatures(running)))
                chosen.append(draw(weights[-1], uniform[:, i]))
        return torch.stack(chosen, 1), torch.stack(weights, 1) if weights else None

    def _choose(self, logits: Tensor, running: Sequence[Running]) -> list[int]:
        """The next token of each request from logits [B, V]."""
        if all(r.random is None for r in running):
            return logits.argmax(-1).tolist()
        uniform = self._tensor([r.uniforms(1)[0] for r in running], torch.float64)
        return draw(distribution(logits, self._temperatures(running)), uniform).tolist()

    def _retire(self, answers: dict[int, Answer], on_answer: Callable[[Answer], None] | None) -> None:
        """Hand out finished answers and close the gaps: the last slot's request moves into the free one."""
        for slot in reversed(range(len(self._running))):
            done = self._running[slot]
            if done.finish is None:
                continue
            answers[done.order] = done.answer()
            last = self._running.pop()
            if last is not done:
                self._running[slot] = last
                self._copy(len(self._running), slot)
                if self.draft is not None and last.fed:
                    self.draft.move(len(self._running), slot)
            if on_answer is not None:
                on_answer(answers[done.order])

    def _copy(self, source: int, to: int) -> None:
        self._cache.move(source, to)
        if self._aux is not None:
            self._aux[to] = self._aux[source]

    def _states(self, width: int) -> Tensor:
        """Room for the states of every slot [slots, positions, F], made when first wanted."""
        if self._aux is None:
            self._aux = self.target.embedding.new_zeros(self.slots, self._room, width)
        return self._aux

    def _temperatures(self, running: Sequence[Running]) -> Tensor:
        return self._tensor([r.request.temperature for r in running], torch.float64)

    def _tensor(self, values: Sequence[Any], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.target.device)


Engine = InProcess  # the name under which entry points find an engine file's engine
