"""gate-training's table last state: before the final norm, by value and by what it says."""

from __future__ import annotations

from typing import Any

from stages.contracts.params import Params
from stages.gates._judge import Table, at_most, between
from stages.gates._training_evidence import Evidence, capture_anew

# Nats a token of a row. On SmolLM2 bfloat16 storage moves it by 6e-5 over many tokens and one token of random text by up
# to 0.036; a second norm moves it by 196.
_MAX_LIKELIHOOD_GAP = 0.05


def last(evidence: Evidence, params: Params) -> Table:
    import pandas as pd

    line: dict[str, Any] = {"state": "last state", **evidence.last}
    line["norm_words"] = f"{line['distance_folder']}: " + (
        "before the final norm"
        if line["before_distance"] < line["after_distance"]
        else "after the final norm: normed states are stored where the stream before the norm belongs"
    )
    line["likelihood_gap"] = abs(line["before_nll"] - line["target_nll"])
    line["likelihood_words"] = (
        f"{line['likelihood_folder']}: {line['before_nll']:.3f} nats a token from the stored state, {line['target_nll']:.3f} from the target run again; "
        f"{line['after_nll']:.3f} when it is taken for already normed"
    )
    fresh = capture_anew(evidence.manifest.capture)
    checks = (
        at_most(
            "before_distance",
            "after_distance",
            says="the last state was taken before the final norm",
            why="a norm applied twice keeps the argmax and makes the soft targets far too sharp or too flat",
            do="capture the stream before the norm, then " + fresh,
            tell="norm_words",
        ),
        between(
            "argmax_agreement",
            params.gates.training.min_argmax_agreement,
            says="the last state says the tokens that the target said",
            why="soft targets are computed from it; when its argmax is another token, so is what the draft is taught",
            do="check that rows and states are of one target, then " + fresh,
        ),
        between(
            "likelihood_gap",
            high=_MAX_LIKELIHOOD_GAP,
            says="the stored tokens are as likely by the stored state as by the target",
            why="argmax survives a wrong scale; likelihood, and with it every soft target, does not",
            do="capture the stream before the norm, then " + fresh,
            tell="likelihood_words",
        ),
    )
    return Table("last state", pd.DataFrame([line]), "state", checks)
