"""Every command and option there is: a new one is a promise, and is made here on purpose."""

import subprocess
import sys
from typing import Any

import typer

from whorl.cli import app
from whorl.extras import how_to_install

# Of EngineSettings; bench decode sizes its engines itself.
ANY_ENGINE = {"--device", "--dtype", "--block-size", "--graphs", "--no-graphs", "--run-ahead", "--no-run-ahead"}
ANY_ENGINE |= {
    "--warmup",
    "--kv-cache-dtype",
    "--prompt-graphs",
    "--backend",
    "--logprobs-mode",
    "--lora",
    "--max-loras",
    "--tp-segments",
    "--ep",
    "--expert-parallel",
    "--kv-offload-memory",
    "--kv-offload-dir",
    "--kv-offload-disk",
    "--routed-experts",
}
ENGINE = ANY_ENGINE | {
    *("MODEL", "--model-dir", "--model", "--max-seq", "--tp", "--tp-size", "--report", "--compilation-config"),
    *("--sp", "--sp-quantize", "--sp-min-tokens", "--sp-fuse", "--prefix-cache", "--no-prefix-cache"),
    *("--max-num-seqs", "--max-num-batched-tokens", "--max-step-tokens"),
    *("--num-blocks", "--cache-memory", "--gpu-memory-utilization", "--encoder-cache"),
    *("--num-snapshots", "--snapshot-tokens"),
    *("--quantize", "--unpack", "--no-unpack"),
}
DRAFTING = {
    *("--pld-k", "--pld-ngram", "--pld-min-hist", "--pld-no-guard", "--pld-guard-distinct", "--pld-guard-tail"),
    *("--pld-loop-warn", "--speculate", "--draft-model", "--draft-k", "--draft-fixed"),
}
TEXT = {
    *("--max-tokens", "--n-predict", "-n", "--temperature", "--top-k", "--top-p", "--min-p", "--seed", "-s"),
    *("--top-n-sigma", "--repetition-penalty", "--presence-penalty", "--frequency-penalty"),
    *("--system", "--think", "--no-think", "--reset", "--no-stream", "--stop", "--when-full"),
}
THREADS = {"--threads", "-t"}
PROMPT = {
    "--prompts",
    "--samples",
    "--schema",
    "--prompt",
    "-p",
    "--prompt-file",
    "-f",
    "--chat",
    "--interactive",
    "-i",
    "--json",
    "--image",
    "--video",
}
REPLICAS = {
    *("--on", "--replicas", "--min-replicas", "--max-replicas", "--replica-cpus", "--routing", "--ray-address"),
    "--ray-dashboard",
}
CHAT = sorted(ENGINE | DRAFTING | TEXT | THREADS | {"--pld", "PROMPT"})
SURFACE = {
    "whorl": ["--version"],
    "whorl generate": sorted(ENGINE | DRAFTING | TEXT | PROMPT | THREADS | {"--pld"}),
    "whorl chat": CHAT,
    "whorl run": CHAT,
    "whorl list": [],
    "whorl pull": ["MODEL"],
    "whorl rm": ["MODEL"],
    "whorl show": ["--json", "MODEL"],
    "whorl ps": ["--url"],
    "whorl plan": ["--batch", "--cards", "--json", "--kind", "--kv", "--seq", "--serve", "--top", "--weights"],
    "whorl serve": sorted(
        {"--allowed-hosts", "--api-key", "--drain", "--host", "--max-body", "--max-queue", "--name", "--allow-origin"}
        | {"--api-key-file", "--strict-model-name", "--max-request-pixels"}
        | {"--port", "--timeout", "--seed", "--pld", "--chat-template", "--tool-parser", "--reasoning-parser"}
        | {"--media-folder", "--media-hosts", "--max-logprobs", "--runtime-lora", "--rl", "--weight-transfer-config"}
        | {"--limit-mm-per-prompt", "--log-level", "--override-generation-config", "--mcp-server", "--compare-with"}
        | REPLICAS
        | THREADS
        | ENGINE
        | DRAFTING
    ),
    "whorl doctor": sorted(
        {"--device", "--framework", "--json", "--log", "--rollout", "--set", "--trace", "--train", "--trainer", "PATH"}
    ),
    "whorl quantize": ["--format", "--ignore", "--json", "MODEL", "OUT"],
    "whorl verify": sorted((ENGINE - {"--model-dir", "--model", "--report"}) | THREADS | {"ANSWER", "--json"}),
    "whorl ops": ["--json"],
    "whorl selftest": ["--device", "--jobs", "--json", "--ranks"],
    "whorl train": sorted(
        {"--plan", "--cards", "--dies", "--memory", "--seq", "--batch", "--hardware", "--efficiency", "--link"}
        | {"--network", "--host", "--imbalance", "--top", "--json", "--states", "--checkpointing", "--no-checkpointing"}
        | {"RECIPE", "--ranks", "--fresh", "--torchrun", "--dry-run", "--plot"}
    ),
    "whorl bench": [],
    "whorl bench ops": [
        "--compile",
        "--device",
        "--dtype",
        "--full",
        "--json",
        "--no-compile",
        "--plot",
        "--quick",
        "NAMES",
    ],
    "whorl bench decode": sorted(
        {
            *("MODEL", "--random-config", "--batch", "--tokens", "--prompt-tokens", "--repeats", "--peer", "--json"),
            *("--classify", "--seed", "--context", "--profile"),
        }
        | ANY_ENGINE
        | DRAFTING
    ),
    "whorl bench serve": sorted(
        {"--api-key", "--body", "--chat", "--concurrency", "--ignore-eos", "--input", "--json", "--no-ignore-eos"}
        | {"--output", "--plot", "--prefixes", "--random-config", "--rate", "--records", "--requests", "--seconds"}
        | {"--seed", "--shared-prefix", "--slo", "--sweep", "--timeout", "--trace", "--url", "--warmup-requests"}
        | ENGINE - {"--model-dir", "--model", "--report"}
    ),
    "whorl bench train": sorted(
        {"--device", "--full", "--json", "--layers", "--out", "--peer", "--profile"}
        | {"--ring", "--rows", "--seq", "--steps", "--time-limit", "--tiny", "--warmup"}
    ),
    "whorl bench vision": sorted(
        {"--batch", "--device", "--dtype", "--frame", "--frames", "--json", "--out", "--peer", "--pictures"}
        | {"--processes", "--random-config", "--repeats", "--side", "--time-limit", "--tokens"}
    ),
}


def surface(command: Any, name: str) -> dict[str, list[str]]:
    options = []
    for parameter in command.params:
        is_option = parameter.opts[0].startswith("-")
        options += [*parameter.opts, *parameter.secondary_opts] if is_option else [parameter.name.upper()]
    commands = {name: sorted(options)}
    for sub, inner in getattr(command, "commands", {}).items():
        commands |= surface(inner, f"{name} {sub}")
    return commands


def test_command_line() -> None:
    """A new command or option is a promise: it is made here, on purpose."""
    assert surface(typer.main.get_command(app), "whorl") == SURFACE


WITHOUT_EXTRA = """
import sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.split(".")[0] not in ("fastapi", "starlette", "uvicorn", "prometheus_client", "llguidance"):
            return PathFinder.find_spec(name, path, target)

sys.meta_path = [Without if finder is PathFinder else finder for finder in sys.meta_path]
sys.argv = ["whorl", "serve"]
from whorl.__main__ import main
main()
"""


def test_a_server_without_its_extra_says_what_to_install() -> None:
    result = subprocess.run([sys.executable, "-c", WITHOUT_EXTRA], capture_output=True, text=True, timeout=120)
    assert result.returncode == 2
    assert f"not installed: {how_to_install('serve')}" in result.stderr
    assert "Traceback" not in result.stderr
