"""SGLang as the engine: a server of its own, started from params and the draft's record, or one that runs already.

Parts: _sglang_launch.py (the command), _sglang_checks.py (what is checked before anything starts), _sglang_process.py (a process group that cannot
outlive us), _sglang_http.py and _sglang_server.py (talking to it), _sglang_answers.py (its counts in this project's terms). Everything is for
version 0.5.23: a newer server numbers layers and counts as it likes.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stages.contracts.errors import EngineError
from stages.contracts.params import SGLang
from stages.engines._requests import Answer, Request
from stages.engines._sglang_checks import DraftFacts, check_launch, differing, differing_at_all, unmet
from stages.engines._sglang_http import Client
from stages.engines._sglang_launch import Launch, command, environment
from stages.engines._sglang_process import ServerProcess
from stages.engines._sglang_server import Server

__all__ = [
    "DIALECT",
    "NAME",
    "VERSION",
    "Answer",
    "DraftFacts",
    "Launch",
    "Request",
    "Server",
    "demand_alike",
    "demand_equal_settings",
    "serve",
]

NAME = "sglang"
VERSION = "0.5.23"
DIALECT = "sglang"  # of layer ids, in stages/capture/dialects.py
LOGS = Path("logs/sglang")
_ANSWER_LIMIT_S = 3600.0  # for one answer, waiting in the server's queue included
# Settings under which answers with and without a draft are compared.
ALIKE = (
    "version", "dtype", "quantization", "kv_cache_dtype", "attention_backend", "context_length", "disable_radix_cache",
    "max_running_requests", "tp_size", "dp_size", "ep_size",
)  # fmt: skip


@contextmanager
def serve(
    launch: Launch, told: SGLang, *, label: str, url: str = "", by_value: bool = False
) -> Generator[Server, None, None]:
    """A server for `launch`: started and ended here, or at `url` and left as it is.

    Args:
        label: names the log file and the progress bar.
        by_value: the layers fed are going to be compared by value; see check_launch.

    Raises:
        EngineError: what check_launch refuses, a server that does not start, or settings that did not take.
    """
    if url:
        yield _attach(launch, url, by_value)
        return
    fields = launch.fields(told)
    _warn(check_launch(fields, launch.draft, positions=launch.positions, by_value=by_value))
    port = _free_port()
    client = Client(f"http://127.0.0.1:{port}", time_limit_s=_ANSWER_LIMIT_S)
    started = command(fields, told.python, port)
    process = ServerProcess(started, env=environment(launch.device, launch.threads), log=LOGS / f"{label}.log")
    try:
        process.wait_until(client.healthy, told.start_limit_s, f"sglang starts ({label})")
        info = _info(client)
        _demand_effective(launch.expected(told), info, process)
        yield Server(client, info, launch.draft_steps if launch.draft else 0)
    finally:
        process.end()


def _attach(launch: Launch, url: str, by_value: bool) -> Server:
    """A server that someone else started: its own settings are judged as a command's would be."""
    client = Client(url, time_limit_s=_ANSWER_LIMIT_S)
    info = _info(client)
    _warn(check_launch(info, launch.draft, positions=launch.positions, by_value=by_value, where=f"the server at {url}"))
    steps = info.get("speculative_num_steps") or 0
    if steps != (launch.draft_steps if launch.draft else 0):
        raise EngineError(
            "The server drafts another number of tokens than params.yaml says",
            where=f"the server at {url}",
            expected=f"speculative_num_steps {launch.draft_steps or None}",
            got=str(info.get("speculative_num_steps")),
            do="start it so, or set serve.draft_steps",
        )
    return Server(client, info, steps)


def _info(client: Client) -> dict[str, Any]:
    info = client.get("/server_info", "/get_server_info")
    if (version := str(info.get("version"))).split("+")[0] != VERSION:
        raise EngineError(
            "This is another SGLang than the one this line is made for",
            where=client.url,
            expected=f"{VERSION}: layer ids and counts mean other things in other versions",
            got=version,
            do="install that version; raise it only together with stages/capture/dialects.py and a run of gate-deployment",
        )
    return info


def _demand_effective(expected: Mapping[str, Any], info: Mapping[str, Any], process: ServerProcess) -> None:
    """Raises EngineError when a setting did not take: SGLang warns in its log and goes on without."""
    if faults := unmet(expected, info):
        raise EngineError(
            "SGLang runs with other settings than it was started with",
            where=str(process.log),
            expected="every setting in effect",
            got="\n    " + "\n    ".join(faults),
            do="read the log for its reason; on a CPU `make sglang` installs what intel_amx needs",
        )


def demand_alike(one: Server, other_info: Mapping[str, Any]) -> None:
    """Raises EngineError when two servers differ in a setting that answers depend on."""
    if faults := differing(one.info, other_info, ALIKE):
        raise EngineError(
            "The servers with and without a draft are not started alike",
            where="the servers with and without a draft",
            expected="equal settings but for speculation",
            got="; ".join(faults),
            do="start both with the same flags",
        )


def demand_equal_settings(servers: Sequence[Server]) -> int:
    """How many settings the servers report alike: all of them, speculation and what names the process apart.

    Raises:
        EngineError: servers whose figures are to be compared differ in a setting; each is named.
    """
    first = servers[0]
    for other in servers[1:]:
        faults, _ = differing_at_all(first.info, other.info)
        if faults:
            raise EngineError(
                "The servers to compare do not run under equal settings",
                where=f"{first.client.url} and {other.client.url}",
                expected="every setting equal but for speculation: a difference would be timed as if the draft had made it",
                got="\n    " + "\n    ".join(faults),
                do="start both with the same flags; what SGLang chooses by itself (memory_fraction, max_total_tokens) is set in "
                "params.yaml: serve.sglang",
            )
    return min((differing_at_all(first.info, other.info)[1] for other in servers[1:]), default=0)


def _warn(warnings: Sequence[str]) -> None:
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr, flush=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
