"""whorl beside llama.cpp on a CPU: one GGUF file, the same prompt ids and threads, one after the other, by turns.

Each turn is a process of its own, so that memory and a start are those of a user's. llama.cpp runs as the package
xllamacpp, in the interpreter that `--peer` names, because its requirements are not ours:

    python -m venv peer && peer/bin/pip install xllamacpp
    python -m bench.llama_cpp --peer peer/bin/python --out bench/results/cpu.md

Output tokens a second are counted from the first token of the last request to the last token; a prompt's time is that
to its first token.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CASES = {  # requests, tokens of a prompt, tokens of an answer
    "alone": (1, 20, 64),
    "4": (4, 20, 64),
    "8": (8, 20, 64),
    "16": (16, 20, 64),
    "prompt of 905": (1, 905, 2),
    "1024 keys": (1, 1024, 32),
}
SPACING = 977  # between the ids of a prompt


def prompts(count: int, length: int) -> list[list[int]]:
    """Return prompts that share no prefix, of ids that any vocabulary has."""
    return [[100 + (i * SPACING + j * 131) % 20000 for j in range(length)] for i in range(count)]


def run_ours(path: str | None, threads: int) -> dict[str, Any]:
    """Measure whorl in this process."""
    import torch

    from whorl import LLM, SamplingParams
    from whorl.ops.cpu import library

    torch.set_num_threads(threads)
    begin = time.perf_counter()
    llm = LLM(path or None, device="cpu", warmup="off", max_model_len=2048, use_prefix_cache=False)
    results: dict[str, Any] = {"start": time.perf_counter() - begin, "kernels": library.variant()}
    for name, (count, length, answer) in CASES.items():
        params = SamplingParams(max_tokens=answer, temperature=0, ignore_eos=True)
        llm.generate(prompts(1, 8), SamplingParams(max_tokens=2), progress=False)
        begin = time.perf_counter()
        for ids in prompts(count, length):
            llm.add(ids, params)
        times: list[float] = []
        waiting = count
        while llm.has_work:
            for delta in llm.step():
                times += [time.perf_counter()] * len(delta.token_ids)
        results[name] = rates(begin, times, waiting)
    return results


def run_peer(path: str, threads: int) -> dict[str, Any]:
    """Measure llama.cpp in this process, through its server's own queue, without HTTP."""
    import threading

    import xllamacpp as xlc

    params = xlc.CommonParams()
    params.model.path = path
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.n_ctx, params.n_parallel, params.warmup = 16 * 2048, 16, False
    begin = time.perf_counter()
    server = xlc.Server(params)
    results: dict[str, Any] = {"start": time.perf_counter() - begin, "kernels": "llama.cpp"}
    for name, (count, length, answer) in CASES.items():
        times: list[float] = []

        def ask(ids: list[int], answer: int = answer, times: list[float] = times) -> None:
            body = {"prompt": ids, "n_predict": answer, "temperature": 0, "ignore_eos": True, "stream": True}

            def note(chunk: Any) -> bool:
                times.extend([time.perf_counter()] * max(1, len(chunk.get("tokens") or [0])))
                return False

            server.handle_completions({**body, "cache_prompt": False}, note)

        begin = time.perf_counter()
        threads_of = [threading.Thread(target=ask, args=(ids,)) for ids in prompts(count, length)]
        for thread in threads_of:
            thread.start()
        for thread in threads_of:
            thread.join()
        results[name] = rates(begin, sorted(times), count)
    return results


def rates(begin: float, times: list[float], count: int) -> dict[str, float]:
    """Return the seconds to the first token and the tokens a second after every request has its first."""
    steady = times[count - 1 :]
    spent = steady[-1] - steady[0]
    return {"first": times[0] - begin, "rate": (len(steady) - 1) / spent if spent else 0.0}


def turn(interpreter: str, side: str, path: str, threads: int) -> dict[str, Any]:
    """Run one side in a process of its own and return what it measured."""
    command = [interpreter, str(Path(__file__).resolve()), "--side", side, "--model", path, "--threads", str(threads)]
    root = str(Path(__file__).resolve().parents[1])
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)} | ({"PYTHONPATH": root} if side == "ours" else {})
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{side} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def copy_rate(threads: int) -> float:
    """Return the bytes a second that all threads read, in GB/s: what a decode step cannot exceed."""
    import torch

    torch.set_num_threads(threads)
    x = torch.ones(1 << 26)
    best = min(_timed(x.sum) for _ in range(5))
    return x.nbytes / best / 1e9


def _timed(function: Any) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def table(turns: dict[str, list[dict[str, Any]]], threads: int) -> str:
    """Return the medians as Markdown."""
    from whorl.bench.provenance import commit
    from whorl.device import arithmetic_of

    def median(side: str, *keys: str) -> float:
        values = [one[keys[0]][keys[1]] if len(keys) > 1 else one[keys[0]] for one in turns[side]]
        return statistics.median(values)

    identity = arithmetic_of("cpu") or {}
    lines = [
        f"CPU: {identity.get('device', platform.machine())}, {threads} threads, kernels {turns['ours'][0]['kernels']}.",
        f"Commit {commit()}, {len(turns['ours'])} turns, medians. Reading: {copy_rate(threads):.1f} GB/s.",
        "",
        "| | whorl | llama.cpp | ratio |",
        "|---|---|---|---|",
    ]
    for name, (_, _, answer) in CASES.items():
        key = "first" if answer <= 2 else "rate"
        ours, peer = median("ours", name, key), median("peer", name, key)
        unit, ratio = ("s", peer / ours) if key == "first" else ("tok/s", ours / peer)
        lines.append(f"| {name}, {unit} | {ours:.3g} | {peer:.3g} | {ratio:.2f} |")
    ours, peer = median("ours", "alone", "first"), median("peer", "alone", "first")
    lines.append(f"| first token of 20, s | {ours:.3g} | {peer:.3g} | {peer / ours:.2f} |")
    for name, unit in (("start", "s"), ("memory", "MB")):
        ours, peer = median("ours", name), median("peer", name)
        lines.append(f"| {name}, {unit} | {ours:.3g} | {peer:.3g} | {peer / ours:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", default=sys.executable, help="an interpreter that has xllamacpp")
    parser.add_argument("--model", default="", help="a .gguf file; default: the default model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", default="", help="a file for the table")
    parser.add_argument("--side", choices=("ours", "peer"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        result = (run_ours if options.side == "ours" else run_peer)(options.model, options.threads)
        result["memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps(result))
        return
    from whorl.engine.weights import resolve

    path = options.model or str(resolve(None))
    turns: dict[str, list[dict[str, Any]]] = {"ours": [], "peer": []}
    for number in range(options.turns):
        for side, interpreter in (("ours", sys.executable), ("peer", options.peer)):
            turns[side].append(turn(interpreter, side, path, options.threads))
            print(number + 1, side, json.dumps(turns[side][-1]), file=sys.stderr)
    text = table(turns, options.threads)
    print(text)
    if options.out:
        Path(options.out).write_text(f"# whorl and llama.cpp on a CPU\n\n{text}\n")


if __name__ == "__main__":
    main()
