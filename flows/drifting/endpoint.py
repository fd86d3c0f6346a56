"""Asking a serving engine: its metrics page, and who it says it is. Only reads; nothing of the key that it may need is kept."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import httpx

from flows.drifting.metrics import Reading, read_page
from stages.contracts.errors import EngineError

KEY = "DRAFTLINE_API_KEY"


@dataclass(frozen=True)
class Look:
    """One endpoint at one moment."""

    reading: Reading
    identity: dict[str, str]


def look(url: str, timeout_s: float) -> Look:
    """Raises: EngineError: it does not answer; DataError: its page cannot be used."""
    key = os.environ.get(KEY, "")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(base_url=url.rstrip("/"), timeout=timeout_s, headers=headers) as client:
        reading = read_page(_text(client, "/metrics", url), f"{url}/metrics")
        identity = _sglang(client) if reading.engine == "sglang" else _vllm(client)
        return Look(reading, {"engine": reading.engine, **identity})


def _text(client: httpx.Client, path: str, url: str) -> str:
    try:
        answer = client.get(path)
        answer.raise_for_status()
    except httpx.HTTPError as error:
        got = f"HTTP {error.response.status_code}" if isinstance(error, httpx.HTTPStatusError) else str(error)
        raise EngineError(
            "A serving engine does not show its metrics",
            where=url + path,
            expected="a page for Prometheus",
            got=got or type(error).__name__,
            do=f"start SGLang with --enable-metrics (vLLM has it always); set {KEY} where the server asks for a key",
        ) from error
    return answer.text


def _json(client: httpx.Client, path: str) -> dict[str, Any]:
    """A server's answer, or nothing: not every version has every address."""
    try:
        answer = client.get(path)
        told: Any = answer.json() if answer.is_success else {}
    except (httpx.HTTPError, ValueError):
        told = {}
    return told if isinstance(told, dict) else {}


def _sglang(client: httpx.Client) -> dict[str, str]:
    server, model = _json(client, "/server_info"), _json(client, "/model_info")
    told = {
        "version": server.get("version"),
        "target": model.get("model_path") or server.get("model_path"),
        "target weights": model.get("weight_version"),
        "draft": server.get("speculative_draft_model_path"),
        "draft steps": server.get("speculative_num_steps"),
    }
    return {name: str(value) for name, value in told.items() if value is not None}


def _vllm(client: httpx.Client) -> dict[str, str]:
    version, models = _json(client, "/version"), _json(client, "/v1/models").get("data") or [{}]
    told = {"version": version.get("version"), "target": models[0].get("root") or models[0].get("id")}
    return {name: str(value) for name, value in told.items() if value is not None}
