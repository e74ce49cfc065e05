"""`whorl bench`: what it takes. The measuring is in the modules beside this one."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from whorl.options import Device, Dtype, Json, asking, need_torch, print_json

bench = typer.Typer(help="Measure, next to the best alternatives in the same run.", no_args_is_help=True)


@bench.command("ops")
def bench_ops(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Operators; default: all.")] = None,
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
    from whorl.device import require

    with asking():
        settings = bench_module.Settings.resolve(
            names=names or (),
            device=require(device.value) if device else None,
            dtype=dtype.value,
            quick=quick,
            compiled=compiled,
        )
        if plot is not None:
            bench_module.need_plot(plot)
    result = bench_module.run(settings)
    if plot is not None:
        bench_module.write_plot(result, plot)
    if as_json:
        print_json(result)
    else:
        print(bench_module.render(result))
    sys.exit(0 if bench_module.is_good(result) else 1)


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
