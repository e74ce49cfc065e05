"""Shows an answer in a terminal as it is meant: tables, code, lists. Markdown is drawn block by block.

A block is written as it comes. When it is whole, its lines are taken back and drawn again by rich, which breaks lines
between words. A block that is higher than the terminal stays as it came.
"""

import io
import re
import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .terminal import Screen

# A model may write control characters that change the terminal; only line breaks and tabs are passed through.
HARMLESS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
_FENCE = re.compile(r" {0,3}(```+|~~~+)")
_ITEM = re.compile(r"\s*([-*+]|\d{1,9}[.)])\s")


def first_block(text: str) -> int | None:
    """Return the length of the first block of a text that still grows; None: it may go on."""
    fence, start, is_list, length = "", 0, False, 0
    while (end := text.find("\n", start)) >= 0:
        line = text[start:end]
        start = end + 1
        if match := _FENCE.match(line):
            if fence and line.strip().startswith(fence) and not line.strip().strip(fence[0]):
                return start
            if not fence:
                if length and not is_list:
                    return length
                fence = match[1]
        elif not fence and not line.strip() and length:
            rest = text[start:].lstrip("\n")
            if not rest.partition("\n")[0].strip():
                return None  # what comes behind decides
            goes_on = is_list and (rest[0].isspace() or _ITEM.match(rest) or re.match(r"\d*[-*+.)]?$", rest))
            if not goes_on:
                return start
        if not length:
            is_list = bool(_ITEM.match(line))
        length = start
    return None


class BlockWriter:
    """Writes the blocks of one answer to a screen. size: columns and lines of the terminal; None: ask it."""

    def __init__(self, screen: "Screen", size: tuple[int, int] | None = None) -> None:
        self._screen, self._size = screen, size
        self._text = ""  # of the block that is not whole
        self._num_shown = 0  # characters of it

    def add(self, text: str) -> None:
        """Take the next part of the answer."""
        self._text += text.translate(HARMLESS)
        while (end := first_block(self._text)) is not None:
            block, self._text = self._text[:end], self._text[end:]
            self._draw(block)
        self._screen.write(self._text[self._num_shown :])
        self._num_shown = len(self._text)

    def finish(self) -> None:
        """Draw the last block."""
        block, self._text = self._text, ""
        if block.strip():
            self._draw(block)

    def _draw(self, block: str) -> None:
        """Replace the raw text of a block, as much as is shown, by the drawn block."""
        columns, lines = self._size or tuple(shutil.get_terminal_size())
        raw, self._num_shown = block[: self._num_shown], 0
        rows = num_rows(raw, columns)
        if rows >= lines:
            self._screen.write(block[len(raw) :])
            return
        if raw:
            up = f"\x1b[{rows - 1}A" if rows > 1 else ""
            self._screen.control(f"\r{up}\x1b[J")
        self._screen.control(drawn(block, columns), is_line_open=False)


def num_rows(text: str, columns: int) -> int:
    """Return how many rows of the terminal a text takes from the row of its beginning to that of the cursor."""
    from rich.cells import get_character_cell_size

    rows = 0
    for line in text.split("\n"):
        rows, column = rows + 1, 0
        for size in map(get_character_cell_size, line.expandtabs()):
            if column + size > columns:  # half of a wide character does not stay at the end of a row
                rows, column = rows + 1, 0
            column += size
    return rows


def drawn(block: str, columns: int) -> str:
    """Return a block of Markdown as a terminal shows it."""
    from rich.console import Console
    from rich.markdown import Markdown

    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=min(columns, 100), legacy_windows=False)
    console.print(Markdown(block, code_theme="ansi_dark", hyperlinks=False))
    return "\n".join(line.rstrip() for line in out.getvalue().strip("\n").split("\n")) + "\n\n"
