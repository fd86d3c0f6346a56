"""The part of glance that shows a prepared row: `python -m stages.glance data/prepared ROW [--html] [--json]`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from stages.contracts.errors import DataError, LineError
from stages.contracts.files import file_digest, write_whole
from stages.contracts.manifest import PREPARED_MANIFEST, PreparedManifest
from stages.contracts.params import load_params

PAGES = Path("reports/rows")


def show_row(arguments: Sequence[str]) -> bool:
    """Show a row when the command line names one; False when it asks for something else.

    Raises:
        LineError: --html without a row.
        DataError: no such row, or the target's tokenizer is not the one that the rows were prepared with.
    """
    named = [a for a in arguments if not a.startswith("-")]
    options = set(arguments) - set(named)
    if len(named) != 2 or options - {"--html", "--json"}:
        if "--html" in options:
            raise LineError(
                "Which row?",
                where="command line",
                expected="the folder of prepared rows, a row's number or the beginning of its id, and --html or --json",
                got=" ".join(arguments),
                do="`python -m stages.glance data/prepared 0 --html`",
            )
        return False
    from stages.reporting.prepared_row import as_json, as_page, as_texts, read_prepared_row

    folder = Path(named[0])
    row = read_prepared_row(folder, named[1], _Decoder(folder))
    if "--json" in options:
        print(as_json(row))
    elif "--html" in options:
        page = PAGES / f"{row.facts['row_id']}.html"
        write_whole(page, as_page(row).encode())
        print(page)
    else:
        from rich.console import Console

        console = Console(file=sys.stdout)
        for text in as_texts(row, colour=console.is_terminal and not console.no_color):
            console.print(text, soft_wrap=True)
    return True


class _Decoder:
    """Ids to text by the target's tokenizer, special tokens included."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        from stages.targets import locate_target

        path = locate_target(load_params().target.origin) / "tokenizer.json"
        expected = PreparedManifest.read(folder / PREPARED_MANIFEST.name).target.tokenizer_digest
        if (got := file_digest(path)) != expected:
            raise DataError(
                "The target's tokenizer is not the one that these rows were prepared with",
                where=str(path),
                expected=expected,
                got=got,
                do="mend target.origin in params.yaml, or run `dvc repro prepare`",
            )
        self._tokenizer = Tokenizer.from_file(str(path))

    def __call__(self, ids: Sequence[int]) -> str:
        text = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        spaced = (self._tokenizer.id_to_token(ids[0]) or "").startswith(
            "▁"
        )  # SentencePiece drops the first one's space
        return f" {text}" if spaced and not text.startswith(" ") else text
