"""What every benchmark is for its command, and what it writes: text, JSON, charts. It needs no torch."""

import importlib.util
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from whorl.bench.provenance import Document
from whorl.extras import how_to_install
from whorl.files import check_output_file, output_file
from whorl.options import print_json

PLOT_FORMATS = (".png", ".svg", ".pdf")


@dataclass(frozen=True, kw_only=True, slots=True)
class Benchmark:
    """A benchmark whose options have been checked.

    run: measures, and returns the document. render: the document as text. is_good: whether nothing in it is missing or
    wrong. draw: writes a chart of it to a file; None for a benchmark without charts.
    """

    run: Callable[[], Document]
    render: Callable[[Document], str]
    is_good: Callable[[Document], bool] = lambda document: True
    draw: Callable[[Document, Path], None] | None = None


def finish(benchmark: Benchmark, as_json: bool, plot: Path | None = None) -> NoReturn:
    """Run a benchmark, write its chart, print its result, and exit: with 1 when something is missing or wrong."""
    document = benchmark.run()
    if plot is not None and benchmark.draw is not None:
        benchmark.draw(document, plot)
    if as_json:
        print_json(document)
    else:
        print(benchmark.render(document))
    sys.exit(0 if benchmark.is_good(document) else 1)


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


Column = tuple[str, str | Callable[[Document], str]]


def columns(rows: Iterable[Document], layout: Sequence[Column], *, named: int = 1) -> list[str]:
    """Return documents as a table.

    layout: the heading of each column, and its cell as a format such as "{tok_s:.1f}" or a function of the row. A
    figure that is absent or None is shown as "-". A row with a "note" has only the first `named` cells, and its note
    behind the first of them.
    """
    return table([[heading for heading, _ in layout], *(cells(row, layout, named=named) for row in rows)])


def cells(row: Document, layout: Sequence[Column], *, named: int = 1) -> list[str]:
    """Return the cells of one row of `columns`."""
    if "note" not in row:
        return [_cell(row, cell) for _, cell in layout]
    first, *others = (_cell(row, cell) for _, cell in layout[:named])
    return [f"{first}: {row['note']}", *others]


def _cell(row: Document, cell: str | Callable[[Document], str]) -> str:
    if callable(cell):
        return cell(row)
    try:
        return cell.format(**row)
    except (KeyError, TypeError):
        return "-"


def noted(work: Callable[[], Document]) -> Document:
    """Return what the work returns, or a note with its error, which must not end the benchmark."""
    try:
        return work()
    except Exception as error:
        return {"note": f"did not run: {first_line(error)}"}


def first_line(error: Exception) -> str:
    """Return the type of an error and the first line of its text."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def need_plot(path: Path | None) -> None:
    """Raise ValueError or CannotWrite when the plot cannot be written; called before minutes of measuring."""
    if path is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"--plot needs matplotlib: {how_to_install('bench')}")
    if path.suffix not in PLOT_FORMATS:
        raise ValueError(f"--plot is {path}, expected a file name that ends in one of {', '.join(PLOT_FORMATS)}")
    check_output_file(path)


def save_figure(figure: Any, path: Path, dpi: int = 150) -> None:
    """Write a figure of matplotlib; the suffix of the path gives its format."""
    with output_file(path) as file:
        figure.savefig(file, dpi=dpi)


def write_document(document: Document, path: Path) -> None:
    """Write a document as JSON. A reader sees the last one that was complete."""
    with output_file(path) as file:
        file.write_text(json.dumps(document, indent=2), encoding="utf-8")
