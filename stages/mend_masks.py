"""mend_masks: a copy of another tool's store in which every row has its own loss mask. `python -m stages.mend_masks FOLDER OUT`

speculators 0.4.0 and 0.4.0.1 wrote the masks of batches above ten rows beside other rows' tokens. Tokens and states agree, so
nothing is extracted again: a mask is taken from the file where it stands, or made from the tokens where it was cut. FOLDER is
only read. OUT is whole or absent; files without a fault are linked to those of FOLDER where the disk can, else copied;
mended_masks.json in it says which rows were mended.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from stages._template_rule import rule_of, target_at_hand
from stages.bridges.formats.speculators_legacy import write_with_mask
from stages.bridges.identity import fingerprint
from stages.bridges.stores import ForeignStore, open_store
from stages.capture.mask_order import MaskFacts, MaskOrder
from stages.capture.mask_repair import explain, folder_of, mask_facts, own_masks
from stages.capture.masks import MaskRule
from stages.contracts.adoption import MENDED_MASKS, MendedFolder, MendedMasks
from stages.contracts.errors import DataError, LineError, Refusal, run
from stages.contracts.files import whole_folder
from stages.contracts.progress import progress

_SPARE_BYTES = 64 << 20
Folders = dict[str, dict[int, MaskFacts]]


def choose(arguments: list[str]) -> tuple[Path, Path]:
    """The two selectors: a store, and where its copy goes.

    Raises:
        LineError: not two.
        Refusal: one holds the other, or something else than an earlier copy stands where this one is to go.
    """
    if len(arguments) != 2:
        raise LineError(
            "Mend which store, and where is the copy to go?",
            where="command line",
            expected="a folder of hidden states, then one that is not there yet",
            got=" ".join(arguments) or "nothing",
        )
    source, out = map(Path, arguments)
    here, there = source.resolve(), out.resolve()
    taken = out.exists() and not (out.is_dir() and ((out / MENDED_MASKS).exists() or not any(out.iterdir())))
    if taken or here.is_relative_to(there) or there.is_relative_to(here):
        raise Refusal(
            "The copy cannot stand there",
            where=str(out),
            expected=f"no folder, an empty one, or one with {MENDED_MASKS}, which is replaced as a whole; outside {source}",
            got="files of another origin" if taken else "one of the two folders holds the other",
            do="name another folder",
        )
    return source, out


def demand_kind(store: ForeignStore) -> None:
    """Raises Refusal for a tool that never wrote masks beside other rows' tokens."""
    if (store.kind.tool, store.kind.era) != ("speculators", "0.3-0.4"):
        raise Refusal(
            "Masks of this tool are not known to stand beside other rows' tokens",
            where=str(store.root),
            expected="hidden states of speculators 0.3-0.4, data_{i}.pt",
            got=f"{store.kind.tool} {store.kind.era}",
            do="look at it with `python -m stages.glance FOLDER --deep`; adopted (capture.adopt), rows take the prepared masks",
        )


def rule_at_hand(store: ForeignStore) -> MaskRule | None:
    """How the target's template makes masks, where the target is here; told in words where it is not."""
    models = [m for c in store.configs.values() if isinstance(m := c.get("model"), dict)]
    named = next((m.get("target_model_path") for m in models), None)
    folder = target_at_hand(named, store.hidden_size)
    if folder is None:
        tell(
            "no target at hand (one that the run names by its folder, or params.yaml's if it is as wide): by lengths alone"
        )
        return None
    try:
        return rule_of(folder, store, store.files)
    except DataError as error:
        tell(f"{error.what}: {error.got}; by lengths alone")
        return None


def tell(words: str) -> None:
    print(f"mend_masks: {words}", file=sys.stderr, flush=True)


def read_masks(store: ForeignStore, rule: MaskRule | None) -> tuple[Folders, dict[str, str]]:
    """Masks and lengths of every row by folder and number, and why the others could not be read. No state is touched."""
    folders: Folders = {}
    unread: dict[str, str] = {}
    with progress(len(store.files), "masks of the store", "files") as advance:
        for file in store.files:
            try:
                facts = mask_facts(next(iter(store.rows_of(file, uneven=True))), rule)
                if facts is not None:
                    folders.setdefault(folder_of(file.path), {})[facts.number] = facts
            except DataError as error:
                unread[file.path] = f"{error.what} ({error.got})"
            advance()
    return folders, unread


def find_orders(store: ForeignStore, folders: Folders) -> dict[str, tuple[MaskOrder, Mapping[int, MaskFacts]]]:
    """What explains the masks of each folder that has some out of order, and the rows it was told from.

    Raises:
        Refusal: none has.
    """
    found = {name: told for name, rows in folders.items() if (told := explain(rows)) is not None}
    if not found:
        raise Refusal(
            "No folder's masks are out of order",
            where=str(store.root),
            expected='masks that stand as if sorted as text, "10" before "2"',
            got=f"{sum(map(len, folders.values()))} rows in {len(folders)} folders, explained by no batch size",
            do="look at it with `python -m stages.glance FOLDER --deep`; nothing was written",
        )
    return found


def demand_room(store: ForeignStore, out: Path, mended: dict[str, bytes]) -> None:
    """Raises Refusal when the disk cannot hold the rows that are written again, and copies of all where it has no links."""
    there = next(p for p in (out.absolute(), *out.absolute().parents) if p.exists())
    linked = there.stat().st_dev == store.root.stat().st_dev
    need = sum(f.bytes for f in store.files if f.path in mended or not linked) + _SPARE_BYTES
    free = shutil.disk_usage(there).free
    if need > free:
        raise Refusal(
            "The copy does not fit on this disk",
            where=str(there),
            expected=f"{need / 1e9:.2f} GB free",
            got=f"{free / 1e9:.2f} GB",
            do="free some, or name a folder on a larger disk",
        )


def files_below(root: Path) -> Iterator[Path]:
    """Every file, relative to `root`; links that lead nowhere are left out."""
    for folder, _, names in os.walk(root):
        yield from (p.relative_to(root) for n in sorted(names) if (p := Path(folder, n)).is_file())


def link(source: Path, to: Path) -> None:
    """The file again: by a link, or copied where the disk has none."""
    with contextlib.suppress(OSError):
        os.link(source.resolve(), to)
        return
    shutil.copyfile(source, to)


def copy(root: Path, aside: Path, mended: dict[str, bytes]) -> None:
    """Everything below `root` again; the rows in `mended`, by path, with these masks."""
    files = [p for p in files_below(root) if p.name != MENDED_MASKS]
    with progress(len(files), "mended copy", "files") as advance:
        for path in files:
            to = aside / path
            to.parent.mkdir(parents=True, exist_ok=True)
            mask = mended.get(path.as_posix())
            if mask is None:
                link(root / path, to)
            else:
                write_with_mask(root / path, mask, to)
            advance()


def main() -> None:
    source, out = choose(sys.argv[1:])
    store = open_store(source)
    demand_kind(store)
    folders, unread = read_masks(store, rule_at_hand(store))
    orders = find_orders(store, folders)
    path_of = {(folder_of(f.path), f.index): f.path for f in store.files}
    mended: dict[str, bytes] = {}
    made = 0
    mended_folders: dict[str, MendedFolder] = {}
    for name, (order, rows) in orders.items():
        names = {number: path_of[name, number] for number in rows}
        masks, from_tokens = own_masks(names, rows, order)
        mended |= {names[number]: mask for number, mask in masks.items()}
        made += len(from_tokens)
        mended_folders[name] = MendedFolder(batch=order.batch, rows=tuple(sorted(masks)))
    demand_room(store, out, mended)
    record = MendedMasks(
        store_fingerprint=fingerprint(store),
        rows=sum(map(len, folders.values())),
        mended_rows=len(mended),
        rebuilt_rows=made,
        folders=mended_folders,
        unread=unread,
    )
    with whole_folder(out) as aside:
        copy(source, aside, mended)
        record.write(MendedMasks.path(aside))
    print(
        f"{out}: {record.mended_rows} of {record.rows} rows have their own mask again ({made} made from the tokens), in "
        f"{len(orders)} of {len(folders)} folders"
        + (f"; {len(unread)} files could not be read and stand there as they were" if unread else "")
    )


if __name__ == "__main__":
    run(main)
