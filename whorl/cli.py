"""The `whorl` command. Heavy modules are imported inside the commands, so `--help` and `doctor` run without torch.

Exit codes: 0 success, 1 a check failed or something is wrong, 2 bad usage.
"""

import importlib.util
import os
import shlex
import sys
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from whorl.bench.command import bench
from whorl.chat.models_command import commands as of_models
from whorl.chat.options import AT_ONCE, AnswerOptions, ChatOptions, MediaOptions, SamplingOptions
from whorl.chat.text_streams import as_argument, read_file, read_stdin
from whorl.cluster.options import ClusterOptions
from whorl.engine import model_names
from whorl.engine.drafting import DraftOptions
from whorl.engine.settings import MODEL, RANKS, EngineSettings
from whorl.extras import how_to_install, need_server
from whorl.files import NO_ROOM, CannotWrite
from whorl.host_memory import is_of_memory, limits
from whorl.options import (
    Device,
    Json,
    Model,
    Overrides,
    exit_on_bad_usage,
    expand_options,
    need_engine,
    need_torch,
    print_json,
    stop,
)
from whorl.pasted import PASTED, with_first
from whorl.plan.options import PlanOptions, ServingOptions
from whorl.serve.options import ServeOptions
from whorl.startup import INTERRUPTED, end_at_once, raise_again, starting

app = typer.Typer(
    name="whorl",
    help="Rotary-embedding language models on CPU, NVIDIA GPUs and Ascend NPUs.",
    epilog="Exit codes: 0 success, 1 a check failed or something is wrong, 2 bad usage.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["--help", "-h"]},
    pretty_exceptions_enable=False,
)
app.add_typer(bench, name="bench")


def _version(requested: bool) -> None:
    if requested:
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
        typer.Option(
            help="megatron, mindspeed, mindspeed-mm, bridge, vllm, sglang, hf, torchtitan, whorl, or a job's: verl, "
            "slime, vime, nemo-rl, trl, prime-rl. Default: guessed."
        ),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a setting; may be repeated.")
    ] = None,
    train: Annotated[bool, typer.Option("--train", help="The model will be trained: check gradients too.")] = False,
    device: Annotated[str | None, typer.Option(help="npu or cuda: the device the model will run on.")] = None,
    log: Annotated[Path | None, typer.Option(metavar="FILE", help="A log or traceback to explain.")] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A torch profiler trace: report which rotary operators ran.")
    ] = None,
    trainer: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A trainer to compare with its rollout; PATH is then the model of both. Without --rollout, FILE is a "
            "job that starts both.",
        ),
    ] = None,
    rollout: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The launch of the trainer's rollout: vLLM, SGLang or whorl.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Report which rotary path a configuration takes, and what is wrong with it, before anything runs.

    With --trainer and --rollout: what the two sides of a training compute differently, by which mechanism, and the fix.
    """
    if not any((path, log, trace, trainer, rollout)):
        stop("doctor: nothing to check; give a PATH, --log FILE, --trace FILE or --trainer FILE")
    from whorl.doctor.command import run

    sys.exit(run(path, framework, settings, train, device, log, trace, as_json, trainer, rollout))


class Scheme(StrEnum):
    w4a16 = "w4a16"
    w8a8 = "w8a8"
    fp8 = "fp8"


ModelDir = Annotated[
    str | None,
    typer.Option("--model-dir", "--model", metavar="MODEL", help="The same as MODEL.", rich_help_panel=MODEL),
]
Threads = Annotated[
    int | None,
    typer.Option(
        *("--threads", "-t"),
        min=1,
        metavar="N",
        help="CPU threads of a rank. Default: all cores.",
        rich_help_panel=MODEL,
    ),
]
Report = Annotated[
    bool,
    typer.Option(
        "--report", help="Report on standard error an answer's speed, and what --sp exchanges.", rich_help_panel=RANKS
    ),
]
# `generate` and `chat` run one sequence at a time by default, which selects the kernels for few tokens. Their --seed is
# the seed of sampling, so the engine's own seed is not an option.
FIRST = ("--device", "--max-seq", "--tp", "--quantize")  # of the engine's options, those that people use first
OneSequence = Annotated[
    EngineSettings, Overrides(defaults={"max_num_seqs": 1}, without={"seed": "--seed seeds the sampling"})
]


def _use_threads(threads: int | None) -> None:
    """Set the number of CPU threads of this process, before torch reads it, and of the ranks that it starts."""
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)


def _one_model(command: str, model: str | None, model_dir: str | None, drafting: DraftOptions) -> str | None:
    """Return MODEL or --model-dir, a URL as an id. ValueError when both were given, or a model cannot be found."""
    if model is not None and model_dir is not None:
        raise ValueError(f"{command}: MODEL {model} and --model-dir {model_dir} mean the same; give only one of them")
    if drafting.draft_model is not None:
        model_names.local_or_hub(drafting.draft_model)
    name = model or model_dir
    model_names.local_or_hub(name)
    return name and model_names.plain_name(name)


def _run_model(command: str, model: str | None, model_dir: str | None, **options: Any) -> NoReturn:
    """Run `whorl generate` or `whorl chat` and exit with its exit code.

    options: the other fields of `whorl.chat.command.Options`. Options that conflict end the command with one line.
    """
    need_torch()
    need_engine(command)
    from whorl.chat.command import Options, build_session

    with exit_on_bad_usage():
        options["drafting"].check()
        chosen = _one_model(command, model, model_dir, options["drafting"])
        work = build_session(Options(model=chosen, **options))
    sys.exit(work())


@app.command(
    cls=with_first(*FIRST, "--prompt", "--chat", "--system", "--max-tokens", "--temperature", "--json"), epilog=PASTED
)
@expand_options
def generate(
    context: typer.Context,
    model: Model = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            "--prompt", "-p", metavar="TEXT", help="The text to continue. Default: standard input, when it is a pipe."
        ),
    ] = None,
    prompt_file: Annotated[
        str | None,
        typer.Option("--prompt-file", "-f", metavar="FILE", help="Read the prompt from a file; -: standard input."),
    ] = None,
    as_json: Json = False,
    *,
    answers: AnswerOptions,
    media: MediaOptions,
    sampling: SamplingOptions,
    chat: ChatOptions,
    model_dir: ModelDir = None,
    threads: Threads = None,
    engine: OneSequence,
    report: Report = False,
    drafting: DraftOptions,
) -> None:
    """Continue a prompt, or answer it with --chat. Only the generated text goes to standard output."""
    with exit_on_bad_usage():
        from whorl.chat.command import read_prompt

        text = read_prompt(prompt, prompt_file, or_pipe=not chat.interactive and answers.prompts is None)
    _use_threads(threads)
    source = context.get_parameter_source("max_num_seqs")
    if answers.are_many and source is not None and source.name == "DEFAULT":
        engine = engine.changed(max_num_seqs=AT_ONCE)
    options = {
        "prompt": text,
        "answers": answers,
        "sampling": sampling,
        "chat": chat,
        "engine": engine,
        "drafting": drafting,
    }
    _run_model("generate", model, model_dir, media=media, report=report, as_json=as_json, **options)


@app.command(cls=with_first(*FIRST, "--system", "--max-tokens", "--temperature", "--think", "--seed"), epilog=PASTED)
@expand_options
def chat(
    model: Model = None,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="A message: answer it and end, instead of reading more.")
    ] = None,
    *,
    sampling: SamplingOptions,
    chat: Annotated[
        ChatOptions,
        Overrides(
            defaults={"chat": True, "interactive": True},
            without={
                "chat": "whorl chat always uses it: leave it out",
                "interactive": "whorl chat always is: leave it out",
            },
        ),
    ],
    model_dir: ModelDir = None,
    threads: Threads = None,
    engine: OneSequence,
    report: Report = False,
    drafting: DraftOptions,
) -> None:
    """Talk with a model in the terminal. It remembers the conversation; /help lists its other commands."""
    if prompt is not None:
        with exit_on_bad_usage():
            prompt, chat = as_argument(prompt, "PROMPT"), replace(chat, interactive=False)
    _use_threads(threads)
    options = {"sampling": sampling, "chat": chat, "engine": engine, "drafting": drafting}
    _run_model("chat", model, model_dir, prompt=prompt, default_tokens=None, report=report, **options)


app.command(
    "run",
    cls=with_first(*FIRST, "--system", "--max-tokens", "--temperature", "--think", "--seed"),
    epilog=PASTED,
    help="The same as whorl chat: whorl run FILE.gguf, or whorl run FILE.gguf PROMPT.",
)(chat)


app.registered_commands.extend(of_models.registered_commands)  # list, pull, rm, show, ps


@app.command()
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


@app.command()
@expand_options
def verify(
    answer: Annotated[str, typer.Argument(metavar="ANSWER", help="A saved answer: JSON; -: standard input.")],
    model: Model = None,
    as_json: Json = False,
    *,
    threads: Threads = None,
    engine: OneSequence,
) -> None:
    """Compute an answer's log-probabilities again, here, and say whether they are equal bit for bit.

    ANSWER is what `whorl generate --json` printed, or a completion of a server with token ids and logprobs. Exit codes:
    0 equal, 1 not equal, 2 no such answer.
    """
    need_torch()
    need_engine("verify")
    from whorl.chat import verify as check

    with exit_on_bad_usage():
        chosen = _one_model("verify", model, None, DraftOptions())
        text = read_stdin() if answer == "-" else read_file(answer, answer)
        answers = check.read_answers(text, answer)
    _use_threads(threads)
    with starting():
        from whorl.engine.llm import LLM
    with exit_on_bad_usage():
        llm = LLM(chosen, engine)
        verdicts = list(check.verify(llm, answers, next(reversed(engine.adapters), None)))
    if as_json:
        print_json([verdict._asdict() for verdict in verdicts])
    else:
        print(*verdicts, sep="\n")
    sys.exit(0 if all(verdict.is_equal for verdict in verdicts) else 1)


@app.command()
def ops(as_json: Json = False) -> None:
    """List the operators and, for each backend, whether it runs here or why not."""
    need_torch()
    with starting():
        from whorl.ops import availability

    print(availability.as_json() if as_json else availability.as_table())


@app.command()
def selftest(
    device: Annotated[Device | None, typer.Option(help="Default: the best device of this machine.")] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes. Default: 1 on a CPU, else up to 8, which compile kernels.")
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(min=2, metavar="N", help="Check N ranks together instead, one device each."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check every case of every operator in every backend of this machine; the report belongs in a bug report.

    With --ranks N, check collectives, sequence and tensor parallelism, and every way of sharding a training step over
    this machine's collectives (NCCL, HCCL; gloo on a CPU) against the same work on one rank.
    """
    need_torch()
    with starting():
        from whorl import selftest as tests
        from whorl.device import default_device, require

    with exit_on_bad_usage():
        chosen = require(device.value if device else default_device())
    if ranks is not None:
        from whorl.selftest_ranks.command import run_and_print

        with exit_on_bad_usage():
            run_and_print(ranks, chosen, as_json)
    report = tests.run(chosen, jobs=jobs or tests.default_jobs(chosen))
    if as_json:
        print_json(report.as_dict())
    else:
        print(tests.render(report))
    sys.exit(0 if report.passed else 1)


@app.command(
    cls=with_first(*FIRST, "--host", "--port", "--api-key", "--name", "--max-num-seqs", "--gpu-memory-utilization"),
    epilog=PASTED,
)
@expand_options
def serve(
    model: Model = None,
    *,
    server: ServeOptions,
    cluster: ClusterOptions,
    model_dir: ModelDir = None,
    threads: Threads = None,
    engine: EngineSettings,
    report: Report = False,
    drafting: DraftOptions,
) -> None:
    """Serve a model over HTTP with the OpenAI API, until Ctrl-C or SIGTERM."""
    need_torch()
    need_engine("serve")
    _use_threads(threads)
    with exit_on_bad_usage():
        need_server()
        drafting.check()
        chosen = _one_model("serve", model, model_dir, drafting)  # before an import that takes half a second
        from whorl.serve import openai

        if cluster.on is None:
            settings = server.settings()
            if server.rl:
                from whorl.rl.routes import add_routes

                settings["more_routes"] = (add_routes,)
            run = openai.build_server(chosen, engine, drafting=drafting, report=report, **settings)
        else:
            from whorl.cluster import command

            if report:
                stop("serve: --report reports on one engine; leave it out with --on ray")
            if server.rl:
                stop("serve: --rl steers one engine; leave out --on ray, and start a server for each GPU")
            run = command.build_server(chosen, engine, cluster, drafting=drafting, **server.settings())
    sys.exit(run())


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
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


def _plan(model: str, cards: int, options: PlanOptions, as_json: bool) -> int:
    from whorl.plan import command as plan_command

    with exit_on_bad_usage():
        plan = plan_command.build_plan(model, cards, options)
    if as_json:
        print_json(plan_command.as_dict(plan, options.top))
    else:
        print(plan_command.render(plan, options.top))
    return 0 if plan.problem is None else 1


@app.command()
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


def run() -> int:
    """Run the command line and return its exit code.

    Ctrl-C ends it in silence; an output without room, and imports that do not fit into memory, in one line.
    """
    try:
        raise_again()
        try:
            app()
        except SystemExit as end:
            code = end.code
        if sys.stdout is not None:
            sys.stdout.flush()  # not left to the interpreter, which would print a traceback
        return code if isinstance(code, int) else 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except CannotWrite as error:
        return _without_output(str(error))
    except BrokenPipeError:  # `whorl ops | head -1` is no mistake
        return _without_output(None)
    except OSError as error:
        if is_of_memory(error):
            return _without_memory(error)
        if error.errno not in NO_ROOM:
            raise
        return _without_output(f"{error.filename or 'standard output'}: cannot be written: {error.strerror}")
    except (MemoryError, ImportError, RuntimeError) as error:
        if isinstance(error.__cause__, KeyboardInterrupt):  # Python 3.11 wraps one that comes while a class is made
            return INTERRUPTED
        if not is_of_memory(error):
            raise
        return _without_memory(error)
    finally:
        end_at_once()


def _without_memory(error: BaseException) -> int:
    """Print what is free, and return the exit code."""
    free, owner = min(limits(), default=(None, ""))
    left = "" if free is None else f"; {free / 1e9:.3g} GB {owner} are free"
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    print(f"whorl: memory ran out{left}: {reason[:200]}", file=sys.stderr)
    return 1


def _without_output(problem: str | None) -> int:
    """Print the problem, give up what is left for standard output, and return the exit code."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else the interpreter would try to write it once more
    if problem is not None:
        print(f"whorl: {problem}", file=sys.stderr)
    return 1
