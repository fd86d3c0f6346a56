"""An audit in a terminal: the chain as a tree, then what is wrong with what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flows.auditing.answers import Change, Use
from flows.auditing.model import Audit, Finding, Thing

_MARK = {"verified": "✓", "unreachable": "?", "altered": "✗"}
_MANY = 6  # folders beyond this are told as one line, save those at fault
_TWICE = "joins"  # the merged set names the folders that the hidden states hold
_SHOWN_FACTS = ("rows", "tokens", "licence", "accept length", "points", "checks", "origin")


def tree(audit: Audit) -> str:
    """The release and all below it."""
    lines: list[str] = []
    below: dict[str, list[tuple[str, str]]] = {}
    for bond in audit.bonds:
        if bond.label == _TWICE:
            continue
        below.setdefault(bond.above, []).append((bond.below, bond.label))
    _branch(audit, below, "release", "", "", "", set(), lines)
    counts = ", ".join(f"{audit.count(s)} {s}" for s in ("verified", "unreachable", "altered") if audit.count(s))
    verdict = "sound" if audit.sound else f"{len(audit.findings)} finding{'s' * (len(audit.findings) != 1)}"
    return "\n".join([*lines, "", f"{counts}; {verdict}", *findings(audit.findings)])


def findings(found: Iterable[Finding]) -> list[str]:
    """Each finding as an error of the line says it."""
    lines: list[str] = []
    for finding in found:
        lines += ["", f"{finding.fault}: {finding.what}", f"  where: {finding.where}"]
        parts = (("expected", finding.expected), ("got", finding.got), ("what to do", finding.do))
        lines += [f"  {name}: {value}" for name, value in parts if value]
    return lines


def _branch(
    audit: Audit,
    below: dict[str, list[tuple[str, str]]],
    key: str,
    label: str,
    stem: str,
    indent: str,
    seen: set[str],
    lines: list[str],
) -> None:
    thing = audit.things[key]
    again = " (above)" if key in seen and below.get(key) else ""
    lines.append(f"{stem}{_MARK[thing.state]} {label + ' ' if label else ''}{_words(thing)}{again}")
    if key in seen:
        return
    seen.add(key)
    children = _few(audit, below.get(key, []))
    for i, (child, words) in enumerate(children):
        last = i == len(children) - 1
        if child not in audit.things:
            lines.append(f"{indent}{'└ ' if last else '├ '}{words}")
            continue
        _branch(
            audit,
            below,
            child,
            words,
            indent + ("└ " if last else "├ "),
            indent + ("  " if last else "│ "),
            seen,
            lines,
        )


def _words(thing: Thing) -> str:
    digest = thing.digest.removeprefix("sha256:")[:12]
    facts = "; ".join(f"{k} {v}" for k, v in thing.facts.items() if k in _SHOWN_FACTS and not v.startswith("sha256:"))
    places = thing.places or "nowhere here"
    return f"{thing.title} {digest} [{places}]" + (f" {facts}" if facts else "")


def _few(audit: Audit, children: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Of many folders only those at fault; the rest as one line without a thing of its own."""
    folders = [c for c in children if audit.things[c[0]].kind == "folder"]
    if len(folders) <= _MANY:
        return list(children)
    states = {key: (audit.things[key].state, _state_below(audit, key)) for key, _ in folders}
    odd = [c for c in folders if set(states[c[0]]) != {"verified"}]
    shown = odd[:_MANY]
    left = len(folders) - len(shown)
    good = len(folders) - len(odd)
    words = f"{left} more row folders" + (f", {good} of them verified to the byte" if good else "")
    return [c for c in children if c not in folders] + shown + [("", words)]


def _state_below(audit: Audit, key: str) -> str:
    states = audit.things.get(key.replace("rows:", "states:", 1))
    return states.state if states else "unreachable"


def uses(found: Sequence[Use], asked: str) -> str:
    """Which drafts used it, a line each."""
    if not found:
        return f"No draft here was trained on {asked}."
    return "\n".join(f"{use.release}  draft {use.draft}  {use.what}" for use in found)


def difference(found: Sequence[Change], before: str, after: str) -> str:
    """What changed, a block each."""
    if not found:
        return f"Nothing differs between {before} and {after}."
    return "\n".join(
        line for c in found for line in (c.what, f"  - {c.before or '(nothing)'}", f"  + {c.after or '(nothing)'}")
    )
