"""Synthetic conversations prepared end to end against the target's tokenizer alone on the same rendered text, in one run.

    python -m benchmarks.corpus

Prints tokens/s of both, their ratio (at most 1.3), what each part of the rest costs, and the process's peak memory (at most
2 GiB). Both arms run in one thread and are told in CPU seconds too, which hold still when the machine is busy with other
work. Conversations are CONVERSATIONS; set it lower for a first look.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["RAYON_NUM_THREADS"] = "1"  # the tokenizer's own threads; before it is imported

from stages.contracts.params import Prepare, Source, load_params
from stages.corpus.gather import Corpus, gather
from stages.corpus.prepared import table, write_prepared
from stages.corpus.ready import ReadyRows
from stages.corpus.rendering import Renderer
from stages.corpus.sources import Reading
from stages.targets import identify_target, locate_target

CONVERSATIONS = 200_000  # of 1 to 3 turns, 500 tokens in the mean: 100 M tokens
CHUNK = 256  # texts that the tokenizer alone is handed at once
MAX_RATIO, MAX_MEMORY_GIB = 1.3, 2.0
SYLLABLES = [a + b for a in "bcdfghjklmnprstvw" for b in ("a", "e", "i", "o", "u", "an", "er", "ing", "ion", "al")]


def words(draw: random.Random) -> list[str]:
    """20,000 made-up words; short ones are common, as in a language."""
    return ["".join(draw.choices(SYLLABLES, k=1 + i // 7000)) for i in range(20_000)]


def conversations(count: int) -> Iterator[dict[str, list[dict[str, str]]]]:
    """Equal on every machine: questions of 20 to 80 words, answers of 80 to 240, words by Zipf's law."""
    draw = random.Random(7)
    vocabulary = words(draw)
    weights = list(itertools.accumulate(1 / (rank + 10) for rank in range(len(vocabulary))))

    def text(least: int, most: int) -> str:
        chosen = draw.choices(vocabulary, cum_weights=weights, k=draw.randint(least, most))
        return " ".join(chosen).capitalize() + "."

    for _ in range(count):
        turns = [("user", text(20, 80)), ("assistant", text(80, 240))]
        for _ in range(draw.choice((0, 0, 0, 1, 2))):
            turns += [("user", text(8, 40)), ("assistant", text(50, 190))]
        yield {"messages": [{"role": role, "content": content} for role, content in turns]}


class Clock:
    """Wall and CPU seconds by part."""

    def __init__(self) -> None:
        self.parts: dict[str, tuple[float, float]] = {}

    def run(self, part: str, work: Callable[..., Any], *args: Any) -> Any:
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            return work(*args)
        finally:
            before = self.parts.get(part, (0.0, 0.0))
            self.parts[part] = (before[0] + time.perf_counter() - wall, before[1] + time.process_time() - cpu)


class TimedRenderer:
    """A renderer that tells the clock what it costs."""

    def __init__(self, renderer: Renderer, clock: Clock) -> None:
        self._renderer, self._clock = renderer, clock

    def given(self, *args: Any) -> Any:
        return self._clock.run("rendering", self._renderer.given, *args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._renderer, name)


def settings(path: Path, prepare: Prepare) -> Prepare:
    """The shipped settings over one source of conversations with their answers."""
    source = Source(
        name="synthetic",
        kind="files",
        path=str(path),
        domain="general",
        licence="none",
        answers="given",
        limit=CONVERSATIONS,
    )
    wide = {"max_prompt_tokens": 4096, "max_new_tokens": 4096, "max_row_tokens": 8192}
    return prepare.model_copy(update={"sources": (source,), **wide})


def write_source(path: Path) -> None:
    with path.open("w") as file:
        for row in conversations(CONVERSATIONS):
            file.write(json.dumps(row) + "\n")


def texts(path: Path, tokenizer: Any) -> Iterator[list[str]]:
    """The same conversations as the template writes them, in lists of CHUNK."""
    chunk: list[str] = []
    with path.open() as file:
        for line in file:
            chunk.append(tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=False))
            if len(chunk) == CHUNK:
                yield chunk
                chunk = []
    yield chunk


def tokenize(backend: Any, chunk: list[str]) -> int:
    return sum(len(backend.encode(text, add_special_tokens=False).ids) for text in chunk)


def drain(reading: Reading) -> None:
    for _ in reading:
        pass


def main() -> None:
    from transformers import PreTrainedTokenizerFast

    params, clock = load_params(), Clock()
    folder = locate_target(params.target.origin)
    with tempfile.TemporaryDirectory(dir=".cache") as room:
        path, out = Path(room) / "source.jsonl", Path(room) / "prepared"
        write_source(path)
        prepare = settings(path, params.prepare)
        renderer: Any = TimedRenderer(Renderer(folder, params.prepare.rendering), clock)
        identity = identify_target(folder, params.target.name)

        def write(corpus: Corpus) -> Any:
            return write_prepared(out, corpus, {}, prepare, identity, renderer.end_ids, renderer.text)

        start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        corpus = clock.run("gathering", gather, prepare, renderer, ReadyRows(folder), Path(room) / "spool")
        manifest = clock.run("writing", write, corpus)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        spool = sum(f.stat().st_size for f in (Path(room) / "spool").rglob("*") if f.is_file())
        shutil.rmtree(Path(room) / "spool")
        clock.run("reading", drain, Reading(prepare.sources[0], prepare.seed, prepare.max_prompt_tokens))
        tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
        tokens = sum(
            clock.run("tokenizer alone", tokenize, tokenizer.backend_tokenizer, t) for t in texts(path, tokenizer)
        )
        size = path.stat().st_size
    print(table(manifest))
    report(clock, tokens, peak / 2**20, start / 2**20, size, spool)


def report(clock: Clock, tokens: int, peak: float, start: float, size: int, spool: int) -> None:
    """Print what was measured; exits 1 when a bound is broken."""
    parts = clock.parts
    parts["sifting, spool and n-grams"] = _less(_less(parts["gathering"], parts["rendering"]), parts["reading"])
    parts["prepare"] = (parts["gathering"][0] + parts["writing"][0], parts["gathering"][1] + parts["writing"][1])
    alone = parts["tokenizer alone"]
    print(f"{tokens:,} tokens of {size / 2**20:,.0f} MiB of source; the spool takes {spool / 2**20:,.0f} MiB of disk")
    for name in ("tokenizer alone", "prepare", "reading", "rendering", "sifting, spool and n-grams", "writing"):
        wall, cpu = parts[name]
        rate = f"{tokens / wall:10,.0f} tokens/s"
        print(f"{name:<28}{wall:8.1f} s {cpu:8.1f} CPU s {rate}   {cpu / alone[1]:.2f} of the tokenizer's CPU time")
    ratio, cpu_ratio = (parts["prepare"][k] / alone[k] for k in (0, 1))
    print(f"prepare over the tokenizer alone: {ratio:.2f}, by CPU seconds {cpu_ratio:.2f} (at most {MAX_RATIO})")
    print(f"peak memory: {peak:.2f} GiB, {start:.2f} GiB before the first row (at most {MAX_MEMORY_GIB})")
    if cpu_ratio > MAX_RATIO or peak > MAX_MEMORY_GIB:
        sys.exit(1)


def _less(whole: tuple[float, float], part: tuple[float, float]) -> tuple[float, float]:
    return whole[0] - part[0], whole[1] - part[1]


if __name__ == "__main__":
    main()
