"""The result of `whorl bench train` as text."""

from whorl.bench.options import PEER
from whorl.bench.provenance import Document, render_provenance
from whorl.bench.report import table

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


def one_line(row: Document) -> str:
    """Return a row as one line, for showing it when it is measured."""
    return "  ".join(filter(None, _cells(row)))


def render(document: Document) -> str:
    """Return the document as text."""
    head = [
        "row",
        "layers",
        "tokens",
        "tok/s",
        "ms/step",
        "host ms",
        "MFU",
        "alloc GiB",
        "reserved",
        "predicted",
        "moved GB",
        "KL",
        "loss",
    ]
    cells = [head, *(_cells(row) for row in document["rows"])]
    wrong = sorted({problem for row in document["rows"] for problem in row.get("wrong", [])})
    notes = [f"WRONG, see the rows marked !: {problem}" for problem in wrong]
    return "\n".join([*render_header(document["header"]), "", *table(cells), *_ratios(document["rows"]), *notes])


def _cells(row: Document) -> list[str]:
    name = "+".join([row["row"], *(["checkpoint"] if "checkpoint" in row["switches"] else [])])
    name += " !" if row.get("wrong") else ""
    place = [str(row["layers"]), str(row["seq"])]
    if "note" in row:
        return [f"{name}: {row['note']}", *place]
    speed = [f"{row['tok_s']:.0f}", f"{row['ms_per_step']:.1f}", f"{row['host_ms']:.1f}"]
    memory = [_gib(row.get(f"{kind}")) for kind in ("allocated_bytes", "reserved_bytes", "predicted_bytes")]
    mfu, kl = row.get("mfu"), row.get("indexer_kl")
    return [
        name,
        *place,
        *speed,
        "-" if mfu is None else f"{mfu:.1%}",
        *memory,
        f"{row['moved_bytes'] / 1e9:.2f}" if "moved_bytes" in row else "-",
        "-" if kl is None else f"{kl:.3g}",
        f"{row['loss']:.4f}",
    ]


def _gib(num_bytes: float | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / GIB:.2f}"


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
            name = "+".join([base, *(["checkpoint"] if "checkpoint" in base_row["switches"] else [])])
            lines.append(f"over {name}, {base_row['layers']} layers, {base_row['seq']} tokens: {', '.join(parts)}")
    return ["", *lines] if lines else []


def _memory_ratio(row: Document, base: Document) -> str:
    if not row["allocated_bytes"] or not base["allocated_bytes"]:
        return ""
    return f" ({row['allocated_bytes'] / base['allocated_bytes'] - 1:+.0%} memory)"
