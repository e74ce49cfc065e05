"""One turn of `bench.llama_cpp`, in its own process and interpreter: `llama_cpp_turn.py SIDE MODEL THREADS CASE...`.

It needs no package but the one it measures, and prints its results as JSON.
"""

import json
import resource
import sys
import time
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


def run_ours(path: str | None, threads: int, cases: list[str]) -> dict[str, Any]:
    """Measure whorl in this process."""
    import torch

    from whorl import LLM, SamplingParams
    from whorl.ops.cpu import library

    torch.set_num_threads(threads)
    begin = time.perf_counter()
    llm = LLM(path or None, device="cpu", warmup="off", max_model_len=2048, use_prefix_cache=False)
    results: dict[str, Any] = {"start": time.perf_counter() - begin, "kernels": library.variant()}
    for name in cases:
        count, length, answer = CASES[name]
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


def run_peer(path: str, threads: int, cases: list[str]) -> dict[str, Any]:
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
    for name in cases:
        count, length, answer = CASES[name]
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


if __name__ == "__main__":
    side, path, threads, *cases = sys.argv[1:]
    result = (run_ours if side == "ours" else run_peer)(path, int(threads), cases or list(CASES))
    result["memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps(result))
