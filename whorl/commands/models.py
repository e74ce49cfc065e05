"""Commands that make models, and plan where they are trained and served: quantize, train, plan."""

import importlib.util
import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from whorl.engine import model_names
from whorl.extras import how_to_install
from whorl.options import Json, exit_on_bad_usage, expand_options, need_engine, need_torch, print_json, stop
from whorl.plan.options import PlanOptions, ServingOptions
from whorl.startup import starting


class Scheme(StrEnum):
    w4a16 = "w4a16"
    w8a8 = "w8a8"
    fp8 = "fp8"


def quantize(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder of safetensors or a Hugging Face id.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; it must not exist yet.")],
    format: Annotated[
        Scheme,
        typer.Option(
            "--format", help="w4a16: 4-bit groups; w8a8: int8 weights and activations; fp8: FP8 by row or block."
        ),
    ] = Scheme.w4a16,
    ignore: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A module to leave unquantised, or re: and a pattern; may be repeated."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a quantised copy of a model in the compressed-tensors format, and report the error of each layer.

    FP8 weights of DeepSeek models are written as DeepSeek publishes them, in blocks of 128 by 128.
    """
    need_torch()
    need_engine("quantize")
    with exit_on_bad_usage():
        model_names.local_or_hub(model)
        with starting():
            from whorl.engine.weights import rewrite
        result = rewrite.quantize_folder(model, out, scheme=format.value, ignore=ignore or ())
    if as_json:
        print_json(result.as_dict())
    else:
        print(rewrite.render(result))


@expand_options
def train(
    context: typer.Context,
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="RECIPE", help="tiny, debug, 4l, 8l, 671b or a .toml file; TorchTitan's options may follow."
        ),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Processes on this machine. Default: one for each accelerator, or 1.")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Move an earlier run in the folder aside instead of resuming it.")
    ] = False,
    torchrun: Annotated[
        str, typer.Option(metavar="OPTIONS", help="More options for torchrun, such as --nnodes=8.")
    ] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the torchrun command and start nothing.")] = False,
    plot: Annotated[
        list[Path] | None,
        typer.Option(metavar="FOLDER", help="Plot the curves of a run; repeat it to plot several runs together."),
    ] = None,
    as_json: Json = False,
    *,
    planned: PlanOptions,
) -> None:
    """Train with TorchTitan; or with --plan list the parallel degrees that fit a cluster, their memory and speed."""
    plan = planned.plan
    if recipe is not None and recipe.startswith("-") and (plan is not None or plot is not None):
        stop(f"train: no such option: {recipe}")
    if (recipe is not None) + (plan is not None) + (plot is not None) != 1:
        stop("train: give exactly one of RECIPE (whorl train tiny), --plan MODEL and --plot FOLDER")
    if recipe is not None:
        sys.exit(_train(recipe, context.args, ranks, fresh, torchrun, dry_run))
    if context.args:
        stop(f"train: no such option: {context.args[0]}")
    if plot is not None:
        sys.exit(_plot_training(plot))
    if plan is None or planned.cards is None:
        stop("train --plan: --cards is missing; give --cards N")
    sys.exit(_plan(plan, planned.cards, planned, as_json))


def _train(recipe: str, options: list[str], ranks: int | None, fresh: bool, torchrun: str, dry_run: bool) -> int:
    need_torch()
    from whorl.titan import train_command

    with exit_on_bad_usage():
        job = train_command.build_job(recipe, options, ranks=ranks, torchrun=torchrun)
    if dry_run:
        print(shlex.join(job.command))
        return 0
    with exit_on_bad_usage():
        train_command.prepare(job, is_fresh=fresh)
    return train_command.run(job)


def _plot_training(folders: list[Path]) -> int:
    if importlib.util.find_spec("matplotlib") is None:
        stop(f"train --plot needs matplotlib: {how_to_install('bench')}")
    from whorl.titan.display import plot

    output = folders[0] / "metrics.png"
    with exit_on_bad_usage():
        plot(folders, output)
    print(output)
    return 0


def _plan(model: str, cards: int, options: PlanOptions, as_json: bool) -> int:
    from whorl.plan import command as plan_command

    with exit_on_bad_usage():
        plan = plan_command.build_plan(model, cards, options)
    if as_json:
        print_json(plan_command.as_dict(plan, options.top))
    else:
        print(plan_command.render(plan, options.top))
    return 0 if plan.problem is None else 1


@expand_options
def plan(as_json: Json = False, *, options: ServingOptions) -> None:
    """List the layouts in which a cluster can serve a model: what fits, its cache, and a limit of its speed."""
    from whorl.plan import serving

    with exit_on_bad_usage():
        layouts = serving.build_serving_plan(options)
    if as_json:
        print_json(serving.serving_dict(layouts, options.top))
    else:
        print(serving.render_serving(layouts, options.top))
    sys.exit(0 if layouts.problem is None else 1)
