"""Tokens cut into pieces that can be read, in colour where there is colour."""

from __future__ import annotations

from rich.console import Console

from stages.reporting.prepared_row import Piece, PreparedRow, as_page, as_texts, pieces


def decode(ids: list[int]) -> str:
    """Ids are bytes."""
    return bytes(ids).decode("utf-8", errors="replace")


def cut(text: bytes, mask: list[int]) -> list[tuple[str, int, bool]]:
    return [(p.text, len(p.ids), p.supervised) for p in pieces(list(text), mask, decode)]


def test_parts_of_one_character_stand_together_and_lone_parts_alone() -> None:
    text = "a€b".encode()
    assert cut(text, [0, 1, 1, 1, 1]) == [("a", 1, False), ("€", 3, True), ("b", 1, True)]
    assert [n for _, n, _ in cut(text, [0, 0, 0, 1, 1])] == [1, 1, 1, 1, 1]  # a mask that cuts it is shown
    assert cut(b"\xffx", [0, 0]) == [("\N{REPLACEMENT CHARACTER}", 1, False), ("x", 1, False)]


ROW = PreparedRow(
    {"row": 0, "row_id": "ab<c"},
    (Piece("hi\n", (1,), False), Piece("<b>", (2,), True), Piece("&", (3,), True)),
    [{"role": "user", "content": "[red]<i>", "tool_calls": [1]}],
    [{"here": "its twin", "item": "a:1", "reason": "duplicate prompt", "detail": "<x>"}],
    {"duplicate prompt": 1},
)


def printed(colour: bool) -> str:
    console = Console(force_terminal=colour, width=200, color_system="standard" if colour else None)
    with console.capture() as capture:
        for text in as_texts(ROW, colour=colour):
            console.print(text)
    return capture.get()


def test_supervised_tokens_are_green_or_bracketed_and_nothing_is_taken_for_markup() -> None:
    plain, coloured = printed(False), printed(True)
    assert "hi⏎\n⟦<b>&⟧" in plain and "[red]<i>" in plain and "\x1b" not in plain
    assert "\x1b[1;4;32m<b>" in coloured and "⟦" not in coloured


def test_a_page_stands_alone_and_escapes_what_rows_say() -> None:
    page = as_page(ROW)
    assert '<span class=s title="2">&lt;b&gt;</span>' in page and '<span title="1">hi⏎\n</span>' in page
    assert "<i>" not in page and "<x>" not in page and "ab&lt;c" in page and "http" not in page
