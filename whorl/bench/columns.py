"""Rows of cells as lines of text."""

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of columns, the first to the left, the others to the right."""
    columns = zip(*(row for row in rows if len(row) == len(rows[0])), strict=True)
    widths = [max(map(len, column)) for column in columns]
    return [
        "  ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=False))).rstrip()
        for row in rows
    ]
