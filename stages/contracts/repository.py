"""Where commands run: at the root of the repository, since every path in the contracts starts there."""

from __future__ import annotations

from pathlib import Path

from stages.contracts.errors import LineError

GRAPH = Path("dvc.yaml")


def demand_repository(root: Path = Path()) -> None:
    """Let a command go on only at the repository's root: elsewhere it would find nothing and say that nothing is there.

    Raises:
        LineError: `root` has no dvc.yaml.
    """
    if not (root / GRAPH).is_file():
        raise LineError(
            "This is not the root of the repository",
            where=str(root.absolute()),
            expected=f"{GRAPH}, which names the stages; every path starts beside it",
            got="no such file",
            do="`cd` to the folder that holds it, then do this again",
        )
