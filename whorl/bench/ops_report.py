"""The result of `whorl bench ops` as text and as a chart."""

from pathlib import Path

from whorl.bench.provenance import Document, render_provenance
from whorl.bench.report import save_figure
from whorl.timing import bandwidth, operations


def render(document: Document) -> str:
    """Return the document as text."""
    header, lines = document["header"], []
    lines += [
        *render_provenance(header),
        f"dtype     {header['dtype']}",
        *(f"note      {note}" for note in header["notes"]),
    ]
    for row in document["rows"]:
        lines += ["", *_render_row(row)]
    failed = sum(not row["passed"] for row in document["rows"])
    lines += ["", f"{len(document['rows']) - failed} of {len(document['rows'])} cases correct" + "." * (not failed)]
    return "\n".join(lines) + (f", {failed} FAILED and have no speed." if failed else "")


def _render_row(row: Document) -> list[str]:
    ours = f"whorl ({row['backend']})"
    if not row["passed"]:
        return [f"{row['op']}: {row['case']}", f"  {ours:<56} FAILED: {row['problem']}"]
    copy = f"copy {bandwidth(row['bytes'], row['copy_us'])}"
    work = (
        f", {row['flops'] / 1e9:.3g} GFLOP, matmul {operations(row['matmul_tflop_s'] * 1e12)}" if "flops" in row else ""
    )
    lines = [f"{row['op']}: {row['case']}; {row['bytes'] / 1e6:.2f} MB, {copy}{work}, {row['timing']}"]
    for label, speed in [(ours, row), *((p["label"], p) for p in row["peers"])]:
        if "note" in speed:
            lines.append(f"  {label:<56} {speed['note']}")
            continue
        rate, times = bandwidth(row["bytes"], speed["us"]), speed["us"] / row["us"]
        share = f"{speed['share_of_copy']:.0%} of copy"
        if "tflop_s" in speed:
            rate, share = operations(speed["tflop_s"] * 1e12), f"{speed['share_of_matmul']:.0%} of matmul"
        hot = f"  {speed['hot_us']:.2f} us hot" if "hot_us" in speed else ""
        lines.append(f"  {label:<56}{speed['us']:>10.2f} us {rate:>13} {share:>14} {times:>7.2f}x{hot}")
    return lines


def write_plot(document: Document, path: Path) -> None:
    """Write a bar chart of the share of copy bandwidth: a group of bars for each case, whorl dark and peers light."""
    from matplotlib.figure import Figure

    bars: list[tuple[str, float, str]] = []
    for row in (r for r in document["rows"] if r["passed"]):
        bars.append((f"{row['op']}: {row['case']}", 0.0, "none"))
        bars.append((f"whorl ({row['backend']}), {row['us']:.1f} us", row["share_of_copy"], "#1f4e79"))
        timed = (p for p in row["peers"] if "us" in p)
        bars += [(f"{p['label']}, {p['us']:.1f} us", p["share_of_copy"], "#9fb8d0") for p in timed]
    labels, shares, colours = zip(*bars, strict=True) if bars else ((), (), ())
    figure = Figure(figsize=(10, 1.5 + 0.22 * len(bars)), layout="constrained")
    axes = figure.subplots()
    axes.barh(range(len(bars)), [100 * s for s in shares], color=colours)
    axes.set_yticks(range(len(bars)), labels, fontsize=7)
    for label, colour in zip(axes.get_yticklabels(), colours, strict=True):
        label.set_fontweight("bold" if colour == "none" else "normal")
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.axvline(100, color="grey", linewidth=0.8)
    axes.set_xlabel("% of the bandwidth of a copy of as many bytes, same run", fontsize=8)
    header = document["header"]
    axes.set_title(f"{header['device_name']}, {header['dtype']}, commit {header['commit']}", fontsize=9)
    save_figure(figure, path)
