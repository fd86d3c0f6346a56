"""The benchmark's figures beside those of sglang.benchmark.serving, SGLang's own client, from the same servers and prompts in one
run. Needs a draft (`dvc repro train`) and the SGLang environment (`make sglang`); changes nothing.

    python -m benchmarks.second_opinion

A server with the draft and one without answer held-out prompts, a few at once: to us, to SGLang's client, and to us again, whose two
figures tell the machine's noise. Accept length is ours from the run's own requests; SGLang's client prints the server's mean over
all it served before. Fails when throughput or the time per token are further apart than _APART.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from stages._bench import PLAIN, Way, trial
from stages._bench_served import ServedBench, open_servers
from stages.acceptance.prompts import Prompt, held_out_prompts
from stages.acceptance.sweep import Trial, latencies, tokens_a_pass
from stages.contracts.draft import DRAFT, DRAFT_RECORD, DraftRecord
from stages.contracts.manifest import PREPARED_MANIFEST, PreparedManifest
from stages.contracts.params import Params, load_params
from stages.engines._sglang_launch import environment
from stages.targets import locate_target

_REQUESTS, _AT_ONCE, _TOKENS = 8, 2, 24
_LIMIT_S = 300
_APART = 1.35  # the larger over the smaller; a shared CPU alone moves a run by a fifth
_ROWS = (
    ("first token p50, ms", "median_ttft_ms"),
    ("first token p99, ms", "p99_ttft_ms"),
    ("a token p50, ms", "median_tpot_ms"),
    ("a token p99, ms", "p99_tpot_ms"),
    ("output tokens/s", "output_throughput"),
    ("accept length", "accept_length"),
)
# Its data sets of pictures import a library that the CPU environment is spared; prompts of our own need none of them.
_CLIENT = """
import sys, types
try:
    import datasets
except ModuleNotFoundError:
    sys.modules["datasets"] = types.SimpleNamespace(load_dataset=None)
from sglang.benchmark.serving import cli_main
cli_main()
"""
_JUDGED = ("median_tpot_ms", "output_throughput")


def texts(prompts: list[Prompt], folder: Path) -> dict[str, Prompt]:
    """Prompts by their text: those whose text gives the same ids again, for SGLang's client sends text."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    found: dict[str, Prompt] = {}
    for prompt in prompts:
        text = tokenizer.decode(list(prompt.ids), skip_special_tokens=False)
        if tuple(tokenizer.encode(text).ids) == prompt.ids and len(found) < _REQUESTS:
            found[text] = prompt
    return found


def ours(found: Trial) -> dict[str, float]:
    """Our figures under SGLang's names."""
    times = latencies([found])
    return {
        "median_ttft_ms": times.first_token_ms.p50,
        "p99_ttft_ms": times.first_token_ms.p99,
        "median_tpot_ms": times.per_token_ms.p50,
        "p99_tpot_ms": times.per_token_ms.p99,
        "output_throughput": found.tokens_per_s,
        "accept_length": tokens_a_pass([found]),
    }


def theirs(url: str, params: Params, said: list[str], folder: Path) -> dict[str, Any]:
    """The figures of SGLang's own client."""
    with tempfile.TemporaryDirectory() as scratch:
        prompts, out = Path(scratch) / "prompts.jsonl", Path(scratch) / "out.jsonl"
        lines = [{"conversations": [{"content": text}, {"content": "answer"}]} for text in said]
        prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
        told = {
            "backend": "sglang", "base-url": url, "dataset-name": "custom", "dataset-path": prompts, "num-prompts": len(said),
            "max-concurrency": _AT_ONCE, "sharegpt-output-len": _TOKENS, "tokenizer": folder, "model": folder,
            "output-file": out, "warmup-requests": 1, "temperature": 0.0, "seed": 1,
        }  # fmt: skip
        python = str(Path(params.serve.sglang.python).absolute())
        command = [python, "-P", "-c", _CLIENT, "--disable-tqdm"]
        command += [part for name, value in told.items() for part in (f"--{name}", str(value))]
        env = environment(params.target.device, params.target.threads)
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=_LIMIT_S)
        if done.returncode or not out.exists():
            sys.exit(f"SGLang's client failed:\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}")
        return json.loads(out.read_text().splitlines()[-1])


def compare(bench: ServedBench, way: Way, by_text: dict[str, Prompt], params: Params, folder: Path) -> list[str]:
    """Print one server's figures side by side; what is too far apart."""
    prompts = list(by_text.values())
    trial(bench, way, prompts[:_AT_ONCE], _AT_ONCE, 4)
    first = ours(trial(bench, way, prompts, _AT_ONCE, _TOKENS))
    other = theirs(bench.servers[way.draft_steps].client.url, params, list(by_text), folder)
    again = ours(trial(bench, way, prompts, _AT_ONCE, _TOKENS))
    print(f"\n{way.name}, {way.draft_steps} drafted: {len(prompts)} requests of {_TOKENS} tokens, {_AT_ONCE} at once")
    print(f"  {'':<22}{'ours':>10}{'SGLang':>10}{'ours again':>12}")
    faults: list[str] = []
    for words, name in _ROWS[: None if way.draft_steps else -1]:  # plain decoding has no accept length
        a, b, c = first[name], other.get(name) or 0.0, again[name]
        print(f"  {words:<22}{a:>10.2f}{b:>10.2f}{c:>12.2f}")
        middle = (a + c) / 2
        if name in _JUDGED and (not b or max(middle, b) / min(middle, b) > _APART):
            faults.append(f"{way.name}: {words} {middle:.2f} against {b:.2f}")
    return faults


def main() -> None:
    params = load_params()
    torch.set_num_threads(params.target.threads)
    steps = params.serve.draft_steps
    small = params.benchmark.model_copy(update={"draft_steps": (steps,), "concurrencies": (_AT_ONCE,)})
    params = params.model_copy(update={"benchmark": small})
    folder = locate_target(params.target.origin).resolve()
    held_out = held_out_prompts(PreparedManifest.read(PREPARED_MANIFEST))
    by_text = texts([p for p in held_out if len(p.ids) <= small.max_prompt_tokens], folder)
    longest = max(len(p.ids) for p in by_text.values()) + _TOKENS
    faults: list[str] = []
    with open_servers(params, DraftRecord.read(DRAFT / DRAFT_RECORD), longest) as bench:
        for way in (PLAIN, Way("speculative", steps, steps)):
            faults += compare(bench, way, by_text, params, folder)
    if faults:
        sys.exit("too far apart: " + "; ".join(faults))


if __name__ == "__main__":
    main()
