"""A server takes the release that production is: it is restarted by the command in params.yaml, has to be healthy, and has to
reach the accept length of the release's own canary requests.

SGLang cannot exchange a draft while it runs: its /update_weights_from_disk (read in 0.5.23) loads one path into the target
first and then into the draft, and /update_weights_from_tensor, which can be told to mean the draft alone, leaves the worker's
copy of the draft vocabulary as it was at the start. So it is started anew, with the draft of releases/current.json.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from flows.child import TimeLimit, run_child
from stages.contracts.canary import CANARY, Canary
from stages.contracts.errors import LineError
from stages.contracts.params import Promotion
from stages.contracts.release import RELEASES, ReleaseRecord

_KEPT = f"evidence/{CANARY.name}"


class ServerFault(LineError):
    """The server did not take the release, or does not serve it as it was validated."""


@dataclass(frozen=True)
class Served:
    """How a server does with a release: accept length now, and when it was validated."""

    accept_length: float
    validated: float
    requests: int

    def words(self) -> str:
        return f"canary of {self.requests} requests: accept length {self.accept_length:.3f}, validated {self.validated:.3f}"


def switch(root: Path, record: ReleaseRecord, promotion: Promotion, say: Callable[[str], None]) -> str:
    """Let the server take a release, and look at how it does; gives that in words.

    Raises:
        ServerFault: the command failed, or the server is not healthy in time, or falls short on the canary.
    """
    if not promotion.restart_command:
        return f"no server was told: start yours with releases/{record.name}/draft (promotion.restart_command is empty)"
    _restart(root, record, promotion, say)
    if not promotion.server_url:
        return "restarted; promotion.server_url is empty, so nobody looked at it"
    _wait_healthy(promotion)
    path = root / RELEASES / record.name / _KEPT
    if not path.exists():
        return (
            "restarted and healthy; the release carries no canary requests (`python -m stages.canary` before promoting)"
        )
    served = ask(Canary.read(path), promotion)
    if served.accept_length < served.validated - promotion.canary_max_loss:
        raise ServerFault(
            "The server falls short of the release's own accept length",
            where=promotion.server_url,
            expected=f"at least {served.validated - promotion.canary_max_loss:.3f} on the canary requests",
            got=served.words(),
            do="compare the server's draft, points and settings with the release's model card",
        )
    return served.words()


def _restart(root: Path, record: ReleaseRecord, promotion: Promotion, say: Callable[[str], None]) -> None:
    """Run the command, which has to return once the server is on its way; it finds the draft in its environment."""
    draft = root / RELEASES / record.name / "draft"
    told = {"DRAFTLINE_DRAFT": str(draft.absolute()), "DRAFTLINE_RELEASE": record.name}
    command = list(promotion.restart_command)
    try:
        ended = run_child(command, cwd=root, env=os.environ | told, time_limit_s=promotion.restart_limit_s, on_line=say)
    except (TimeLimit, FileNotFoundError, PermissionError) as error:
        raise ServerFault(
            "The restart command did not end well",
            where=" ".join(command),
            got=str(error).splitlines()[0],
            do="mend promotion.restart_command in params.yaml; it has to return once the server is on its way",
        ) from error
    if ended.code:
        raise ServerFault(
            "The restart command did not end well",
            where=" ".join(command),
            expected="exit code 0",
            got=f"exit code {ended.code}: " + " | ".join(ended.lines[-3:]),
            do="its last lines say why",
        )


def _wait_healthy(promotion: Promotion) -> None:
    deadline, fault = time.monotonic() + promotion.restart_limit_s, "no answer"
    with httpx.Client(base_url=promotion.server_url, trust_env=False, timeout=5.0) as client:
        while time.monotonic() < deadline:
            try:
                status = client.get("/health").status_code
                if status == httpx.codes.OK:
                    return
                fault = f"HTTP {status}"
            except httpx.HTTPError as error:
                fault = type(error).__name__
            time.sleep(1.0)
    raise ServerFault(
        "The server is not healthy in time",
        where=f"{promotion.server_url}/health",
        expected=f"HTTP 200 within {promotion.restart_limit_s:g} s of the restart",
        got=fault,
        do="look at its log; `promotion.restart_limit_s` is the time that loading may take",
    )


def ask(canary: Canary, promotion: Promotion) -> Served:
    """The canary requests, greedily, as serve-validate asked them.

    Raises:
        ServerFault: the server refuses one, or does not count verifications: it runs without a draft.
    """
    tokens = verifications = 0
    with httpx.Client(base_url=promotion.server_url, trust_env=False, timeout=promotion.restart_limit_s) as client:
        for request in canary.requests:
            meta = _answer(client, list(request.ids), canary.max_new_tokens, promotion.server_url)
            tokens += int(meta.get("completion_tokens") or 0)
            verifications += int(meta.get("spec_verify_ct") or 0)
    if not tokens or not verifications:
        raise ServerFault(
            "The server answers without a draft",
            where=promotion.server_url,
            expected="spec_verify_ct in the answers' meta_info",
            got=f"{tokens} tokens, {verifications} verifications",
            do="start it with --speculative-algorithm EAGLE3 and the release's draft",
        )
    return Served(tokens / verifications, canary.accept_length, len(canary.requests))


def _answer(client: httpx.Client, ids: list[int], max_new_tokens: int, where: str) -> dict[str, Any]:
    body = {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens}}
    try:
        reply = client.post("/generate", json=body)
        reply.raise_for_status()
        return dict(reply.json()["meta_info"])
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise ServerFault(
            "The server does not answer a canary request", where=f"{where}/generate", got=str(error)[:300]
        ) from error
