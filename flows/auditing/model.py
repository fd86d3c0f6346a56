"""What an audit says: things, the bonds between them, where their bytes were found, and what is wrong.

A thing is in one of three states. VERIFIED: its bytes were found in at least one place and have the digest that the thing
above it names. UNREACHABLE: nowhere that this machine can read. ALTERED: found, and other bytes than those named.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

State = Literal["verified", "unreachable", "altered"]
Fault = Literal["altered", "missing", "unreproducible"]


@dataclass(frozen=True)
class Copy:
    """One place where bytes of a thing lie: `release`, `workspace`, `cache`, `remote`, `git`, `target`."""

    place: str
    where: str
    good: bool
    got: str = ""


@dataclass
class Thing:
    """A node of the graph. `key` is its name in the graph, `digest` what names its bytes, `facts` what a person asks for."""

    key: str
    kind: str
    title: str
    digest: str = ""
    copies: list[Copy] = field(default_factory=lambda: [])
    facts: dict[str, str] = field(default_factory=lambda: {})

    @property
    def state(self) -> State:
        if any(not c.good for c in self.copies):
            return "altered"
        return "verified" if self.copies else "unreachable"

    @property
    def places(self) -> str:
        """Where good bytes were found, in words."""
        return ", ".join(sorted({c.place for c in self.copies if c.good}))


@dataclass(frozen=True)
class Bond:
    """`above` names `below` by its digest; `label` says as what."""

    above: str
    below: str
    label: str


@dataclass(frozen=True)
class Finding:
    """Something altered, missing or unreproducible, in the words of an error of the line."""

    fault: Fault
    what: str
    where: str
    expected: str = ""
    got: str = ""
    do: str = ""


@dataclass(frozen=True)
class RowFolder:
    """A row folder as its config tells it: enough to find a row by its name."""

    name: str
    source: str
    start: int
    row_ids: tuple[str, ...]


@dataclass
class Audit:
    """One release, walked from its record down to the sources. The first thing is the release itself."""

    release: str
    draft: str = ""
    things: dict[str, Thing] = field(default_factory=lambda: {})
    bonds: list[Bond] = field(default_factory=lambda: [])
    findings: list[Finding] = field(default_factory=lambda: [])
    folders: list[RowFolder] = field(default_factory=lambda: [])
    params: dict[str, Any] = field(default_factory=lambda: {})
    code: dict[str, str] = field(default_factory=lambda: {})

    def add(self, thing: Thing, above: str = "", label: str = "") -> Thing:
        """Put a thing below another; one that is there already only gets the bond."""
        known = self.things.setdefault(thing.key, thing)
        if above:
            self.bonds.append(Bond(above, thing.key, label))
        return known

    def blame(self, fault: Fault, what: str, where: str, *, expected: str = "", got: str = "", do: str = "") -> None:
        self.findings.append(Finding(fault, what, where, expected, got, do))

    def count(self, state: State) -> int:
        return sum(t.state == state for t in self.things.values())

    @property
    def sound(self) -> bool:
        return not self.findings

    def told(self) -> dict[str, Any]:
        """All of it as JSON values, in one order."""
        return {
            "release": self.release,
            "draft": self.draft,
            "sound": self.sound,
            "states": {s: self.count(s) for s in ("verified", "unreachable", "altered")},
            "findings": [asdict(f) for f in self.findings],
            "things": [asdict(t) | {"state": t.state} for t in self.things.values()],
            "bonds": [asdict(b) for b in self.bonds],
            "folders": [asdict(f) for f in self.folders],
        }
