"""The commands of `whorl bench` and their options. The other modules of this package do the measuring."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from whorl.bench.decode_options import SET_BY_MEASUREMENT, DecodeOptions
from whorl.bench.outputs import need_plot
from whorl.bench.serve_options import LoadOptions
from whorl.bench.train_options import TrainOptions
from whorl.bench.vision_options import VisionOptions
from whorl.engine import model_names
from whorl.engine.drafting import DraftOptions
from whorl.engine.settings import EngineSettings
from whorl.files import check_output_file
from whorl.options import (
    Device,
    Dtype,
    Json,
    Model,
    Overrides,
    exit_on_bad_usage,
    expand_options,
    need_engine,
    need_torch,
    print_json,
)
from whorl.pasted import PASTED, PastedCommand
from whorl.startup import starting

bench = typer.Typer(help="Benchmarks that time the best alternatives in the same run.", no_args_is_help=True)


@bench.command("ops")
def bench_ops(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...", help="Operators, or the groups sparse_attention, indexer and moe. Default: all."
        ),
    ] = None,
    device: Annotated[Device | None, typer.Option(help="Default: the best device of this machine.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="dtype of the inputs.")] = Dtype.bfloat16,
    quick: Annotated[
        bool | None,
        typer.Option("--quick/--full", help="Use at most 64 tokens. Default: --quick without an accelerator."),
    ] = None,
    compiled: Annotated[
        bool | None,
        typer.Option("--compile/--no-compile", help="Time torch.compile too. Default: yes, unless --quick."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a bar chart (.png, .svg, .pdf).")] = None,
    as_json: Json = False,
) -> None:
    """Time every operator next to eager torch, torch.compile and Liger; wrong outputs get no speed."""
    need_torch()
    if plot is not None:
        with exit_on_bad_usage():
            need_plot(plot)
    with starting():
        from whorl.bench import ops as bench_module
        from whorl.bench import ops_report
        from whorl.device import require

    with exit_on_bad_usage():
        where = require(device.value) if device else None
        settings = bench_module.OpsSettings.resolve(
            names=names or (), device=where, dtype=dtype.value, quick=quick, compiled=compiled
        )
    result = bench_module.run(settings)
    if plot is not None:
        ops_report.write_plot(result, plot)
    if as_json:
        print_json(result)
    else:
        print(ops_report.render(result))
    sys.exit(0 if bench_module.is_good(result) else 1)


@bench.command("calls")
def bench_calls(
    device: Annotated[Device | None, typer.Option(help="Default: the best device of this machine.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="dtype of the inputs.")] = Dtype.bfloat16,
    repeats: Annotated[int, typer.Option(min=1, help="Number of runs of 50 calls; the median is reported.")] = 41,
    as_json: Json = False,
) -> None:
    """Time the host overhead of eager calls of small operators, next to torch, bare Triton launches and Liger."""
    need_torch()
    with starting():
        from whorl.bench import calls

    with exit_on_bad_usage():
        result = calls.run(device.value if device else None, dtype.value, repeats)
    if as_json:
        print_json(result)
    else:
        print(calls.render(result))
    sys.exit(0 if calls.is_good(result) else 1)


@bench.command("positions")
def bench_positions(
    repeats: Annotated[int, typer.Option(min=1, help="Number of runs; the median is reported.")] = 20,
    as_json: Json = False,
) -> None:
    """Time multimodal position ids next to transformers' get_rope_index (needs transformers)."""
    need_torch()
    with starting():
        from whorl.bench import positions

    sys.exit(positions.main(["--repeats", str(repeats), *(["--json"] if as_json else [])]))


@bench.command("rope-lookup")
def bench_rope_lookup(
    device: Annotated[Device | None, typer.Option(help="Default: the best device of this machine.")] = None,
    layers: Annotated[int, typer.Option(min=1, help="Number of layers that share one lookup.")] = 48,
    repeats: Annotated[int, typer.Option(min=1, help="Number of runs; the median is reported.")] = 20,
    as_json: Json = False,
) -> None:
    """Compare looking up cos and sin once per step with looking them up in every layer."""
    need_torch()
    with starting():
        from whorl.bench import rope_lookup
        from whorl.device import require

    with exit_on_bad_usage():
        where = ["--device", require(device.value)] if device else []
    counts = ["--layers", str(layers), "--repeats", str(repeats)]
    sys.exit(rope_lookup.main([*where, *counts, *(["--json"] if as_json else [])]))


@bench.command("collectives")
def bench_collectives(
    device: Annotated[Device | None, typer.Option(help="Default: the best device of this machine.")] = None,
    ranks: Annotated[
        int | None, typer.Option(min=2, help="Number of ranks. Default: one for each device; 2 on a CPU.")
    ] = None,
    rows: Annotated[list[int] | None, typer.Option(min=1, help="Rows of the tensor; may be repeated.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Number of runs; the median is reported.")] = 20,
    as_json: Json = False,
) -> None:
    """Time collectives under each setting of NCCL, HCCL or gloo, next to whorl's rank-ordered ones."""
    need_torch()
    with starting():
        from whorl.bench import collectives

    with exit_on_bad_usage():
        result = collectives.run(device.value if device else None, ranks, rows, repeats)
    if as_json:
        print_json(result)
    else:
        collectives.show(result)
    sys.exit(0 if collectives.is_good(result) else 1)


@bench.command("decode", cls=PastedCommand, epilog=PASTED)
@expand_options
def bench_decode(
    model: Model = None,
    *,
    measured: DecodeOptions,
    drafting: Annotated[
        DraftOptions, Overrides(without={"pld": "--classify drafts by prompt lookup by default: leave it out"})
    ],
    engine: Annotated[EngineSettings, Overrides(without=SET_BY_MEASUREMENT)],
    as_json: Json = False,
) -> None:
    """Time decoding of a whole model against the bytes it must read, or measure what speculation gains.

    "Of roofline" is the time to read these bytes at the speed of a memory copy, as a share of the time of a step; the
    experts that a step reads are counted.
    """
    need_torch()
    if measured.random_config is None:
        need_engine("bench decode")
    with exit_on_bad_usage():
        measured.check(engine, drafting)
        if measured.random_config is None:
            model_names.local_or_hub(model)
        with starting():
            from whorl.bench import decode_command
        work = decode_command.build_benchmark(model, measured, engine, drafting)
    _finish(work, as_json)


@bench.command("serve", cls=PastedCommand, epilog=PASTED)
@expand_options
def bench_serve(
    model: Model = None,
    *,
    load: LoadOptions,
    engine: Annotated[EngineSettings, Overrides(without={"seed": "--seed seeds the workload"})],
    as_json: Json = False,
) -> None:
    """Send a load to a running server, or to an engine in this process, and report latencies and throughput."""
    need_torch()
    if load.random_config is None and load.url is None:
        need_engine("bench serve")
    from whorl.bench import serve_command

    with exit_on_bad_usage():
        work = serve_command.build_benchmark(model, load, engine)
    _finish(work, as_json)


@bench.command("sp")
def bench_sp(
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
    need_torch()
    if plot is not None:
        with exit_on_bad_usage():
            need_plot(plot)
    with starting():
        from whorl.bench import sp

    if simulate:
        table = sp.simulate(hidden or 8192)
        print_json(table) if as_json else print(sp.render_simulation(table))
        return
    with exit_on_bad_usage():
        settings = sp.SpSettings(
            ranks=ranks,
            tokens=tokens,
            hidden=hidden or 512,
            layers=layers,
            repeats=repeats,
            rate=rate,
            delay=delay,
            timeout=timeout,
        )
        result = sp.run(settings)
    if plot is not None:
        sp.write_plot(result, plot)
    print_json(result) if as_json else print(sp.render(result))
    sys.exit(0 if sp.is_good(result) else 1)


@bench.command("train")
@expand_options
def bench_train(*, options: TrainOptions, as_json: Json = False) -> None:
    """Time training steps of DeepSeek-V3.2 with and without fused operators and transformers, or plot a loss curve."""
    need_torch()
    from whorl.bench import train_command

    with exit_on_bad_usage():
        work = train_command.build_benchmark(options)
    _finish(work, as_json)


@bench.command("vision")
@expand_options
def bench_vision(*, options: VisionOptions, as_json: Json = False) -> None:
    """Time a vision tower, the first token after images, and decoding, next to text and optionally transformers."""
    need_torch()
    with exit_on_bad_usage():
        if options.out is not None:
            check_output_file(options.out)
        with starting():
            from whorl.bench import vision
        work = vision.build_benchmark(options)
    _finish(work, as_json)


def _finish(work: Callable[[], tuple[Any, str, bool]], as_json: bool) -> None:
    """Run the benchmark, print its result, and exit with 1 when a row is missing or wrong."""
    document, text, is_good = work()
    if as_json:
        print_json(document)
    else:
        print(text)
    sys.exit(0 if is_good else 1)
