"""Commands that run a model: generate, chat, serve, and verify what it answered."""

import os
import sys
from dataclasses import replace
from typing import Annotated, Any, NoReturn

import typer

from whorl.chat.options import AT_ONCE, AnswerOptions, ChatOptions, MediaOptions, SamplingOptions
from whorl.chat.text_streams import as_argument, read_file, read_stdin
from whorl.cluster.options import ClusterOptions
from whorl.engine import model_names
from whorl.engine.drafting import DraftOptions
from whorl.engine.settings import MODEL, RANKS, EngineSettings
from whorl.extras import need_server
from whorl.options import (
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
from whorl.serve.options import ServeOptions
from whorl.startup import starting

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
