"""What stands beside the data: the code of each stage, and the target with its tokenizer and template."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flows.auditing.code import Repository
from flows.auditing.model import Audit, Copy, Thing
from stages.contracts.draft import DraftRecord
from stages.contracts.files import canonical, digest, file_digest
from stages.contracts.manifest import TargetIdentity
from stages.contracts.provenance import Lock, LockedPath

_TARGETS = Path(".cache/targets")  # where wheels are unpacked


def walk_code(audit: Audit, lock: Lock, repository: Repository) -> None:
    """The commit whose files have the hashes that DVC wrote down, for all stages at once or, failing that, one by one."""
    audit.code = {told.path: told.md5 for told in lock.code}
    thing = audit.add(Thing("code", "code", "code"), "dvc.lock", "was run with")
    commit = repository.revision_of(lock.code)
    if commit:
        thing.title, thing.digest = f"code of commit {commit[:12]}", commit
        thing.copies.append(Copy("git", commit, True))
        return
    stages: dict[str, list[LockedPath]] = defaultdict(list)
    for told in lock.code:
        stages[told.stage].append(told)
    for stage, paths in stages.items():
        commit = repository.revision_of(paths)
        part = audit.add(Thing(f"code:{stage}", "code", f"code of {stage}", commit), "code", "is")
        if commit:
            part.copies.append(Copy("git", commit, True))
            part.title += f", commit {commit[:12]}"
            continue
        newest = next(iter(repository.commits(sorted({p.path for p in paths}))), "HEAD")
        audit.blame("unreproducible", f"No commit holds the code that {stage} ran", "dvc.lock: deps",
                    expected="a commit whose files have the hashes in dvc.lock",
                    got=f"in {newest[:12]} these differ: {', '.join(repository.differing(newest, paths)[:4])}",
                    do="commit before a run that is to be promoted; fetch the branch it was made on")  # fmt: skip
    if all(audit.things[f"code:{stage}"].copies for stage in stages) and stages:
        thing.copies.append(Copy("git", "a commit a stage", True))


def walk_target(
    audit: Audit, draft: DraftRecord, prepared: object, params: Mapping[str, Any], root: Path, hash_all: bool
) -> None:
    """The target's weights, tokenizer and template: recomputed where its folder is on this machine."""
    target = draft.target
    thing = audit.add(Thing("target", "target", f"target {target.name}", target.weights_digest), "draft", "drafts for")
    if prepared is not None:
        audit.add(thing, "prepared", "was answered by")
    thing.facts |= {"family": target.model_type, "layers": str(target.layers), "hidden size": str(target.hidden_size)}
    parts = {
        "tokenizer": Thing("tokenizer", "target", "tokenizer", target.tokenizer_digest),
        "template": Thing("template", "target", "chat template", target.template_digest),
    }
    for part in parts.values():
        audit.add(part, "target", "with")
    origin = str(params.get("target", {}).get("origin", ""))
    thing.facts["origin"] = origin or "not told"
    if not hash_all:
        return
    for folder, certain in _folders(origin, root):
        found = _identity(folder)
        told = (
            (thing, target.weights_digest, "weights"),
            (parts["tokenizer"], target.tokenizer_digest, "tokenizer"),
            (parts["template"], target.template_digest, "template"),
        )
        if not certain and not any(found.get(word) == expected for _, expected, word in told):
            continue  # another target, unpacked beside it
        for part, expected, word in told:
            _take(audit, part, folder, word, expected, found.get(word, "not there"))


def _take(audit: Audit, part: Thing, folder: Path, word: str, expected: str, got: str) -> None:
    part.copies.append(Copy("target", str(folder), got == expected, "" if got == expected else got))
    if got != expected:
        audit.blame("altered", f"The target's {word} is not the one the draft was trained for", str(folder),
                    expected=expected, got=got,
                    do="put the target of this release back, or retrain the draft for the new one")  # fmt: skip


def _folders(origin: str, root: Path) -> Iterator[tuple[Path, bool]]:
    """Where the target may lie, and whether it must be that one: a wheel is unpacked under a name of its own."""
    if origin.startswith("wheel:"):
        kept = root / _TARGETS
        yield from ((p, False) for p in sorted(kept.iterdir() if kept.is_dir() else ()) if p.is_dir())
    elif origin and (root / origin).is_dir():
        yield root / origin, True


def _identity(folder: Path) -> dict[str, str]:
    """The three digests of stages/contracts/manifest.py: TargetIdentity, from the files."""
    found: dict[str, str] = {}
    weights = {f.name: file_digest(f) for f in sorted(folder.glob("*.safetensors"))}
    if weights:
        found["weights"] = digest(canonical(weights))
    if (folder / "tokenizer.json").is_file():
        found["tokenizer"] = file_digest(folder / "tokenizer.json")
    own, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    try:
        template = own.read_text() if own.is_file() else json.loads(config.read_text()).get("chat_template")
    except (OSError, ValueError):
        template = None
    if template:
        found["template"] = digest(canonical(template))
    return found


def same_target(one: TargetIdentity, other: TargetIdentity) -> bool:
    """Equal weights, ids and rendering, whatever the name."""
    return one.model_copy(update={"name": ""}) == other.model_copy(update={"name": ""})
