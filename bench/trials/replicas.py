"""Prefix cache hit rate and throughput of several replicas on one machine, routed by prefix and by round robin.

    python bench/trials/replicas.py                      # 2 and 4 replicas, both routings: a table
    python bench/trials/replicas.py --replicas 2 --requests 32

Needs the extras ray and bench. The model has random weights, is small enough for a CPU, and uses the tokenizer of the
default model. The KV cache of a replica holds a few of the shared prefixes, not all. `whorl bench serve` makes the
load.
"""

import argparse
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "max_position_embeddings": 4096,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "dtype": "float32",
}
PREFIXES, PREFIX_TOKENS, PROMPT_TOKENS, OUTPUT = 12, 384, 32, 8
CACHE_BLOCKS = 160  # of 16 tokens: room for five or six prefixes and the running requests


def create_replica(settings: Any) -> Any:
    """Return the application of one replica."""
    import torch

    from whorl.engine.llm import LLM
    from whorl.engine.settings import EngineSettings
    from whorl.engine.tokenizer import Tokenizer
    from whorl.engine.weights import random_model, resolve
    from whorl.serve.openai import create_app

    with torch.inference_mode():
        model = random_model(CONFIG, device="cpu", dtype=torch.float32)
    engine = EngineSettings(device="cpu", block_size=16, num_blocks=CACHE_BLOCKS, max_model_len=1024)
    return create_app(LLM(model=model, tokenizer=Tokenizer.from_path(resolve(None)), settings=engine), settings)


def serve(port: int, replicas: int, routing: Any) -> int:
    """Serve the replicas until SIGTERM; returns the exit code."""
    from whorl.cluster.command import build_server
    from whorl.cluster.options import ClusterOptions
    from whorl.engine.settings import EngineSettings

    options = ClusterOptions(on="ray", replicas=replicas, routing=routing)
    # A partial, since Ray must pickle the function by value: by name it would look for it in the worker's __main__.
    make = functools.partial(create_replica)
    return build_server("random", EngineSettings(device="cpu"), options, port=port, make=make)()


def measure(replicas: int, routing: str, requests: int, concurrency: int) -> dict[str, Any]:
    """Start a server, send the load, and return its row."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serve_command = [sys.executable, __file__, "--serve", str(port), "--replicas", str(replicas), "--routing", routing]
    server = subprocess.Popen(serve_command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=sys.stderr)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for(f"{url}/health", server)
        load = [
            "--url",
            url,
            "--requests",
            str(requests),
            "--concurrency",
            str(concurrency),
            "--input",
            str(PROMPT_TOKENS),
        ]
        load += ["--output", str(OUTPUT), "--shared-prefix", str(PREFIX_TOKENS), "--prefixes", str(PREFIXES), "--json"]
        command = [sys.executable, "-m", "whorl", "bench", "serve", *load, "--warmup-requests", "2"]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        return {"replicas": replicas, "routing": routing, "row": json.loads(done.stdout)["rows"][0]}
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()


def wait_for(url: str, server: "subprocess.Popen[bytes]", seconds: float = 300.0) -> None:
    """Return when the server answers; raises RuntimeError when it has ended or takes too long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and server.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=10):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise RuntimeError(f"the server did not answer at {url} within {seconds:g} s")


def table(results: list[dict[str, Any]]) -> str:
    """Return the results as a Markdown table."""
    lines = [
        "| replicas | routing | requests | failed | cached tokens | requests/s | input tok/s | ttft p50 / p90, s |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|")
    for result in results:
        row = result["row"]
        first = " / ".join(f"{row['ttft_ms'][name] / 1000:.2f}" for name in ("p50", "p90"))
        failed = row["num_requests"] - row["num_good"]
        cells = (result["replicas"], result["routing"], row["num_requests"], failed, f"{row['cached_share']:.0%}")
        cells += (f"{row['requests_s']:.2f}", f"{row['input_tok_s']:.0f}", first)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", default="2,4", help="numbers of replicas, separated by commas")
    parser.add_argument("--routing", default="prefix,round_robin")
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--serve", type=int, metavar="PORT", help="run the server of one measurement on this port")
    args = parser.parse_args()
    if args.serve is not None:
        return serve(args.serve, int(args.replicas), args.routing)
    results = []
    for replicas in map(int, args.replicas.split(",")):
        for routing in args.routing.split(","):
            results.append(measure(replicas, routing, args.requests, args.concurrency))
            print(table(results[-1:]), flush=True)
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
