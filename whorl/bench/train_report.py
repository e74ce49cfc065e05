"""The result of `whorl bench train` as text."""

from collections.abc import Callable

from whorl.bench.options import PEER
from whorl.bench.provenance import Document, render_provenance
from whorl.bench.report import Column, cells, columns

GIB = 2**30


def render_header(header: Document) -> list[str]:
    """Return the header of a document as lines of text."""
    dtype = header["dtype"]
    return [
        *render_provenance(header),
        f"model     {header['model']}; first layer dense; weights, gradients, moments {dtype}; one sequence per step",
        f"steps     median of {header['steps']} after {header['warmup']}; checkpointing where the row says so",
        *_swap_lines(header),
    ]


def _swap_lines(header: Document) -> list[str]:
    """Return the line about swapped moments, if there are rows with them."""
    if "ring" not in header:
        return []
    link = header["link_gb_s"]
    speed = "no link"
    if link is not None:
        alone = f"{link['to_device']:.1f} GB/s to the device, {link['to_host']:.1f} to the host"
        speed = f"link {alone}, {link['both']:.1f} each way at once"
    return [f"swap      {header['ring']} buckets on the device; {speed}; moments of swap8 in int8"]


def _name(row: Document) -> str:
    return "+".join([row["row"], *(["checkpoint"] if "checkpoint" in row["switches"] else [])])


def _scaled(name: str, unit: float) -> Callable[[Document], str]:
    """Return the cell of a number of bytes, in this unit."""
    return lambda row: "-" if row.get(name) is None else f"{row[name] / unit:.2f}"


_COLUMNS: tuple[Column, ...] = (
    ("row", lambda row: _name(row) + (" !" if row.get("wrong") else "")),
    ("layers", "{layers}"),
    ("tokens", "{seq}"),
    ("tok/s", "{tok_s:.0f}"),
    ("ms/step", "{ms_per_step:.1f}"),
    ("host ms", "{host_ms:.1f}"),
    ("MFU", "{mfu:.1%}"),
    ("alloc GiB", _scaled("allocated_bytes", GIB)),
    ("reserved", _scaled("reserved_bytes", GIB)),
    ("predicted", _scaled("predicted_bytes", GIB)),
    ("moved GB", _scaled("moved_bytes", 1e9)),
    ("KL", "{indexer_kl:.3g}"),
    ("loss", "{loss:.4f}"),
)


def one_line(row: Document) -> str:
    """Return a row as one line, for showing it when it is measured."""
    return "  ".join(cells(row, _COLUMNS, named=3))


def render(document: Document) -> str:
    """Return the document as text."""
    rows = document["rows"]
    wrong = sorted({problem for row in rows for problem in row.get("wrong", [])})
    notes = [f"WRONG, see the rows marked !: {problem}" for problem in wrong]
    lines = [*render_header(document["header"]), "", *columns(rows, _COLUMNS, named=3)]
    return "\n".join([*lines, *_ratios(rows), *notes])


def _ratios(rows: list[Document]) -> list[str]:
    """Return the speed-up of every row over the peer and over our unfused operators, at the same size."""
    lines = []
    timed = [row for row in rows if "tok_s" in row]
    for base in (PEER, "small"):
        for base_row in (row for row in timed if row["row"] == base):
            comparable = [
                r
                for r in timed
                if (r["layers"], r["seq"]) == (base_row["layers"], base_row["seq"]) and r is not base_row
            ]
            parts = [
                f"{r['row']} {r['tok_s'] / base_row['tok_s']:.2f}x" + _memory_ratio(r, base_row) for r in comparable
            ]
            lines.append(
                f"over {_name(base_row)}, {base_row['layers']} layers, {base_row['seq']} tokens: {', '.join(parts)}"
            )
    return ["", *lines] if lines else []


def _memory_ratio(row: Document, base: Document) -> str:
    if not row["allocated_bytes"] or not base["allocated_bytes"]:
        return ""
    return f" ({row['allocated_bytes'] / base['allocated_bytes'] - 1:+.0%} memory)"
