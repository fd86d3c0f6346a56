"""gate-extraction's table rows: names, ids, masks, template, limits."""

from __future__ import annotations

import numpy as np

from stages.contracts.params import Params
from stages.gates._extraction_evidence import AGAIN, Evidence
from stages.gates._extraction_facts import opening_bos
from stages.gates._judge import Expectation, among, between, same, unique


def row_expectations(evidence: Evidence, params: Params) -> tuple[Expectation, ...]:
    V, prepare = params.target.vocab_size, params.prepare
    prefix = list(evidence.template_prefix)
    finishes = ["stop", "given"] + (["capped"] if prepare.capped == "keep" else [])
    names = [s.name for s in prepare.sources]
    return (
        unique("row_id", says="no row twice", why="a doubled row weighs double and breaks resume by row", do=AGAIN),
        same(
            "row_id",
            "recomputed_row_id",
            says="a row's name is the digest of its tokens and mask",
            why="extraction resumes by this name; a wrong one pairs a row with another row's states",
            do=AGAIN + "; the file was written by something else",
        ),
        same(
            "prompt_id",
            "recomputed_prompt_id",
            says="a prompt's name is the digest of its tokens",
            why="the split into train and held out goes by this name",
            do=AGAIN + "; the file was written by something else",
        ),
        between(
            "lowest_id",
            0,
            says="token ids are not negative",
            why="a negative id reads the end of the embedding table without an error",
            do="mend the tokenizer or the source's rendering, then " + AGAIN,
        ),
        between(
            "highest_id",
            high=V - 1,
            says="token ids lie within the target's vocabulary",
            why="the target has no embedding for a higher id; the tokenizer is another model's",
            do="check target.vocab_size and that tokenizer.json is the target's, then " + AGAIN,
        ),
        same(
            "mask_tokens",
            "tokens",
            says="the loss mask is as long as the row",
            why="a shorter or longer mask supervises the wrong tokens from there on",
            do=AGAIN,
        ),
        among(
            "strange_mask_values",
            [0],
            says="the loss mask holds only 0 and 1",
            why="another value would weigh a token without anyone having said so",
            do=AGAIN,
        ),
        between(
            "longest_supervised_run",
            2,
            says="at least two supervised tokens stand together",
            why="the draft learns from pairs of supervised tokens; a row without a pair costs a forward pass for nothing",
            do="raise prepare.max_row_tokens or drop the row at its source, then " + AGAIN,
        ),
        same(
            "prompt_tokens",
            "first_supervised_token",
            says="the prompt ends where supervision begins",
            why="a mask off by one teaches the draft the wrong boundary between prompt and answer",
            do="mend the loss mask of the source, then " + AGAIN,
        ),
        among(
            "begins_as_the_template",
            [True],
            says="the row opens as the target's chat template does",
            why="states of a prompt that the server never renders are states the draft never meets",
            do=f"render with the target's own template (it opens with ids {prefix}), then " + AGAIN,
        ),
        among(
            "opening_bos",
            [opening_bos(np.asarray(evidence.template_prefix, np.int32), evidence.bos_id)],
            says="beginning-of-sequence tokens are as many as the template writes",
            why="text rendered with one and tokenised with another has two; every state after it differs from the server's",
            do="tokenise the rendered text with add_special_tokens off, then " + AGAIN,
        ),
        between(
            "tokens",
            high=prepare.max_row_tokens,
            says="rows keep to prepare.max_row_tokens",
            why="a longer row exceeds the memory that extraction and training planned for",
            do="raise prepare.max_row_tokens, or " + AGAIN,
        ),
        among(
            "finish",
            finishes,
            says="answers ended in a way that the policy keeps",
            why="an answer cut off and kept as whole teaches the draft to go on after the end",
            do="set prepare.capped, then " + AGAIN,
        ),
        among(
            "source",
            names,
            says="rows come from the sources in params.yaml",
            why="a row of unknown origin has no licence and no domain",
            do="add the source to prepare.sources, or " + AGAIN,
        ),
        among(
            "split",
            ["train", "held_out"],
            says="each row is train or held out",
            why="a row in neither is trained on or measured by accident",
            do=AGAIN,
        ),
        unique(
            "prompt_id",
            says="no prompt twice",
            why="a doubled prompt outweighs the others, and its copy in the other split is leakage",
            do="remove the doubles at the source, then " + AGAIN,
        ),
        among(
            "splits_of_prompt",
            [1],
            says="no prompt stands both in train and in held out",
            why="held-out accept length would measure memory",
            do=AGAIN + "; the split goes by a hash of the prompt, so the file was edited",
        ),
    )
