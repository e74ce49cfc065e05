"""The `whorl` command. Heavy modules are imported inside the commands, so `--help` and `doctor` run without torch.

Exit codes: 0 success, 1 a check failed or something is wrong, 2 bad usage.
"""

import os
import sys
from typing import Annotated, Any

import typer

from whorl.bench.command import bench
from whorl.chat.models_command import commands as of_models
from whorl.commands import answers, checks, models
from whorl.files import NO_ROOM, CannotWrite
from whorl.host_memory import is_of_memory, limits
from whorl.pasted import PASTED, with_first
from whorl.startup import INTERRUPTED, end_at_once, raise_again

_FIRST = ("--device", "--max-seq", "--tp", "--quantize")  # of the engine's options, those that people use first
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


# ---- the commands, in the order of --help


def _model_command(*options: str) -> dict[str, Any]:
    """Return how a command that runs a model is registered. options: those that --help lists first."""
    return {"cls": with_first(*_FIRST, *options), "epilog": PASTED}


_OF_CHAT = _model_command("--system", "--max-tokens", "--temperature", "--think", "--seed")
_OF_TORCHTITAN = {"allow_extra_args": True, "ignore_unknown_options": True}

app.command()(checks.doctor)
app.command(**_model_command("--prompt", "--chat", "--system", "--max-tokens", "--temperature", "--json"))(
    answers.generate
)
app.command(**_OF_CHAT)(answers.chat)
app.command("run", **_OF_CHAT, help="The same as whorl chat: whorl run FILE.gguf, or whorl run FILE.gguf PROMPT.")(
    answers.chat
)
app.registered_commands.extend(of_models.registered_commands)  # list, pull, rm, show, ps
app.command()(models.quantize)
app.command()(answers.verify)
app.command()(checks.ops)
app.command()(checks.selftest)
app.command(**_model_command("--host", "--port", "--api-key", "--name", "--max-num-seqs", "--gpu-memory-utilization"))(
    answers.serve
)
app.command(context_settings=_OF_TORCHTITAN)(models.train)
app.command()(models.plan)


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
