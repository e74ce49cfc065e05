"""`whorl bench train`: times training steps of DeepSeek-V3.2, adding one optimisation per row, next to transformers."""

import gc
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch

from whorl import device as devices
from whorl.bench import train_report
from whorl.bench.options import PEER, TrainOptions, check_peer, parse_counts
from whorl.bench.provenance import Document, provenance
from whorl.bench.report import Benchmark, first_line, write_document
from whorl.bench.train_meters import (
    Clock,
    measure_link,
    peak_flops,
    peak_memory,
    predict,
    profile,
    reset_peak,
)
from whorl.bench.train_model import (
    SWAPPED,
    SWITCHES,
    Shape,
    Trainee,
    host_format,
    indexer_losses,
    ours,
    transformers_model,
    verdicts,
)
from whorl.bench.train_report import one_line, render_header
from whorl.streams import event
from whorl.titan.swap_optimizer import SwapAdamW

ROWS = {  # switches of each row; each row has those of the row before
    "small": "",
    "fused": "dsa",
    "kernels": "dsa+rms_norm+rope+permute+gmm",
    "compile": "dsa+rms_norm+rope+permute+gmm+compile",
    "swap": "dsa+rms_norm+rope+permute+gmm+compile+swap",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSettings:
    """Validated settings of `whorl bench train`. tiny: a small model; lengths: tokens per step."""

    options: TrainOptions
    device: str
    tiny: bool
    rows: dict[str, frozenset[str]]  # switches by name of the row
    layers: tuple[int, ...]
    lengths: tuple[int, ...]
    profiled: tuple[str, ...]

    @staticmethod
    def resolve(options: TrainOptions) -> "TrainSettings":
        """Return the settings with defaults for this machine; raises ValueError for values out of range."""
        device = devices.require(options.device or devices.default_device())
        check_peer(options.peer)
        named = {name: switches_of(name) for name in filter(None, options.rows.split(","))}
        if not named and options.peer is None:
            raise ValueError(f"--rows is empty, expected some of {', '.join(ROWS)}, or --peer {PEER}")
        profiled = tuple(filter(None, options.profile.split(",")))
        if unknown := [name for name in profiled if name not in (*named, PEER)]:
            raise ValueError(f"--profile is {unknown[0]}, expected one of --rows {', '.join(named)}")
        return TrainSettings(
            options=options,
            device=device,
            tiny=devices.accelerator(device) is None if options.tiny is None else options.tiny,
            rows=named,
            layers=parse_counts(options.layers, "--layers"),
            lengths=parse_counts(options.seq, "--seq", least=2),
            profiled=profiled,
        )


def benchmark(options: TrainOptions) -> Benchmark:
    """Return the benchmark, ready to run; raises ValueError for values out of range."""
    settings = TrainSettings.resolve(options)
    return Benchmark(run=lambda: run(settings), render=train_report.render, is_good=is_good)


def switches_of(name: str) -> frozenset[str]:
    """Return the switches of a row: one of ROWS, or switches joined by +; raises ValueError for unknown ones."""
    switches = frozenset(filter(None, ROWS.get(name, name).split("+")))
    if switches.issuperset(SWAPPED):
        raise ValueError(f"--rows is {name}: {' and '.join(SWAPPED)} exclude each other; leave one out")
    if unknown := sorted(switches - set(SWITCHES)):
        raise ValueError(
            f"--rows is {name}: {unknown[0]} is neither a row ({', '.join(ROWS)}) nor a switch ({', '.join(SWITCHES)})"
        )
    return switches


# ---- running


def run(settings: TrainSettings) -> Document:
    """Run the benchmark; returns {"header": ..., "rows": [...]}.

    Every row is printed to standard error when it is measured; one that fails has a note with the reason.
    """
    begin = time.perf_counter()
    document: Document = {"header": header(settings), "rows": []}
    log("\n".join(render_header(document["header"])))
    for layers in settings.layers:
        for seq in settings.lengths:
            shape = Shape(
                layers=layers, seq=seq, tiny=settings.tiny, device=settings.device, ring=settings.options.ring
            )
            is_first = (layers, seq) == (settings.layers[0], settings.lengths[0])
            for name in [*([PEER] if settings.options.peer and seq == settings.lengths[0] else []), *settings.rows]:
                _add_row(document, settings, shape, name, begin, is_first=is_first)
    return document


def _add_row(
    document: Document, settings: TrainSettings, shape: Shape, name: str, begin: float, *, is_first: bool
) -> None:
    """Measure one row. One of ours that runs out of memory is measured again with activation checkpointing."""
    switches = settings.rows.get(name, frozenset())
    tries = [switches] if name == PEER or "checkpoint" in switches else [switches, switches | {"checkpoint"}]
    for attempt in tries:
        row: Document = {"row": name, "switches": sorted(attempt), "layers": shape.layers, "seq": shape.seq}
        if time.perf_counter() - begin > settings.options.time_limit:
            row["note"] = f"skipped: --time-limit of {settings.options.time_limit:.0f} s is over"
        else:
            row |= _measure_or_note(settings, shape, name, attempt, is_profiled=is_first and name in settings.profiled)
        document["rows"].append(row)
        log(one_line(row))
        for problem in row.get("wrong", []):
            log(f"    WRONG: {problem}")
        for line in row.get("kernels", []):
            log(f"    {line['ms']:8.2f} ms {line['count']:5d} x {line['name']}")
        if settings.options.out is not None:
            write_document(document, settings.options.out)
        if not row.get("out_of_memory"):
            return


def _measure_or_note(
    settings: TrainSettings, shape: Shape, name: str, switches: frozenset[str], *, is_profiled: bool
) -> Document:
    try:
        return measure(settings, shape, name, switches, is_profiled=is_profiled)
    except torch.OutOfMemoryError:
        return {"note": "out of memory", "out_of_memory": True}
    except Exception as error:  # a failed row is a result; the others still run
        return {"note": f"did not run: {first_line(error)}"}
    finally:
        _free(settings.device)


def measure(
    settings: TrainSettings, shape: Shape, name: str, switches: frozenset[str], *, is_profiled: bool = False
) -> Document:
    """Build the model of a row and time its steps; returns the row."""
    clock = Clock(settings.device)
    trainee = transformers_model(shape) if name == PEER else ours(shape, switches)
    built = clock.lap()
    for _ in range(settings.options.warmup):
        trainee.step()
    warm = clock.lap()
    reset_peak(settings.device)
    for _ in indexer_losses(trainee.model):
        pass  # reading the sums resets them, so that they do not include the warm-up
    seconds, hosts = [], []
    for _ in range(settings.options.steps):
        begin = time.perf_counter()
        loss = trainee.step()
        hosts.append(time.perf_counter() - begin)
        # Waits for the stream of the model alone: swapped moments are stored during the next step, as in training.
        event(settings.device)()
        seconds.append(time.perf_counter() - begin)
    median = statistics.median(seconds)
    row: Document = {
        "tok_s": shape.seq / median,
        "ms_per_step": median * 1e3,
        "fastest_ms": min(seconds) * 1e3,
        "slowest_ms": max(seconds) * 1e3,
        "host_ms": statistics.median(hosts) * 1e3,
        **peak_memory(settings.device),
        "loss": loss.item(),
        "num_parameters": sum(p.numel() for p in trainee.model.parameters()),
        "build_s": built,
        "warmup_s": warm,
    }
    if name != PEER:
        row |= _ours_only(trainee, shape, switches, median, settings.options.steps)
    if isinstance(optimizer := trainee.optimizer, SwapAdamW):
        row |= {"ring": settings.options.ring, "moved_bytes": optimizer.bytes_each_way}
        row["backend"] = optimizer.backend_of(shape.dtype, settings.device)
    if is_profiled:
        row["kernels"] = profile(trainee)
    return row


def _ours_only(trainee: Trainee, shape: Shape, switches: frozenset[str], seconds: float, steps: int) -> Document:
    """Return the fields of our rows only: indexer loss, MFU, predicted memory, and failed checks of converters."""
    losses = [float(loss) / steps for loss in indexer_losses(trainee.model)]
    args: Any = trainee.model.model_args
    _, flops = args.get_nparams_and_flops(trainee.model, shape.seq)
    rate = flops * shape.seq / seconds
    peak = peak_flops(shape.device)
    return {
        "indexer_kl": sum(losses) / len(losses),
        "flops_per_token": flops,
        "tflop_s": rate / 1e12,
        "mfu": None if peak is None else rate / peak,
        "predicted_bytes": predict(args, shape.seq, switches, shape.dtype, shape.ring),
        "wrong": [problem for name in switches if (problem := verdicts.get(f"whorl_{name}"))],
    }


def _free(device: str) -> None:
    """Free memory, including compiled code and the tensors it refers to."""
    torch._dynamo.reset()
    gc.collect()
    devices.empty_cache(device)


def log(text: str) -> None:
    """Print to standard error, so that standard output is one document."""
    print(text, file=sys.stderr, flush=True)


def is_good(document: Document) -> bool:
    """Return whether all our rows ran, with checkpointing if needed, and the checks of their converters passed."""
    our_rows = [row for row in document["rows"] if row["row"] != PEER]
    return all("did not run" not in row.get("note", "") and not row.get("wrong") for row in our_rows)


# ---- header


def header(settings: TrainSettings) -> Document:
    """Return the header of the document."""
    return {
        **provenance(settings.device),
        "model": "a tiny DeepSeek-V3.2" if settings.tiny else "DeepSeek-V3.2, full width, top-2 of 8 experts",
        "dtype": "float32" if settings.device == "cpu" else "bfloat16",
        "steps": settings.options.steps,
        "warmup": settings.options.warmup,
        **_swap_header(settings),
    }


def _swap_header(settings: TrainSettings) -> Document:
    """Return what rows with swapped moments depend on, if there are any: the ring and the speed of the host link."""
    if not any(host_format(switches) for switches in settings.rows.values()):
        return {}
    has_link = devices.accelerator(settings.device) is not None
    link = measure_link(settings.device) if has_link else None
    devices.empty_cache(settings.device)  # what was copied counts in no row
    return {"ring": settings.options.ring, "link_gb_s": link}
