"""Data of a tiny line, written the way the stages write it: prepared rows, gate reports, params. For tests to start from."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml

from stages.contracts.files import canonical, digest, file_digest
from stages.contracts.manifest import PREPARED, PREPARED_MANIFEST, PreparedManifest, PreparedSource
from stages.contracts.quality import PREPARED_QUALITY
from stages.contracts.report import Check, GateName, GateReport, report_path
from stages.corpus.gather import Corpus
from stages.corpus.measure import Measures
from stages.corpus.rows import Row, columns_of
from stages.targets import identify_target, load_target, read_target_config
from stages.targets._decoder import Decoder
from tests import tiny

ROOT = Path(__file__).parent.parent


class TinySource(NamedTuple):
    name: str
    domain: str
    prompts: int


SOURCES = (TinySource("code", "coding", 14), TinySource("tools", "agentic", 10), TinySource("talk", "general", 8))
_WORDS = tuple(
    [
        "sort",
        "the",
        "list",
        "of",
        "numbers",
        "and",
        "say",
        "why",
        "this",
        "call",
        "has",
        "to",
        "stop",
        "before",
        "noon",
        "or",
        "add",
        "two",
        "files",
    ]
)
ROWS_SCHEMA = pa.schema(
    [
        ("row_id", pa.string()),
        ("prompt_id", pa.string()),
        ("source", pa.string()),
        ("domain", pa.string()),
        ("split", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.uint8())),
        ("prompt_tokens", pa.int32()),
        ("finish", pa.string()),
        ("repetitive", pa.bool_()),
        ("on_policy", pa.bool_()),
        ("messages", pa.string()),
    ]
)
PROMPTS_SCHEMA = pa.schema(
    [(n, pa.string()) for n in ("prompt_id", "domain")]
    + [("input_ids", pa.list_(pa.int32())), ("messages", pa.string())]
)
REJECTS_SCHEMA = pa.schema([(n, pa.string()) for n in ("source", "prompt_id", "item", "reason", "detail")])


def prompt_id(ids: list[int]) -> str:
    """First 24 hex digits of sha256 over the prompt's int32 ids."""
    return hashlib.sha256(np.asarray(ids, "<i4").tobytes()).hexdigest()[:24]


def row_id(ids: list[int], mask: list[int]) -> str:
    """First 24 hex digits of sha256 over int32 ids, then mask bytes."""
    return hashlib.sha256(np.asarray(ids, "<i4").tobytes() + np.asarray(mask, "u1").tobytes()).hexdigest()[:24]


def text_of(source: str, i: int) -> str:
    """A prompt, another for every source and number; lengths vary."""
    words = [_WORDS[(i * 7 + k * (1 + len(source))) % len(_WORDS)] for k in range(3 + i % 5)]
    return f"{source} {i}: " + " ".join(words)


def encode_prompts(folder: Path, texts: list[str]) -> list[list[int]]:
    """Token ids of the target's own render of each text as the one user message, with the generation prompt."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    head = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
    tail = "<|im_end|>\n<|im_start|>assistant\n"
    return [tokenizer.encode(head + text + tail, add_special_tokens=False).ids for text in texts]


def greedy(target: Decoder, prompts: list[list[int]], limits: list[int]) -> list[list[int]]:
    """Greedy answers of at most limits[i] tokens; an end-of-turn token closes an answer and belongs to it."""
    cache = target.new_cache(len(prompts), max(map(len, prompts)) + max(limits))
    lengths = torch.tensor([len(p) for p in prompts])
    flat = torch.tensor([t for p in prompts for t in p])
    last = target.packed(flat, lengths.tolist(), cache=cache, slots=range(len(prompts))).last
    token = target.logits(last[lengths.cumsum(0) - 1]).argmax(-1)
    drawn = [token]
    for _ in range(max(limits) - 1):
        token = target.logits(target.decode(token[:, None], lengths, cache).last[:, 0]).argmax(-1)
        lengths = lengths + 1
        drawn.append(token)
    answers = []
    for row, limit in zip(torch.stack(drawn, 1).tolist(), limits, strict=True):
        row = row[:limit]
        stop = next((i for i, t in enumerate(row) if t in target.config.eos_ids), None)
        answers.append(row if stop is None else row[: stop + 1])
    return answers


def make_rows(target: Decoder, folder: Path, source: TinySource) -> list[dict[str, Any]]:
    """Rows of prompts answered greedily by the target itself; every fifth prompt is held out."""
    texts = [text_of(source.name, i) for i in range(source.prompts)]
    prompts = encode_prompts(folder, texts)
    answers = greedy(target, prompts, [20 + 4 * (i % 4) for i in range(len(prompts))])
    rows = []
    for i, (text, prompt, answer) in enumerate(zip(texts, prompts, answers, strict=True)):
        ids, mask = prompt + answer, [0] * len(prompt) + [1] * len(answer)
        rows.append(
            {
                "row_id": row_id(ids, mask),
                "prompt_id": prompt_id(prompt),
                "source": source.name,
                "domain": source.domain,
                "split": "held_out" if i % 5 == 4 else "train",
                "input_ids": ids,
                "loss_mask": mask,
                "prompt_tokens": len(prompt),
                "finish": "stop" if answer[-1] in target.config.eos_ids else "capped",
                "repetitive": False,
                "on_policy": True,
                "messages": json.dumps([{"role": "user", "content": text}]),
            }
        )
    return rows


def write_rows(root: Path, name: str, rows: list[dict[str, Any]]) -> Path:
    """data/prepared/<name>/rows.parquet below `root`."""
    path = root / PREPARED / name / "rows.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, ROWS_SCHEMA), path, compression="zstd")
    return path


def describe_source(path: Path, source: TinySource, rows: list[dict[str, Any]]) -> PreparedSource:
    return PreparedSource(
        name=source.name,
        domain=source.domain,
        licence="MIT",
        kind="jsonl",
        answers="regenerate",
        origin_digest=digest(source.name.encode()),
        rows_read=len(rows),
        rows=len(rows),
        train_rows=sum(r["split"] == "train" for r in rows),
        held_out_rows=sum(r["split"] == "held_out" for r in rows),
        tokens=sum(len(r["input_ids"]) for r in rows),
        supervised_tokens=sum(sum(r["loss_mask"]) for r in rows),
        capped=sum(r["finish"] == "capped" for r in rows),
        repetitive=0,
        rejects={},
        rows_digest=file_digest(path),
    )


def write_prepared(
    root: Path, target_folder: Path, sources: tuple[TinySource, ...] = SOURCES, out_of_distribution: int = 4
) -> PreparedManifest:
    """Write data/prepared below `root` as stages/prepare.py does: rows, out-of-distribution prompts, no rejects, manifest."""
    target = load_target(target_folder)
    described = []
    measures = Measures(Corpus([], []))
    for source in sources:
        rows = make_rows(target, target_folder, source)
        for row in rows:
            ids, mask = np.asarray(row["input_ids"], np.int32), np.asarray(row["loss_mask"], np.uint8)
            measures.take(columns_of([Row(**{**row, "input_ids": ids, "loss_mask": mask})]))
        described.append(describe_source(write_rows(root, source.name, rows), source, rows))
    other = encode_prompts(target_folder, [f"Who was number {i}?" for i in range(out_of_distribution)])
    prompts = [
        {"prompt_id": prompt_id(p), "domain": "out_of_distribution", "input_ids": p, "messages": "[]"} for p in other
    ]
    for name, table in (
        ("out_of_distribution", pa.Table.from_pylist(prompts, PROMPTS_SCHEMA)),
        ("rejects", REJECTS_SCHEMA.empty_table()),
    ):
        pq.write_table(table, root / PREPARED / f"{name}.parquet", compression="zstd")
    manifest = PreparedManifest(
        target=identify_target(target_folder, "tiny"),
        seed=7,
        temperature=0.0,
        max_new_tokens=32,
        sources=tuple(described),
        out_of_distribution_prompts=len(prompts),
        out_of_distribution_digest=file_digest(root / PREPARED / "out_of_distribution.parquet"),
        rejects_digest=file_digest(root / PREPARED / "rejects.parquet"),
    )
    measures.done(manifest, {}).write(root / PREPARED_QUALITY)
    manifest.write(root / PREPARED_MANIFEST)
    return manifest


def write_gate_report(root: Path, gate: GateName, subject_digest: str, success: bool = True) -> GateReport:
    """A report of `gate` on `subject_digest` with one check that passed (or failed)."""
    check = Check(
        table="rows", assertion="there are rows", column="row_id", success=success, expected="at least 1", actual="32"
    )
    report = GateReport(gate=gate, subject="tiny data", subject_digest=subject_digest, success=success, checks=(check,))
    report.write(root / report_path(gate))
    return report


def write_params(root: Path, target_folder: Path, changes: dict[str, dict[str, Any]] | None = None) -> Path:
    """params.yaml below `root`: the shipped one, cut down to the tiny target. `changes` is {section: {key: value}}."""
    params = yaml.safe_load((ROOT / "params.yaml").read_text())
    vocabulary = read_target_config(target_folder)["vocab_size"]
    params["target"] |= {
        "name": "tiny",
        "origin": str(target_folder),
        "layers": tiny.LAYERS,
        "hidden_size": tiny.HIDDEN,
        "vocab_size": vocabulary,
        "threads": 1,
    }
    params["prepare"] |= {"max_prompt_tokens": 160, "max_new_tokens": 32, "max_row_tokens": 256, "workers": 1}
    params["benchmark"] |= {"max_prompt_tokens": 256}
    params["capture"] |= {"points": list(tiny.POINTS), "rows_per_folder": 6, "tokens_per_batch": 256}
    params["merge"] |= {"draft_vocab_size": vocabulary}  # byte tokens are always in: all there is
    params["train"] |= {
        "optimizer_steps": 12,
        "batch_tokens": 512,
        "heads": tiny.HEADS,
        "kv_heads": tiny.KV_HEADS,
        "head_dim": tiny.HEAD_DIM,
        "intermediate_size": tiny.INTER,
        "head": "frozen",
        "loss": "kl",
        "products": "float32",
        "evaluate_every": 6,
        "checkpoint_every": 6,
    }
    for section, values in (changes or {}).items():
        params[section] |= values
    path = root / "params.yaml"
    path.write_bytes(canonical(params))
    return path
