"""`python -m bench.sp`: prefill with all-reduce, sequence parallelism, int8 all-gathers and MLA placement.

Ranks are processes on this machine. They communicate over loopback or, with a rate, through network namespaces with a
slow link, where communication dominates as it does in production. `simulated` only evaluates the cost model.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from bench import network
from whorl import device as devices
from whorl.bench.provenance import Document
from whorl.bench.report import Benchmark, finish, need_plot, save_figure
from whorl.options import Json, exit_on_bad_usage
from whorl.passes.cost import TABLE, CostModel, Traffic

app = typer.Typer(add_completion=False)
BYTES_TOLERANCE = 0.02  # allowed difference from the pass's report: gloo's headers, and the barriers around a run


@dataclass(frozen=True, kw_only=True, slots=True)
class SpSettings:
    """Validated settings of `python -m bench.sp`. rate, delay: of a simulated link, as tc writes them."""

    ranks: int = 2
    tokens: int = 512
    hidden: int = 512
    layers: int = 4
    repeats: int = 5
    rate: str | None = None
    delay: str | None = None
    timeout: int = 600

    def __post_init__(self) -> None:
        if not 2 <= self.ranks <= 4:
            raise ValueError(f"bench sp: --ranks is {self.ranks}, expected 2 to 4")
        if self.hidden % (64 * self.ranks):
            raise ValueError(
                f"bench sp: --hidden is {self.hidden}, expected a multiple of {64 * self.ranks}, one head per rank"
            )
        if self.delay is not None and self.rate is None:
            raise ValueError("bench sp: --delay needs --rate, which creates the link that is delayed")
        if self.link is not None and (reason := network.refusal()) is not None:
            raise ValueError(f"bench sp: --rate: {reason}. Without --rate the ranks communicate over loopback")

    @property
    def link(self) -> network.Link | None:
        return None if self.rate is None else network.Link(rate=self.rate, delay=self.delay)


# ---- measuring


def run(settings: SpSettings) -> Document:
    """Run the benchmark; returns {"header": ..., "model": the fitted cost model, "rows": [...]}.

    Raises RuntimeError with a rank's output when it fails or exceeds the time limit.
    """
    with _launch_environment(settings) as (prefixes, environment):
        result = _run_ranks(settings, prefixes, environment)
    for row in result["rows"]:
        base = next(r for r in result["rows"] if r["name"] == row["baseline"])
        row |= {
            "speedup": base["seconds"] / row["seconds"],
            "bytes_ratio": row["payload_bytes"] / base["payload_bytes"],
            "predicted_speedup": base["predicted_seconds"] / row["predicted_seconds"],
            "prediction_error": row["predicted_seconds"] / row["seconds"] - 1,
            "bytes_error": row["payload_bytes"] / row["report_bytes"] - 1,
            "communication_share": 1 - row["compute_seconds"] / row["seconds"],
        }
    return {"header": _header(settings), **result}


def is_good(document: Document) -> bool:
    """Return whether the bytes sent are those that the pass reports; times are for the reader to judge."""
    return all(abs(row["bytes_error"]) <= BYTES_TOLERANCE for row in document["rows"])


def _header(settings: SpSettings) -> Document:
    link = settings.link
    return {
        "device_name": devices.device_name(devices.HOST),
        "versions": devices.versions(),
        "date": datetime.now(UTC).date().isoformat(),
        "settings": asdict(settings),
        "network": "loopback" if link is None else f"namespaces, {link.rate} per rank, delay {link.delay or 'none'}",
        "load": os.getloadavg()[0],
    }


@contextlib.contextmanager
def _launch_environment(settings: SpSettings) -> Iterator[tuple[list[list[str]], dict[str, str]]]:
    """Yield the command prefix of each rank and the environment of all; creates the network where there is a rate."""
    link = settings.link
    if link is None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
        yield [[] for _ in range(settings.ranks)], environment
        return
    with network.namespaces(settings.ranks, link) as names:
        environment = {
            "MASTER_ADDR": network.address(0),
            "MASTER_PORT": "29500",
            "GLOO_SOCKET_IFNAME": network.INTERFACE,
        }
        yield [["ip", "netns", "exec", name] for name in names], environment


def _run_ranks(settings: SpSettings, prefixes: Sequence[Sequence[str]], environment: dict[str, str]) -> Document:
    env = os.environ | environment | {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(settings.ranks)}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [env.get("PYTHONPATH")])])
    command = [sys.executable, "-W", "ignore", "-m", "bench.sp_rank", json.dumps(asdict(settings))]
    ranks = [
        subprocess.Popen(
            [*prefix, *command],
            env=env | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, prefix in enumerate(prefixes)
    ]
    end = time.monotonic() + settings.timeout
    try:
        outputs = [process.communicate(timeout=max(1.0, end - time.monotonic())) for process in ranks]
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(
            f"bench sp: not done after {settings.timeout} s; give a larger --timeout or less work"
        ) from error
    finally:
        for process in ranks:
            process.kill()
    for rank, (process, (_, errors)) in enumerate(zip(ranks, outputs, strict=True)):
        if process.returncode:
            raise RuntimeError(f"bench sp: rank {rank} failed:\n{errors[-4000:]}")
    result: Document = json.loads(outputs[0][0].splitlines()[-1])
    return result


def render(document: Document) -> str:
    """Return the document as text."""
    header, settings = document["header"], document["header"]["settings"]
    lines = [
        f"machine   {header['device_name']}, load {header['load']:.1f}",
        "versions  " + ", ".join(f"{n} {v}" for n, v in header["versions"].items()),
        f"network   {header['network']}",
        "stack     "
        + ", ".join(f"{settings[name]} {name}" for name in ("ranks", "layers", "hidden", "tokens", "repeats")),
        "",
        f"{'':<20}{'time':>11}{'speed':>8}{'bytes':>8}{'sent':>12}{'report':>12}{'predicted':>11}{'error':>8}{'comm.':>7}",
    ]
    for row in document["rows"]:
        lines.append(
            f"{row['name']:<20}{row['seconds'] * 1e3:>8.0f} ms{row['speedup']:>7.2f}x{row['bytes_ratio']:>8.3f}"
            f"{row['payload_bytes']:>12.0f}{row['report_bytes']:>12}{row['predicted_seconds'] * 1e3:>8.0f} ms"
            f"{row['prediction_error']:>8.0%}{row['communication_share']:>7.0%}"
        )
    lines += [
        "",
        "speed and bytes: relative to all-reduce in the same stack; sent: payload of a rank's sockets in one pass;",
        "predicted: measured compute plus the cost model's collectives; comm.: share of time that is not compute.",
    ]
    if settings["rate"] is None:
        lines.append(
            "Loopback only copies memory: its bytes are meaningful, its times are not. --rate simulates a slow link."
        )
    if any(row["communication_share"] < 0 for row in document["rows"]):
        lines.append("Compute alone took longer than a whole pass: the machine is busy, and the times mean nothing.")
    if not is_good(document):
        lines.append(f"BYTES SENT DIFFER FROM THE REPORT by more than {BYTES_TOLERANCE:.0%}.")
    return "\n".join(lines)


def write_plot(document: Document, path: Path) -> None:
    """Write a chart of compute, communication and predicted time of each variant, and of its bytes."""
    from matplotlib.figure import Figure

    rows = document["rows"]
    names, places = [row["name"] for row in rows], range(len(rows))
    figure = Figure(figsize=(10, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    computing = [min(row["compute_seconds"], row["seconds"]) for row in rows]
    left.barh(places, computing, color="#9fb8d0", label="compute")
    communication = [row["seconds"] - c for row, c in zip(rows, computing, strict=True)]
    left.barh(places, communication, left=computing, color="#1f4e79", label="communication")
    left.plot([row["predicted_seconds"] for row in rows], places, "k|", markersize=14, label="predicted")
    left.set_xlabel("seconds for one prefill")
    left.legend(fontsize=7)
    right.barh(places, [row["bytes_ratio"] for row in rows], color="#1f4e79")
    right.axvline(1, color="grey", linewidth=0.8)
    right.set_xlabel("bytes sent, relative to all-reduce")
    for axes in (left, right):
        axes.set_yticks(places, names, fontsize=8)
        axes.invert_yaxis()
    figure.suptitle(f"{document['header']['network']}; {document['header']['device_name']}", fontsize=9)
    save_figure(figure, path)


# ---- the cost model alone

WORLDS = (2, 4, 8, 16)
TOKENS = (64, 256, 1024, 4096, 16384)
VARIANTS = ("sp", "sp_int8", "sp, MLA")


def simulated(hidden: int = 8192) -> Document:
    """Return for every link of the cost model and TP 2 to 16 the threshold and the gain of sequence parallelism.

    The threshold is the number of tokens from which it wins; the gain is the time of an all-reduce over that of the
    collectives which replace it.
    """
    rows = []
    for model in TABLE.values():
        for world in WORLDS:
            threshold = model.threshold(world, Traffic.of_norm(hidden, torch.bfloat16))
            gains = {variant: [_gain(model, variant, hidden, t, world) for t in TOKENS] for variant in VARIANTS}
            rows.append({"link": model.name, "ranks": world, "min_tokens": threshold, "speedup": gains})
    return {"hidden": hidden, "dtype": "bfloat16", "tokens": list(TOKENS), "rows": rows}


def _gain(model: CostModel, variant: str, hidden: int, tokens: int, world: int) -> float:
    latent = round(hidden * 2112 / 7168) if variant == "sp, MLA" else None
    traffic = Traffic.of_norm(hidden, torch.bfloat16, latent)
    choice: Any = "sp" if variant == "sp, MLA" else variant
    return model.seconds("all_reduce", tokens, world, traffic) / model.seconds(choice, tokens, world, traffic)


def render_simulation(document: Document) -> str:
    """Return the document of `simulated` as text."""
    lines = [
        f"Time of an all-reduce of [tokens, {document['hidden']}] in bf16 over that of reduce-scatter and all-gather,",
        "by the cost model: above 1 sequence parallelism wins. min_tokens: it wins from there, with or without int8.",
        "",
        f"{'link':<18}{'TP':>3}{'min_tokens':>12}  {'gather':<9}" + "".join(f"{t:>8}" for t in document["tokens"]),
    ]
    for row in document["rows"]:
        threshold = "never" if row["min_tokens"] is None else str(row["min_tokens"])
        for i, (variant, gains) in enumerate(row["speedup"].items()):
            start = f"{row['link']:<18}{row['ranks']:>3}{threshold:>12}" if i == 0 else " " * 33
            lines.append(f"{start}  {variant:<9}" + "".join(f"{gain:>7.2f}x" for gain in gains))
    return "\n".join(lines)


@app.command()
def main(
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Print the cost model's estimate for TP 2 to 16 and measure nothing.")
    ] = False,
    ranks: Annotated[int, typer.Option(min=2, max=4, help="Number of ranks.")] = 2,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the prefill.")] = 512,
    hidden: Annotated[
        int | None, typer.Option(min=128, help="Hidden size. Default: 512, or 8192 with --simulate.")
    ] = None,
    layers: Annotated[int, typer.Option(min=1)] = 4,
    repeats: Annotated[int, typer.Option(min=1, help="Number of runs; the median is reported.")] = 5,
    rate: Annotated[
        str | None, typer.Option(metavar="RATE", help="Bandwidth of a simulated link, such as 100mbit; needs root.")
    ] = None,
    delay: Annotated[str | None, typer.Option(metavar="TIME", help="One-way delay of that link, such as 1ms.")] = None,
    timeout: Annotated[int, typer.Option(min=10, help="Time limit in seconds for the whole benchmark.")] = 600,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a chart (.png, .svg, .pdf).")] = None,
    as_json: Json = False,
) -> None:
    """Time prefill with all-reduce, sequence parallelism, int8 all-gathers and MLA placement; count the bytes sent."""
    if simulate:
        finish(Benchmark(run=lambda: simulated(hidden or 8192), render=render_simulation), as_json)
    with exit_on_bad_usage():
        need_plot(plot)
        settings = SpSettings(
            ranks=ranks,
            tokens=tokens,
            hidden=hidden or 512,
            layers=layers,
            repeats=repeats,
            rate=rate,
            delay=delay,
            timeout=timeout,
        )
    finish(Benchmark(run=lambda: run(settings), render=render, is_good=is_good, draw=write_plot), as_json, plot)


if __name__ == "__main__":
    app()
