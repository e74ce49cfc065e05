"""`python -m bench.offload`: a long prompt whose blocks come from host memory, beside a copy of them and its prefill.

Qwen3-30B-A3B with random weights and two prompts of 32,768 tokens, of which the device holds one. Each is computed
once; then they displace each other, so that every further time all blocks come from the host. Checks that the logits
have equal bits. Prints a table, then one JSON document. --quick: small sizes, for a machine without a GPU.

--restart: a chat of 4,000 tokens with the default model goes on in a new process, from files.
"""

import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from whorl import device as devices
from whorl.bench.provenance import provenance
from whorl.bench.random_config import read_config
from whorl.engine.host_blocks import Carry
from whorl.engine.llm import LLM
from whorl.engine.load import use_one_stream
from whorl.engine.sequence import SamplingParams
from whorl.engine.settings import EngineSettings
from whorl.engine.weights import random_model
from whorl.models.qwen3 import Qwen3

app = typer.Typer(add_completion=False)


def first_token(llm: LLM, prompt: list[int]) -> tuple[float, torch.Tensor, int]:
    """Return the milliseconds until a prompt's first token, its logits, and how many tokens were cached."""
    rows: list[torch.Tensor] = []
    run_call = llm.runner.run_call

    def recording(call: Any, *rest: Any) -> Any:
        result = run_call(call, *rest)
        rows.extend(row.clone() for row in result.logits[: len(result.samples)])
        return result

    llm.runner.run_call = recording  # type: ignore[method-assign, assignment]
    devices.synchronize(llm.runner.device)
    started = time.perf_counter()
    (seq,) = llm.add(prompt, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    while not seq.num_outputs:
        llm.step()
    seconds = time.perf_counter() - started
    while llm.has_work:
        llm.step()
    llm.runner.run_call = run_call  # type: ignore[method-assign]
    return seconds * 1e3, rows[0], seq.num_cached


def median_ms(work: Any, device: str, repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):
        devices.synchronize(device)
        started = time.perf_counter()
        work()
        devices.synchronize(device)
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times[1:])


def measure(model: Any, length: int, device: str, repeats: int) -> dict[str, float]:
    """Return milliseconds by what was done."""
    num_blocks = length // 16 + 4
    cache_bytes = 2 * num_blocks * 16 * sum(spec.token_bytes for spec in model.cache_specs())
    sizes: dict[str, Any] = {"num_blocks": num_blocks, "block_size": 16, "max_num_seqs": 2, "max_model_len": length + 8}
    llm = LLM(model=model, device=device, kv_offload_memory=cache_bytes + (1 << 24), **sizes)
    prompts = [[(i * stride + 1) % model.vocab_size for i in range(length)] for stride in (7919, 104729)]
    first_token(llm, [(5 * i + 2) % model.vocab_size for i in range(length)])  # compiles
    llm.forget()
    computed = [first_token(llm, prompt) for prompt in prompts]
    hits: list[float] = []
    for _ in range(repeats):
        for prompt, (_, logits, _) in zip(prompts, computed, strict=True):
            ms, actual, num_cached = first_token(llm, prompt)
            assert num_cached >= length - 16, f"{num_cached} of {length} tokens came from a cache"
            assert torch.equal(actual, logits), "the logits of the first token have other bits"
            hits.append(ms)
    beyond = llm.runner.beyond
    assert beyond is not None
    count = length // 16
    blocks = list(range(count))
    moved = [Carry("block", blocks, blocks, is_spilled=is_spilled) for is_spilled in (True, False)]
    spill, fetch = (median_ms(lambda move=move: llm.runner.move([move]), device, repeats) for move in moved)
    host = devices.host_buffer(1 << 28, device)
    there, total = torch.empty_like(host, device=device), count * beyond.slot_bytes
    copy = median_ms(lambda: there.copy_(host, non_blocking=True), device, repeats) * total / len(host)
    prefill = statistics.median(ms for ms, *_ in computed)
    rows = {"prefill": prefill, "hit, first token": statistics.median(hits), "blocks to the device": fetch}
    return {**rows, "blocks to the host": spill, "pinned copy": copy, "GB": total / 1e9}


def chat(folder: str, length: int) -> dict[str, float | int | str]:
    """Return what a chat's next answer waits for in a process that finds what others have left in the folder."""
    started = time.perf_counter()
    llm = LLM(kv_offload_dir=folder, max_num_seqs=1)
    loaded = time.perf_counter() - started
    vocab_size = llm.vocab_size - 200
    history = [7919 * i % vocab_size + 100 for i in range(length)]
    first_token(llm, history[:40])  # so that no kernel is loaded, nor memory taken, for the first time below
    ms, logits, num_cached = first_token(llm, history)
    digest = hashlib.sha256(logits.float().numpy().tobytes()).hexdigest()[:16]
    llm.close()
    return {"load_s": loaded, "first_token_ms": ms, "cached": num_cached, "logits": digest}


def restart(length: int) -> None:
    """Run `chat` in three processes: nothing is there, files are there, and so are they in the page cache."""
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(3):
            command = [sys.executable, "-m", "bench.offload", "--chat", folder, "--tokens", str(length)]
            runs.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout))
        num_bytes = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    assert len({run["logits"] for run in runs}) == 1, "the logits have other bits after a restart"
    print(json.dumps({**provenance("cpu"), "tokens": length, "bytes": num_bytes, "runs": runs}))
    for name, run in zip(("computed", "after a restart", "after another"), runs, strict=True):
        print(f"{name:18}{run['first_token_ms']:10.1f} ms to the first token, {run['cached']} tokens cached")


@app.command(help=__doc__)
def main(
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes, for a machine without a GPU.")] = False,
    is_restart: Annotated[bool, typer.Option("--restart", help="A chat that goes on in a new process.")] = False,
    folder: Annotated[str | None, typer.Option("--chat", help="Run one process of --restart.")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of the chat, with --restart.")] = 4000,
) -> None:
    if folder is not None:
        print(json.dumps(chat(folder, tokens)))
        return
    if is_restart:
        restart(tokens)
        return
    device = devices.require(devices.default_device())
    settings: dict[str, Any] = {"device": device}
    use_one_stream(EngineSettings(**settings))
    config = Qwen3.tiny(vocab_size=512, max_position_embeddings=1024) if quick else read_config("Qwen3-30B-A3B")
    with torch.inference_mode():
        model: Any = random_model(config, device=device, dtype=torch.float32 if quick else torch.bfloat16)
    length = 512 if quick else 32768
    rows = measure(model, length, device, 2 if quick else 4)
    print(json.dumps({**provenance(device), "tokens": length, "ms": rows}))
    print(f"{length} tokens, {rows['GB']:.2f} GB")
    for name, ms in rows.items():
        if name != "GB":
            print(f"{name:24}{ms:10.1f} ms{ms / rows['pinned copy']:8.2f} of a pinned copy")


if __name__ == "__main__":
    app()
