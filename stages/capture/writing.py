"""Writing a folder of rows, group by group, a group being the rows that went through the target together. Its sha256 is
taken by other threads while the next rows are computed and written, and while the disk takes the last ones.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from stages.capture.forms import encode
from stages.capture.layout import (
    CONFIG,
    ROWS,
    Offsets,
    folder_bytes,
    group_counts,
    head_bytes,
    offsets_of,
    starts,
    streams,
)
from stages.capture.rows import FolderPlan, Row
from stages.capture.spill import batches
from stages.capture.verify import root_digest
from stages.contracts.errors import DataError
from stages.contracts.files import whole_folder
from stages.contracts.manifest import CaptureSpec, FolderConfig, RowGroup

GROUP_TOKENS = 2048  # where no batch size is given
_HASHING_THREADS = 2
_PARTS_AT_ONCE = 1024  # IOV_MAX of Linux
_LIBC = ctypes.CDLL(None)
_SYNC_FILE_RANGE_WRITE = 2
_WORTH_A_CALL = 1 << 20  # bytes
_HASHED_BEHIND = 4  # groups whose digest is still being taken; more would pile up in memory


def write_folder(
    path: Path,
    plan: FolderPlan,
    capture: CaptureSpec,
    states: Iterable[Tensor],
    groups: Sequence[Sequence[Row]] | None = None,
) -> FolderConfig:
    """Write the folder `path`: it appears whole, by rename, or not at all.

    Args:
        states: for each row of `plan`, in order, bf16 [L, slots, H].
        groups: the rows of `plan`, in order, as they go through the target together; cut by GROUP_TOKENS when None.

    Raises:
        DataError: a row's states do not fit the row or the capture spec.
    """
    offsets = offsets_of(plan.rows, capture.form)
    head = head_bytes(capture, offsets)
    with whole_folder(path) as aside:
        with (aside / ROWS).open("wb", buffering=0) as file:
            _write_at(file.fileno(), [memoryview(head)], 0)
            cut = list(batches(plan.rows, GROUP_TOKENS)) if groups is None else groups
            told = _write_groups(file.fileno(), len(head), plan, capture, offsets, states, cut)
            size = file.seek(0, os.SEEK_END)
        assert size == folder_bytes(capture, plan.rows)
        head_digest = "sha256:" + hashlib.sha256(head).hexdigest()
        config = FolderConfig(
            capture=capture,
            source=plan.source,
            start=plan.start,
            end=plan.end,
            row_ids=plan.row_ids,
            tokens=plan.tokens,
            bytes=size,
            head_digest=head_digest,
            groups=told,
            rows_digest=root_digest(head_digest, told),
        )
        config.write(aside / CONFIG)
    return config


def _write_groups(
    handle: int,
    head: int,
    plan: FolderPlan,
    capture: CaptureSpec,
    offsets: Offsets,
    states: Iterable[Tensor],
    groups: Sequence[Sequence[Row]],
) -> tuple[RowGroup, ...]:
    at = starts(capture, head, {name: int(o[-1]) for name, o in offsets.items()})
    paired = zip(plan.rows, states, strict=True)
    found: list[tuple[int, int, Future[str]]] = []
    behind: deque[Future[str]] = deque()
    begin = 0
    with ThreadPoolExecutor(_HASHING_THREADS) as hashing:
        for rows in groups:
            pieces = _encoded(islice(paired, len(rows)), capture)
            behind.append(hashing.submit(_digest, [p for parts in pieces.values() for p in parts]))
            for name, parts in pieces.items():
                at[name] += _write_at(handle, parts, at[name])
            found.append((begin, begin + len(rows), behind[-1]))
            begin += len(rows)
            if len(behind) > _HASHED_BEHIND:
                behind.popleft().result()
        next(paired, None)  # raises where there are more states than rows
        os.fsync(handle)
        return tuple(_group(start, end, offsets, future.result()) for start, end, future in found)


def _write_at(handle: int, parts: Sequence[memoryview], at: int) -> int:
    """Bytes written: all of `parts`, one behind the other, from byte `at`; as few calls as the system takes."""
    begin, left = at, deque(p for p in parts if len(p))
    while left:
        done = os.pwritev(handle, list(islice(left, _PARTS_AT_ONCE)), at)
        at += done
        while left and done >= len(left[0]):
            done -= len(left.popleft())
        if done:
            left[0] = left[0][done:]
    _begin_to_disk(handle, begin, at - begin)
    return at - begin


def _begin_to_disk(handle: int, at: int, size: int) -> None:
    """Let the disk begin on these bytes at once, so that it works while the next ones are computed and digested; fsync at
    the end still waits for all. Linux has a call for it, which Python does not; elsewhere fsync does it all."""
    if size >= _WORTH_A_CALL and (start := getattr(_LIBC, "sync_file_range", None)):
        start(handle, ctypes.c_int64(at), ctypes.c_int64(size), _SYNC_FILE_RANGE_WRITE)


def _group(start: int, end: int, offsets: Offsets, digest: str) -> RowGroup:
    tokens, aux, last = group_counts(offsets, start, end)
    return RowGroup(start=start, end=end, tokens=tokens, aux_tokens=aux, last_tokens=last, bytes_digest=digest)


def _encoded(rows: Iterator[tuple[Row, Tensor]], capture: CaptureSpec) -> dict[str, list[memoryview]]:
    """The bytes of some rows by stream, in file order."""
    pieces: dict[str, list[memoryview]] = {stream.name: [] for stream in streams(capture)}
    for row, states in rows:
        _check_states(states, row.row_id, (len(row), len(capture.points) + 1, capture.hidden_size))
        for name, tensor in encode(states, row.loss_mask, capture.form).items():
            pieces[name].append(tensor.contiguous().view(torch.uint8).numpy().reshape(-1).data)
        pieces["input_ids"].append(row.input_ids.astype("<i4").view(np.uint8).data)
        pieces["loss_mask"].append(row.loss_mask.astype("u1").data)
    return pieces


def _digest(pieces: Iterable[memoryview]) -> str:
    sha = hashlib.sha256()
    for piece in pieces:
        sha.update(piece)
    return "sha256:" + sha.hexdigest()


def _check_states(states: Tensor, row_id: str, shape: tuple[int, ...]) -> None:
    if states.dtype != torch.bfloat16 or tuple(states.shape) != shape:
        raise DataError(
            "States do not fit their row",
            where=f"row {row_id}",
            expected=f"bfloat16 {list(shape)}: tokens, slots, hidden size",
            got=f"{str(states.dtype).removeprefix('torch.')} {list(states.shape)}",
            do="the target or the engine returned something else than one state a token: mend it, then `dvc repro extract`",
        )
