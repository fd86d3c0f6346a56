"""The serving policy, as written for SGLang: read by its own parser, and served by it without changing an answer."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from stages._served import facts_for_server, served_points
from stages.acceptance.prompts import held_out_prompts
from stages.contracts.draft import DRAFT, DRAFT_RECORD, DraftRecord
from stages.contracts.manifest import PREPARED_MANIFEST, PreparedManifest
from stages.contracts.params import load_params
from stages.contracts.policy import PolicyLevel, ServingPolicy
from stages.contracts.serving import SGLANG_ADAPTIVE, sglang_flags, write_serving
from stages.drafts.eagle3 import read_draft
from stages.engines import sglang
from stages.engines._sglang_launch import environment
from stages.engines.in_process import InProcess, Request
from stages.targets import load_target, locate_target
from tests.sglang.conftest import PYTHON

pytestmark = pytest.mark.sglang

READ = """
import sys
from sglang.srt.speculative.adaptive_spec_params import AdaptiveSpeculativeParams, resolve_candidate_steps_from_config
for path in sys.argv[1:]:
    steps = resolve_candidate_steps_from_config(path)
    params = AdaptiveSpeculativeParams(initial_steps=max(steps), cfg_path=path)
    for round in range(50):  # whatever is accepted, its average must move nothing
        for batch in range(1, 40):
            assert params.on_verify_complete([round % 4] * batch, batch) is None
    print(steps, [params.get_steps_for_batch(batch) for batch in range(1, 40)])
"""


def policy(levels: dict[int, int], up_to: int, measured_from: int = 1) -> ServingPolicy:
    return ServingPolicy(
        draft_digest="sha256:0",
        engine="sglang",
        engine_version="0.5.23",
        device="cpu",
        levels=tuple(PolicyLevel(min_batch=b, draft_steps=k, ratio=1, low=1, high=1) for b, k in levels.items()),
        measured_from=measured_from,
        measured_up_to=up_to,
    )


def test_sglang_s_own_parser_reads_the_policy_s_steps_and_has_nothing_to_choose(tmp_path: Path) -> None:
    policies = [policy({1: 3, 2: 1, 9: 0}, 16), policy({2: 3, 5: 0, 8: 2}, 16, 2), policy({1: 2}, 4), policy({1: 0}, 4)]
    for i, chosen in enumerate(policies):
        write_serving(chosen, tmp_path / f"{i}")
    paths = [str(tmp_path / f"{i}" / SGLANG_ADAPTIVE) for i in range(len(policies))]
    command = [str(PYTHON), "-P", "-c", READ, *paths]
    done = subprocess.run(command, env=environment("cpu", 1), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    expected = [[chosen.steps_for(batch) for batch in range(1, 40)] for chosen in policies]
    assert done.stdout.splitlines()[-4:] == [f"{sorted(set(steps))} {steps}" for steps in expected]


def test_sglang_switches_by_the_policy_as_the_batch_grows_and_shrinks_and_answers_stay_as_they_are(here: Path) -> None:
    params, record = load_params(), DraftRecord.read(DRAFT / DRAFT_RECORD)
    folder = locate_target(params.target.origin)
    target, checkpoint = load_target(folder, "cpu", "float32"), read_draft(DRAFT)
    points = served_points(sglang, checkpoint, record, target.config.layers)
    chosen = policy({1: 3, 2: 1, 3: 0}, 4)
    write_serving(chosen, Path("reports/serving"))
    prompts = held_out_prompts(PreparedManifest.read(PREPARED_MANIFEST))[:4]
    # Ends far apart: four requests at once become three, two, one while the last ones run.
    requests = [Request(p.prompt_id, p.ids, 8 + 10 * i, ignore_eos=True) for i, p in enumerate(prompts)]
    positions = max(len(r.prompt_ids) + r.max_new_tokens for r in requests)
    plain = InProcess(target, slots=4, positions=positions).generate(requests, concurrency=4)
    launch = sglang.Launch(
        target=folder, device="cpu", dtype="float32", threads=2, concurrency=4, positions=positions,
        draft=facts_for_server(checkpoint, record, points, target), draft_steps=3,
        adaptive=Path("reports/serving") / SGLANG_ADAPTIVE,
    )  # fmt: skip
    flags = sglang_flags(chosen, (Path("reports/serving") / SGLANG_ADAPTIVE).resolve())
    fields = launch.fields(params.serve.sglang)
    assert {name: fields[name] for name in flags} == flags
    with sglang.serve(launch, params.serve.sglang, label="adaptive") as server:
        assert server.info["speculative_adaptive"] is True
        bodies = [
            {
                "input_ids": list(r.prompt_ids),
                "sampling_params": {"temperature": 0, "max_new_tokens": r.max_new_tokens, "ignore_eos": True},
            }
            for r in requests
        ]
        together = {
            "input_ids": [b["input_ids"] for b in bodies],
            "sampling_params": [b["sampling_params"] for b in bodies],
        }
        replies = server.client.post("/generate", together)
        alone = server.client.post("/generate", bodies[-1])
    assert [tuple(r["output_ids"]) for r in replies] == [a.ids for a in plain]
    assert tuple(alone["output_ids"]) == plain[-1].ids
    log = Path("logs/sglang/adaptive.log").read_text()
    switched = [tuple(map(int, m)) for m in re.findall(r"Switch adaptive runtime state: steps (\d+) -> (\d+)", log)]
    # Buffers for each length are made first; then plain for the four, one token for two of them, three for the last.
    assert switched[-3:] == [(3, 0), (0, 1), (1, 3)]
    assert alone["meta_info"]["spec_verify_ct"] <= 37
