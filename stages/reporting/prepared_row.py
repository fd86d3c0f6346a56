"""One prepared row as the model sees it: its tokens, which of them are supervised, its messages, and what its source lost.

Found by its place over all sources, counted from 0 as extraction's folders count, or by the start of its row id.
"""

from __future__ import annotations

import html
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.contracts.errors import DataError
from stages.contracts.manifest import PREPARED_MANIFEST, PreparedManifest

if TYPE_CHECKING:
    from rich.text import Text

Decode = Callable[[Sequence[int]], str]
_LOST = "\N{REPLACEMENT CHARACTER}"
_LONGEST_CHARACTER = 4  # tokens that one character in UTF-8 can take
_OTHERS = 8  # rejects of the same source that are shown


@dataclass(frozen=True)
class Piece:
    """Tokens that make whole characters together; mostly one token."""

    text: str
    ids: tuple[int, ...]
    supervised: bool


@dataclass(frozen=True)
class PreparedRow:
    """What there is to see of a row.

    Attributes:
        facts: name and value, in the order to show.
        rejected: of its neighbours, the ones that it caused first: item, reason, detail.
        reasons: why rows of this source were rejected, and how many.
    """

    facts: dict[str, Any]
    pieces: tuple[Piece, ...]
    messages: list[dict[str, Any]]
    rejected: list[dict[str, str]]
    reasons: dict[str, int]


def read_prepared_row(folder: Path, wanted: str, decode: Decode) -> PreparedRow:
    """The row `wanted` of data/prepared at `folder`; decode: ids to text, special tokens included.

    Raises:
        DataError: no prepared rows there, no such row, or a row id that several begin with.
    """
    manifest = PreparedManifest.read(folder / PREPARED_MANIFEST.name)
    source, place, number = _find(folder, manifest, wanted)
    row = _read(folder / source / "rows.parquet", place)
    told = next(s for s in manifest.sources if s.name == source)
    mask = row["loss_mask"]
    facts = {
        "row": number,
        "row_id": row["row_id"],
        "prompt_id": row["prompt_id"],
        "source": f"{source} ({told.kind}, {told.licence})",
        "domain": row["domain"],
        "split": row["split"],
        "tokens": len(mask),
        "prompt_tokens": row["prompt_tokens"],
        "supervised_tokens": sum(mask),
        "finish": row["finish"],
        "on_policy": row["on_policy"],
        "repetitive": row["repetitive"],
    }
    rejected = _rejected(folder, source, row["prompt_id"])
    return PreparedRow(
        facts, tuple(pieces(row["input_ids"], mask, decode)), json.loads(row["messages"]), rejected, told.rejects
    )


def pieces(ids: Sequence[int], mask: Sequence[int], decode: Decode) -> Iterator[Piece]:
    """The row's text cut where its tokens are cut; tokens that are parts of one character stand together."""
    start = 0
    while start < len(ids):
        end = start + 1
        text = decode(ids[start:end])
        for more in range(start + 2, min(start + _LONGEST_CHARACTER, len(ids)) + 1):
            if _LOST not in text:
                break
            longer = decode(ids[start:more])
            if _LOST not in longer and mask[start] == mask[more - 1]:
                text, end = longer, more
        yield Piece(text, tuple(ids[start:end]), bool(mask[start]))
        start = end


def _find(folder: Path, manifest: PreparedManifest, wanted: str) -> tuple[str, int, int]:
    """Source, place within it and number over all sources."""
    import pyarrow.parquet as pq

    start = 0
    found: list[tuple[str, int, int]] = []
    for source in manifest.sources:
        if wanted.isdigit() and len(wanted) < 12:
            if start <= int(wanted) < start + source.rows:
                return source.name, int(wanted) - start, int(wanted)
        else:
            names = pq.read_table(folder / source.name / "rows.parquet", columns=["row_id"])["row_id"].to_pylist()
            found += [(source.name, i, start + i) for i, name in enumerate(names) if name.startswith(wanted)]
        start += source.rows
    if len(found) != 1:
        raise DataError(
            "No such row" if not found else "Several rows begin so",
            where=str(folder),
            expected=f"a row's number, 0 to {start - 1}, or the beginning of one row's id",
            got=wanted if not found else f"{wanted}: {len(found)} rows, among them {[n for _, _, n in found[:4]]}",
            do=f"`python -m stages.glance {folder} 0` shows the first",
        )
    return found[0]


def _read(path: Path, place: int) -> dict[str, Any]:
    """One row; only the row group that holds it is read."""
    import pyarrow.parquet as pq

    file = pq.ParquetFile(path)
    for group in range(file.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        if place < rows:
            return file.read_row_group(group).slice(place, 1).to_pylist()[0]
        place -= rows
    raise DataError(
        "A file has fewer rows than its manifest says", where=str(path), do="run `dvc repro prepare`, or `dvc pull`"
    )


def _rejected(folder: Path, source: str, prompt: str) -> list[dict[str, str]]:
    """Rejects that name this row's prompt, then the first of each reason in its source."""
    import pyarrow.parquet as pq

    table = pq.read_table(folder / "rejects.parquet", filters=[("source", "==", source)]).to_pylist()
    caused = [r for r in table if prompt and (r["prompt_id"] == prompt or prompt in r["detail"])]
    seen: Counter[str] = Counter()
    others: list[dict[str, str]] = []
    for reject in table:
        seen[reject["reason"]] += 1
        if reject not in caused and seen[reject["reason"]] == 1:
            others.append(reject)
    shown = [{**r, "here": "its twin"} for r in caused] + [{**r, "here": ""} for r in others]
    return [{name: str(r[name]) for name in ("here", "item", "reason", "detail")} for r in shown[:_OTHERS]]


def as_json(row: PreparedRow) -> str:
    """Everything, for programs."""
    return json.dumps(asdict(row), ensure_ascii=False, indent=1)


def as_texts(row: PreparedRow, *, colour: bool) -> Iterable[Text]:
    """For a terminal: supervised tokens in green, every other one underlined; without colour, between ⟦ and ⟧."""
    from rich.text import Text

    width = max(map(len, row.facts))
    for name, value in row.facts.items():
        yield Text.assemble((f"{name.replace('_', ' '):<{width}}  ", "dim"), str(value))
    yield Text()
    shown, before = Text(), False
    for i, piece in enumerate(row.pieces):
        if not colour and piece.supervised != before:
            shown.append("⟦" if piece.supervised else "⟧")
        before = piece.supervised
        style = ("bold green" if piece.supervised else "") + (" underline" if i % 2 else "")
        shown.append(_visible(piece.text), style.strip() or None)
    yield shown.append("⟧" if before and not colour else "")
    yield Text()
    for message in row.messages:
        rest = {k: v for k, v in message.items() if k not in ("role", "content")}
        yield Text.assemble(
            (f"{message.get('role')}: ", "cyan"), str(message.get("content")), str(rest) if rest else ""
        )
    yield Text()
    reasons = ", ".join(f"{n} {reason}" for reason, n in sorted(row.reasons.items())) or "none"
    yield Text.assemble(("rejected of this source: ", "dim"), reasons)
    for r in row.rejected:
        twin = (f"{r['here']} ", "yellow") if r["here"] else ""
        yield Text.assemble("  ", twin, r["item"], ": ", (r["reason"], "red"), f" {r['detail']}".rstrip())


def _visible(text: str) -> str:
    """Line breaks and tabs marked, and kept."""
    return text.replace("\n", "⏎\n").replace("\t", "⇥\t")


_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}
pre{font:13px/1.7 ui-monospace,monospace;white-space:pre-wrap;overflow-wrap:anywhere;background:#f6f6f4;padding:1rem}
td,th{text-align:left;padding:.1rem 1rem .1rem 0;vertical-align:top}th{font-weight:400;color:#666}
span{border-bottom:1px solid #bbb;margin-right:1px}span.s{background:#c9efcf;border-color:#2a8a3e}
"""


def as_page(row: PreparedRow) -> str:
    """A page without anything from elsewhere; a token's id shows when it is pointed at."""
    said = html.escape
    facts = "".join(
        f"<tr><th>{said(name.replace('_', ' '))}</th><td>{said(str(value))}</td></tr>"
        for name, value in row.facts.items()
    )
    tokens = "".join(
        f'<span{" class=s" if p.supervised else ""} title="{" ".join(map(str, p.ids))}">{said(_visible(p.text))}</span>'
        for p in row.pieces
    )
    messages = "".join(
        f"<h3>{said(str(m.get('role')))}</h3><pre>{said(str(m.get('content')))}{_rest(m)}</pre>" for m in row.messages
    )
    rejected = "".join(
        "<tr>" + "".join(f"<td>{said(r[name])}</td>" for name in ("here", "item", "reason", "detail")) + "</tr>"
        for r in row.rejected
    )
    reasons = ", ".join(f"{n} {reason}" for reason, n in sorted(row.reasons.items())) or "none"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>row {said(row.facts["row_id"])}</title>'
        f"<style>{_STYLE}</style><h1>Row {row.facts['row']}</h1><table>{facts}</table>"
        f"<h2>Tokens</h2><p>Green ones are supervised.</p><pre>{tokens}</pre><h2>Messages</h2>{messages}"
        f"<h2>Rejected of this source</h2><p>{said(reasons)}</p><table>{rejected}</table></html>\n"
    )


def _rest(message: dict[str, Any]) -> str:
    rest = {k: v for k, v in message.items() if k not in ("role", "content")}
    return "\n" + html.escape(json.dumps(rest, ensure_ascii=False, indent=1)) if rest else ""
