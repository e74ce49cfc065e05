"""The `whorl` command. Everything heavy is imported inside the commands: `--help` and `doctor` run without torch.

Exit codes: 0 good, 1 found something wrong, 2 asked wrongly.
"""

import importlib.util
import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from whorl.bench.command import bench
from whorl.chat.options import AT_ONCE, AnswerOptions, ChatOptions, MediaOptions, SamplingOptions
from whorl.cluster.options import ClusterOptions
from whorl.engine.drafting import DraftOptions
from whorl.engine.settings import MODEL, RANKS, EngineSettings
from whorl.options import Device, Here, Json, Model, asking, need_engine, need_torch, print_json, spread, stop
from whorl.pasted import PASTED, PastedCommand
from whorl.plan.options import PlanOptions
from whorl.serve.options import ServeOptions

app = typer.Typer(
    name="whorl",
    help="Rotary-embedding language models on CPU, NVIDIA GPUs and Ascend NPUs.",
    epilog="Exit codes: 0 good, 1 found something wrong, 2 asked wrongly.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench, name="bench")


def _version(asked: bool) -> None:
    if asked:
        from whorl import __version__

        print(f"whorl {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None: ...


@app.command()
def doctor(
    path: Annotated[
        str | None,
        typer.Argument(
            metavar="PATH", help="A model folder, config.json, launch script, YAML or JSON flags, or a log."
        ),
    ] = None,
    framework: Annotated[
        str | None,
        typer.Option(help="megatron, mindspeed, mindspeed-mm, bridge, vllm, verl, hf or torchtitan. Default: guessed."),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a setting; may be repeated.")
    ] = None,
    train: Annotated[bool, typer.Option("--train", help="It will be trained: gradients matter.")] = False,
    device: Annotated[str | None, typer.Option(help="npu or cuda: where it will run.")] = None,
    log: Annotated[Path | None, typer.Option(metavar="FILE", help="A log or traceback to explain.")] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A torch profiler trace: which rotary operators ran.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say which rotary path a configuration takes, and what is wrong with it, before anything runs."""
    if path is None and log is None and trace is None:
        stop("doctor: nothing to look at: give a PATH, --log FILE or --trace FILE")
    from whorl.doctor.command import run

    sys.exit(run(path, framework, settings, train, device, log, trace, as_json))


class Scheme(StrEnum):
    w4a16 = "w4a16"
    w8a8 = "w8a8"
    fp8 = "fp8"


ModelDir = Annotated[
    str | None,
    typer.Option("--model-dir", "--model", metavar="MODEL", help="The same as MODEL.", rich_help_panel=MODEL),
]
Report = Annotated[
    bool, typer.Option("--report", help="Say what --sp has rewritten, on standard error.", rich_help_panel=RANKS)
]
# One conversation at a time; the kernels of few rows. --seed is that of the text.
OneSequence = Annotated[
    EngineSettings, Here(defaults={"max_num_seqs": 1}, without={"seed": "--seed is that of the text"})
]


def _which(command: str, model: str | None, model_dir: str | None) -> str | None:
    if model is not None and model_dir is not None:
        raise ValueError(f"{command}: MODEL {model} and --model-dir {model_dir} are the same thing: say one")
    return model or model_dir


def _run_model(command: str, model: str | None, model_dir: str | None, **given: Any) -> NoReturn:
    """given: fields of `Options`, whose `check` refuses what does not go together."""
    need_torch()
    need_engine(command)
    from whorl.chat.command import Options, build_session

    with asking():
        work = build_session(Options(model=_which(command, model, model_dir), **given))
    sys.exit(work())


@app.command(cls=PastedCommand, epilog=PASTED)
@spread
def generate(
    context: typer.Context,
    model: Model = None,
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", "-p", metavar="TEXT", help="What to go on from. Default: what is piped in."),
    ] = None,
    prompt_file: Annotated[
        str | None,
        typer.Option("--prompt-file", "-f", metavar="FILE", help="The prompt is in a file; -: standard input."),
    ] = None,
    as_json: Json = False,
    *,
    answers: AnswerOptions,
    media: MediaOptions,
    sampling: SamplingOptions,
    chat: ChatOptions,
    model_dir: ModelDir = None,
    engine: OneSequence,
    report: Report = False,
    drafting: DraftOptions,
) -> None:
    """Go on from a prompt, or with --chat answer it. The text goes to standard output, nothing else does."""
    with asking():
        from whorl.chat.command import read_prompt

        text = read_prompt(prompt, prompt_file, or_pipe=not chat.interactive and answers.prompts is None)
    source = context.get_parameter_source("max_num_seqs")
    if answers.are_many and source is not None and source.name == "DEFAULT":
        engine = engine.changed(max_num_seqs=AT_ONCE)
    given = {
        "prompt": text,
        "answers": answers,
        "sampling": sampling,
        "chat": chat,
        "engine": engine,
        "drafting": drafting,
    }
    _run_model("generate", model, model_dir, media=media, report=report, as_json=as_json, **given)


@app.command(cls=PastedCommand, epilog=PASTED)
@spread
def chat(
    model: Model = None,
    *,
    sampling: SamplingOptions,
    chat: Annotated[
        ChatOptions,
        Here(
            defaults={"chat": True, "interactive": True},
            without={"chat": "whorl chat is one: leave it out", "interactive": "whorl chat always is: leave it out"},
        ),
    ],
    model_dir: ModelDir = None,
    engine: OneSequence,
    report: Report = False,
    drafting: DraftOptions,
) -> None:
    """Talk with a model in the terminal. It remembers the conversation; /help lists what else it takes."""
    given = {"sampling": sampling, "chat": chat, "engine": engine, "drafting": drafting}
    _run_model("chat", model, model_dir, report=report, **given)


@app.command()
def quantize(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder of safetensors or a Hugging Face id.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write, which is not there yet.")],
    format: Annotated[
        Scheme,
        typer.Option("--format", help="4-bit groups; int8 with int8 activations; or FP8 by row or block."),
    ] = Scheme.w4a16,
    ignore: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A module to leave as it is, or re: and a pattern; may be repeated."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a model with weights of fewer bits, as compressed-tensors stores them, and say what that costs by layer.

    FP8 of DeepSeek's models is written as their makers publish it, in blocks of 128 by 128.
    """
    need_torch()
    need_engine("quantize")
    from whorl.engine.weights import rewrite

    with asking():
        found = rewrite.quantize_folder(model, out, scheme=format.value, ignore=ignore or ())
    if as_json:
        print_json(found.as_dict())
    else:
        print(rewrite.render(found))


@app.command()
def ops(as_json: Json = False) -> None:
    """List the operators and, for each backend, whether it runs here or why not."""
    need_torch()
    from whorl.ops import availability

    print(availability.as_json() if as_json else availability.as_table())


@app.command()
def selftest(
    device: Annotated[Device | None, typer.Option(help="Default: the best this machine has.")] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes. Default: 1 on a CPU, up to 8 to compile kernels for others.")
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(min=2, metavar="N", help="Check what N processes do together instead, one card each."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run every operator's cases in every backend of this machine; the report can go into a bug report.

    With --ranks N: collectives, sequence and tensor parallelism, and every way of sharding a training step, over this
    machine's own collectives (NCCL, HCCL; gloo on a CPU), against one rank.
    """
    need_torch()
    from whorl import selftest as tests
    from whorl.device import default_device, require

    with asking():
        chosen = require(device.value if device else default_device())
    if ranks is not None:
        from whorl.selftest_ranks.command import run_and_print

        with asking():
            run_and_print(ranks, chosen, as_json)
    report = tests.run(chosen, jobs=jobs or tests.default_jobs(chosen))
    if as_json:
        print_json(report.as_dict())
    else:
        print(tests.render(report))
    sys.exit(0 if report.passed else 1)


@app.command(cls=PastedCommand, epilog=PASTED)
@spread
def serve(
    model: Model = None,
    *,
    server: ServeOptions,
    cluster: ClusterOptions,
    model_dir: ModelDir = None,
    engine: EngineSettings,
    report: Report = False,
    drafting: DraftOptions,
) -> None:
    """Serve a model over HTTP with OpenAI's interface, until Ctrl-C or SIGTERM."""
    need_torch()
    need_engine("serve")
    from whorl.serve import openai

    with asking():
        openai.need_extra()
        drafting.check()
        chosen = _which("serve", model, model_dir)
        if cluster.on is None:
            run = openai.build_server(chosen, engine, drafting=drafting, report=report, **server.settings())
        else:
            from whorl.cluster import command

            if report:
                stop("serve: --report is of one engine; with --on ray leave it out")
            run = command.build_server(chosen, engine, cluster, drafting=drafting, **server.settings())
    sys.exit(run())


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
@spread
def train(
    context: typer.Context,
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="RECIPE", help="tiny, debug, 4l, 8l, 671b or a .toml file; TorchTitan's own options may follow."
        ),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Processes on this machine. Default: one for each accelerator, or 1.")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Set an earlier run in the folder aside; do not go on.")
    ] = False,
    torchrun: Annotated[str, typer.Option(metavar="OPTIONS", help="More for torchrun, as --nnodes=8 ...")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command of torchrun, and do nothing.")] = False,
    plot: Annotated[
        list[Path] | None, typer.Option(metavar="FOLDER", help="Draw the curves of a run; several: together.")
    ] = None,
    as_json: Json = False,
    *,
    planned: PlanOptions,
) -> None:
    """Train with TorchTitan; or with --plan say which layouts fit a cluster, their memory and speed."""
    plan = planned.plan
    if recipe is not None and recipe.startswith("-") and (plan is not None or plot is not None):
        stop(f"train: no such option: {recipe}")
    if (recipe is not None) + (plan is not None) + (plot is not None) != 1:
        stop("train: say one of RECIPE (whorl train tiny), --plan MODEL and --plot FOLDER")
    if recipe is not None:
        sys.exit(_train(recipe, context.args, ranks, fresh, torchrun, dry_run))
    if context.args:
        stop(f"train: no such option: {context.args[0]}")
    if plot is not None:
        sys.exit(_plot_training(plot))
    if plan is None or planned.cards is None:
        stop("train --plan: say --cards N")
    sys.exit(_plan(plan, planned.cards, planned, as_json))


def _plan(model: str, cards: int, asked: PlanOptions, as_json: bool) -> int:
    from whorl.plan import command as plan_command

    with asking():
        made = plan_command.build_plan(model, cards, asked)
    if as_json:
        print_json(plan_command.as_dict(made, asked.top))
    else:
        print(plan_command.render(made, asked.top))
    return 0 if made.problem is None else 1


def _train(recipe: str, options: list[str], ranks: int | None, fresh: bool, torchrun: str, dry_run: bool) -> int:
    need_torch()
    from whorl.titan import train_command
    from whorl.titan.folder_lock import check_free

    with asking():
        job = train_command.build_job(recipe, options, ranks=ranks, torchrun=torchrun)
    if dry_run:
        print(shlex.join(job.command))
        return 0
    with asking():
        check_free(job.locked)
    if fresh and (aside := train_command.set_aside(job.folder)):
        print(f"the earlier run is now in {aside}")
    return train_command.run(job)


def _plot_training(folders: list[Path]) -> int:
    if importlib.util.find_spec("matplotlib") is None:
        stop("train --plot needs matplotlib: pip install 'whorl[bench]'")
    from whorl.titan.display import plot

    output = folders[0] / "metrics.png"
    with asking():
        plot(folders, output)
    print(output)
    return 0


def main() -> None:
    app()


if __name__ == "__main__":
    main()
