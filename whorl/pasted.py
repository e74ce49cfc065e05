"""Command lines written for vLLM or llama.cpp: options that whorl translates, ignores or refuses.

An option that whorl has is translated: its field states vLLM's name (`whorl.fields.Option.vllm`), and llama.cpp's are
listed here. So are the others: one that asks for something whorl always does is ignored with a line on standard error;
one that asks for something whorl does not have is refused with a line that says what to do instead.
"""

import copy
import difflib
import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from whorl.options import stop

HELP_ALL = "--help-all"
PASTED = "vLLM's and llama.cpp's names for these options work too."  # for --help
# llama.cpp's names, each with whorl's.
LLAMA_CPP = {
    **dict.fromkeys(("-m", "-hf", "--hf-repo"), "--model-dir"),
    **dict.fromkeys(("-c", "--ctx-size"), "--max-seq"),
    **dict.fromkeys(("-np", "--parallel"), "--max-num-seqs"),
    "--predict": "--max-tokens",
    "--temp": "--temperature",
    "-sys": "--system",
    "--system-prompt": "--system",
    "--alias": "--name",
    "--reverse-prompt": "--stop",
    "-r": "--stop",
    "-ub": "--max-step-tokens",
    "--ubatch-size": "--max-step-tokens",
    "-md": "--draft-model",
    "--model-draft": "--draft-model",
    "--draft-max": "--draft-k",
    "--chat-template-file": "--chat-template",
}

# Ignored options that take a value, then ignored flags.
_NEEDLESS_VALUES = {
    "--max-lora-rank": "slots have room for any rank",
    "--vocab": "the tokenizer comes with the model",
    **dict.fromkeys(("-ngl", "--n-gpu-layers", "--gpu-layers"), "the whole model is on the device, see --device"),
}
_NEEDLESS_FLAGS = {
    "--enable-auto-tool-choice": "tool calls are always parsed",
    "--enable-chunked-prefill": "prefill is always chunked",
    "--enable-lora": "adapters are always taken, see --lora",
    "--trust-remote-code": "code in a checkpoint is never run",
    "--disable-log-requests": "the content of requests is never logged",
    "--no-enable-log-requests": "the content of requests is never logged",
    "--disable-log-stats": "the log has no statistics; GET /metrics has them",
    "--jinja": "chat templates are always read as Jinja",
    **dict.fromkeys(("--mlock", "--no-mmap"), "weights are copied to memory once"),
}
NEEDLESS = _NEEDLESS_VALUES | _NEEDLESS_FLAGS
_RANKS = "tensor parallelism is the only way to split a model over ranks: use --tensor-parallel-size"
_FORMAT = "the checkpoint says how its weights are quantized: leave it out; --quantize rounds them while loading"
_SERVER = "it is an option of whorl serve"
_LENGTH = "it is an option of whorl generate and chat; clients of a server send max_tokens"
# Refused options, with the text that says what to do instead.
MISSING = {
    **dict.fromkeys(("--host", "--port", "--api-key", "--served-model-name"), _SERVER),
    **dict.fromkeys(("-fa", "--flash-attn"), "attention is always fused: leave it out"),
    **dict.fromkeys(("-cnv", "--conversation"), "use whorl chat"),
    **dict.fromkeys(("-b", "--batch-size"), "use --max-num-seqs N for sequences, --max-step-tokens N for prompts"),
    **dict.fromkeys(("-n", "--n-predict", "--predict", "--max-tokens"), _LENGTH),
    "--repeat-penalty": "requests of a server have repetition_penalty",
    "-ts": _RANKS,
    "--tensor-split": _RANKS,
    "--quantization": _FORMAT,
    "-q": _FORMAT,
    "--load-format": "the format follows from the files, safetensors or .gguf: leave it out",
    "--pipeline-parallel-size": _RANKS,
    "-pp": _RANKS,
    "--data-parallel-size": "use --replicas N --on ray: several engines behind one address",
    "-dp": "use --replicas N --on ray: several engines behind one address",
    "--prefill-context-parallel-size": _RANKS,
    "--decode-context-parallel-size": _RANKS,
    "--distributed-executor-backend": "--tensor-parallel-size starts the processes: leave it out, or use torchrun",
    "--nnodes": "start the ranks of several machines with torchrun",
    "--speculative-config": "use --draft-model MODEL and --draft-k N, --speculate mtp, or --pld for prompt lookup",
    "--tokenizer": "the tokenizer comes with the model: leave it out",
    "--tokenizer-mode": "the tokenizer comes with the model: leave it out",
    "--revision": "download the revision and give its folder",
    "--download-dir": "set Hugging Face's HF_HOME to say where downloads go",
    "--hf-overrides": "edit the config.json of a copy of the model's folder",
    "--rope-scaling": "edit rope_scaling in the config.json of a copy of the model's folder",
    "--kv-offloading-size": "use --kv-offload-memory BYTES",
    "--cpu-offload-gb": "weights stay on the device: split the model over more devices with --tensor-parallel-size",
    "--swap-space": "use --kv-offload-memory BYTES, where blocks of preempted sequences go as well",
    "--additional-config": "vllm-ascend's settings have no counterpart, but --compilation-config is read",
    "--generation-config": "the model's generation_config.json has the defaults: leave it out",
    "--scheduling-policy": "requests are scheduled in order of arrival: leave it out",
    "--allowed-origins": "use --allow-origin URL, once for each origin",
    "--ssl-keyfile": "put a proxy that terminates TLS in front",
    "--ssl-certfile": "put a proxy that terminates TLS in front",
    "--root-path": "let the proxy in front strip the prefix",
}
# Options that take several values in vLLM. They do so here only when MODEL came first: else MODEL could be one of them.
SEVERAL = (
    "--served-model-name",
    "--allowed-media-domains",
)


class PastedCommand(TyperCommand):
    """A command that accepts the options of vLLM and llama.cpp, and its own written with _ for -, as vLLM does.

    `whorl.options.expand_options` puts `aliases` and `refused` on its function. `first`: the options that --help shows,
    if it does not show all; see `with_first`.
    """

    first: tuple[str, ...] = ()

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        args = list(_with_config(args, str(self.name)))
        takes_value = {
            name: not getattr(parameter, "is_flag", False)
            for parameter in self.get_params(ctx)
            for name in (*parameter.opts, *parameter.secondary_opts)
            if name.startswith("-")
        }
        refused = MISSING | getattr(self.callback, "refused", {})
        aliases = {name: own for name, own in LLAMA_CPP.items() if own in takes_value and name not in takes_value}
        aliases |= getattr(self.callback, "aliases", {})
        if HELP_ALL in args:
            ctx.meta[HELP_ALL], args = True, ["--help"]
        return super().parse_args(ctx, list(_translate(args, takes_value, aliases, refused, str(self.name))))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        shown = self
        if self.first and HELP_ALL not in ctx.meta:
            shown = copy.copy(self)
            shown.params = [each for each in self.params if not each.opts[0].startswith("-") or self._is_first(each)]
            number = sum(each.opts[0].startswith("-") for each in self.params)
            shown.epilog = f"All {number} options: {ctx.command_path} {HELP_ALL}. {self.epilog or ''}"
        super(PastedCommand, shown).format_help(ctx, formatter)

    def _is_first(self, parameter: Any) -> bool:
        return bool({*parameter.opts} & {*self.first})


def with_first(*names: str) -> type[PastedCommand]:
    """Return a command whose --help lists these options; --help-all lists all."""
    return type("PastedCommand", (PastedCommand,), {"first": names})


def _with_config(args: list[str], command: str) -> list[str]:
    """Put the options of vLLM's `--config FILE` in front of the others, which then count more."""
    at = next((i for i, word in enumerate(args) if word.partition("=")[0] == "--config"), None)
    if at is None:
        return args
    _, equals, file = args[at].partition("=")
    if not equals and at + 1 == len(args):
        stop(f"{command}: --config needs the name of a file")
    file, rest = (file, args[:at] + args[at + 1 :]) if equals else (args[at + 1], args[:at] + args[at + 2 :])
    first = rest[:1] if rest and not rest[0].startswith("-") else []  # MODEL
    options = _read_config(file, command)
    model = options.pop("model", None)
    words = [word for name, value in options.items() for word in _as_words(str(name), value)]
    return [*(first or ([str(model)] if model is not None else [])), *words, *rest[len(first) :]]


def _read_config(file: str, command: str) -> dict[str, Any]:
    try:
        import yaml  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        stop(f"{command}: --config needs a package: pip install pyyaml")
    try:
        options = yaml.safe_load(Path(file).expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        stop(f"{command}: --config {file}: cannot be read: {error}")
    if not isinstance(options, dict):
        stop(f"{command}: --config {file}: expected lines such as `port: 8000`")
    return options


def _as_words(name: str, value: Any) -> list[str]:
    """Return an option of a file as it is written on a command line. As in vLLM, false leaves a switch alone."""
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return [flag] if value else []
    if isinstance(value, list):
        return [word for entry in value for word in (flag, str(entry))]
    return [flag, json.dumps(value) if isinstance(value, dict) else str(value)]


def _translate(
    args: list[str],
    takes_value: Mapping[str, bool],
    aliases: Mapping[str, str],
    refused: Mapping[str, str],
    command: str,
) -> Iterator[str]:
    """Yield the arguments with vLLM's names replaced by those of the command, and without ignored options.

    takes_value: for every option of the command, whether a value follows it. aliases: the command's name for vLLM's.
    refused: options that end the command, with the reason.
    """
    at = 0
    while at < len(args):
        word, at = args[at], at + 1
        if word == "--":
            yield from args[at - 1 :]
            return
        if len(word) < 2 or not word.startswith("-"):
            yield word
            continue
        name, equals, value = word.partition("=")
        if name not in takes_value and name.startswith("--"):
            name = name.replace("_", "-")
        may_be_several = name in SEVERAL and not args[0].startswith("-")
        name = aliases.get(name, name)
        if name in takes_value:
            yield f"{name}{equals}{value}"
            if takes_value[name] and not equals and at < len(args):
                yield args[at]
                at += 1
            while may_be_several and at < len(args) and not args[at].startswith("-"):
                yield from (name, args[at])
                at += 1
        elif name in NEEDLESS:
            at += name in _NEEDLESS_VALUES and not equals
            typer.echo(f"whorl: {command}: {name} is ignored: {NEEDLESS[name]}", err=True)
        elif name in refused and (name.startswith("--") or name[:2] not in takes_value):  # -pp may be -p p
            stop(f"{command}: there is no {name}: {refused[name]}")
        elif name.startswith("--"):
            stop(f"{command}: no such option: {name}{_meant(name, [*takes_value, *aliases])}")
        else:
            yield word


def _meant(name: str, known: Collection[str]) -> str:
    """Return a question about the one option that a misspelt one is close to; else where all options are listed."""
    near = difflib.get_close_matches(name, [one for one in known if one.startswith("--")], n=1, cutoff=0.8)
    return f"; did you mean {near[0]}?" if near else "; --help-all lists those that there are"
