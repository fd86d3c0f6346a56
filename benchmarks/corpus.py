"""Synthetic conversations prepared end to end, against the target's tokenizer alone on the same rendered text.

    python -m benchmarks.corpus [CONVERSATIONS]

200,000 conversations (about 100 M tokens) unless a number is given. Both arms use the same cores and threads or processes,
prepare.readers of them; the tokenizer alone is timed as `encode_batch`, and as `encode_batch_fast`, which tells no offsets.
Prints rates by wall and by CPU seconds, what the rest costs, the peak of memory, all processes together (PSS), and what
gate-extraction takes over the rows that were written. Exits 1 above MAX_RATIO by wall, or MAX_MEMORY_GIB.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import random
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from stages.contracts.manifest import PREPARED
from stages.contracts.params import Params, Prepare, Source, load_params
from stages.corpus import gather as gathering
from stages.corpus import rows as writing
from stages.corpus import taking
from stages.corpus.gather import gather
from stages.corpus.prepared import table, write_prepared
from stages.corpus.ready import ReadyRows
from stages.corpus.rendering import Renderer
from stages.corpus.template import Template
from stages.targets import identify_target, locate_target

CONVERSATIONS = 200_000  # of 1 to 3 turns, 500 tokens in the mean: 100 M tokens
PARTS = 4_000  # conversations of which the parts are timed, in one process
CHUNK = 1024  # texts that the tokenizer alone is handed at once
MAX_RATIO, MAX_MEMORY_GIB = 1.3, 2.0
SYLLABLES = [a + b for a in "bcdfghjklmnprstvw" for b in ("a", "e", "i", "o", "u", "an", "er", "ing", "ion", "al")]
Seconds = tuple[float, float]  # wall, CPU


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


def write_source(path: Path, count: int) -> None:
    with path.open("w") as file:
        for row in conversations(count):
            file.write(json.dumps(row) + "\n")


def settings(path: Path, prepare: Prepare, count: int) -> Prepare:
    """The shipped settings over one source of conversations with their answers."""
    source = Source(
        name="synthetic", kind="files", path=str(path), domain="general", licence="none", answers="given", limit=count
    )
    wide = {"max_prompt_tokens": 4096, "max_new_tokens": 4096, "max_row_tokens": 8192}
    return prepare.model_copy(update={"sources": (source,), **wide})


def prepare_all(prepare: Prepare, folder: Path, room: Path, name: str = "target") -> Any:
    """What stages/prepare.py does, answers aside."""
    renderer = Renderer(folder, prepare.rendering)
    corpus = gather(prepare, renderer, ReadyRows(folder), room / "spool")
    identity = identify_target(folder, name)
    return write_prepared(room / PREPARED, corpus, {}, prepare, identity, renderer.end_ids, renderer.text)


def cpu_s() -> float:
    """CPU seconds of this process and of those that it started and that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def pss_gib() -> float:
    """Memory of this process and its children, shared pages counted by their share."""
    found = 0
    for task in Path("/proc/self/task").iterdir():
        for child in [str(os.getpid()), *(task / "children").read_text().split()]:
            if child != str(os.getpid()) or task.name == child:
                with contextlib.suppress(OSError):
                    found += int(Path(f"/proc/{child}/smaps_rollup").read_text().split("Pss:")[1].split()[0])
    return found / 2**20


@contextlib.contextmanager
def peak_memory() -> Iterator[list[float]]:
    """A list whose one number is the peak of `pss_gib` so far."""
    peak, over = [pss_gib()], threading.Event()

    def watch() -> None:
        while not over.wait(0.5):
            peak[0] = max(peak[0], pss_gib())

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    yield peak
    over.set()
    watching.join()


def alone(path: Path, folder: Path, prepare: Prepare, news: Any) -> None:
    """The tokenizer alone, in a process of its own; the texts are rendered beforehand and not timed."""
    os.environ["RAYON_NUM_THREADS"], os.environ["TOKENIZERS_PARALLELISM"] = str(prepare.readers), "true"
    template = Template(folder, prepare.rendering.template_arguments, None)
    backend = template.tokenizer.backend_tokenizer
    ways = {"encode_batch_fast": backend.encode_batch_fast, "encode_batch": backend.encode_batch}
    spent: dict[str, Seconds] = dict.fromkeys(ways, (0.0, 0.0))
    tokens = count = 0
    with path.open() as file:
        while lines := list(itertools.islice(file, CHUNK)):
            texts = [template.text(json.loads(line)["messages"], (), generation=False) for line in lines]
            for way, encode in ways.items():
                wall, cpu = time.perf_counter(), time.process_time()
                count = sum(len(e.ids) for e in encode(texts, add_special_tokens=False))
                spent[way] = (spent[way][0] + time.perf_counter() - wall, spent[way][1] + time.process_time() - cpu)
            tokens += count
    news.put((tokens, spent))


def gate(params: Params, room: Path, news: Any) -> None:
    """gate-extraction over the rows in `room`, in a process of its own: seconds, peak GiB, and checks that failed."""
    from stages._gate_extraction import gather_extraction
    from stages.gates._judge import judge

    os.chdir(room)
    start = time.perf_counter()
    with peak_memory() as peak:
        subject, digest, tables = gather_extraction(params)
        report = judge("extraction", subject, digest, tables)
    news.put(
        (
            time.perf_counter() - start,
            peak[0],
            len(report.checks),
            [c.assertion for c in report.checks if not c.success],
        )
    )


def apart(work: Callable[..., None], *args: Any) -> Any:
    """What `work` puts into its last argument, a queue, in a process of its own."""
    context = multiprocessing.get_context("spawn")
    news = context.Queue()
    process = context.Process(target=work, args=(*args, news))
    process.start()
    told = news.get()
    process.join()
    return told


class Clock:
    """CPU seconds by part; a part within another is taken off it."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}
        self._inner = [0.0]

    def timed(self, part: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **named: Any) -> Any:
            start = time.thread_time()
            self._inner.append(0.0)
            try:
                return work(*args, **named)
            finally:
                whole = time.thread_time() - start
                self.parts[part] = self.parts.get(part, 0.0) + whole - self._inner.pop()
                self._inner[-1] += whole

        return run


def parts(prepare: Prepare, folder: Path, room: Path) -> dict[str, float]:
    """CPU seconds of the parts over the first PARTS conversations, in this process."""
    clock = Clock()
    places: list[tuple[str, Any, str]] = [
        ("tokenising", Template, "encode_many"),
        ("rendering by the template", Template, "text"),
        ("masks", Renderer, "given_many"),
        ("reading JSON, its digest", taking, "item_of"),
        ("n-grams, MinHash, spool", taking.Taker, "_kept"),
        ("order of turns, ids, loops", taking.Taker, "take"),
        ("near duplicates, leaks, weights", gathering, "_sifted"),
        ("packing parquet (a thread)", writing.TableWriter, "_pack"),
    ]
    before = [(holder, name, getattr(holder, name)) for _, holder, name in places]
    for (part, holder, name), (_, _, work) in zip(places, before, strict=True):
        setattr(holder, name, clock.timed(part, work))
    few = prepare.sources[0].model_copy(update={"limit": PARTS})
    try:
        clock.timed("everything else", prepare_all)(
            prepare.model_copy(update={"sources": (few,), "readers": 1}), folder, room
        )
    finally:
        for holder, name, work in before:
            setattr(holder, name, work)
    return clock.parts


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else CONVERSATIONS
    params = load_params()
    folder = locate_target(params.target.origin)
    Path(".cache").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=".cache") as made:
        room, path = Path(made).resolve(), Path(made).resolve() / "source.jsonl"
        write_source(path, count)
        prepare = settings(path, params.prepare, count)
        start, start_cpu = time.perf_counter(), cpu_s()
        with peak_memory() as peak:
            manifest = prepare_all(prepare, folder, room, params.target.name)
        whole = time.perf_counter() - start, cpu_s() - start_cpu
        spool = sum(f.stat().st_size for f in (room / "spool").rglob("*") if f.is_file())
        (room / ".cache").symlink_to(Path(".cache").resolve())
        judged = apart(gate, params.model_copy(update={"prepare": prepare}), room)
        tokens, ways = apart(alone, path, folder, prepare)
        (room / "parts").mkdir()
        costs = parts(prepare, folder, room / "parts")
        size = path.stat().st_size
    print(table(manifest))
    print(f"{tokens:,} tokens of {size / 2**20:,.0f} MiB of source; the spool takes {spool / 2**20:,.0f} MiB of disk")
    seconds, gate_gib, checks, failed = judged
    print(f"gate-extraction: {checks} checks in {seconds:.1f} s, peak {gate_gib:.2f} GiB; failed: {failed or 'none'}")
    report(whole, ways, tokens, count, max(peak[0], gate_gib), costs)


def report(
    whole: Seconds, ways: dict[str, Seconds], tokens: int, count: int, peak: float, costs: dict[str, float]
) -> None:
    """Print what was measured; exits 1 when a bound is broken."""
    for name, (wall, cpu) in {"prepare": whole, **{f"tokenizer alone, {w}": s for w, s in ways.items()}}.items():
        print(f"{name:<36}{wall:8.1f} s {cpu:8.1f} CPU s {tokens / wall:12,.0f} tokens/s")
    for way, (wall, cpu) in ways.items():
        print(f"prepare over {way}: {whole[0] / wall:.2f} by wall, {whole[1] / cpu:.2f} by CPU seconds")
    print(f"parts, CPU us a conversation, over {min(PARTS, count):,} of them in one process:")
    for part, seconds in sorted(costs.items(), key=lambda c: -c[1]):
        print(f"  {part:<34}{seconds / min(PARTS, count) * 1e6:8.0f}")
    print(f"peak memory of all processes, the gate among them: {peak:.2f} GiB (at most {MAX_MEMORY_GIB})")
    ratio = whole[0] / ways["encode_batch"][0]
    if ratio > MAX_RATIO or peak > MAX_MEMORY_GIB:
        print(f"above the bounds: {ratio:.2f} by wall (at most {MAX_RATIO}), {peak:.2f} GiB")
        sys.exit(1)


if __name__ == "__main__":
    main()
