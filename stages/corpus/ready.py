"""Rows that came past their rendering: text of the chat template, or token ids. Nothing is added to them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from stages.corpus.items import RowFault
from stages.corpus.shapes import Ready

_OPENED = re.compile(r"(?:<think>\s*(?:</think>\s*)?)?")  # what may stand between an answer's header and the answer


class ReadyRows:
    """Ids and masks of rows that stand ready, by the target's tokenizer; it is loaded with the first of them."""

    def __init__(self, target: Path) -> None:
        self.target = target

    @cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(self.target / "tokenizer.json"))
        tokenizer.no_truncation()  # a server asks for neither
        tokenizer.no_padding()
        return tokenizer

    @cached_property
    def _vocab_size(self) -> int:
        config = json.loads((self.target / "config.json").read_text())
        return int(config.get("text_config", config)["vocab_size"])

    def whole(self, row: Ready) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ids and loss mask of a row with its answers.

        Raises:
            RowFault: it does not tell which of it is an answer, or its ids are not the target's.
        """
        ids, mask = self._read(row)
        if mask is None:
            kind = "spans" if row.text is not None else "loss_mask, labels or assistant_masks"
            raise RowFault("no loss mask", f"the row has no {kind}; what is an answer is not guessed")
        return ids, mask

    def prompt(self, row: Ready, header: str = "") -> tuple[int, ...]:
        """Ids up to the first answer, all of them where the row marks none.

        Args:
            header: what the template writes in front of an answer, for a prompt that is to be answered: a row that marks no
                answer has to end with it. Behind a finished turn a target says what it never says when it serves.

        Raises:
            RowFault: its ids are not the target's, or no answer can begin where it ends.
        """
        ids, mask = self._read(row)
        if mask and 1 in mask:
            return ids[: mask.index(1)]
        if header:
            text = self._tokenizer.decode(list(ids), skip_special_tokens=False) if row.text is None else row.text
            at = text.rfind(header)
            if at < 0 or not _OPENED.fullmatch(text, at + len(header)):
                raise RowFault("no answer can begin", f"it marks none and ends {text[-40:]!r}, not {header!r}")
        return ids

    def said(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens: these rows bring no messages that could be shown."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def _read(self, row: Ready) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        if row.text is None:
            if not row.ids:
                raise RowFault("no tokens")
            if not 0 <= min(row.ids) <= max(row.ids) < self._vocab_size:
                strange = next(i for i in row.ids if not 0 <= i < self._vocab_size)
                raise RowFault("foreign token id", f"{strange}; the target's vocabulary has {self._vocab_size}")
            return row.ids, row.mask
        encoding = self._tokenizer.encode(row.text, add_special_tokens=False)
        if not encoding.ids:
            raise RowFault("no tokens")
        if row.spans is None:
            return tuple(encoding.ids), None
        inside = [any(a <= start and end <= b for a, b in row.spans) for start, end in encoding.offsets]
        return tuple(encoding.ids), tuple(map(int, inside))
