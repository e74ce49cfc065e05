"""`whorl bench`: what it takes. The measuring is in the modules beside this one."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from whorl.bench.decode_options import SET_BY_MEASUREMENT, DecodeOptions
from whorl.bench.serve_options import LoadOptions
from whorl.bench.train_options import TrainOptions
from whorl.bench.vision_options import VisionOptions
from whorl.engine.drafting import DraftOptions
from whorl.engine.settings import EngineSettings
from whorl.options import Device, Dtype, Here, Json, Model, asking, need_engine, need_torch, print_json, spread
from whorl.pasted import PASTED, PastedCommand

bench = typer.Typer(help="Measure, next to the best alternatives in the same run.", no_args_is_help=True)


@bench.command("ops")
def bench_ops(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...", help="Operators, or the groups sparse_attention, indexer, moe; default: all."
        ),
    ] = None,
    device: Annotated[Device | None, typer.Option(help="Default: the best this machine has.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="Of the inputs.")] = Dtype.bfloat16,
    quick: Annotated[
        bool | None, typer.Option("--quick/--full", help="At most 64 tokens. Default: quick without an accelerator.")
    ] = None,
    compiled: Annotated[
        bool | None,
        typer.Option("--compile/--no-compile", help="Time torch.compile too. Default: unless quick."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a bar chart (.png, .svg, .pdf).")] = None,
    as_json: Json = False,
) -> None:
    """Time every operator next to eager, torch.compile and Liger; no speed for an answer that is wrong."""
    need_torch()
    from whorl.bench import ops as bench_module
    from whorl.bench import ops_report
    from whorl.device import require

    with asking():
        where = require(device.value) if device else None
        settings = bench_module.OpsSettings.resolve(
            names=names or (), device=where, dtype=dtype.value, quick=quick, compiled=compiled
        )
        if plot is not None:
            ops_report.need_plot(plot)
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
    device: Annotated[Device | None, typer.Option(help="Default: the best this machine has.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="Of the inputs.")] = Dtype.bfloat16,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of 50 calls to take the median of.")] = 41,
    as_json: Json = False,
) -> None:
    """Time the host in eager calls of small operators, next to torch, bare Triton launches and Liger."""
    need_torch()
    from whorl.bench import calls

    with asking():
        result = calls.run(device.value if device else None, dtype.value, repeats)
    if as_json:
        print_json(result)
    else:
        print(calls.render(result))
    sys.exit(0 if calls.is_good(result) else 1)


@bench.command("positions")
def bench_positions(
    repeats: Annotated[int, typer.Option(min=1, help="Runs to take the median of.")] = 20, as_json: Json = False
) -> None:
    """Time multimodal position ids next to transformers' get_rope_index (needs transformers)."""
    need_torch()
    from whorl.bench import positions

    sys.exit(positions.main(["--repeats", str(repeats), *(["--json"] if as_json else [])]))


@bench.command("rope-lookup")
def bench_rope_lookup(
    device: Annotated[Device | None, typer.Option(help="Default: the best this machine has.")] = None,
    layers: Annotated[int, typer.Option(min=1, help="Layers that share one lookup.")] = 48,
    repeats: Annotated[int, typer.Option(min=1, help="Runs to take the median of.")] = 20,
    as_json: Json = False,
) -> None:
    """Time cos/sin looked up once a step against once in every layer."""
    need_torch()
    from whorl.bench import rope_lookup
    from whorl.device import require

    with asking():
        where = ["--device", require(device.value)] if device else []
    counts = ["--layers", str(layers), "--repeats", str(repeats)]
    sys.exit(rope_lookup.main([*where, *counts, *(["--json"] if as_json else [])]))


@bench.command("collectives")
def bench_collectives(
    device: Annotated[Device | None, typer.Option(help="Default: the best this machine has.")] = None,
    ranks: Annotated[int | None, typer.Option(min=2, help="Processes. Default: all devices; 2 on a CPU.")] = None,
    rows: Annotated[list[int] | None, typer.Option(min=1, help="Of a tensor; may be given several times.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs to take the median of.")] = 20,
    as_json: Json = False,
) -> None:
    """Time collectives between ranks under each setting of their library, next to our rank-ordered forms."""
    need_torch()
    from whorl.bench import collectives

    with asking():
        result = collectives.run(device.value if device else None, ranks, rows, repeats)
    if as_json:
        print_json(result)
    else:
        collectives.show(result)
    sys.exit(0 if collectives.is_good(result) else 1)


@bench.command("decode", cls=PastedCommand, epilog=PASTED)
@spread
def bench_decode(
    model: Model = None,
    *,
    measured: DecodeOptions,
    drafting: Annotated[DraftOptions, Here(without={"pld": "--classify compares it: leave it out"})],
    engine: Annotated[EngineSettings, Here(without=SET_BY_MEASUREMENT)],
    as_json: Json = False,
) -> None:
    """Time decoding of a whole model against what it must read, or say what speculation brings and on what text."""
    need_torch()
    if measured.random_config is None:
        need_engine("bench decode")
    from whorl.bench import decode_command

    with asking():
        work = decode_command.prepare(model, measured, engine, drafting)
    _finish(work, as_json)


@bench.command("serve", cls=PastedCommand, epilog=PASTED)
@spread
def bench_serve(
    model: Model = None,
    *,
    load: LoadOptions,
    engine: Annotated[EngineSettings, Here(without={"seed": "--seed is that of the workload"})],
    as_json: Json = False,
) -> None:
    """Send a load to a running server or an engine in this process, and say how long requests and tokens wait."""
    need_torch()
    if load.random_config is None and load.url is None:
        need_engine("bench serve")
    from whorl.bench import serve_command

    with asking():
        work = serve_command.prepare(model, load, engine)
    _finish(work, as_json)


@bench.command("sp")
def bench_sp(
    simulate: Annotated[bool, typer.Option("--simulate", help="Ask the cost model only: TP 2 to 16.")] = False,
    ranks: Annotated[int, typer.Option(min=2, max=4, help="Processes.")] = 2,
    tokens: Annotated[int, typer.Option(min=1, help="Of one prefill.")] = 512,
    hidden: Annotated[int | None, typer.Option(min=128, help="Channels; 512, or 8192 with --simulate.")] = None,
    layers: Annotated[int, typer.Option(min=1)] = 4,
    repeats: Annotated[int, typer.Option(min=1, help="Runs to take the median of.")] = 5,
    rate: Annotated[
        str | None, typer.Option(metavar="RATE", help="A link of our own, 100mbit say: network namespaces, needs root.")
    ] = None,
    delay: Annotated[str | None, typer.Option(metavar="TIME", help="Of that link, one way: 1ms say.")] = None,
    timeout: Annotated[int, typer.Option(min=10, help="Seconds for all of it.")] = 600,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a chart (.png, .svg, .pdf).")] = None,
    as_json: Json = False,
) -> None:
    """Time prefill with all-reduces, sequence parallelism, int8 gathers and MLA placement, and count their bytes."""
    need_torch()
    from whorl.bench import sp

    if simulate:
        table = sp.simulate(hidden or 8192)
        print_json(table) if as_json else print(sp.render_simulation(table))
        return
    with asking():
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
        if plot is not None:
            sp.need_plot(plot)
        result = sp.run(settings)
    if plot is not None:
        sp.write_plot(result, plot)
    print_json(result) if as_json else print(sp.render(result))
    sys.exit(0 if sp.is_good(result) else 1)


@bench.command("train")
@spread
def bench_train(*, asked: TrainOptions, as_json: Json = False) -> None:
    """Time training steps of DeepSeek-V3.2 as operators are fused, next to transformers, or show that it learns."""
    need_torch()
    from whorl.bench import train_command

    with asking():
        work = train_command.prepare(asked)
    _finish(work, as_json)


@bench.command("vision")
@spread
def bench_vision(*, asked: VisionOptions, as_json: Json = False) -> None:
    """Time a vision tower, the first token behind pictures and decoding, next to text and, on request, transformers."""
    need_torch()
    from whorl.bench import vision

    with asking():
        work = vision.prepare(asked)
    _finish(work, as_json)


def _finish(work: Callable[[], tuple[Any, str, bool]], as_json: bool) -> None:
    """Do the work, print what was found, and exit with 1 where a row is missing or wrong."""
    document, text, is_good = work()
    if as_json:
        print_json(document)
    else:
        print(text)
    sys.exit(0 if is_good else 1)
