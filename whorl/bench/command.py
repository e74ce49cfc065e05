"""The commands of `whorl bench`. Their options are in `options`; the other modules of this package do the measuring."""

import importlib
from pathlib import Path
from typing import Annotated, Any, NoReturn

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


def _run(name: str, *arguments: Any, as_json: bool, plot: Path | None = None, out: Path | None = None) -> NoReturn:
    """Run the benchmark that `whorl.bench.<name>` makes of the arguments; plot, out: files that must be writable."""
    with exit_on_bad_usage():
        need_plot(plot)
        if out is not None:
            check_output_file(out)
        with starting():
            module = importlib.import_module(f"whorl.bench.{name}")
        benchmark = module.benchmark(*arguments)
    finish(benchmark, as_json, plot)


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
    _run("ops", names or (), options, as_json=as_json, plot=options.plot)


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
    _run("decode", model, options, engine, drafting, as_json=as_json)


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
    _run("serve", model, load, engine, as_json=as_json, plot=load.plot)


@bench.command("train")
@expand_options
def bench_train(*, options: TrainOptions, as_json: Json = False) -> None:
    """Time training steps of DeepSeek-V3.2 with and without fused operators and transformers."""
    need_torch()
    with exit_on_bad_usage():
        prepare_torchtitan(options.device)
    _run("train", options, as_json=as_json, out=options.out)


@bench.command("vision")
@expand_options
def bench_vision(*, options: VisionOptions, as_json: Json = False) -> None:
    """Time a vision tower, the first token after images, and decoding, next to text and optionally transformers."""
    need_torch()
    _run("vision", options, as_json=as_json, out=options.out)
