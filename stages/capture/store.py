"""The row store: a folder of rows is one safetensors file and its config; a row is one contiguous slice of each tensor.

stages/capture/layout.py says where what lies, stages/capture/writing.py writes it.

Bytes are checked lazily: the first read of a row by `row` checks its whole group, once a process. Training reads every row
in its first epoch anyway, so that costs the one pass that a check beforehand would cost, but starts at once, reads a cold
disk once instead of twice, and never pays for rows that nobody reads. gate-training has read all of them before.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from stages.capture.forms import decode, kept_slots
from stages.capture.layout import (
    CONFIG,
    KIND,
    ROWS,
    Offsets,
    counted_by,
    covers,
    folder_bytes,
    group_slices,
    head_size,
    header_of,
    offsets_of,
    read_header,
    streams,
)
from stages.capture.rows import Row
from stages.capture.verify import REPAIR, find_damage, group_damage, slices_digest, verify_store
from stages.capture.writing import write_folder
from stages.contracts.damage import Damage, damaged
from stages.contracts.errors import DataError
from stages.contracts.manifest import CAPTURE_MANIFEST, HIDDEN_STATES, CaptureManifest, CaptureSpec, FolderConfig

__all__ = ["CONFIG", "ROWS", "RowFolder", "RowStore", "folder_bytes", "verify_store", "write_folder"]


class RowFolder:
    """One open folder: tensors are views of the mapped file, nothing is read before it is touched. Do not write to them.

    Attributes: shape (T, S, H) and dtype of its rows' states, tensors by name (see layout), offsets i64 [R+1], config.
    """

    def __init__(self, path: Path, rows: Sequence[Row] | None = None) -> None:
        """Map `path`.

        Args:
            rows: its rows, from which header and offsets are made instead of read, where those are damaged.

        Raises:
            DataError: a missing or cut off file, a header that cannot be parsed, tensors that do not fit the config,
                offsets that do not ascend. Bytes are judged by `row` and `verify`.
        """
        self.path = path
        self.config = FolderConfig.read(path / CONFIG)
        capture = self.config.capture
        self._fits(self.config.end - self.config.start == len(self.config.row_ids), "as many row_ids as rows", CONFIG)
        self.tensors = self._map(check_header=rows is None)
        self._offsets: Offsets = (
            {name: self.tensors[name].numpy() for name in counted_by(capture.form)}
            if rows is None
            else offsets_of(rows, capture.form)
        )
        self.offsets = torch.from_numpy(self._offsets["offsets"])
        self._check_offsets()
        self._checked: set[int] = set()  # groups; -1 is the head
        self._group_of = [n for n, g in enumerate(self.config.groups) for _ in range(g.start, g.end)]
        self._slices = [slices for _, slices in group_slices(self.config)]

    def __len__(self) -> int:
        return len(self.config.row_ids)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Tokens, slots and hidden size of the states that `row` gives."""
        capture = self.config.capture
        return self.config.tokens, len(capture.points) + 1, capture.hidden_size

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16

    @property
    def states(self) -> Tensor:
        """bf16 [T, S, H], mapped; a smaller form has no such tensor."""
        return self.tensors["states"]

    def row(self, i: int) -> tuple[Tensor, Tensor, Tensor]:
        """States bf16 [L, S, H], input_ids i32 [L] and loss_mask u8 [L] of row `i`; in the default form without a copy.

        Raises:
            DataError: the bytes of its group are not those that were written.
        """
        group = self._group_of[i]
        if group not in self._checked:
            self._check_group(group)
        return self.view(i)

    def view(self, i: int) -> tuple[Tensor, Tensor, Tensor]:
        """The same, its bytes not checked."""
        part = {
            stream.name: self.tensors[stream.name][int(cut[i]) : int(cut[i + 1])]
            for stream in streams(self.config.capture)
            for cut in (self._offsets[stream.by],)
        }
        ids, mask = part.pop("input_ids"), part.pop("loss_mask")
        return decode(part, mask.numpy(), self.config.capture.form), ids, mask

    def kept(self, i: int) -> Tensor:
        """Which states of row `i` are stored, bool [L, S]; `row` gives zeros for the others."""
        part = slice(int(self.offsets[i]), int(self.offsets[i + 1]))
        mask = self.tensors["loss_mask"][part].numpy()
        return kept_slots(mask, self.config.capture.form, self.shape[1])

    def trust(self, groups: Iterable[int]) -> None:
        """Take the header and these groups for checked: their bytes were read and compared by someone else."""
        self._checked |= {-1, *groups}

    def is_trusted(self, i: int) -> bool:
        """Whether the bytes of row `i` were checked and found good."""
        return self._group_of[i] in self._checked

    def damages(self) -> list[Damage]:
        """Read the whole file and name what is not as it was written."""
        return find_damage(self.path, self.config)

    def verify(self) -> None:
        """Read the whole file.

        Raises:
            DataError: bytes are not those that were written; the rows are named.
        """
        if damages := self.damages():
            raise damaged(self.path.parent, damages)
        self.trust(range(len(self.config.groups)))

    def _check_group(self, number: int) -> None:
        handle = os.open(self.path / ROWS, os.O_RDONLY)
        try:
            for group, slices in ((-1, [(0, head_size(self.config))]), (number, self._slices[number])):
                if group in self._checked:
                    continue
                told = None if group < 0 else self.config.groups[group]
                expected = self.config.head_digest if told is None else told.bytes_digest
                if (got := slices_digest(handle, slices)) != expected:
                    raise damaged(self.path.parent, [group_damage(self.path, self.config, told, got)])
                self._checked.add(group)
        finally:
            os.close(handle)

    def _fits(self, good: bool, expected: str, at: str, got: str = "something else") -> None:
        if not good:
            raise DataError(
                "A folder of rows is damaged or does not fit its config",
                where=f"{self.path}: {at}",
                expected=expected,
                got=got,
                do=REPAIR,
            )

    def _check_offsets(self) -> None:
        steps = np.diff(self._offsets["offsets"])
        ends = (int(self._offsets["offsets"][0]), int(self._offsets["offsets"][-1]))
        whole = ends == (0, self.config.tokens)
        self._fits(whole and bool((steps > 0).all()), f"offsets that ascend from 0 to {self.config.tokens}", "offsets")
        self._fits(covers(self.config.groups, self._offsets), "groups that follow one another over all rows", CONFIG)

    def _map(self, check_header: bool) -> dict[str, Tensor]:
        config, file = self.config, self.path / ROWS
        self._fits(file.is_file(), f"a file of {config.bytes} bytes", ROWS, "no such file")
        size = file.stat().st_size
        self._fits(size == config.bytes, f"{config.bytes} bytes", ROWS, f"{size} bytes: cut off or replaced")
        good, start = header_of(config)
        if check_header:
            header, found = read_header(file)
            self._fits(header is not None, "a safetensors header", ROWS, f"a header of {found} bytes that is none")
            for name, item in good.items():
                told = (header or {}).get(name)
                self._fits(told == item, f"{name} {item}", ROWS, str(told))
            self._fits(found == start, f"data that begins at byte {start}", ROWS, f"at byte {found}")
        end = start + max(item["data_offsets"][1] for item in good.values())
        self._fits(end == size, f"data that ends at byte {end}", ROWS, f"a file of {size} bytes")
        with warnings.catch_warnings():  # mapped read-only on purpose; torch has no read-only tensors and warns
            warnings.simplefilter("ignore", UserWarning)
            raw = torch.from_numpy(np.memmap(file, np.uint8, mode="r"))
        tensors = {}
        for name, item in good.items():
            begin, stop = (start + x for x in item["data_offsets"])
            tensors[name] = raw[begin:stop].view(KIND[item["dtype"]]).view(item["shape"])
        return tensors


class RowStore:
    """All folders below data/hidden_states, or below any folder of row folders; each is mapped when first asked for."""

    def __init__(self, root: Path = HIDDEN_STATES) -> None:
        self.root = root
        self._open: dict[str, RowFolder] = {}

    def manifest(self) -> CaptureManifest:
        return CaptureManifest.read(self.root / CAPTURE_MANIFEST.name)

    def folder(self, name: str) -> RowFolder:
        """The folder `name`.

        Raises:
            DataError: see RowFolder.
        """
        if name not in self._open:
            self._open[name] = RowFolder(self.root / name)
        return self._open[name]

    def row(self, folder: str, i: int) -> tuple[Tensor, Tensor, Tensor]:
        """States bf16 [L, S, H], input_ids i32 [L], loss_mask u8 [L] of row `i` of `folder`; see RowFolder.row.

        Raises:
            DataError: the bytes of its group are not those that were written.
        """
        return self.folder(folder).row(i)

    def verify(self, folder: str) -> None:
        """Raises DataError when the folder's bytes are not those its config digests."""
        self.folder(folder).verify()

    def check_spec(self, folders: Sequence[str], capture: CaptureSpec) -> None:
        """Raises DataError for a folder captured another way (another target, other points) than `capture`."""
        for name in folders:
            got = self.folder(name).config.capture
            if got != capture:
                raise DataError(
                    "A folder was captured another way than its manifest says",
                    where=str(self.root / name),
                    expected=capture.canonical().decode(),
                    got=got.canonical().decode(),
                    do="run `dvc repro extract`",
                )
