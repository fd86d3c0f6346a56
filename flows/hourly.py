"""The watch as a flow: one look an hour; a fall opens an event, for which Prefect starts `retrain` (prefect.yaml)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import flow
from prefect.artifacts import create_markdown_artifact
from prefect.client.schemas.objects import State
from prefect.events import emit_event
from prefect.states import Completed, Failed

from flows.drift import EVENT, markdown, one_look, payload
from stages.contracts.errors import LineError
from stages.contracts.params import load_params


@flow(name="drift")
def drift() -> State[Any]:
    """Look at what is served, compare it with its release, and say so on a fall."""
    root = Path.cwd()
    try:
        if not load_params(root / "params.yaml").drift.endpoints:
            return Completed(message="No endpoint is watched: params.yaml, drift.endpoints")
        verdict, watch = one_look(root)
    except LineError as error:
        return Failed(message=error.text())
    create_markdown_artifact(key="drift", markdown=markdown(verdict, watch))
    if verdict.event:
        emit_event(
            event=EVENT,
            resource={
                "prefect.resource.id": f"draftline.release.{watch.release}",
                "prefect.resource.name": f"release {watch.release}",
                "draftline.cause": verdict.cause or "unexplained",
            },
            payload=payload(verdict, watch),
        )
    return Completed(message=f"{verdict.status}: {verdict.words}")


if __name__ == "__main__":
    drift()
