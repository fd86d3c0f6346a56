"""The row store: a folder of rows is one safetensors file and its config; a row is one contiguous slice of it.

Layout of rows.safetensors, T tokens of R rows laid end to end, H hidden size, S slots (the points ascending, then the
last state before the final norm):

    offsets i64 [R+1] | states bf16 [T, S, H] | input_ids i32 [T] | loss_mask u8 [T]

All lengths are known before the first state is, so the header goes out first and states stream behind it while the
sha256 of the whole file is taken. Nothing is padded: 2·S·H + 5 bytes a token.
"""

from __future__ import annotations

import hashlib
import json
import struct
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stages.capture.rows import FolderPlan
from stages.contracts.errors import DataError
from stages.contracts.files import file_digest, whole_folder
from stages.contracts.manifest import CAPTURE_MANIFEST, HIDDEN_STATES, CaptureManifest, CaptureSpec, FolderConfig

ROWS = "rows.safetensors"
CONFIG = "data_config.json"
_ALIGN = 64
_WIDTH = {"I64": 8, "BF16": 2, "I32": 4, "U8": 1}
_KIND = {"I64": torch.int64, "BF16": torch.bfloat16, "I32": torch.int32, "U8": torch.uint8}
_MAX_HEADER = 1 << 20


def layout(rows: int, tokens: int, slots: int, hidden_size: int) -> dict[str, dict[str, Any]]:
    """The safetensors header of a folder, tensors in file order."""
    shapes = {
        "offsets": ("I64", [rows + 1]),
        "states": ("BF16", [tokens, slots, hidden_size]),
        "input_ids": ("I32", [tokens]),
        "loss_mask": ("U8", [tokens]),
    }
    header: dict[str, dict[str, Any]] = {}
    begin = 0
    for name, (kind, shape) in shapes.items():
        end = begin + _WIDTH[kind] * int(np.prod(shape))
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
        begin = end
    return header


def _head(header: dict[str, dict[str, Any]]) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    return struct.pack("<Q", len(text) + -(8 + len(text)) % _ALIGN) + text + b" " * (-(8 + len(text)) % _ALIGN)


def folder_bytes(rows: int, tokens: int, slots: int, hidden_size: int) -> int:
    """Size of rows.safetensors, to the byte, before it is written."""
    header = layout(rows, tokens, slots, hidden_size)
    return len(_head(header)) + header["loss_mask"]["data_offsets"][1]


def write_folder(path: Path, plan: FolderPlan, capture: CaptureSpec, states: Iterable[Tensor]) -> FolderConfig:
    """Write the folder `path`: it appears whole, by rename, or not at all.

    Args:
        states: for each row of `plan`, in order, bf16 [L, slots, H].

    Raises:
        DataError: a row's states do not fit the row or the capture spec.
    """
    slots = len(capture.points) + 1
    head = _head(layout(len(plan.rows), plan.tokens, slots, capture.hidden_size))
    offsets = np.cumsum([0] + [len(row) for row in plan.rows], dtype="<i8")
    sha, size = hashlib.sha256(), 0
    with whole_folder(path) as aside:
        with (aside / ROWS).open("wb") as file:

            def put(data: Any) -> None:
                nonlocal size
                file.write(data)
                sha.update(data)
                size += len(data)

            put(head)
            put(offsets.tobytes())
            for row, row_states in zip(plan.rows, states, strict=True):
                _check_states(row_states, row.row_id, (len(row), slots, capture.hidden_size))
                put(row_states.contiguous().view(torch.uint8).numpy().reshape(-1).data)
            put(b"".join(row.input_ids.astype("<i4").tobytes() for row in plan.rows))
            put(b"".join(row.loss_mask.astype("u1").tobytes() for row in plan.rows))
        assert size == folder_bytes(len(plan.rows), plan.tokens, slots, capture.hidden_size)
        config = FolderConfig(
            capture=capture,
            source=plan.source,
            start=plan.start,
            end=plan.end,
            row_ids=plan.row_ids,
            tokens=plan.tokens,
            bytes=size,
            rows_digest="sha256:" + sha.hexdigest(),
        )
        config.write(aside / CONFIG)
    return config


def _check_states(states: Tensor, row_id: str, shape: tuple[int, ...]) -> None:
    if states.dtype != torch.bfloat16 or tuple(states.shape) != shape:
        raise DataError(
            "States do not fit their row",
            where=f"row {row_id}",
            expected=f"bfloat16 {list(shape)}: tokens, slots, hidden size",
            got=f"{str(states.dtype).removeprefix('torch.')} {list(states.shape)}",
            do="the target or the engine returned something else than one state a token: mend it, then `dvc repro extract`",
        )


class RowFolder:
    """One open folder: tensors are views of the mapped file, nothing is read before it is touched. Do not write to them.

    Attributes: states bf16 [T, S, H], input_ids i32 [T], loss_mask u8 [T], offsets i64 [R+1], config.
    """

    def __init__(self, path: Path) -> None:
        """Map `path`.

        Raises:
            DataError: a missing or cut off file, a header that cannot be parsed, tensors that do not fit the config,
                offsets that do not ascend. Bytes are judged by `verify`.
        """
        self.path = path
        self.config = FolderConfig.read(path / CONFIG)
        self._fits(self.config.end - self.config.start == len(self.config.row_ids), "as many row_ids as rows", CONFIG)
        tensors = self._map()
        self.states, self.offsets = tensors["states"], tensors["offsets"]
        self.input_ids, self.loss_mask = tensors["input_ids"], tensors["loss_mask"]
        steps = self.offsets.diff()
        whole = int(self.offsets[0]) == 0 and int(self.offsets[-1]) == self.config.tokens
        self._fits(whole and bool((steps > 0).all()), f"offsets that ascend from 0 to {self.config.tokens}", "offsets")

    def __len__(self) -> int:
        return len(self.config.row_ids)

    def row(self, i: int) -> tuple[Tensor, Tensor, Tensor]:
        """States bf16 [L, S, H], input_ids i32 [L] and loss_mask u8 [L] of row `i`, without a copy."""
        part = slice(int(self.offsets[i]), int(self.offsets[i + 1]))
        return self.states[part], self.input_ids[part], self.loss_mask[part]

    def verify(self) -> None:
        """Take the sha256 of the whole file again.

        Raises:
            DataError: the bytes are not those that were written.
        """
        if (got := file_digest(self.path / ROWS)) != self.config.rows_digest:
            raise DataError(
                "A folder's bytes are not those that were written",
                where=str(self.path / ROWS),
                expected=self.config.rows_digest,
                got=got,
                # Hard links: the cache's copies are the same damaged bytes, and DVC trusts read-only files unread.
                do=f"`find .cache/states .dvc/cache -samefile {self.path / ROWS} -delete; rm -r {self.path}`, then "
                "`dvc repro`: it computes this folder again, or names what else has to go",
            )

    def _fits(self, good: bool, expected: str, at: str, got: str = "something else") -> None:
        if not good:
            raise DataError(
                "A folder of rows is damaged or does not fit its config",
                where=f"{self.path}: {at}",
                expected=expected,
                got=got,
                do="run `dvc checkout data/hidden_states`, or remove the folder and run `dvc repro extract`",
            )

    def _map(self) -> dict[str, Tensor]:
        config, file = self.config, self.path / ROWS
        self._fits(file.is_file(), f"a file of {config.bytes} bytes", ROWS, "no such file")
        size = file.stat().st_size
        self._fits(size == config.bytes, f"{config.bytes} bytes", ROWS, f"{size} bytes: cut off or replaced")
        header, start = self._header(file, size)
        good = layout(len(config.row_ids), config.tokens, len(config.capture.points) + 1, config.capture.hidden_size)
        for name, item in good.items():
            self._fits(header.get(name) == item, f"{name} {item}", ROWS, str(header.get(name)))
        end = start + good["loss_mask"]["data_offsets"][1]
        self._fits(end == size, f"data that ends at byte {end}", ROWS, f"a file of {size} bytes")
        with warnings.catch_warnings():  # mapped read-only on purpose; torch has no read-only tensors and warns
            warnings.simplefilter("ignore", UserWarning)
            raw = torch.from_numpy(np.memmap(file, np.uint8, mode="r"))
        tensors = {}
        for name, item in good.items():
            begin, stop = (start + x for x in item["data_offsets"])
            tensors[name] = raw[begin:stop].view(_KIND[item["dtype"]]).view(item["shape"])
        return tensors

    def _header(self, file: Path, size: int) -> tuple[dict[str, Any], int]:
        with file.open("rb") as handle:
            raw = handle.read(8)
            length = struct.unpack("<Q", raw)[0] if len(raw) == 8 else -1
            fits = 0 < length <= min(size - 8, _MAX_HEADER) and not (8 + length) % _ALIGN
            self._fits(fits, "a safetensors header", ROWS, f"a header length of {length} in {size} bytes")
            text = handle.read(length)
        try:
            header = json.loads(text)
        except ValueError:  # bytes that are no UTF-8, or no JSON
            header = None
        self._fits(isinstance(header, dict), "a safetensors header", ROWS, "a header that is no JSON object")
        return header, 8 + length  # type: ignore[return-value]


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
        """States bf16 [L, S, H], input_ids i32 [L], loss_mask u8 [L] of row `i` of `folder`, without a copy."""
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
