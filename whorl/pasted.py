"""Command lines written for other programs: whose options have a meaning here, which are needless, which are missing.

What has one is an option of ours, whose field says how vLLM spells it (`whorl.fields.Option.vllm`). The rest is here,
by name: an option that asks for what is so anyway is passed over with a line on standard error; one that asks for what
we do not have is refused with a line that says what to do.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import typer
from typer.core import TyperCommand

from whorl.options import stop

PASTED = "vLLM's names of these options are understood, too."  # for --help

# Options that take a value, then flags.
_NEEDLESS_VALUES = {
    "--vocab": "the tokenizer comes with the model",
}
_NEEDLESS_FLAGS = {
    "--enable-auto-tool-choice": "tool calls are always read",
    "--enable-chunked-prefill": "long prompts are always read in chunks",
    "--trust-remote-code": "no code of a checkpoint is ever run",
    "--disable-log-requests": "what requests say is not logged",
    "--no-enable-log-requests": "what requests say is not logged",
}
NEEDLESS = _NEEDLESS_VALUES | _NEEDLESS_FLAGS
_RANKS = "models are shared among ranks by tensor parallelism alone: --tensor-parallel-size"
_LORA = "merge the adapter into the weights, and give the folder of the merged model"
_FORMAT = "the checkpoint says how its weights are quantised: leave it out; --quantize rounds them while loading"
MISSING = {
    "--quantization": _FORMAT,
    "-q": _FORMAT,
    "--load-format": "the files themselves say it, safetensors or .gguf: leave it out",
    "--kv-cache-dtype": "the cache has the dtype of the weights: leave it out",
    "--enable-lora": _LORA,
    "--lora-modules": _LORA,
    "--pipeline-parallel-size": _RANKS,
    "-pp": _RANKS,
    "--data-parallel-size": "say --replicas N --on ray: engines of their own behind one address",
    "-dp": "say --replicas N --on ray: engines of their own behind one address",
    "--enable-expert-parallel": _RANKS,
    "--prefill-context-parallel-size": _RANKS,
    "--decode-context-parallel-size": _RANKS,
    "--distributed-executor-backend": "--tensor-parallel-size starts its own processes: leave it out; or use torchrun",
    "--nnodes": "start the ranks of several machines with torchrun",
    "--speculative-config": "say --draft-model MODEL and --draft-k N, --speculate mtp, or --pld for prompt lookup",
    "--tokenizer": "the tokenizer comes with the model: leave it out",
    "--tokenizer-mode": "the tokenizer comes with the model: leave it out",
    "--revision": "download the revision, and give its folder",
    "--download-dir": "Hugging Face's own HF_HOME says where downloads go",
    "--hf-overrides": "edit the config.json of a copy of the model's folder",
    "--rope-scaling": "edit rope_scaling in the config.json of a copy of the model's folder",
    "--limit-mm-per-prompt": "a request may have up to 64 pictures and videos: leave it out",
    "--cpu-offload-gb": "weights stay on their device: share the model among more, with --tensor-parallel-size",
    "--swap-space": "a full cache computes again what it has to give up: leave it out",
    "--additional-config": "vllm-ascend's own settings have no counterpart, but --compilation-config is read",
    "--generation-config": "the model's own generation_config.json advises: leave it out",
    "--scheduling-policy": "requests are taken in the order they come: leave it out",
    "--allowed-origins": "say --allow-origin URL, once for each",
    "--ssl-keyfile": "put a proxy that speaks TLS in front",
    "--ssl-certfile": "put a proxy that speaks TLS in front",
    "--root-path": "let the proxy in front take the prefix off",
}
SEVERAL = (
    "--served-model-name",
    "--allowed-media-domains",
)  # vLLM takes several values behind one name; here, where MODEL came before


class PastedCommand(TyperCommand):
    """A command that knows these options, and takes its own with _ for -, as vLLM does.

    `spread` tells it by its function: `aliases`, `refused`.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        takes_value = {
            name: not getattr(parameter, "is_flag", False)
            for parameter in self.params
            for name in (*parameter.opts, *parameter.secondary_opts)
        }
        refused = MISSING | getattr(self.callback, "refused", {})
        aliases = getattr(self.callback, "aliases", {})
        return super().parse_args(ctx, list(_translate(args, takes_value, aliases, refused, str(self.name))))


def _translate(
    args: list[str],
    takes_value: Mapping[str, bool],
    aliases: Mapping[str, str],
    refused: Mapping[str, str],
    command: str,
) -> Iterator[str]:
    """The arguments as the command knows them."""
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
            typer.echo(f"whorl: {command}: {name} is not read: {NEEDLESS[name]}", err=True)
        elif name in refused and (name.startswith("--") or name[:2] not in takes_value):  # -pp may be -p with a p
            stop(f"{command}: there is no {name}: {refused[name]}")
        else:
            yield word
