"""Canary requests of a draft: `python -m stages.canary`, after serve-validate. Not a stage of the graph: nothing stands on it but
the promotion, which lets a server answer them.

    data/prepared/      the prompts' ids
    reports/            serve_validate.json, what they came to; canary.json is written
"""

from __future__ import annotations

from stages.acceptance.prompts import held_out_prompts
from stages.contracts.canary import CANARY, Canary, CanaryRequest
from stages.contracts.errors import DataError, run
from stages.contracts.evidence import SERVE_EVIDENCE, ServeEvidence
from stages.contracts.manifest import PREPARED_MANIFEST, PreparedManifest
from stages.contracts.params import load_params
from stages.contracts.repository import demand_repository


def main() -> None:
    """Write the requests that serve-validate answered, as many as promotion.canary_requests.

    Raises:
        DataError: a prompt that was served is not among the prepared ones.
    """
    demand_repository()
    params = load_params()
    served = ServeEvidence.read(SERVE_EVIDENCE)
    prompts = {p.prompt_id: p.ids for p in held_out_prompts(PreparedManifest.read(PREPARED_MANIFEST))}
    chosen = served.requests[: params.promotion.canary_requests]
    if lost := [r.prompt_id for r in chosen if r.prompt_id not in prompts]:
        raise DataError(
            "A prompt that was served is not among the prepared ones",
            where=str(SERVE_EVIDENCE),
            got=", ".join(lost[:5]),
            do="run `dvc repro serve-validate`, then do this again",
        )
    requests = tuple(
        CanaryRequest(prompt_id=r.prompt_id, ids=prompts[r.prompt_id], tokens=r.tokens, verifications=r.verifications)
        for r in chosen
    )
    canary = Canary(
        draft_digest=served.draft_digest,
        engine=served.engine,
        engine_version=served.engine_version,
        max_new_tokens=served.max_new_tokens,
        requests=requests,
    )
    canary.write(CANARY)
    print(f"{CANARY}: {len(requests)} requests, accept length {canary.accept_length:.3f} when they were validated")


if __name__ == "__main__":
    run(main)
