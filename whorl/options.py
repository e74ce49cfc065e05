"""What commands share: how they refuse, and the options that several of them take, each written once. No torch here."""

import contextlib
import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any, NoReturn

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]


class Device(StrEnum):
    cpu = "cpu"
    cuda = "cuda"
    npu = "npu"


class Dtype(StrEnum):
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


class Sp(StrEnum):
    auto = "auto"
    on = "on"
    off = "off"


class SpFormat(StrEnum):
    int8 = "int8"


def stop(message: str) -> NoReturn:
    """Asked wrongly: one line, no traceback."""
    typer.echo(f"whorl: {message}", err=True)
    raise typer.Exit(2)


@contextlib.contextmanager
def asking() -> Iterator[None]:
    """Around what a command makes of its arguments; errors of its work keep their traceback."""
    try:
        yield
    except ValueError as error:
        stop(str(error))


def need_torch() -> None:
    """Refuse where it is not installed; else a terminal shows that something happens in the seconds of its import."""
    if importlib.util.find_spec("torch") is None:
        stop("this command needs torch: pip install torch")
    if "torch" not in sys.modules and sys.stderr.isatty():
        print("starting", end="", file=sys.stderr, flush=True)
        importlib.import_module("torch")
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def need_engine(command: str) -> None:
    packages = {"tokenizers": "tokenizers", "jinja2": "jinja2", "safetensors": "safetensors", "gguf": "gguf"}
    if missing := [name for name, module in packages.items() if importlib.util.find_spec(module) is None]:
        stop(f"{command} needs {', '.join(missing)}: pip install 'whorl[engine]'")


def print_json(document: Any) -> None:
    print(json.dumps(document, indent=2))


SAMPLING, CHAT, MODEL = "Sampling", "Chat", "Model"
LOOKUP, DRAFT = "Prompt lookup decoding", "Drafting"


def number(*names: str, panel: str, text: str, least: float | None = None, most: float | None = None) -> Any:
    return typer.Option(*names, min=least, max=most, metavar="N", help=text, rich_help_panel=panel)


def flag(*names: str, panel: str, text: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel)


Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL", help="A folder, a .gguf file or a Hugging Face id. Default: SmolLM2-135M-Instruct."
    ),
]
ModelDir = Annotated[
    str | None, typer.Option("--model-dir", metavar="MODEL", help="The same as MODEL.", rich_help_panel=MODEL)
]
ModelDevice = Annotated[Device | None, flag("--device", panel=MODEL, text="Default: the best this machine has.")]
ModelDtype = Annotated[
    Dtype | None,
    flag("--dtype", panel=MODEL, text="Of the weights as they are kept. Default: the model's; float32 on a CPU."),
]
MaxSeq = Annotated[
    int | None,
    number(
        "--max-seq", panel=MODEL, least=2, text="Longest prompt and answer together, in tokens. Default: what fits."
    ),
]
MaxStepTokens = Annotated[
    int | None,
    number(
        "--max-step-tokens",
        panel=MODEL,
        least=1,
        text="Prompt tokens of one step; others wait for its end. Default: 2048, on a CPU what takes half a second.",
    ),
]
TensorParallel = Annotated[
    int | None,
    typer.Option(
        *("--tp", "--tp-size"),
        envvar="TP_SIZE",
        min=1,
        metavar="N",
        help="Devices to share the model among, one process each. Default: 1, or those that torchrun started.",
        rich_help_panel=MODEL,
    ),
]
SequenceParallel = Annotated[
    Sp, flag("--sp", panel=MODEL, text="Prompts by sequence parallelism over the ranks of --tp; auto: where it pays.")
]
SpQuantize = Annotated[
    SpFormat | None,
    flag("--sp-quantize", panel=MODEL, text="With --sp: prompts travel in 8 bits. Rounds."),
]
SpReport = Annotated[bool, flag("--report", panel=MODEL, text="Say what --sp has rewritten, on standard error.")]
Temperature = Annotated[
    float | None,
    number("--temperature", "-t", panel=SAMPLING, least=0, text="0: greedy. Default: what the model advises, or 0."),
]
TopK = Annotated[
    int | None, number("--top-k", panel=SAMPLING, least=0, text="Sample from the N likeliest tokens; 0: all.")
]
TopP = Annotated[
    float | None,
    number(
        "--top-p", panel=SAMPLING, least=0, most=1, text="Sample from the likeliest, of N probability together; 1: all."
    ),
]
MinP = Annotated[
    float | None,
    number(
        "--min-p",
        panel=SAMPLING,
        least=0,
        most=1,
        text="Leave out what is less than N times as likely as the likeliest; 0: none.",
    ),
]
Seed = Annotated[
    int, number("--seed", "-s", panel=SAMPLING, text="The same seed, the same text; 0: another one each time.")
]
MaxTokens = Annotated[
    int | None,
    number(
        *("--max-tokens", "--n-predict", "-n"),
        panel=SAMPLING,
        least=1,
        text="Longest answer, in tokens. Default: 256; in a chat what fits.",
    ),
]
System = Annotated[
    str | None, typer.Option("--system", metavar="TEXT", help="The system message.", rich_help_panel=CHAT)
]
Reset = Annotated[bool, flag("--reset", panel=CHAT, text="No memory: each message is the first.")]
NoStream = Annotated[bool, flag("--no-stream", panel=CHAT, text="Print an answer when it is whole.")]
Think = Annotated[
    bool | None,
    flag("--think/--no-think", panel=CHAT, text="Whether a model that can think first does. Default: its own."),
]
Lookup = Annotated[bool, flag("--pld", panel=LOOKUP, text="Draft from what was said: the same text, sooner.")]
LookupK = Annotated[int | None, number("--pld-k", panel=LOOKUP, least=1, text="Longest draft (10).")]
LookupNgram = Annotated[
    int | None, number("--pld-ngram", panel=LOOKUP, least=1, text="Shortest match that may draft (1).")
]
LookupMinHist = Annotated[
    int | None, number("--pld-min-hist", panel=LOOKUP, least=0, text="Tokens before the first draft (20).")
]
LookupNoGuard = Annotated[bool, flag("--pld-no-guard", panel=LOOKUP, text="Draft repetitions too.")]
LookupDistinct = Annotated[
    int | None,
    number("--pld-guard-distinct", panel=LOOKUP, least=0, text="Fewest different tokens of a draft (3)."),
]
LookupTail = Annotated[
    int | None,
    number("--pld-guard-tail", panel=LOOKUP, least=1, text="Equal tokens after which their like is not drafted (6)."),
]
LookupWarn = Annotated[
    int | None, number("--pld-loop-warn", panel=LOOKUP, least=1, text="Equal tokens in a row to warn of (8).")
]
DraftModelPath = Annotated[
    str | None,
    typer.Option(
        "--draft-model",
        metavar="MODEL",
        help="A smaller model of the same tokenizer that drafts for this one.",
        rich_help_panel=DRAFT,
    ),
]
DraftK = Annotated[int | None, number("--draft-k", panel=DRAFT, least=1, text="Longest draft of --draft-model (4).")]
DraftFixed = Annotated[
    bool, flag("--draft-fixed", panel=DRAFT, text="Always draft the longest. Default: as much as pays, by measurement.")
]
ApiKeys = Annotated[
    list[str] | None,
    typer.Option(
        "--api-key",
        envvar="WHORL_API_KEY",
        metavar="KEY",
        help="Clients must send it as a bearer token; may be repeated: keys do not share the prefix cache.",
    ),
]
AllowedHosts = Annotated[
    list[str] | None,
    typer.Option(
        "--allowed-hosts",
        metavar="NAME",
        help="Names in the header Host that are taken, * for any; may be repeated. Default: this machine's own where "
        "only it can reach the server, else any.",
    ),
]
ServedNames = Annotated[
    list[str] | None,
    typer.Option(
        "--name", metavar="NAME", help="What clients may call the model; may be repeated. Default: its own name."
    ),
]
Origins = Annotated[
    list[str] | None,
    typer.Option("--origin", metavar="URL", help="Web pages that may ask (CORS); may be repeated. Default: none."),
]
