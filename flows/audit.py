"""The audit: what a release was trained on, byte for byte, and whether all of it still is what it was.

python -m flows.audit                    the current release, as a tree; exit code 1 if anything is wrong, naming it
python -m flows.audit NAME               another one, of this clone or of the registry; --all for every release
python -m flows.audit A B                what changed between two releases
python -m flows.audit --source NAME      which drafts used a source (name, licence, kind or digest)
python -m flows.audit --row ID           which drafts used a row
--json, --html FILE, --openlineage FILE  the same for programs, for a browser, for Marquez or DataHub
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from flows.auditing import tree
from flows.auditing.answers import changes, uses_of_row, uses_of_source
from flows.auditing.bytes import Hashed
from flows.auditing.model import Audit, Finding
from flows.auditing.page import write_page
from flows.auditing.registered import store_faults
from flows.auditing.registry_releases import NearestReleases
from flows.auditing.releases import Releases
from flows.auditing.standing import registry_faults
from flows.auditing.unreleased import unreleased
from flows.auditing.walk import Walk
from flows.registry.store import open_store
from stages.contracts.errors import LineError, run
from stages.contracts.params import load_registry
from stages.contracts.progress import progress
from stages.contracts.repository import demand_repository

_HASHED = ("data", "models", ".dvc/cache/files", ".cache/targets")


def audit(store: Releases, names: Sequence[str], root: Path, hash_all: bool = True) -> list[Audit]:
    """Audit these releases; a file that several of them share is hashed once."""
    if not hash_all:
        return [Walk(store, name, root, Hashed(), hash_all=False).run() for name in names]
    total = _size(root) + sum(store.size_bytes(name) for name in names)
    with progress(total, "audit", "bytes at most") as advance:
        hashed = Hashed(advance)
        return [Walk(store, name, root, hashed).run() for name in names]


def _size(root: Path) -> int:
    """Bytes that may have to be read; hard links count once."""
    seen: dict[tuple[int, int], int] = {}
    for folder in _HASHED:
        for file in (root / folder).rglob("*"):
            if file.is_file():
                at = file.stat()
                seen[at.st_dev, at.st_ino] = at.st_size
    return sum(seen.values())


def chosen(store: Releases, asked: Sequence[str], every: bool) -> list[str]:
    """The releases asked for; the head of a name is enough; the current one when nothing is asked.

    Raises:
        LineError: no such release, or several.
    """
    names = list(store.names())
    if every or (not asked and not names):
        return names
    if not asked:
        now = store.pointers().get("current")
        return [now] if now in names else names
    return [_one(word, names) for word in asked]


def _one(word: str, names: Sequence[str]) -> str:
    found = [n for n in names if n.startswith(word.rstrip("/").rpartition("/")[2])]
    if len(found) != 1:
        raise LineError(
            "No such release" if not found else "More than one release begins like that",
            expected=f"one of {', '.join(names) or 'none: nothing was promoted yet'}",
            got=word,
            do="`python -m flows.release list`",
        )
    return found[0]


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m flows.audit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("releases", nargs="*", metavar="release")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--source")
    parser.add_argument("--row")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--html", type=Path, metavar="FILE")
    parser.add_argument("--openlineage", type=Path, metavar="FILE")
    return parser.parse_args()


def _answer(store: Releases, asked: argparse.Namespace, root: Path) -> None:
    """Which drafts used it; exit code 1 when some release can no longer be told about."""
    told = audit(store, chosen(store, asked.releases, not asked.releases), root, hash_all=False)
    here = None if asked.releases else unreleased(root, told)
    told += [here] if here else []
    word = asked.source if asked.source is not None else asked.row
    found = uses_of_source(told, word) if asked.source is not None else uses_of_row(told, word)
    print(json.dumps([asdict(u) for u in found], indent=1) if asked.json else tree.uses(found, word))
    sys.exit(any(not use.certain for use in found))


def _compare(store: Releases, asked: argparse.Namespace, root: Path) -> None:
    before, after = audit(store, chosen(store, asked.releases, False), root, hash_all=False)
    found = changes(before, after)
    words = tree.difference(found, before.release, after.release)
    print(json.dumps([asdict(c) for c in found], indent=1) if asked.json else words)


def _show(audits: Sequence[Audit], faults: Sequence[Finding], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"registry": [asdict(f) for f in faults], "releases": [a.told() for a in audits]}, indent=1))
        return
    for told in audits:
        print(tree.tree(told), end="\n\n")
    if faults:
        print("\n".join(["The registry itself:", *tree.findings(faults)]))
    if not audits:
        print("No release yet: `make retrain`, then `python -m flows.release promote`.")


def main() -> None:
    """Audit, compare or answer, from the repository root."""
    asked = _asked()
    demand_repository()
    root, settings = Path(), load_registry()
    registry = open_store(settings, root)
    store = NearestReleases(root, registry)
    if asked.source is not None or asked.row is not None:
        return _answer(store, asked, root)
    if len(asked.releases) == 2 and not asked.all:
        return _compare(store, asked, root)
    faults = [*registry_faults(store, settings.keep_releases), *store_faults(registry)]
    # a damaged pointer is a finding, and every release is looked at
    audits = audit(store, chosen(store, asked.releases, asked.all or bool(faults and not asked.releases)), root)
    _show(audits, faults, asked.json)
    if asked.html:
        write_page(asked.html, audits, faults)
    if asked.openlineage:
        from flows.auditing.lineage import write_events  # nobody else needs that library

        write_events(asked.openlineage, audits, store)
    sys.exit(bool(faults) or any(not a.sound for a in audits))


if __name__ == "__main__":
    run(main)
