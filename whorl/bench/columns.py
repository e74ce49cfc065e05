"""Plain-text tables."""

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows as aligned lines: the first column to the left, the others to the right.

    The first row has the headings. A row with fewer cells, such as one with a note, does not widen the columns.
    """
    columns = zip(*(row for row in rows if len(row) == len(rows[0])), strict=True)
    widths = [max(map(len, column)) for column in columns]
    return [
        "  ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=False))).rstrip()
        for row in rows
    ]
