"""The files that benchmarks write: documents and charts. It needs no torch: paths are checked before the work."""

import importlib.util
import json
from pathlib import Path
from typing import Any

from whorl.bench.provenance import Document
from whorl.extras import how_to_install
from whorl.files import check_output_file, output_file

PLOT_FORMATS = (".png", ".svg", ".pdf")


def need_plot(path: Path) -> None:
    """Raise ValueError or CannotWrite when the plot cannot be written; called before minutes of measuring."""
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
