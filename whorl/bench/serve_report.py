"""The result of `whorl bench serve` as text and as a chart."""

from pathlib import Path
from typing import Any

from whorl.bench.provenance import Document, render_provenance
from whorl.bench.report import Column, columns, save_figure, table

LATENCIES = (
    ("ttft_ms", "first token"),
    ("itl_ms", "between tokens"),
    ("tpot_ms", "mean of a request"),
    ("gap_ms", "between pieces"),
    ("e2e_ms", "whole request"),
    ("queue_ms", "in the queue"),
    ("send_late_ms", "sent late"),
)
COLUMNS = ("mean", "p50", "p90", "p99", "max")
_COLOURS = {"p50": "#9fb8d0", "p90": "#4f81b0", "p99": "#1f4e79"}


_THROUGHPUT: tuple[Column, ...] = (
    ("load", "{label}"),
    ("good", "{num_good}"),
    ("failed", lambda row: str(sum(row["failures"].values()))),
    ("seconds", "{seconds:.1f}"),
    ("req/s", "{requests_s:.2f}"),
    ("input tok/s", "{input_tok_s:.1f}"),
    ("output tok/s", "{output_tok_s:.1f}"),
    ("cached", lambda row: "unknown" if row["cached_share"] is None else f"{row['cached_share']:.1%}"),
    ("tok/piece", "{tokens_per_piece:.2f}"),
)
_GOODPUT: tuple[Column, ...] = (("good/s", "{goodput[requests_s]:.2f}"), ("within", "{goodput[share]:.1%}"))


def render(document: Document) -> str:
    """Return the document as text."""
    rows = document["rows"]
    throughput = columns(rows, (*_THROUGHPUT, *([] if rows[0]["goodput"] is None else _GOODPUT)))
    warnings = [f"WARNING   {row['label']}: {warning}" for row in rows for warning in row["warnings"]]
    return "\n".join([*_header(document["header"]), "", *throughput, "", *_latencies(rows), *warnings])


def _header(header: Document) -> list[str]:
    workload = {name: value for name, value in header["workload"].items() if value is not None}
    lines = [*render_provenance(header), f"model     {header['model']}, {header['target']}"]
    if "engine" in header:
        settings = ", ".join(f"{name} {value}" for name, value in header["engine"].items())
        lines.append(f"engine    {header['weights']} weights, {settings}")
    else:
        version = f", version {header['server_version']}" if header["server_version"] else ""
        lines.append(f"server    may run on another machine{version}; prompts are {header['prompts']}")
    return [*lines, "workload  " + ", ".join(f"{name} {value}" for name, value in workload.items())]


def _latencies(rows: list[Document]) -> list[str]:
    cells = [["load", "milliseconds", *COLUMNS]]
    for row in rows:
        label = row["label"]
        for name, meaning in LATENCIES:
            if row[name] is not None:
                cells.append([label, meaning, *(_cell(row[name], column) for column in COLUMNS)])
                label = ""
    return table(cells)


def _cell(figures: Document, column: str) -> str:
    if figures[column] is None:
        return "-"
    is_bound = figures.get("are_bounds") and column != "mean"
    return f"{'<= ' if is_bound else ''}{figures[column]:.2f}"


def write_plot(document: Document, path: Path) -> None:
    """Write a chart of latencies, throughput and goodput against the load."""
    from matplotlib.figure import Figure

    rows = [row for row in document["rows"] if row["num_good"]]
    places: list[Any] = [row["load"]["value"] or index for index, row in enumerate(rows)]
    figure = Figure(figsize=(10, 6.5), layout="constrained")
    (first, between), (speed, last) = figure.subplots(2, 2)
    _draw_latency(first, places, rows, "ttft_ms", "time to first token, ms")
    _draw_latency(between, places, rows, "itl_ms", "between tokens, ms")
    speed.plot(places, [row["output_tok_s"] for row in rows], "o-", color="#1f4e79", label="output tok/s")
    speed.plot(places, [row["input_tok_s"] for row in rows], "o--", color="#9fb8d0", label="input tok/s")
    speed.set_title("throughput", fontsize=9)
    if rows and rows[0]["goodput"] is not None:
        last.plot(places, [row["requests_s"] for row in rows], "o--", color="#9fb8d0", label="requests/s")
        last.plot(places, [row["goodput"]["requests_s"] for row in rows], "o-", color="#1f4e79", label="goodput")
        slo = ", ".join(f"{name} {bound:g} ms" for name, bound in rows[0]["goodput"]["slo_ms"].items())
        last.set_title(f"requests/s within {slo}", fontsize=9)
    else:
        _draw_latency(last, places, rows, "e2e_ms", "whole request, ms")
    for axes in (first, between, speed, last):
        if len(places) > 1 and max(places) > 4 * min(places):
            axes.set_xscale("log", base=2)
        axes.set_xticks(places, [f"{place:g}" for place in places])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=7)
    kind = rows[0]["load"]["kind"] if rows else ""
    words = {"concurrency": "requests in flight", "rate": "requests per second"}
    figure.supxlabel(words.get(kind, "load"), fontsize=9)
    header = document["header"]
    figure.suptitle(f"{header['model']}, {header['target']}; commit {header['commit']}", fontsize=9)
    save_figure(figure, path)


def _draw_latency(axes: Any, places: list[Any], rows: list[Document], name: str, title: str) -> None:
    for column, colour in _COLOURS.items():
        values = [(row[name] or {}).get(column) for row in rows]
        axes.plot(
            places, [float("nan") if value is None else value for value in values], "o-", color=colour, label=column
        )
    axes.set_title(title, fontsize=9)
