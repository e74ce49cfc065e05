"""The `whorl` command. Everything heavy is imported inside the commands: `--help` and `doctor` run without torch.

Exit codes: 0 good, 1 found something wrong, 2 asked wrongly.
"""

import contextlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

app = typer.Typer(
    name="whorl",
    help="Rotary-embedding language models on CPU, NVIDIA GPUs and Ascend NPUs.",
    epilog="Exit codes: 0 good, 1 found something wrong, 2 asked wrongly.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Measure, next to the best alternatives in the same run.", no_args_is_help=True)
app.add_typer(bench, name="bench")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]


class Device(StrEnum):
    cpu = "cpu"
    cuda = "cuda"
    npu = "npu"


class Dtype(StrEnum):
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


def _stop(message: str) -> NoReturn:
    """Asked wrongly: one line, no traceback."""
    typer.echo(f"whorl: {message}", err=True)
    raise typer.Exit(2)


@contextlib.contextmanager
def _asking() -> Iterator[None]:
    """Around what a command makes of its arguments; errors of its work keep their traceback."""
    try:
        yield
    except ValueError as error:
        _stop(str(error))


def _need_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        _stop("this command needs torch: pip install torch")


def _print_json(document: Any) -> None:
    print(json.dumps(document, indent=2))


def _version(asked: bool) -> None:
    if asked:
        from whorl import __version__

        print(f"whorl {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print and exit.")
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
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a setting.")
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
        _stop("doctor: nothing to look at: give a PATH, --log FILE or --trace FILE")
    from whorl.doctor.command import run

    sys.exit(run(path, framework, settings, train, device, log, trace, as_json))


_SAMPLING, _CHAT, _MODEL, _LOOKUP = "Sampling", "Chat", "Model", "Prompt lookup decoding"


def _number(*names: str, panel: str, text: str, least: float | None = None, most: float | None = None) -> Any:
    return typer.Option(*names, min=least, max=most, metavar="N", help=text, rich_help_panel=panel)


def _flag(*names: str, panel: str, text: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel)


Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL", help="A folder, a .gguf file or a Hugging Face id. Default: SmolLM2-135M-Instruct."
    ),
]
ModelDir = Annotated[
    str | None, typer.Option("--model-dir", metavar="MODEL", help="The same as MODEL.", rich_help_panel=_MODEL)
]
ModelDevice = Annotated[Device | None, _flag("--device", panel=_MODEL, text="Default: the best this machine has.")]
ModelDtype = Annotated[Dtype | None, _flag("--dtype", panel=_MODEL, text="Of the weights. Default: the model's.")]
MaxSeq = Annotated[
    int | None,
    _number("--max-seq", panel=_MODEL, least=2, text="Longest prompt and answer together. Default: what fits."),
]
TensorParallel = Annotated[
    int,
    typer.Option(
        *("--tp", "--tp-size"),
        envvar="TP_SIZE",
        min=1,
        metavar="N",
        help="Devices to share the model among.",
        rich_help_panel=_MODEL,
    ),
]
Temperature = Annotated[
    float | None,
    _number("--temperature", "-t", panel=_SAMPLING, least=0, text="0: greedy. Default: what the model advises, or 0."),
]
TopK = Annotated[
    int | None, _number("--top-k", panel=_SAMPLING, least=0, text="Sample from the N likeliest tokens; 0: all.")
]
TopP = Annotated[
    float | None,
    _number("--top-p", panel=_SAMPLING, least=0, most=1, text="Sample from the likeliest that make up N; 1: all."),
]
MinP = Annotated[
    float | None,
    _number("--min-p", panel=_SAMPLING, least=0, most=1, text="Leave out what is under N of the likeliest; 0: none."),
]
Seed = Annotated[int, _number("--seed", "-s", panel=_SAMPLING, text="0: another one each time.")]
MaxTokens = Annotated[
    int | None, _number("--max-tokens", "--n-predict", "-n", panel=_SAMPLING, least=1, text="Longest answer.")
]
System = Annotated[
    str | None, typer.Option("--system", metavar="TEXT", help="The system message.", rich_help_panel=_CHAT)
]
Reset = Annotated[bool, _flag("--reset", panel=_CHAT, text="No memory: each message is the first.")]
NoStream = Annotated[bool, _flag("--no-stream", panel=_CHAT, text="Print an answer when it is whole.")]
Think = Annotated[
    bool | None,
    _flag("--think/--no-think", panel=_CHAT, text="Whether a model that can think first does. Default: its own."),
]
Lookup = Annotated[bool, _flag("--pld", panel=_LOOKUP, text="Draft from what was said: the same text, sooner.")]
LookupK = Annotated[int | None, _number("--pld-k", panel=_LOOKUP, least=1, text="Longest draft (10).")]
LookupNgram = Annotated[
    int | None, _number("--pld-ngram", panel=_LOOKUP, least=1, text="Shortest match that may draft (1).")
]
LookupMinHist = Annotated[
    int | None, _number("--pld-min-hist", panel=_LOOKUP, least=0, text="Tokens before the first draft (20).")
]
LookupNoGuard = Annotated[bool, _flag("--pld-no-guard", panel=_LOOKUP, text="Draft repetitions too.")]
LookupDistinct = Annotated[
    int | None,
    _number("--pld-guard-distinct", panel=_LOOKUP, least=0, text="Fewest different tokens of a draft (3)."),
]
LookupTail = Annotated[
    int | None,
    _number("--pld-guard-tail", panel=_LOOKUP, least=1, text="Equal tokens after which their like is not drafted (6)."),
]
LookupWarn = Annotated[
    int | None, _number("--pld-loop-warn", panel=_LOOKUP, least=1, text="Equal tokens in a row to warn of (8).")
]


def _run_model(command: str, model: str | None, model_dir: str | None, **given: Any) -> NoReturn:
    """Names of `given` are those of `Options`; `check` refuses what does not go together."""
    _need_torch()
    _need_engine(command)
    from whorl.serve.command import Options, prepare

    with _asking():
        if model is not None and model_dir is not None:
            raise ValueError(f"{command}: MODEL {model} and --model-dir {model_dir} are the same thing: say one")
        work = prepare(Options(model=model or model_dir, **given))
    sys.exit(work())


def _need_engine(command: str) -> None:
    packages = {"tokenizers": "tokenizers", "jinja2": "jinja2", "safetensors": "safetensors", "gguf": "gguf"}
    if missing := [name for name, module in packages.items() if importlib.util.find_spec(module) is None]:
        _stop(f"{command} needs {', '.join(missing)}: pip install 'whorl[engine]'")


@app.command()
def generate(
    model: Model = None,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", metavar="TEXT", help="What to go on from.")] = None,
    prompt_file: Annotated[
        str | None,
        typer.Option("--prompt-file", "-f", metavar="FILE", help="The prompt is in a file; -: standard input."),
    ] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Seed = 0,
    chat: Annotated[
        bool,
        _flag("--chat", "-c", panel=_CHAT, text="The prompt is a message: write it with the model's chat template."),
    ] = False,
    system: System = None,
    think: Think = None,
    interactive: Annotated[
        bool, _flag("--interactive", "-i", panel=_CHAT, text="Read prompts line by line; with --chat a conversation.")
    ] = False,
    reset: Reset = False,
    no_stream: NoStream = False,
    max_seq: MaxSeq = None,
    tp: TensorParallel = 1,
    model_dir: ModelDir = None,
    device: ModelDevice = None,
    dtype: ModelDtype = None,
    pld: Lookup = False,
    pld_k: LookupK = None,
    pld_ngram: LookupNgram = None,
    pld_min_hist: LookupMinHist = None,
    pld_no_guard: LookupNoGuard = False,
    pld_guard_distinct: LookupDistinct = None,
    pld_guard_tail: LookupTail = None,
    pld_loop_warn: LookupWarn = None,
    as_json: Json = False,
) -> None:
    """Go on from a prompt, or with --chat answer it. The text goes to standard output, nothing else does."""
    given = {name: value for name, value in locals().items() if name not in ("prompt_file", "no_stream")}
    with _asking():
        from whorl.serve.command import read_prompt

        given["prompt"] = read_prompt(prompt, prompt_file)
    _run_model("generate", stream=not no_stream, **given)


@app.command()
def chat(
    model: Model = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Seed = 0,
    system: System = None,
    think: Think = None,
    reset: Reset = False,
    no_stream: NoStream = False,
    max_seq: MaxSeq = None,
    tp: TensorParallel = 1,
    model_dir: ModelDir = None,
    device: ModelDevice = None,
    dtype: ModelDtype = None,
    pld: Lookup = False,
    pld_k: LookupK = None,
    pld_ngram: LookupNgram = None,
    pld_min_hist: LookupMinHist = None,
    pld_no_guard: LookupNoGuard = False,
    pld_guard_distinct: LookupDistinct = None,
    pld_guard_tail: LookupTail = None,
    pld_loop_warn: LookupWarn = None,
) -> None:
    """Talk with a model in the terminal. It remembers the conversation; /help lists what else it takes."""
    given = {name: value for name, value in locals().items() if name != "no_stream"}
    _run_model("chat", stream=not no_stream, chat=True, interactive=True, **given)


@app.command()
def ops(as_json: Json = False) -> None:
    """List the operators and, for each backend, whether it runs here or why not."""
    _need_torch()
    from whorl.device import BACKENDS, default_device, device_name
    from whorl.ops import OPS

    device = default_device()
    found = {name: op.availability(device) for name, op in OPS.items()}
    if as_json:
        operators = [
            {
                "name": name,
                "schema": f"whorl::{name}{OPS[name].schema}",
                "backends": {b: {"available": why is None, "reason": why} for b, why in found[name].items()},
            }
            for name in OPS
        ]
        _print_json({"device": device, "device_name": device_name(device), "operators": operators})
        return
    cells = {name: [_availability(found[name], b) for b in BACKENDS] for name in OPS}
    widths = [max(len(row[i]) for row in [*cells.values(), BACKENDS]) for i in range(len(BACKENDS))]
    print(f"device {device}: {device_name(device)}\n")
    for name, row in {"operator": BACKENDS, **cells}.items():
        print(f"{name:<24}" + "  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)).rstrip())


def _availability(found: dict[str, str | None], backend: str) -> str:
    return (found[backend] or "yes") if backend in found else "-"


@app.command()
def selftest(
    device: Annotated[Device | None, typer.Option(help="Default: the best this machine has.")] = None,
    as_json: Json = False,
) -> None:
    """Run every operator's cases in every backend of this machine; the report can go into a bug report."""
    _need_torch()
    from whorl import selftest as tests
    from whorl.device import require

    with _asking():
        chosen = require(device.value) if device else None
    report = tests.run(chosen)
    if as_json:
        _print_json(report.as_dict())
    else:
        print(tests.render(report))
    sys.exit(0 if report.passed else 1)


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
    _need_torch()
    from whorl.bench import ops as bench_module
    from whorl.device import require

    with _asking():
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
        _print_json(result)
    else:
        print(bench_module.render(result))
    sys.exit(0 if bench_module.is_good(result) else 1)


@bench.command("positions")
def bench_positions(
    repeats: Annotated[int, typer.Option(min=1, help="Runs to take the median of.")] = 20, as_json: Json = False
) -> None:
    """Time multimodal position ids next to transformers' get_rope_index (needs transformers)."""
    _need_torch()
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
    _need_torch()
    from whorl.bench import rope_lookup
    from whorl.device import require

    with _asking():
        where = ["--device", require(device.value)] if device else []
    counts = ["--layers", str(layers), "--repeats", str(repeats)]
    sys.exit(rope_lookup.main([*where, *counts, *(["--json"] if as_json else [])]))


@app.command()
def serve(
    model: Model = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0: every network.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535)] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="WHORL_API_KEY", metavar="KEY", help="Clients must send it as a bearer token.")
    ] = None,
    names: Annotated[
        list[str] | None, typer.Option("--name", help="What clients may call the model; default: its own name.")
    ] = None,
    max_seq: MaxSeq = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Sequences that run at once.")] = 64,
    max_queue: Annotated[int, typer.Option(min=1, help="Requests that may wait; one more gets 429.")] = 1024,
    max_body: Annotated[int, typer.Option(min=1, help="Bytes of a request; more get 413.")] = 16 << 20,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds for a whole request; longer ones get 503.")] = 600,
    drain: Annotated[float, typer.Option(min=1, help="Seconds that running requests have after SIGTERM.")] = 60,
    origins: Annotated[
        list[str] | None, typer.Option("--origin", metavar="URL", help="Web pages that may ask (CORS). Default: none.")
    ] = None,
    model_dir: ModelDir = None,
    device: ModelDevice = None,
    dtype: ModelDtype = None,
    pld: Lookup = False,
    pld_k: LookupK = None,
) -> None:
    """Serve a model over HTTP with OpenAI's interface, until Ctrl-C or SIGTERM."""
    _need_torch()
    _need_engine("serve")
    from whorl.serve import openai

    with _asking():
        openai.need_extra()
        if model is not None and model_dir is not None:
            raise ValueError(f"serve: MODEL {model} and --model-dir {model_dir} are the same thing: say one")
        if pld_k is not None and not pld:
            raise ValueError("serve: --pld-k needs --pld")
        run = openai.prepare(
            model or model_dir,
            host=host,
            port=port,
            names=names or (),
            device=device.value if device else None,
            dtype=dtype.value if dtype else None,
            max_model_len=max_seq,
            max_num_seqs=max_num_seqs,
            lookup=(pld_k or 10) if pld else None,
            api_key=api_key,
            origins=tuple(origins or ()),
            max_queue=max_queue,
            max_body=max_body,
            timeout=timeout,
            drain_seconds=drain,
        )
    run()


def main() -> None:
    app()


if __name__ == "__main__":
    main()
