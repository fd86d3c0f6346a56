"""prepare as a whole where rendering matters: conversations that take several rows, one BOS from here to the benchmark, a
server's answers, and rows that a person looks at."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from stages import glance, prepare
from stages.acceptance.prompts import held_out_prompts
from stages.capture.rows import read_rows
from stages.contracts.errors import DataError, EngineError, LineError
from stages.contracts.manifest import PREPARED, PREPARED_MANIFEST, PreparedManifest
from stages.corpus.rendering import Renderer
from tests.corpus.completions import Completions, serve
from tests.corpus.families import policy
from tests.tiny import HIDDEN, LAYERS, POINTS, TEMPLATE, make_target

BOS = 0  # <|endoftext|>, in the target of `line`: its tokenizer adds it, and its template writes it
BRIEF = "{% set last = namespace(of=-1) %}{% for m in messages %}{% if m['role'] == 'user' %}{% set last.of = loop.index0 %}{% endif %}{% endfor %}"
FORGETS = (  # an answer keeps its reasoning until the next question
    "{{ bos_token }}" + BRIEF + "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' and m.reasoning_content and loop.index0 > last.of %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def talk(i: int) -> dict[str, Any]:
    asked = [{"role": "user", "content": f"Question {i} of {n}?"} for n in ("one", "two")]
    said = [{"role": "assistant", "content": f"It is {i}.", "reasoning_content": f"Count to {i}."} for _ in asked]
    return {"messages": [asked[0], said[0], asked[1], said[1]]}


@pytest.fixture
def line(tmp_path: Path, repo_root: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A working folder whose target adds BOS by itself and writes it in its template, which forgets reasoning."""
    monkeypatch.chdir(tmp_path)
    folder = make_target(tmp_path / "target", bos_token_id=BOS)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"bos_token": "<|endoftext|>", "add_bos_token": True, "chat_template": FORGETS}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [BOS], "tokens": ["<|endoftext|>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    raw = yaml.safe_load((repo_root / "params/smollm2-135m.yaml").read_text())
    raw["target"] |= {"origin": "target", "layers": LAYERS, "hidden_size": HIDDEN, "vocab_size": 259, "threads": 1}
    raw["capture"]["points"] = list(POINTS)
    raw["merge"]["draft_vocab_size"] = 259
    raw["gates"]["deployment"]["min_domain_accept_length"] = {}
    told = {"kind": "jsonl", "domain": "general", "licence": "own", "limit": 99}
    raw["prepare"] |= {
        "max_prompt_tokens": 300, "max_new_tokens": 8, "max_row_tokens": 320, "batch_size": 4, "workers": 1,
        "held_out_share": 0.4, "out_of_distribution": 2,
        "sources": [
            {**told, "name": "given", "path": "talks.jsonl", "answers": "given"},
            {**told, "name": "asked", "path": "asked.jsonl", "answers": "regenerate"},
        ],
    }  # fmt: skip
    Path("talks.jsonl").write_text("".join(json.dumps(talk(i)) + "\n" for i in range(8)))
    asked = [{"messages": [{"role": "user", "content": f"And what of {i}, then?"}]} for i in range(6)]
    Path("asked.jsonl").write_text("".join(json.dumps(m) + "\n" for m in asked))
    write(raw)
    return raw


def write(raw: dict[str, Any]) -> None:
    Path("params.yaml").write_text(yaml.safe_dump(raw))


def rows(source: str) -> list[dict[str, Any]]:
    return pq.read_table(PREPARED / source / "rows.parquet").to_pylist()


def manifest() -> PreparedManifest:
    return PreparedManifest.read(PREPARED_MANIFEST)


def test_turns_whose_history_is_rewritten_become_rows_on_one_side_of_the_split_and_are_counted(
    line: dict[str, Any],
) -> None:
    prepare.main()
    given = manifest().sources[0]
    assert (given.rows_read, given.rows, given.extra_rows, given.rejects) == (8, 16, 8, {})
    sides: dict[str, set[str]] = {}
    for row in rows("given"):
        said = json.loads(row["messages"])
        assert sum(row["loss_mask"]) == len(row["input_ids"]) - row["prompt_tokens"]
        assert len(said) in (2, 4) and said[-1]["role"] == "assistant"
        sides.setdefault(said[0]["content"], set()).add(row["split"])
    assert len(sides) == 8 and all(len(side) == 1 for side in sides.values())
    assert {s for side in sides.values() for s in side} == {"train", "held_out"}
    line["prepare"]["rendering"]["rewritten_history"] = "last"
    write(line)
    prepare.main()
    assert (manifest().sources[0].rows, manifest().sources[0].extra_rows) == (8, 0)
    assert b"extra_rows" not in PREPARED_MANIFEST.read_bytes()


def test_a_shuffled_and_appended_source_gives_the_same_rows_for_what_did_not_change(line: dict[str, Any]) -> None:
    prepare.main()
    before = {r["row_id"]: r["split"] for s in ("given", "asked") for r in rows(s)}
    for name in ("talks", "asked"):
        lines = Path(f"{name}.jsonl").read_text().splitlines()
        more = {"talks": talk(20), "asked": {"messages": [{"role": "user", "content": "Something else?"}]}}[name]
        Path(f"{name}.jsonl").write_text("\n".join([*lines[::-1], json.dumps(more)]) + "\n")
    prepare.main()
    after = {r["row_id"]: r["split"] for s in ("given", "asked") for r in rows(s)}
    assert before.items() <= after.items() and len(after) == len(before) + 3


def test_there_is_one_bos_and_capture_serving_and_benchmark_read_the_ids_that_were_prepared(
    line: dict[str, Any],
) -> None:
    prepare.main()
    prepared = {r["row_id"]: r for s in ("given", "asked") for r in rows(s)}
    for row in prepared.values():
        assert row["input_ids"][0] == BOS and row["input_ids"].count(BOS) == 1 + row["input_ids"][
            row["prompt_tokens"] :
        ].count(BOS)
    captured = {row.row_id: row.input_ids.tolist() for found in read_rows(manifest()).values() for row in found}
    assert captured == {name: row["input_ids"] for name, row in prepared.items()}
    for prompt in held_out_prompts(manifest()):  # what serve-validate and benchmark ask
        row = prepared[prompt.row_id]
        assert list(prompt.ids) == row["input_ids"][: row["prompt_tokens"]]


def test_a_servers_answers_are_the_rows_that_the_engine_here_gives(line: dict[str, Any]) -> None:
    prepare.main()
    here = rows("asked")
    shutil.rmtree(".cache")
    with serve(Completions(Path("target"))) as server:
        line["prepare"]["answers"] |= {"engine": "openai", "base_url": server.url, "model": "tiny", "concurrency": 4}
        write(line)
        prepare.main()
        assert rows("asked") == here and manifest().answered_by == "openai tiny"
        asked = len(server.asked)
        prepare.main()
        assert len(server.asked) == asked == 6
    prepare.main()  # all is there: the server is not needed
    assert rows("asked") == here


def test_answers_of_a_server_that_renders_otherwise_are_not_asked_for(line: dict[str, Any], tmp_path: Path) -> None:
    other = make_target(tmp_path / "other")
    with serve(Completions(other, renderer=Renderer(other, policy()))) as server:
        line["prepare"]["answers"] |= {"engine": "openai", "base_url": server.url, "model": "tiny"}
        write(line)
        with pytest.raises(EngineError, match="renders conversations otherwise"):
            prepare.main()
        assert server.asked == []
    assert TEMPLATE not in FORGETS and not PREPARED.exists()


def test_refused_prompts_are_rejects_with_their_reason(line: dict[str, Any]) -> None:
    def fault(number: int, prompt: list[int]) -> Any:
        return (400, {}, {"error": "not this one"}) if number == 0 else None

    with serve(Completions(Path("target"), fault)) as server:
        line["prepare"]["answers"] |= {"engine": "openai", "base_url": server.url, "model": "tiny"}
        write(line)
        prepare.main()
    asked = manifest().sources[1]
    assert asked.rejects == {"refused by the engine": 1} and asked.rows == 5


def look(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    monkeypatch.setattr("sys.argv", ["glance", *words])
    glance.main()
    return capsys.readouterr().out


def test_a_person_sees_a_row_as_the_model_does(
    line: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Path("talks.jsonl").open("a") as file:
        file.write(json.dumps(talk(0)) + "\n" + json.dumps({"messages": [{"role": "user", "content": "<b>x?"}]}) + "\n")
    prepare.main()
    row = rows("given")[0]
    capsys.readouterr()
    text = look(monkeypatch, capsys, "data/prepared", "0")
    assert "⟦<think>Count to 0.</think>It is 0.<|im_end|>⟧" in text and "<|endoftext|><|im_start|>user⏎" in text
    assert "its twin talks.jsonl:9: duplicate prompt" in text and "given (jsonl, own)" in text
    assert "2 duplicate prompt, 1 no assistant turn" in text
    assert look(monkeypatch, capsys, "data/prepared", row["row_id"][:12]) == text
    told = json.loads(look(monkeypatch, capsys, "data/prepared", "0", "--json"))
    assert [i for p in told["pieces"] for i in p["ids"]] == row["input_ids"]
    assert [int(p["supervised"]) for p in told["pieces"] for _ in p["ids"]] == row["loss_mask"]
    page = Path(look(monkeypatch, capsys, "data/prepared", "0", "--html").strip()).read_text()
    assert (
        not re.search(r"(?:src|href|url\()", page)
        and "<span class=s" in page
        and "&lt;think" not in page.split("<style>")[0]
    )
    assert "duplicate prompt" in page and row["row_id"] in page


def test_a_row_that_is_not_there_and_another_tokenizer_are_told(
    line: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare.main()
    with pytest.raises(DataError, match=r"No such row[\s\S]*0 to 21"):
        look(monkeypatch, capsys, "data/prepared", "22")
    with pytest.raises(DataError, match="Several rows begin so"):
        look(monkeypatch, capsys, "data/prepared", "")
    with pytest.raises(LineError, match=r"Which row\?"):
        look(monkeypatch, capsys, "data/prepared", "--html")
    path = Path("target/tokenizer.json")
    path.write_text(path.read_text() + " ")
    with pytest.raises(DataError, match="tokenizer is not the one"):
        look(monkeypatch, capsys, "data/prepared", "0")
