"""The commands of `whorl bench`. Their options are in `options`; the other modules of this package do the measuring."""

from typing import Annotated

import typer

from whorl.bench.options import (
    SET_BY_MEASUREMENT,
    DecodeOptions,
    LoadOptions,
    OpsOptions,
    TrainOptions,
    VisionOptions,
    prepare_torchtitan,
)
from whorl.bench.report import finish, need_plot
from whorl.engine import model_names
from whorl.engine.drafting import DraftOptions
from whorl.engine.settings import EngineSettings
from whorl.files import check_output_file
from whorl.options import Json, Model, Overrides, exit_on_bad_usage, expand_options, need_engine, need_torch
from whorl.pasted import PASTED, PastedCommand
from whorl.startup import starting

bench = typer.Typer(help="Benchmarks that time the best alternatives in the same run.", no_args_is_help=True)


@bench.command("ops")
@expand_options
def bench_ops(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...", help="Operators, or the groups sparse_attention, indexer and moe. Default: all."
        ),
    ] = None,
    *,
    options: OpsOptions,
    as_json: Json = False,
) -> None:
    """Time every operator next to eager torch, torch.compile and Liger; wrong outputs get no speed."""
    need_torch()
    with exit_on_bad_usage():
        need_plot(options.plot)
        with starting():
            from whorl.bench import ops
        benchmark = ops.benchmark(names or (), options)
    finish(benchmark, as_json, options.plot)


@bench.command("decode", cls=PastedCommand, epilog=PASTED)
@expand_options
def bench_decode(
    model: Model = None,
    *,
    options: DecodeOptions,
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
    if options.random_config is None:
        need_engine("bench decode")
    with exit_on_bad_usage():
        options.check(engine, drafting)
        if options.random_config is None:
            model_names.local_or_hub(model)
        with starting():
            from whorl.bench import decode
        benchmark = decode.benchmark(model, options, engine, drafting)
    finish(benchmark, as_json)


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
    from whorl.bench import serve

    with exit_on_bad_usage():
        benchmark = serve.benchmark(model, load, engine)
    finish(benchmark, as_json, load.plot)


@bench.command("train")
@expand_options
def bench_train(*, options: TrainOptions, as_json: Json = False) -> None:
    """Time training steps of DeepSeek-V3.2 with and without fused operators and transformers."""
    need_torch()
    with exit_on_bad_usage():
        if options.out is not None:
            check_output_file(options.out)
        prepare_torchtitan(options.device)
        with starting():
            from whorl.bench import train
        benchmark = train.benchmark(options)
    finish(benchmark, as_json)


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
        benchmark = vision.benchmark(options)
    finish(benchmark, as_json)
