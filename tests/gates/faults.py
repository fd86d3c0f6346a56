"""One fault for every expectation of every gate: what is changed, which check has to fail, and the words it has to say."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from stages.contracts.evidence import Arm, Losslessness
from stages.contracts.files import Fact
from stages.contracts.manifest import PreparedManifest
from stages.contracts.quality import SharedText
from tests.gates import passing

Change = Callable[[Any], Any]


@dataclass(frozen=True)
class Fault:
    """`also`: checks that cannot but fail together with this one."""

    name: str
    table: str
    says: str
    change: Change
    words: str
    also: tuple[str, ...] = ()


def cell(frame: str, at: int, **values: Any) -> Change:
    """Set cells of one line of one of the evidence's frames."""

    def change(evidence: Any) -> Any:
        rows = getattr(evidence, frame).copy()
        for column, value in values.items():
            rows[column] = rows[column].astype(object)
            rows.at[at, column] = value
            rows[column] = rows[column].infer_objects()
        return replace(evidence, **{frame: rows})

    return change


def made(frame: str, at: int, rename: bool = True, **values: Any) -> Change:
    """Change a prepared row and give it the name that its new content has."""

    def change(evidence: Any) -> Any:
        lines = getattr(evidence, frame).to_dict("records")
        lines[at] = passing.renamed({**lines[at], **values}) if rename else {**lines[at], **values}
        return replace(evidence, **{frame: pd.DataFrame(lines)})

    return change


def field(**values: Any) -> Change:
    return lambda evidence: replace(evidence, **values)


def fact(name: str, **values: Any) -> Change:
    """Change fields of a fact that the evidence holds."""

    def change(evidence: Any) -> Any:
        return replace(evidence, **{name: getattr(evidence, name).model_copy(update=values)})

    return change


def ids(**at: int) -> np.ndarray:
    """Row 1's ids with some of them changed: p5=300 sets position 5."""
    changed = passing.row("coding", 1)["input_ids"].copy()
    for place, value in at.items():
        changed[int(place[1:])] = value
    return changed


def mask(*values: int) -> np.ndarray:
    return np.array(values, np.uint8)


def source(at: int, **values: Any) -> Change:
    def change(evidence: Any) -> Any:
        manifest: PreparedManifest = evidence.manifest
        sources = list(manifest.sources)
        sources[at] = sources[at].model_copy(update=values)
        return replace(evidence, manifest=manifest.model_copy(update={"sources": tuple(sources)}))

    return change


def every(frame: str, **values: Any) -> Change:
    return lambda e: replace(e, **{frame: getattr(e, frame).assign(**values)})


def recounted(change: Change) -> Change:
    """Let the manifest count the rows as they are after `change`."""

    def again(evidence: Any) -> Any:
        evidence = change(evidence)
        for at, s in enumerate(evidence.manifest.sources):
            rows = evidence.rows[evidence.rows["source"] == s.name]
            supervised = int(sum((np.asarray(m) == 1).sum() for m in rows["loss_mask"]))
            evidence = source(at, rows=len(rows), rows_read=len(rows) + 2, supervised_tokens=supervised)(evidence)
        return evidence

    return again


def drop(keep: Callable[[pd.DataFrame], pd.Series[bool]]) -> Change:
    return recounted(lambda e: replace(e, rows=e.rows[keep(e.rows)].reset_index(drop=True)))


def same_words(evidence: Any) -> Any:
    """Row 0, held out, asks what row 1, trained on, asks: in capitals, with other spacing."""
    text = evidence.rows.at[1, "messages"].replace("Question coding 1?", "QUESTION   coding, 1")
    return cell("rows", 0, messages=text)(evidence)


def asked_later(evidence: Any) -> Any:
    """Row 0, held out, asks what stands in a later turn of row 1, trained on."""
    text = "Name all the rivers of the old coding country, please!"
    turns = [("user", text), ("assistant", "They are many.")]
    later = [
        ("system", "Be kind."),
        ("user", "Hello"),
        ("assistant", "Hi."),
        ("user", text.upper()),
        ("assistant", "Hm."),
    ]
    for row, said in ((0, turns), (1, later)):
        evidence = cell("rows", row, messages=json.dumps([{"role": r, "content": c} for r, c in said]))(evidence)
    return evidence


def doubled(evidence: Any) -> Any:
    """Row 1 once more, in place of row 2."""
    lines = evidence.rows.to_dict("records")
    lines[2] = dict(lines[1])
    return replace(evidence, rows=pd.DataFrame(lines))


def same_prompt(evidence: Any, split: str) -> Any:
    """Row 2 gets row 1's prompt and keeps an answer of its own."""
    lines = evidence.rows.to_dict("records")
    joined = np.concatenate([lines[1]["input_ids"][:12], lines[2]["input_ids"][12:]]).astype(np.int32)
    lines[2] = passing.renamed({**lines[2], "input_ids": joined, "split": split})
    return replace(evidence, rows=pd.DataFrame(lines))


def alike(row_id: str, other: str) -> tuple[SharedText, ...]:
    return (SharedText(row_id=row_id, other=other, share=0.91),)


def domain_measured(**values: Any) -> Change:
    """The domain coding with other figures."""
    return lambda e: fact("quality", domains=(passing.domain_quality("coding", **values), *e.quality.domains[1:]))(e)


TWELVE, EIGHT = (0,) * 12, (1,) * 8

EXTRACTION = (
    Fault(
        "byte",
        "files",
        "every file holds the bytes that prepared.json recorded",
        cell("files", 0, found="sha256:other"),
        "coding/rows.parquet",
    ),
    Fault(
        "tokenizer",
        "target",
        "rows were prepared for the target on this disk, by the params in force",
        fact("target", tokenizer_digest="sha256:other"),
        "tokenizer: sha256:other",
    ),
    Fault(
        "chat template",
        "target",
        "rows were prepared for the target on this disk, by the params in force",
        fact("target", template_digest="sha256:other"),
        "chat template: sha256:other",
    ),
    Fault("doubled row", "rows", "no row twice", doubled, "2 of 40 rows", ("no prompt twice",)),
    Fault(
        "renamed row",
        "rows",
        "a row's name is the digest of its tokens and mask",
        cell("rows", 1, row_id="0" * 24),
        "0" * 24,
    ),
    Fault(
        "renamed prompt",
        "rows",
        "a prompt's name is the digest of its tokens",
        cell("rows", 1, prompt_id="0" * 24),
        "against",
    ),
    Fault("negative id", "rows", "token ids are not negative", made("rows", 1, input_ids=ids(p5=-1)), ": -1"),
    Fault(
        "foreign id",
        "rows",
        "token ids lie within the target's vocabulary",
        made("rows", 1, input_ids=ids(p5=259)),
        ": 259",
    ),
    Fault(
        "short mask",
        "rows",
        "the loss mask is as long as the row",
        recounted(made("rows", 1, loss_mask=mask(*TWELVE, *EIGHT[1:]))),
        "19 against 20",
    ),
    Fault(
        "mask of two",
        "rows",
        "the loss mask holds only 0 and 1",
        recounted(made("rows", 1, loss_mask=mask(*TWELVE, *EIGHT[:6], 2, 2))),
        "1 of 40 rows",
    ),
    Fault(
        "no pair",
        "rows",
        "at least two supervised tokens stand together",
        recounted(made("rows", 1, loss_mask=mask(*TWELVE, 1, 0, 1, 0, 1, 0, 1, 0))),
        ": 1",
    ),
    Fault(
        "mask off by one",
        "rows",
        "the prompt ends where supervision begins",
        recounted(made("rows", 1, loss_mask=mask(*TWELVE, 0, *EIGHT[1:]))),
        "12 against 13",
    ),
    Fault(
        "another template",
        "rows",
        "the row opens as the target's chat template does",
        made("rows", 1, input_ids=ids(p1=77)),
        "[1, 40, 41]",
    ),
    Fault(
        "two BOS",
        "rows",
        "beginning-of-sequence tokens are as many as the template writes",
        made("rows", 1, input_ids=ids(p1=1)),
        ": 2",
        ("the row opens as the target's chat template does",),
    ),
    Fault(
        "long row",
        "rows",
        "rows keep to prepare.max_row_tokens",
        recounted(made("rows", 1, input_ids=np.resize(ids(), 33), loss_mask=mask(*TWELVE, *(1,) * 21))),
        ": 33",
    ),
    Fault(
        "cut off", "rows", "answers ended in a way that the policy keeps", cell("rows", 1, finish="error"), ": error"
    ),
    Fault(
        "stranger",
        "rows",
        "rows come from the sources in params.yaml",
        lambda e: recounted(cell("rows", 1, source="stranger"))(e),
        ": stranger",
    ),
    Fault("no split", "rows", "each row is train or held out", cell("rows", 1, split="test"), ": test"),
    Fault("doubled prompt", "rows", "no prompt twice", lambda e: same_prompt(e, "train"), "2 of 40 rows"),
    Fault(
        "leak",
        "rows",
        "no prompt stands both in train and in held out",
        lambda e: same_prompt(e, "held_out"),
        ": 2",
        ("no prompt twice",),
    ),
    Fault(
        "missing source",
        "sources",
        "prepared sources are those in params.yaml",
        lambda e: replace(e, manifest=e.manifest.model_copy(update={"sources": e.manifest.sources[:1]})),
        "general: params",
        (
            "a source's domain is the one in params.yaml",
            "rows in the file are as many as recorded",
            "supervised tokens are as many as recorded",
            "data/prepared/quality.json was measured on these rows",
        ),
    ),
    Fault(
        "other domain",
        "sources",
        "a source's domain is the one in params.yaml",
        source(0, domain="poetry"),
        "poetry against coding",
    ),
    Fault(
        "empty source",
        "sources",
        "every source gave rows",
        drop(lambda r: r["source"] != "general"),
        "general: 0",
        ("there are enough rows", "rejects keep below gates.extraction.max_reject_share"),
    ),
    Fault(
        "row lost",
        "sources",
        "rows in the file are as many as recorded",
        source(0, rows=21, rows_read=23),
        "20 against 21",
    ),
    Fault(
        "mask edited",
        "sources",
        "supervised tokens are as many as recorded",
        source(0, supervised_tokens=161),
        "160 against 161",
    ),
    Fault(
        "silent drop",
        "sources",
        "what was read is what was kept and what was rejected",
        source(0, rows_read=25),
        "25 against 22",
    ),
    Fault(
        "rejects",
        "sources",
        "rejects keep below gates.extraction.max_reject_share",
        source(1, rejects={"too long": 30}, rows_read=50),
        "60.0% rejected (30 too long)",
    ),
    Fault(
        "all capped",
        "sources",
        "capped answers keep below gates.extraction.max_capped_share",
        every("rows", finish="capped"),
        "coding: 1",
    ),
    Fault("few rows", "splits", "there are enough rows", drop(lambda r: r.groupby("source").cumcount() < 14), ": 28"),
    Fault(
        "few held out",
        "splits",
        "there are enough held-out rows",
        drop(lambda r: (r["split"] == "train") | (r.index == 0)),
        ": 1",
    ),
    Fault(
        "few supervised",
        "splits",
        "there are enough supervised tokens to train on",
        recounted(lambda e: replace(e, rows=pd.DataFrame([short(r) for r in e.rows.to_dict("records")]))),
        ": 64",
    ),
    Fault(
        "given answers", "splits", "supervised tokens are the target's own", cell("rows", 1, on_policy=False), ": 0.975"
    ),
    Fault(
        "loops",
        "splits",
        "answers that loop keep below gates.extraction.max_repetitive_share",
        cell("rows", 1, repetitive=True),
        ": 0.025",
    ),
    Fault(
        "same words",
        "splits",
        "held-out prompts do not share their text with training prompts",
        same_words,
        "1 of 8 held-out prompts",
    ),
    Fault(
        "asked later",
        "splits",
        "held-out prompts do not share their text with training prompts",
        asked_later,
        "1 of 8 held-out prompts",
    ),
    Fault(
        "figures of other rows",
        "quality",
        "data/prepared/quality.json was measured on these rows",
        fact("quality", rows_digest="sha256:other"),
        "sha256:other against",
    ),
    Fault(
        "near duplicates",
        "quality",
        "near duplicates keep below gates.extraction.max_near_duplicate_share",
        fact("quality", near_duplicates=2, nearest=alike("aaa", "bbb")),
        "2 of 40 rows: aaa like bbb (0.91)",
    ),
    Fault(
        "benchmark prompt",
        "quality",
        "no training row gives away a held-out, out-of-distribution or benchmark prompt",
        fact("quality", leaks=1, leaking=alike("aaa", "benchmark prompt mmlu.jsonl:3")),
        "1 training rows: aaa gives away benchmark prompt mmlu.jsonl:3 (0.91)",
    ),
    Fault(
        "one-word answers",
        "quality",
        "rows of every domain have enough supervised tokens",
        domain_measured(supervised_tokens=40),
        "coding 2, general 8 tokens a row",
    ),
    Fault(
        "another language",
        "quality",
        "the domains say what they said in the rows accepted before",
        domain_measured(token_bins=(0, 80, 0, 40, 40, *(0,) * 1019)),
        "coding 0.493, general 0 bits",
    ),
    Fault(
        "cut short",
        "quality",
        "rows are as long as in the rows accepted before",
        domain_measured(lengths=(0, 0, 0, 20, *(0,) * 20)),
        "rows of 8-15 tokens: 20, 16-31 tokens: 20",
    ),
    Fault(
        "mix missed",
        "quality",
        "sources give the shares of rows that their weights ask for",
        lambda e: fact(
            "quality", sources=(e.quality.sources[0].model_copy(update={"weight": 3.0}), e.quality.sources[1])
        )(e),
        "coding 50.0% for 75.0% asked",
    ),
)


def short(row: dict[str, Any]) -> dict[str, Any]:
    """The row with two supervised tokens."""
    return passing.renamed({**row, "loss_mask": mask(*TWELVE, 1, 1, 0, 0, 0, 0, 0, 0)})


def slots(found: tuple[int, ...], distance: float = 0.3) -> Change:
    """Slots that hold `found` where the points are claimed."""

    def change(evidence: Any) -> Any:
        rows = evidence.slots.copy()
        for i, point in enumerate(found):
            if point != rows.at[i, "claimed_point"]:
                rows.loc[i, ["nearest_point", "claimed_distance", "next_best_distance"]] = [point, distance, 0.0016]
        return replace(evidence, slots=rows.astype({"nearest_point": int}))

    return change


def last(**values: float) -> Change:
    return lambda e: replace(e, last={**e.last, **values})


NEAREST = "of all the target's points, the nearest is the claimed one"
WRONG_LAYER = (
    "states agree with the target run again at the claimed point",
    "the claimed point is nearer than every other by a margin",
)
UP, DOWN = (2, 4, 6), (0, 2, 4)

TRAINING = (
    Fault(
        "other rows",
        "identity",
        "rows, states and vocabulary belong together and to this target",
        cell("chain", 0, found="sha256:other"),
        "prepared rows of the merged set",
    ),
    Fault("folder twice", "folders", "no folder twice", cell("folders", 1, folder="rows_0-20"), "rows_0-20"),
    Fault(
        "header",
        "folders",
        "the folder opens as its config says",
        cell("folders", 1, fault="cut off"),
        "rows_20-40: cut off",
    ),
    Fault(
        "bit",
        "folders",
        "rows.safetensors holds the bytes that were written",
        cell("folders", 1, found_digest="sha256:bad"),
        "rows_20-40",
    ),
    Fault(
        "config",
        "folders",
        "data_config.json of the folder is the one that was written",
        cell("folders", 1, found_config="x"),
        "rows_20-40: x",
    ),
    Fault(
        "gap",
        "folders",
        "folders follow one another without gap or overlap",
        cell("folders", 1, start=21, rows_stored=19),
        "21 against 20",
    ),
    Fault(
        "short folder",
        "folders",
        "a folder holds as many rows as its name says",
        cell("folders", 1, rows_stored=19),
        "19 against 20",
    ),
    Fault(
        "lost token",
        "folders",
        "a folder holds as many tokens as recorded",
        cell("folders", 1, tokens_stored=399),
        "399 against 400",
    ),
    Fault(
        "other points",
        "folders",
        "every folder was captured at the same points, from the same weights",
        cell("folders", 1, capture="sha256:other"),
        "rows_20-40: sha256:other",
    ),
    Fault(
        "three slots",
        "folders",
        "each token has its auxiliary states and the last one",
        cell("folders", 1, slots=3),
        ": 3",
    ),
    Fault("width", "folders", "a state is as wide as the target's hidden size", cell("folders", 1, width=32), ": 32"),
    Fault("dtype", "folders", "states are stored in bfloat16", cell("folders", 1, dtype="float32"), ": float32"),
    Fault(
        "unplanned",
        "rows",
        "every captured row is a prepared row, once",
        cell("rows", 3, times_prepared=0),
        "1 of 40 rows",
    ),
    Fault("missing", "rows", "every prepared row was captured, once", cell("rows", 3, times_captured=0), ": 0"),
    Fault("doubled", "rows", "every prepared row is in the index, once", cell("rows", 3, times_indexed=2), ": 2"),
    Fault("offset", "rows", "the index leads to the row that it names", cell("rows", 3, index_finds_it=False), ": no"),
    Fault("split", "rows", "the index keeps the row's split", cell("rows", 3, split_equal=False), ": no"),
    Fault(
        "last token",
        "rows",
        "a row's states are as many as its tokens",
        cell("rows", 3, stored_tokens=19),
        "19 against 20",
    ),
    Fault(
        "swapped", "rows", "stored token ids are the prepared ones", cell("rows", 3, ids_equal=False), "1 of 40 rows"
    ),
    Fault(
        "mask", "rows", "the stored loss mask is the prepared one", cell("rows", 3, mask_equal=False), "1 of 40 rows"
    ),
    Fault("NaN", "rows", "states are finite", cell("rows", 3, not_finite=1), ": 1"),
    Fault("constant", "rows", "no slot holds one state for all tokens", cell("rows", 3, constant_slots=1), ": 1"),
    Fault("one layer twice", "rows", "no slot of a row repeats another", cell("rows", 3, equal_slots=1), ": 1"),
    Fault(
        "another row's states",
        "rows",
        "no two rows of other tokens have the same states",
        cell("rows", 3, copy_of="0" * 24),
        ": " + "0" * 24,
    ),
    Fault("zeros", "rows", "no token has a state of zeros", cell("rows", 3, zero_states=5), ": 5"),
    Fault(
        "claims",
        "slots",
        "the points claimed are capture.points and the last state",
        cell("slots", 1, claimed_point=4, nearest_point=4),
        "4 against 3",
    ),
    Fault("shift up", "slots", NEAREST, slots(UP), "every slot is shifted by +1 layer", WRONG_LAYER),
    Fault(
        "shift down",
        "slots",
        NEAREST,
        slots(DOWN),
        "every slot is shifted by -1 layer; a slot holds the embedding",
        WRONG_LAYER,
    ),
    Fault(
        "embedding first",
        "slots",
        NEAREST,
        slots((0, 1, 3)),
        "the embedding was put first and the last point dropped",
        WRONG_LAYER,
    ),
    Fault("swap", "slots", NEAREST, slots((3, 1, 5)), "the slots are swapped", WRONG_LAYER),
    Fault(
        "noise",
        "slots",
        "states agree with the target run again at the claimed point",
        cell("slots", 2, claimed_distance=0.02),
        "slot 2: 0.02",
    ),
    Fault(
        "torn row",
        "slots",
        "no part of a row lies farther from the target run again than precision explains",
        cell("slots", 2, claimed_p99_distance=0.6, cause="row ab: A row holds another row's states"),
        "slot 2: 99 of 100 positions keep to 0.6000 of the target, precision explains 0.008; row ab: A row holds another",
    ),
    Fault(
        "no margin",
        "slots",
        "the claimed point is nearer than every other by a margin",
        cell("slots", 2, next_best_distance=0.004),
        "slot 2: 2.5",
    ),
    Fault(
        "normed",
        "last state",
        "the last state was taken before the final norm",
        last(before_distance=0.8, after_distance=0.0016),
        "after the final norm",
    ),
    Fault(
        "other answers",
        "last state",
        "the last state says the tokens that the target said",
        last(argmax_agreement=0.4),
        ": 0.4",
    ),
    Fault(
        "sharp",
        "last state",
        "the stored tokens are as likely by the stored state as by the target",
        last(before_nll=9.0),
        "9.000 nats a token from the stored state, 0.401 from the target run again",
    ),
    Fault(
        "ids for offsets",
        "vocabulary",
        "every draft id leads to a target id",
        lambda e: replace(e, target_ids=(*e.target_ids[:-1], 300), in_t2d=e.in_t2d - {62} | {300}),
        "31: 300",
    ),
    Fault(
        "one token twice",
        "vocabulary",
        "no two draft ids mean the same token",
        lambda e: replace(e, target_ids=(*e.target_ids[:-1], 60)),
        "30: 60",
    ),
    Fault(
        "t2d lacks one",
        "vocabulary",
        "t2d marks every token that d2t leads to",
        lambda e: replace(e, in_t2d=e.in_t2d - {62} | {63}),
        "31: no",
    ),
    Fault(
        "t2d has one more",
        "vocabulary size",
        "the draft vocabulary has merge.draft_vocab_size tokens",
        lambda e: replace(e, in_t2d=e.in_t2d | {63}),
        "ids marked in t2d: 33 against 32",
    ),
    Fault(
        "no end of turn",
        "special tokens",
        "the draft can say the end of a turn and every special token",
        field(always={"<|im_end|>": 3}),
        "<|im_end|> (3): no",
    ),
    Fault(
        "little coverage",
        "coverage",
        "the draft vocabulary covers what the target says",
        cell("coverage", 1, found=0.7, recorded=0.7, words="70.0% of 64 tokens, least 85.0%"),
        "held out: 70.0%",
    ),
    Fault(
        "stale coverage",
        "coverage",
        "coverage is what the manifest says",
        cell("coverage", 1, recorded=0.94),
        "0.94 against 0.93",
    ),
)


def fed(points: tuple[int, ...]) -> Change:
    """The engine feeds `points`, whatever it claims."""

    def change(e: Any) -> Any:
        parity = tuple(
            s
            if s.claimed_point == p
            else s.model_copy(update={"nearest_point": p, "claimed_distance": 0.3, "next_best_distance": 1e-4})
            for s, p in zip(e.serve.parity, points, strict=True)
        )
        return replace(e, serve=e.serve.model_copy(update={"parity": parity}))

    return change


def parity(at: int, **values: Any) -> Change:
    def change(e: Any) -> Any:
        made = list(e.serve.parity)
        made[at] = made[at].model_copy(update=values)
        return replace(e, serve=e.serve.model_copy(update={"parity": tuple(made)}))

    return change


def inside(name: str, inner: str, **values: Any) -> Change:
    """Change fields of a fact within a fact."""

    def change(e: Any) -> Any:
        outer: Fact = getattr(e, name)
        return replace(e, **{name: outer.model_copy(update={inner: getattr(outer, inner).model_copy(update=values)})})

    return change


def config(**values: Any) -> Change:
    return lambda e: replace(e, config={**e.config, **values})


def tensor(name: str, **values: Any) -> Change:
    def change(e: Any) -> Any:
        rows = e.tensors.copy()
        for column, value in values.items():
            rows.loc[rows["tensor"] == name, column] = value
        return replace(e, tensors=rows)

    return change


def without_tensor(name: str) -> Change:
    return lambda e: replace(e, tensors=e.tensors[e.tensors["tensor"] != name].reset_index(drop=True))


def more_tensors(*names: str) -> Change:
    more = [{"tensor": n, "shape": "[64]", "dtype": "float32", "finite": True} for n in names]
    return lambda e: replace(e, tensors=pd.concat([e.tensors, pd.DataFrame(more)], ignore_index=True))


def served(domain: str, length: float, simulated: bool = True) -> Change:
    """Another accept length, in `domain` or overall."""

    def change(e: Any) -> Any:
        found = passing.accept(length)
        kinds = ("served", "simulated") if simulated else ("served",)
        values = {
            (k if domain == "overall" else f"{k}_by_domain"): found
            if domain == "overall"
            else {**getattr(e.serve, f"{k}_by_domain"), domain: found}
            for k in kinds
        }
        return replace(e, serve=e.serve.model_copy(update=values))

    return change


def both(*changes: Change) -> Change:
    def change(e: Any) -> Any:
        for one in changes:
            e = one(e)
        return e

    return change


def ratio(at: int, **values: Any) -> Change:
    def change(e: Any) -> Any:
        ratios = list(e.benchmark.ratios)
        ratios[at] = ratios[at].model_copy(update=values)
        return replace(e, benchmark=e.benchmark.model_copy(update={"ratios": tuple(ratios)}))

    return change


def unmeasured(e: Any) -> Any:
    """Plain was timed at a concurrency where the policy was not."""
    arm: Arm = e.benchmark.arms[0].model_copy(update={"concurrency": 4})
    return replace(e, benchmark=e.benchmark.model_copy(update={"arms": (*e.benchmark.arms, arm)}))


def requests(verifications: int) -> Change:
    def change(e: Any) -> Any:
        made = tuple(r.model_copy(update={"simulated_verifications": verifications}) for r in e.serve.requests)
        return replace(e, serve=e.serve.model_copy(update={"requests": made}))

    return change


def histograms(e: Any) -> Any:
    """As many verifications, of which others accepted something."""
    made = tuple(r.model_copy(update={"simulated_accepted": (2, 2, 0)}) for r in e.serve.requests)
    return replace(e, serve=e.serve.model_copy(update={"requests": made}))


def agentic(e: Any) -> Any:
    found = Losslessness(requests=2, identical=1, near_ties=0, differing_prompt_ids=("cd" * 12,))
    return replace(e, serve=e.serve.model_copy(update={"greedy_by_domain": {"agentic": found}}))


def stops(**values: Any) -> Change:
    def change(e: Any) -> Any:
        made = tuple(s.model_copy(update=values) for s in e.serve.stops)
        return replace(e, serve=e.serve.model_copy(update={"stops": made}))

    return change


CHAIN = "evidence, draft, data and target are links of one chain"
SETTINGS = "config.json makes the engine feed and read what was trained"
FED = "the engine feeds the draft the points that it was trained on"
FILE = "the file holds exactly the tensors that the engine reads"
NEARER = ("the claimed point is nearer than every other",)
AS_LAST = "accept length is not below the last release's by more than gates.deployment.max_accept_length_loss"

DEPLOYMENT = (
    Fault("benchmark of another", "chain", CHAIN, fact("benchmark", draft_digest="sha256:other"), "benchmark is of this draft"),
    Fault("policy of another", "chain", CHAIN, fact("benchmark", policy_digest="sha256:other"), "serving policy is the one benchmarked"),
    Fault("weights changed", "chain", CHAIN, field(weights_digest="sha256:other"), "model.safetensors: sha256:other"),
    Fault("another target", "chain", CHAIN, fact("target", weights_digest="sha256:other"), "target's weights"),
    Fault(
        "gate refused",
        "chain",
        CHAIN,
        lambda e: replace(e, reports=(e.reports[0].model_copy(update={"success": False}), e.reports[1])),
        "gate-extraction passed: False against True",
    ),
    Fault("no lm_head", "tensors", FILE, without_tensor("lm_head.weight"), "lm_head.weight: missing"),
    Fault("vLLM's names", "tensors", FILE, more_tensors("layers.0.input_layernorm.weight"), "layers.0.input_layernorm.weight: unknown"),
    Fault("shape", "tensors", "tensors have the shapes that config.json says", tensor("fc.weight", shape="[64, 64]"), "[64, 64] against [64, 192]"),
    Fault("cast", "tensors", "weights are floating point, d2t is int64, t2d is bool", tensor("d2t", dtype="int32"), "int32 against int64"),
    Fault("NaN", "tensors", "weights are finite", tensor("norm.weight", finite=False), "norm.weight: no"),
    Fault("norm without its weights", "tensors", FILE, config(fc_norm=True), "fc_norm.0.weight: missing", also=(SETTINGS,)),
    Fault("weight without its norm", "tensors", FILE, more_tensors("input_norm.weight"), "input_norm.weight: unknown"),
    Fault("another norm", "config", SETTINGS, config(norm_output=True), "norms that engines make of it: ['norm_output'] against []"),
    Fault("tied", "config", SETTINGS, config(tie_word_embeddings=True), "tie_word_embeddings: True against False"),
    Fault("other engine's ids", "config", SETTINGS, field(config_points=(2, 4, 6)), "points that the engine makes of the layer ids: [2, 4, 6] against [1, 3, 5]"),
    Fault(
        "no states fed",
        "config",
        SETTINGS,
        config(eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 2, 4], "use_aux_hidden_state": False}),
        "use_aux_hidden_state: False against True",
    ),
    Fault(
        "ids for offsets",
        "vocabulary",
        "every draft id leads to a target id",
        lambda e: replace(e, d2t=(*e.d2t[:-1], 269), in_t2d=e.in_t2d - {62} | {300}),
        "31: 300",
    ),
    Fault(
        "one token twice",
        "vocabulary",
        "no two draft ids mean the same token",
        lambda e: replace(e, d2t=(*e.d2t[:-1], 29)),
        "30: 60",
        ("d2t and t2d describe one vocabulary",),
    ),
    Fault("t2d moved", "vocabulary", "d2t and t2d describe one vocabulary", lambda e: replace(e, in_t2d=e.in_t2d - {62} | {63}), "31: 62 against 63"),
    Fault(
        "mark too many",
        "vocabulary",
        "t2d marks as many tokens as there are draft ids",
        lambda e: replace(e, in_t2d=e.in_t2d | {100}),
        "32 of 32 rows",
    ),
    Fault("a slot dropped", "parity", "the engine fed as many slots as the draft was trained on", lambda e: replace(e, serve=e.serve.model_copy(update={"parity": e.serve.parity[:2]})), "2 against 3"),
    Fault("user's bug", "parity", FED, fed((0, 1, 3)), "the embedding was put first and the last point dropped", NEARER),
    Fault("shift up", "parity", FED, fed((2, 4, 6)), "every slot is shifted by +1 layer", NEARER),
    Fault("shift down", "parity", FED, fed((0, 2, 4)), "every slot is shifted by -1 layer", NEARER),
    Fault("another claim", "parity", "the engine says that it feeds the points of the record", parity(1, claimed_point=4), "4 against 3"),
    Fault("two as near", "parity", "the claimed point is nearer than every other", parity(1, next_best_distance=5e-5), "slot 1"),
    Fault("all near ties", "losslessness", "answers could be compared", inside("serve", "greedy", identical=0, near_ties=16), ": 0", ("greedy answers are those of plain decoding",)),
    Fault("other answers", "losslessness", "greedy answers are those of plain decoding", inside("serve", "greedy", identical=14), "14 of 15 answers identical, 1 near tie apart"),
    Fault("tool calls differ", "losslessness", "greedy answers are those of plain decoding", agentic, "greedy, agentic: 1 of 2 answers identical, 0 near ties apart; differing: cdcdcd"),
    Fault("answers run on", "losslessness", "greedy answers are those of plain decoding", stops(drafted_right=7, differing_prompt_ids=("ef" * 12,)), "7 of 8 answers end at their stop token, 8 plainly, 6 of the stops within an accepted draft; differing: efefef"),
    Fault("no stops asked", "losslessness", "answers could be compared", fact("serve", stops=()), "stop conditions: 0", ("greedy answers are those of plain decoding",)),
    Fault(
        "weak domain",
        "accept length",
        "accept length reaches its threshold",
        both(served("coding", 1.45), field(release=None)),
        "coding: 1.450 (1.35 to 1.55, 8 requests), least 1.5",
    ),
    Fault(
        "inert",
        "accept length",
        "the draft does something",
        both(served("general", 1.0), field(release=None)),
        "general: 1",
        ("accept length reaches its threshold",),
    ),
    Fault("ceiling", "accept length", "accept length is below its ceiling", served("coding", 4.0), "coding: 4"),
    Fault("worse than released", "accept length", AS_LAST, served("general", 1.3), "general: 1.300 against 1.420 of the last release"),
    Fault("not simulated", "simulation", "served requests were simulated too", lambda e: replace(e, serve=e.serve.model_copy(update={"requests": ()})), ": 0", ("request by request, verifications and accepted tokens are as simulated",)),
    Fault("gap", "simulation", "served accept length is what the offline simulation foretold", inside("serve", "simulated", accept_length=1.85), "simulated 1.850, served 1.714"),
    Fault("chance", "simulation", "request by request, verifications and accepted tokens are as simulated", requests(8), "0 of 8 requests"),
    Fault("as many, kept elsewhere", "simulation", "request by request, verifications and accepted tokens are as simulated", histograms, "0 of 8 requests"),
    Fault("biased", "sampling", "sampled tokens follow the target's own distribution", inside("serve", "sampling", distance=0.2), "0.2000 against 0.0250 of plain sampling"),
    Fault("too good", "speed-up", "speed-up is not above accept length", ratio(2, ratio=1.9, low=1.8, high=2.0), "1.900 × plain (1.800 to 2.000) at accept length 1.600"),
    Fault("slower", "policy", "the serving policy is never slower than plain decoding", ratio(1, ratio=0.9, low=0.86, high=0.94), "concurrency 2: 0.900 × plain"),
    Fault("another policy", "policy", "the policy measured is the policy written", ratio(1, draft_steps=1), "1 against 0"),
    Fault("dear off", "policy", "switched off, speculation costs nothing", fact("benchmark", off_cost_ratio=0.9, off_cost_high=0.93), "0.900 × an engine that never had a draft"),
)  # fmt: skip
FAULTS = {"extraction": EXTRACTION, "training": TRAINING, "deployment": DEPLOYMENT}
