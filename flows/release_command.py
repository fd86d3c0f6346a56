"""The command line of flows/release.py: words for what to do, no knobs."""

from __future__ import annotations

import sys
from pathlib import Path

from flows import release
from stages.contracts.errors import LineError
from stages.contracts.repository import demand_repository

_USAGE = "promote, rollback [why], list, follow, fetch RELEASE TO, prune or prune delete"


def main() -> None:
    """Do what the words say, from the repository root.

    Raises:
        LineError: no such action, or one that failed.
    """
    action, *more = sys.argv[1:] or [""]
    demand_repository()
    if (action, len(more)) == ("list", 0):
        print(release.list_releases())
    elif (action, len(more)) == ("promote", 0):
        _tell(release.promote(even_if_rolled_back=True))
    elif action == "rollback":
        _tell(release.rollback(words=" ".join(more)))
    elif (action, len(more)) == ("follow", 0):
        found = release.follow()
        _tell(found) if found else print("no release yet")
    elif (action, len(more)) == ("fetch", 2):
        found = release.fetch(Path(), more[0], Path(more[1]))
        print(f"release {found.name}: {more[1]}/draft, accept length {found.record.accept_length:.2f}")
    elif action == "prune" and more in ([], ["delete"]):
        print(release.prune(delete=bool(more)))
    else:
        raise LineError(
            "No such action",
            expected=_USAGE,
            got=" ".join([action, *more]).strip() or "nothing",
            do="python -m flows.release list",
        )


def _tell(found: release.Release) -> None:
    print(f"current: releases/{found.name}, accept length {found.record.accept_length:.2f}")
