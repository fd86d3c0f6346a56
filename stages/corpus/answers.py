"""On-policy answers: the target's own continuation of every prompt, kept as it comes so that a killed run resumes.

Answers are kept by content: a folder a generation setting, in it one append-only file a worker, a line an answer:
[prompt id, finish, ids, digest of the three]. What a crash cut off, what changed since it was written, or what no answer
may be (`Bounds`) is generated again, and so is what was refused or failed: the engine may have been mended. How tokens are made is handed in as an
`Answerer`; this file knows no engine.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import queue
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from stages.contracts.errors import EngineError, LineError
from stages.contracts.files import canonical, digest, write_whole
from stages.contracts.progress import progress
from stages.corpus.asked import Kept

Finish = Literal["stop", "length", "empty", "refused", "mismatched", "failed"]
UNANSWERED = {
    "empty": "empty answer",
    "refused": "refused by the engine",
    "mismatched": "token ids not recovered",
    "failed": "failed in the engine",
}  # reasons by finish
Prompt = tuple[str, tuple[int, ...]]
_POLL_S = 0.5
_AT_ONCE = 8192  # prompts that an answerer is handed, longest first; more of them would be held in memory for nothing


@dataclass(frozen=True)
class Generated:
    """An answer's ids as they were generated; the last one ends the turn when `finish` is "stop".

    Without ids: "empty", the answer was reasoning and nothing else; "refused", the engine will not answer this prompt; "mismatched", it told text whose tokens are not those
    that it sampled; "failed", it did not answer this time. `detail` says why.
    """

    ids: tuple[int, ...]
    finish: Finish
    detail: str = ""


@dataclass(frozen=True)
class Bounds:
    """What the ids of an answer may be: numbers of a vocabulary, and at most so many of them."""

    vocab_size: int
    max_tokens: int

    def fault(self, ids: object) -> str:
        """What is wrong with ids that an engine told, in words; empty when nothing is."""
        if not isinstance(ids, list | tuple):
            return f"token ids told as {type(ids).__name__}"
        strange = next((i for i in ids if type(i) is not int or not 0 <= i < self.vocab_size), None)
        if strange is not None:
            return f"token id {strange!r:.40}; the target's vocabulary has {self.vocab_size}"
        return f"{len(ids)} tokens; {self.max_tokens} may be" if len(ids) > self.max_tokens else ""


class OnAnswer(Protocol):
    def __call__(self, prompt: str, ids: tuple[int, ...], finish: Finish, detail: str = "") -> None: ...


class Answerer(Protocol):
    """Answers prompts and reports each answer as it ends. Pickled into worker processes, so it loads its model when called."""

    def __call__(self, prompts: Sequence[Prompt], on_answer: OnAnswer) -> None: ...


def answer_all(
    prompts: Mapping[str, tuple[int, ...]],
    answerer: Answerer,
    settings: Mapping[str, Any],
    cache: Path,
    workers: int,
    max_failed_share: float = 0.0,
    bounds: Bounds | None = None,
) -> Kept[Generated]:
    """An answer for every prompt, from the cache where it is there; read from it as it is asked for.

    Args:
        prompts: ids by prompt id; asked for some thousand at a time.
        settings: all that decides an answer beside its prompt: weights, cap, temperature, seed.
        workers: processes; with 1 the answerer runs in this one.
        max_failed_share: of the prompts, those that may stay "failed". They are asked again by the next run.
        bounds: what answers may be; those kept that are not so are asked again.

    Raises:
        EngineError: a worker ended early, an answer is missing, or more failed than may.
    """
    folder = cache / digest(canonical(dict(settings)))[7:23]
    write_whole(folder / "settings.json", canonical(dict(settings)))
    known, unfit = _read(folder, bounds)
    unanswered: dict[str, Generated] = {}
    missing = [p for _, p in sorted((-len(ids), p) for p, ids in prompts.items() if p not in known)]
    if unfit:
        told = f"lines cut off, changed or out of bounds: {unfit} passed over; answers to generate: {len(missing)}"
        print(f"{folder}: {told}", file=sys.stderr)
    if missing:
        with progress(len(missing), "answers", "prompts") as advance:
            if workers == 1 or len(missing) == 1:
                _work(answerer, prompts, missing, folder / "worker-0.jsonl", advance, unanswered)
            else:
                _share(answerer, prompts, missing, folder, min(workers, len(missing)), advance)
        known.close()
        known, _ = _read(folder, bounds)
    absent = [p for p in prompts if p not in known and p not in unanswered]
    _demand_few(unanswered, len(prompts), max_failed_share, folder)
    if absent:
        raise EngineError(
            "The engine left prompts without an answer",
            where=str(folder),
            expected=f"{len(prompts)} answers",
            got=f"{len(absent)} missing, the first {absent[0]}",
            do="run it again; answers that are there are kept",
        )
    known.keep(prompts)
    for prompt, answer in unanswered.items():
        if prompt not in known:
            known.give(prompt, answer)
    return known


def outcomes(answers: Mapping[str, Generated], end_ids: frozenset[int]) -> dict[str, int]:
    """How many prompts were answered, capped, empty, refused, mismatched or failed; together all of them."""
    counts = dict.fromkeys(("answered", "capped", *UNANSWERED), 0)
    for answer in answers.values():
        if answer.finish in UNANSWERED:
            counts[answer.finish] += 1
        elif not set(answer.ids) - end_ids:
            counts["empty"] += 1
        else:
            counts["capped" if answer.finish == "length" else "answered"] += 1
    return counts


def _demand_few(unanswered: Mapping[str, Generated], asked: int, max_share: float, folder: Path) -> None:
    """Raises EngineError when more prompts failed than may."""
    failed = {prompt: answer for prompt, answer in unanswered.items() if answer.finish == "failed"}
    if len(failed) > max_share * asked:
        prompt, first = next(iter(failed.items()))
        raise EngineError(
            "The engine left too many prompts without an answer",
            where=str(folder),
            expected=f"at most {max_share:.1%} of {asked} (prepare.answers.max_failed_share)",
            got=f"{len(failed)} failed, the first {prompt}: {first.detail}",
            do="mend what it says and run it again; answers that are there are kept",
        )


def _read(folder: Path, bounds: Bounds | None) -> tuple[Kept[Generated], int]:
    """Answers of all workers' files, and the number of lines passed over because they are not as they were written, or
    out of bounds."""
    known: Kept[Generated] = Kept(_answer_of)
    unfit = 0
    for path in sorted(folder.glob("worker-*.jsonl")):
        for line, note in known.lines(path):
            answer = _parse(line)
            if answer is not None and not (bounds and bounds.fault(answer[1].ids)):
                note(answer[0])
            elif line.strip():
                unfit += 1
    return known, unfit


def _answer_of(line: bytes) -> Generated:
    answer = _parse(line)
    assert answer is not None, "a line that was whole is not any more"
    return answer[1]


def _parse(line: bytes) -> tuple[str, Generated] | None:
    """(prompt id, answer) of a line; None when its shape or its digest does not fit."""
    try:
        match json.loads(line):
            case [str() as prompt, ("stop" | "length") as finish, list() as ids, str() as told]:
                whole = all(type(i) is int for i in ids) and told == _line_digest(prompt, finish, ids)
                return (prompt, Generated(tuple(ids), finish)) if whole else None
            case [str() as prompt, "mismatched", str() as detail, str() as told]:
                whole = told == _line_digest(prompt, "mismatched", detail)
                return (prompt, Generated((), "mismatched", detail)) if whole else None
    except (ValueError, RecursionError):
        pass
    return None


def _line_digest(prompt: str, finish: str, said: Sequence[int] | str) -> str:
    """16 hex digits of sha256 over a line's first three elements, as compact JSON."""
    shown = said if isinstance(said, str) else list(said)
    return digest(json.dumps([prompt, finish, shown], separators=(",", ":")).encode())[7:23]


def _work(
    answerer: Answerer,
    prompts: Mapping[str, tuple[int, ...]],
    names: Sequence[str],
    path: Path,
    told: Callable[[int, str], None],
    unanswered: dict[str, Generated],
) -> None:
    """Answer the prompts `names`, append each answer to `path` and tell of it; refusals and failures go to `unanswered` alone."""
    cut = path.exists() and not path.read_bytes().endswith(b"\n")
    tokens = 0
    with path.open("a", encoding="utf-8") as file:
        file.write("\n" if cut else "")

        def on_answer(prompt: str, ids: tuple[int, ...], finish: Finish, detail: str = "") -> None:
            nonlocal tokens
            if finish in ("refused", "failed"):
                unanswered[prompt] = Generated((), finish, detail)
            else:
                said = detail if finish in UNANSWERED else list(ids)
                line = [prompt, finish, said, _line_digest(prompt, finish, said)]
                file.write(json.dumps(line, separators=(",", ":")) + "\n")
                file.flush()
            tokens += len(ids)
            told(1, f"{tokens} tokens" + (f", {len(unanswered)} unanswered" if unanswered else ""))

        for start in range(0, len(names), _AT_ONCE):
            answerer([(name, prompts[name]) for name in names[start : start + _AT_ONCE]], on_answer)


def _share(
    answerer: Answerer,
    prompts: Mapping[str, tuple[int, ...]],
    names: Sequence[str],
    folder: Path,
    workers: int,
    advance: Callable[..., None],
) -> None:
    """Deal the prompts `names`, longest first, to `workers` processes and wait for all of them."""
    context = multiprocessing.get_context("spawn")
    news: Any = context.Queue()
    running = [
        context.Process(
            target=_worker, args=(answerer, prompts, names[i::workers], folder, i, news, os.getpid()), daemon=True
        )
        for i in range(workers)
    ]
    for process in running:
        process.start()
    try:
        while any(process.is_alive() for process in running) or not news.empty():
            try:
                fault = news.get(timeout=_POLL_S)
            except queue.Empty:
                fault = None
            else:
                if fault is None:
                    advance(1)
            failed = [p.exitcode for p in running if p.exitcode]
            if fault or failed:
                raise EngineError(
                    "A generating process ended early",
                    where=str(folder),
                    expected="exit code 0",
                    got=fault or f"exit code {failed[0]}",
                    do="mend what it says and run it again; answers that are there are kept",
                )
    finally:
        for process in running:
            process.terminate()
            process.join()


def _worker(
    answerer: Answerer,
    prompts: Mapping[str, tuple[int, ...]],
    names: Sequence[str],
    folder: Path,
    index: int,
    news: Any,
    parent: int,
) -> None:
    """A process of `_share`: news is None for an answer and text for a fault. It ends when its parent is gone."""

    def told(count: int, note: str) -> None:
        if os.getppid() != parent:
            sys.exit(1)
        news.put(None)

    try:
        _work(answerer, prompts, names, folder / f"worker-{index}.jsonl", told, {})
    except LineError as error:
        news.put(error.text())
