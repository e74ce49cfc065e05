"""The result of `whorl bench decode --profile` as text."""

from whorl.bench.columns import table
from whorl.bench.decode_report import experts_note, render_header, size
from whorl.bench.provenance import Document

HOW = {
    "graph": "kernels of a replayed step",
    "eager": "kernels of an eager step",
    "host": "time on the host; launches are calls of torch's operators",
}


def render(document: Document) -> str:
    """Return the document as text."""
    lines = render_header(document["header"])
    for result in document["profiles"]:
        total = result["step_us"]
        about = f"batch {result['batch']}, {result['context']} keys: {total:.1f} us a step; {HOW[result['how']]}"
        cells = [["part", "us", "us a layer", "share", "launches", "must move", "of roofline"]]
        cells += [_cells(row, total) for row in result["parts"]]
        lines += ["", about, *experts_note(result), *table(cells)]
    return "\n".join(lines)


def _cells(row: Document, total: float) -> list[str]:
    layer = "" if row["us_per_layer"] is None else f"{row['us_per_layer']:.2f}"
    roofline = "" if row["share_of_roofline"] is None else f"{row['share_of_roofline']:.1%}"
    moved = size(row["bytes"]) if row["bytes"] else ""
    cells = [row["part"], f"{row['us']:.1f}", layer, f"{row['us'] / total:.1%}", f"{row['launches']:.1f}"]
    return [*cells, moved, roofline]
