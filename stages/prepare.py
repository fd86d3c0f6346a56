"""prepare: sources become rows of token ids and loss masks; answers are the target's own."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from stages.contracts.errors import ParamsError, run
from stages.contracts.files import whole_folder
from stages.contracts.manifest import PREPARED, TargetIdentity
from stages.contracts.params import Params, Target, load_params
from stages.corpus.answers import Bounds, Generated, OnAnswer, Prompt, answer_all, outcomes
from stages.corpus.asked import Kept, Prompts
from stages.corpus.gather import Gathered, gather
from stages.corpus.prepared import table, write_prepared
from stages.corpus.ready import ReadyRows
from stages.corpus.rendering import Renderer
from stages.corpus.server import ServerAnswers, demand_same_rendering
from stages.targets import identify_target, load_target, locate_target

ANSWERS = Path(".cache/answers")


@dataclass(frozen=True)
class InProcessAnswers:
    """The in-process engine as an Answerer: plain decoding, the target loaded in whichever process calls it."""

    folder: Path
    device: str
    dtype: str
    batch_size: int
    positions: int
    max_new_tokens: int
    temperature: float
    seed: int
    threads: int
    end_ids: frozenset[int]

    def __call__(self, prompts: Sequence[Prompt], on_answer: OnAnswer) -> None:
        import torch

        from stages.engines.in_process import Answer, InProcess, Request

        torch.set_num_threads(self.threads)

        def told(answer: Answer) -> None:
            on_answer(answer.prompt_id, answer.ids, answer.finish)

        target = load_target(self.folder, self.device, self.dtype)
        target.pack()
        engine = InProcess(target, draft=None, slots=self.batch_size, positions=self.positions)
        ends = tuple(sorted(self.end_ids))
        requests = [
            Request(p, ids, self.max_new_tokens, self.temperature, self._seed(p), stop_ids=ends) for p, ids in prompts
        ]
        engine.generate(requests, concurrency=self.batch_size, draft_steps=0, on_answer=told)

    def _seed(self, prompt_id: str) -> int:
        """A request's own seed, so that its draws do not depend on its neighbours."""
        return int.from_bytes(hashlib.sha256(f"{self.seed}\0{prompt_id}".encode()).digest()[:4], "big")


def check_target(folder: Path, target: Target) -> None:
    """Compare the target's config.json with params.yaml.

    Raises:
        ParamsError: they differ; every difference is named.
    """
    config = json.loads((folder / "config.json").read_text())
    config = config.get("text_config", config)
    pairs = (("layers", "num_hidden_layers"), ("hidden_size", "hidden_size"), ("vocab_size", "vocab_size"))
    wrong = [
        f"target.{ours} {getattr(target, ours)}, {theirs} {config.get(theirs)}"
        for ours, theirs in pairs
        if getattr(target, ours) != config.get(theirs)
    ]
    if wrong:
        raise ParamsError(
            "params.yaml describes another target",
            where=f"params.yaml: target; {folder / 'config.json'}",
            expected="the config.json of target.origin",
            got="; ".join(wrong),
            do="mend these keys, or target.origin; capture.points follow from the number of layers",
        )


def regenerate(
    params: Params, folder: Path, identity: TargetIdentity, gathered: list[Gathered], renderer: Renderer, room: Path
) -> Kept[Generated]:
    """Answers by the target itself for every candidate that did not bring its own. The prompts are kept in `room`."""
    p, t = params.prepare, params.target
    asked = (c for g in gathered if g.source.answers == "regenerate" for c in g.candidates)
    prompts = Prompts(room / "prompts.i32", ((c.prompt_id, c.prompt_ids) for c in asked))
    settings = {
        "engine": p.answers.name,
        "weights_digest": identity.weights_digest,
        "tokenizer_digest": identity.tokenizer_digest,
        "template_digest": identity.template_digest,
        "dtype": t.dtype,
        "max_new_tokens": p.max_new_tokens,
        "temperature": p.temperature,
        "seed": p.seed if p.temperature else 0,
        "end_ids": sorted(renderer.end_ids),
    }
    bounds = Bounds(t.vocab_size, p.max_new_tokens)
    if p.answers.engine == "openai":
        settings |= {"token_ids": p.answers.token_ids, "end_id": renderer.end_id}

        @cache
        def server() -> ServerAnswers:
            return server_answers(params, folder, renderer)

        def ask(prompts: Sequence[Prompt], on_answer: OnAnswer) -> None:
            server()(prompts, on_answer)

        answers = answer_all(prompts, ask, settings, ANSWERS, 1, p.answers.max_failed_share, bounds)
    else:
        here = in_process_answers(params, folder, renderer.end_ids)
        answers = answer_all(prompts, here, settings, ANSWERS, p.workers, bounds=bounds)
    for prompt, answer in answers.items():
        if answer.finish == "stop" and renderer.only_reasons(prompts[prompt], answer.ids):
            answers.give(prompt, Generated((), "empty", "only reasoning"))
    if counts := {what: n for what, n in outcomes(answers, renderer.end_ids).items() if n}:
        print("answers:", ", ".join(f"{n} {what}" for what, n in counts.items()), file=sys.stderr)
    return answers


def in_process_answers(params: Params, folder: Path, end_ids: frozenset[int]) -> InProcessAnswers:
    p, t = params.prepare, params.target
    return InProcessAnswers(
        folder=folder,
        device=t.device,
        dtype=t.dtype,
        batch_size=p.batch_size,
        positions=p.max_row_tokens,
        max_new_tokens=p.max_new_tokens,
        temperature=p.temperature,
        seed=p.seed,
        threads=t.threads if p.workers == 1 else 1,
        end_ids=end_ids,
    )


def server_answers(params: Params, folder: Path, renderer: Renderer) -> ServerAnswers:
    """A server that was seen to render as this line does, as an Answerer.

    Raises:
        EngineError: it cannot be reached, or renders otherwise.
    """
    p, told = params.prepare, params.prepare.answers
    assert told.base_url is not None and told.model is not None
    today = p.rendering.model_copy(update={"date": datetime.date.today().isoformat()})  # that is what a server writes
    probes = Renderer(folder, today).probes()
    found = demand_same_rendering(told.base_url, told.model, p.rendering.template_arguments, probes)
    print(f"{told.base_url}: {found}", file=sys.stderr)
    return ServerAnswers(
        base_url=told.base_url,
        model=told.model,
        concurrency=told.concurrency,
        timeout_s=told.timeout_s,
        retries=told.retries,
        max_new_tokens=p.max_new_tokens,
        temperature=p.temperature,
        seed=p.seed,
        end_ids=renderer.end_ids,
        end_id=renderer.end_id,
        vocab_size=params.target.vocab_size,
        may_retokenise=told.token_ids == "retokenise",
        encode=renderer.encode,
    )


@contextlib.contextmanager
def _spool(folder: Path) -> Iterator[Path]:
    """Room for what is read until it is written; it stands within the folder being made, so that no crash leaves it."""
    yield folder
    shutil.rmtree(folder)


def main() -> None:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads cost a factor of 6 beside any other load
    params = load_params()
    folder = locate_target(params.target.origin)
    check_target(folder, params.target)
    identity = identify_target(folder, params.target.name)
    renderer = Renderer(folder, params.prepare.rendering)
    with whole_folder(PREPARED) as aside, _spool(aside / "spool") as spool:
        corpus = gather(params.prepare, renderer, ReadyRows(folder), spool)
        answers = regenerate(params, folder, identity, corpus.gathered, renderer, spool)
        manifest = write_prepared(aside, corpus, answers, params.prepare, identity, renderer.end_ids, renderer.text)
    print(table(manifest))


if __name__ == "__main__":
    run(main)
