"""What the engine fed the draft and what came out, against what was trained, plain decoding and the simulation: tables of
gate-deployment."""

from __future__ import annotations

from typing import Any

from stages.contracts.evidence import Losslessness, RequestRecord, StoppedAnswers
from stages.contracts.params import Params
from stages.contracts.points import name_points
from stages.gates._deployment_evidence import SERVE, TRAIN, Evidence
from stages.gates._judge import Table, at_most, between, same

_LEAST_EQUAL = 0.5  # of simulated requests; bfloat16 states shift a verification now and then, not in most requests


def parity(e: Evidence, params: Params) -> Table:
    """Every slot the engine fed the draft: the point it was trained on, the one claimed, the one the values are nearest to."""
    import pandas as pd

    slots = sorted(e.serve.parity, key=lambda s: s.slot)
    points = e.record.points
    fed = tuple(s.nearest_point for s in slots)
    words = name_points(fed, points, params.target.layers) if len(fed) == len(points) else f"{len(fed)} slots were fed"
    rows = pd.DataFrame(
        [
            {
                "slot": f"slot {s.slot}",
                "trained_on": point,
                "claimed_point": s.claimed_point,
                "fed_point": s.nearest_point,
                "claimed_distance": s.claimed_distance,
                "next_best_distance": s.next_best_distance,
                "tokens": s.tokens,
                "words": f"trained on point {point}, fed point {s.nearest_point} ({words})",
            }
            for s, point in zip(slots, [*points, *[-1] * len(slots)], strict=False)
        ],
        columns=[
            *("slot", "trained_on", "claimed_point", "fed_point"),
            *("claimed_distance", "next_best_distance", "tokens", "words"),
        ],
    )
    rows["slots"], rows["slots_trained_on"] = len(slots), len(points)
    do = "mend eagle_aux_hidden_state_layer_ids for this engine and export again: " + TRAIN
    checks = (
        same(
            "slots",
            "slots_trained_on",
            says="the engine fed as many slots as the draft was trained on",
            why="SGLang drops doubled layer ids in silence",
            do=do,
        ),
        same(
            "fed_point",
            "trained_on",
            says="the engine feeds the draft the points that it was trained on",
            why="output stays right and accept length falls, by so little for one layer that no threshold sees it",
            do=do,
            tell="words",
        ),
        same(
            "claimed_point",
            "trained_on",
            says="the engine says that it feeds the points of the record",
            why="an engine with other layer ids than the draft's config was started with another draft's flags",
            do=do,
        ),
        at_most(
            "claimed_distance",
            "next_best_distance",
            says="the claimed point is nearer than every other",
            why="where another point is as near, the nearest is chance",
            do=do,
        ),
    )
    return Table("parity", rows, "slot", checks)


def losslessness(e: Evidence, params: Params) -> Table:
    """Greedy answers with the draft against those of plain decoding: all, by domain, and with stop conditions set."""
    import pandas as pd

    domains = [(f"greedy, {name}", found) for name, found in sorted(e.serve.greedy_by_domain.items())]
    lines = [_greedy_line("greedy", e.serve.greedy)]
    # A domain whose answers all part at near ties says nothing either way; if all do, the first line fails.
    lines += [_greedy_line(name, found) for name, found in domains if found.requests > found.near_ties]
    lines += [_stop_line(s) for s in e.serve.stops] or [_NO_STOPS]
    checks = (
        between(
            "compared",
            1,
            says="answers could be compared",
            why="when all are near ties, or none was asked, nothing is shown",
            do="raise serve.prompts_per_source, then " + SERVE,
        ),
        between(
            "identical_share",
            params.gates.deployment.min_identical_outputs,
            says="greedy answers are those of plain decoding",
            why="speculation may only change how fast an answer comes",
            do="serve the listed prompts both ways; the fault is in verification or in rolling back the cache",
            tell="words",
        ),
    )
    return Table("losslessness", pd.DataFrame(lines), "mode", checks)


_NO_STOPS = {"mode": "stop conditions", "compared": 0, "identical_share": 0.0, "words": "no answer was asked with one"}


def _greedy_line(mode: str, greedy: Losslessness) -> dict[str, Any]:
    compared = greedy.requests - greedy.near_ties
    words = f"{greedy.identical} of {compared} answers identical, {greedy.near_ties} near tie{'s' * (greedy.near_ties != 1)} apart"
    share = greedy.identical / compared if compared else 0.0
    return {"mode": mode, "compared": compared, "identical_share": share, "words": words + _named(greedy)}


def _stop_line(stops: StoppedAnswers) -> dict[str, Any]:
    n = stops.requests
    words = f"{stops.drafted_right} of {n} answers end at their stop {stops.condition}, {stops.plain_right} plainly, {stops.inside_a_draft} of the stops within an accepted draft"
    share = stops.drafted_right / n if n else 0.0
    mode = f"stop at a {stops.condition}"
    return {"mode": mode, "compared": n, "identical_share": share, "words": words + _named(stops)}


def _named(found: Losslessness | StoppedAnswers) -> str:
    ids = found.differing_prompt_ids
    return f"; differing: {', '.join(ids[:5])}" if ids else ""


def simulation(e: Evidence, params: Params) -> Table:
    """Served accept length against the offline simulation, over the same requests and request by request."""
    import pandas as pd

    both = [r for r in e.serve.requests if r.simulated_verifications is not None]
    equal = sum(_as_simulated(r) for r in both)
    # Over the same requests: an answer that parted from the stored row at a near tie was served but cannot be simulated.
    verifications = sum(r.verifications for r in both)
    simulated = e.serve.simulated.accept_length
    served = sum(r.tokens for r in both) / verifications if verifications else simulated
    line = {
        "set": "requests served and simulated",
        "requests": len(both),
        "gap": abs(simulated - served) / served,
        "equal_share": equal / len(both) if both else 0.0,
        "gap_words": f"simulated {simulated:.3f}, served {served:.3f}",
        "equal_words": f"{equal} of {len(both)} requests took as many verifications as simulated, accepting as many tokens in as many of them",
    }
    do = "compare tables parity and slots; then the loss mask and the draft's first position in the engine"
    checks = (
        between(
            "requests",
            1,
            says="served requests were simulated too",
            why="the two can only be compared on the same requests",
            do=SERVE,
        ),
        between(
            "gap",
            high=params.gates.deployment.max_simulation_gap,
            says="served accept length is what the offline simulation foretold",
            why="a gap means that the engine feeds or reads something else than training did",
            do=do,
            tell="gap_words",
        ),
        between(
            "equal_share",
            _LEAST_EQUAL,
            says="request by request, verifications and accepted tokens are as simulated",
            why="two averages can agree by chance; requests do not",
            do=do,
            tell="equal_words",
        ),
    )
    return Table("simulation", pd.DataFrame([line]), "set", checks)


def _as_simulated(r: RequestRecord) -> bool:
    """Equal counts and equal histograms; the order is not compared, for a server's events may lose it."""
    if r.simulated_accepted is None:
        return r.simulated_verifications == r.verifications
    return r.simulated_verifications == r.verifications and sorted(r.simulated_accepted) == sorted(r.accepted)


def sampling(e: Evidence, params: Params) -> Table:
    """How much farther sampled tokens lie from the target's own distribution than plain sampling does."""
    import pandas as pd

    s = e.serve.sampling
    line = {
        "mode": f"temperature {s.temperature:g}" if s else "sampling",
        "excess_distance": s.distance - s.distance_plain if s else 0.0,
        "words": f"{s.distance:.4f} against {s.distance_plain:.4f} of plain sampling, {s.draws} draws of {s.prompts} prompts"
        if s
        else "switched off in params.yaml (serve.sampling_prompts: 0); only greedy answers are vouched for",
    }
    check = between(
        "excess_distance",
        high=params.gates.deployment.max_sampling_distance,
        says="sampled tokens follow the target's own distribution",
        why="a biased acceptance rule changes answers without any of them looking wrong",
        do="mend the engine's rejection sampling, then " + SERVE,
        tell="words",
    )
    return Table("sampling", pd.DataFrame([line]), "mode", (check,))
