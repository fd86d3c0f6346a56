"""merge: prepared rows and their states joined, every row exactly once; the draft vocabulary. No tensor is copied."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.numpy import save

from stages.capture.rows import Row, read_rows
from stages.capture.store import RowStore
from stages.capture.verify import REPAIR, apart, captured_folder, describe_store
from stages.contracts.errors import DataError, Refusal, run
from stages.contracts.files import digest, file_digest, whole_folder, write_whole
from stages.contracts.manifest import (
    CAPTURE_MANIFEST,
    HIDDEN_STATES,
    MERGED,
    MERGED_MANIFEST,
    PREPARED,
    PREPARED_MANIFEST,
    CaptureManifest,
    Coverage,
    MergedManifest,
    PreparedManifest,
)
from stages.contracts.params import Params, load_params
from stages.corpus.vocabulary import Ids, always_in, choose_vocabulary, covered, mapping
from stages.targets import locate_target

_SHOWN = 5
_ABOUT = ("row_id", "prompt_id", "source", "domain", "split", "prompt_tokens", "finish")
INDEX = pa.schema(
    [(name, pa.string()) for name in ("row_id", "prompt_id", "source", "domain", "split", "folder")]
    + [("row_in_folder", pa.int32()), ("offset", pa.int64()), ("length", pa.int32())]
    + [("prompt_tokens", pa.int32()), ("supervised_tokens", pa.int32()), ("finish", pa.string())]
)


def demand_same_rows(capture: CaptureManifest, prepared: PreparedManifest) -> None:
    """Raises Refusal when states were captured for other rows, or through another target."""
    found = (capture.prepared_digest, capture.capture.weights_digest)
    wanted = (prepared.digest(), prepared.target.weights_digest)
    if found != wanted:
        raise Refusal(
            "The hidden states belong to other rows, or to another target",
            where=str(HIDDEN_STATES),
            expected=f"prepared rows {wanted[0]} through weights {wanted[1]}",
            got=f"prepared rows {found[0]} through weights {found[1]}",
            do="run `dvc repro extract`",
        )


def open_folders(capture: CaptureManifest, store: RowStore) -> None:
    """Raises DataError when a folder is damaged in shape, or is not the one the manifest speaks of."""
    store.check_spec([folder.name for folder in capture.folders], capture.capture)
    for folder in capture.folders:
        if (found := captured_folder(store.folder(folder.name).config)) != folder:
            expected, got = apart(folder, found)
            raise DataError(
                "A folder is not the one its manifest speaks of",
                where=str(store.root / folder.name),
                expected=expected,
                got=got,
                do=REPAIR,
            )


def demand_description(capture: CaptureManifest, store: RowStore) -> None:
    """Raises DataError when the manifest says something else of its folders than they are."""
    configs = [store.folder(folder.name).config for folder in capture.folders]
    if (fresh := describe_store(capture.prepared_digest, capture.capture, configs)) != capture:
        expected, got = apart(fresh, capture)
        raise DataError(
            "The manifest of the hidden states does not describe its folders",
            where=str(store.root / CAPTURE_MANIFEST.name),
            expected=expected,
            got=got,
            do=REPAIR,
        )


def place_rows(capture: CaptureManifest, store: RowStore, rows: Sequence[Row]) -> dict[str, tuple[str, int, int, int]]:
    """Where each row stands: {row_id: (folder, row in folder, token offset, tokens)}.

    Raises:
        DataError: planned rows without states, rows with states in two places, states of rows not planned, or a length
            that is not the row's; each kind counted and named.
    """
    placed: dict[str, tuple[str, int, int, int]] = {}
    times: Counter[str] = Counter()
    for folder in capture.folders:
        opened = store.folder(folder.name)
        offsets = opened.offsets.tolist()
        for i, row_id in enumerate(opened.config.row_ids):
            times[row_id] += 1
            placed[row_id] = (folder.name, i, offsets[i], offsets[i + 1] - offsets[i])
    planned = {row.row_id: len(row) for row in rows}
    faults = {
        "missing": [name for name in planned if name not in placed],
        "doubled": [name for name, n in times.items() if n > 1],
        "not planned": [name for name in placed if name not in planned],
        "of another length": [name for name, n in planned.items() if name in placed and placed[name][3] != n],
    }
    if any(faults.values()):
        raise DataError(
            "Rows and states cannot be joined: every planned row must have its states exactly once",
            where=str(store.root),
            expected=f"{len(planned)} rows, each once",
            got="; ".join(_named(kind, names) for kind, names in faults.items() if names),
            do="run `dvc repro extract`; finished folders are taken from the work cache",
        )
    return placed


def _named(kind: str, names: Sequence[str]) -> str:
    return f"{len(names)} {kind}: " + ", ".join(names[:_SHOWN]) + (" …" if len(names) > _SHOWN else "")


def make_index(
    prepared: PreparedManifest, rows: dict[str, list[Row]], placed: dict[str, tuple[str, int, int, int]]
) -> list[dict[str, Any]]:
    """A record a prepared row, in the order of sources and rows."""
    index: list[dict[str, Any]] = []
    for source in prepared.sources:
        about = pq.read_table(PREPARED / source.name / "rows.parquet", columns=list(_ABOUT)).to_pylist()
        for record, row in zip(about, rows[source.name], strict=True):
            folder, i, offset, length = placed[row.row_id]
            record |= {"folder": folder, "row_in_folder": i, "offset": offset, "length": length}
            index.append(record | {"supervised_tokens": int(row.loss_mask.sum())})
    return index


def count_supervised(rows: Iterable[Row], vocab_size: int) -> Ids:
    """How often each target id is supervised, i64 [V]."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for row in rows:
        counts += np.bincount(row.input_ids[row.loss_mask.astype(bool)], minlength=vocab_size)
    return counts


def measure_coverage(
    index: Sequence[dict[str, Any]], rows: dict[str, Row], t2d: np.ndarray[Any, np.dtype[np.bool_]], train: Ids
) -> Coverage:
    """Share of supervised tokens that the draft can propose; a domain without held-out rows is left out."""
    held_out = [record for record in index if record["split"] == "held_out"]

    def share(domain: str | None) -> float:
        chosen = (rows[r["row_id"]] for r in held_out if domain in (None, r["domain"]))
        return covered(count_supervised(chosen, len(t2d)), t2d)

    domains = sorted({record["domain"] for record in held_out})
    return Coverage(train=covered(train, t2d), held_out=share(None), by_domain_held_out={d: share(d) for d in domains})


def write_vocabulary(path: Path, target: Path, counts: Ids, size: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Choose and write d2t and t2d; return t2d bool [V]."""
    d2t, t2d = mapping(choose_vocabulary(counts, size, always_in(target)), len(counts))
    write_whole(path, save({"d2t": d2t, "t2d": t2d}))
    return t2d


def write_merged(params: Params, prepared: PreparedManifest, capture: CaptureManifest, store: RowStore) -> None:
    """Join, choose the vocabulary, write the three files, which replace the folder whole; the manifest last."""
    by_source = read_rows(prepared)
    rows = {row.row_id: row for members in by_source.values() for row in members}
    placed = place_rows(capture, store, list(rows.values()))
    demand_description(capture, store)
    index = make_index(prepared, by_source, placed)
    train = count_supervised((rows[r["row_id"]] for r in index if r["split"] == "train"), prepared.target.vocab_size)
    target = locate_target(params.target.origin)
    with whole_folder(MERGED) as aside:
        t2d = write_vocabulary(aside / "vocabulary.safetensors", target, train, params.merge.draft_vocab_size)
        sink = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_pylist(index, INDEX), sink, compression="zstd")
        table = sink.getvalue().to_pybytes()
        (aside / "index.parquet").write_bytes(table)
        MergedManifest(
            prepared_digest=prepared.digest(),
            capture_digest=capture.digest(),
            target=prepared.target,
            capture=capture.capture,
            folders=capture.folders,
            rows=len(index),
            train_rows=sum(r["split"] == "train" for r in index),
            held_out_rows=sum(r["split"] == "held_out" for r in index),
            tokens=sum(r["length"] for r in index),
            supervised_tokens=sum(r["supervised_tokens"] for r in index),
            draft_vocab_size=params.merge.draft_vocab_size,
            coverage=measure_coverage(index, rows, t2d, train),
            index_digest=digest(table),
            vocabulary_digest=file_digest(aside / "vocabulary.safetensors"),
        ).write(aside / MERGED_MANIFEST.name)


def main() -> None:
    params = load_params()
    prepared = PreparedManifest.read(PREPARED_MANIFEST)
    store = RowStore(HIDDEN_STATES)
    capture = store.manifest()
    demand_same_rows(capture, prepared)
    open_folders(capture, store)
    write_merged(params, prepared, capture, store)


if __name__ == "__main__":
    run(main)
