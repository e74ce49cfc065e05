"""Output tokens per second, time to the first token and peak memory on a CPU: whorl in fp32, whorl cpu4 and llama.cpp.

    python bench/trials/packed_cpu.py --llama-python ~/llama/bin/python --rounds 3 > rounds.jsonl
    python bench/trials/packed_cpu.py --medians rounds.jsonl

All run the GGUF file of the default model, each round in a process of its own, one after the other. llama.cpp runs
where the interpreter of --llama-python has the package xllamacpp; without it only whorl runs. `--loop` times the plain
loop that torch runs on CPUs for which it has no kernel, beside fp32.
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

COUNTS = (1, 4, 8, 16)
OUTPUT = 32
LONG_WORDS = 560  # of TEXT: about 900 tokens
TOPICS = ("a fox", "the sea", "bread", "a train", "winter", "a lamp", "the moon", "ink")
TEXT = Path(__file__).parents[2] / "docs" / "engine.md"

Complete = Callable[[str, int], int]  # prompt and tokens to generate, to the tokens of the prompt


def peak_megabytes() -> dict[str, float]:
    """Return the peak resident memory of this process and, at this moment, what it consists of."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    fields = {"peak": "VmHWM", "now": "VmRSS", "own": "RssAnon", "mapped files": "RssFile"}
    return {name: int(lines[field].split()[0]) / 1024 for name, field in fields.items()}


def prompts(count: int, start: int) -> list[str]:
    return [f"{start + i}. Write a story about {TOPICS[i % len(TOPICS)]}:" for i in range(count)]


def long_prompt(number: int) -> str:
    words = TEXT.read_text(encoding="utf-8").split()
    return f"{number} " + " ".join(words[:LONG_WORDS])


def whorl_runs(quantize: str | None, threads: int) -> tuple[Callable[[list[str]], None], Complete]:
    """Return a function that answers several prompts at once, and one that answers one."""
    import torch

    from whorl import LLM, SamplingParams

    torch.set_num_threads(threads)
    llm = LLM(None, device="cpu", quantize=quantize, max_num_seqs=max(COUNTS), use_prefix_cache=False)

    def answer(texts: list[str], tokens: int = OUTPUT) -> int:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        outputs = llm.generate(texts, params, progress=False)
        assert all(len(output.token_ids) == tokens for output in outputs)
        return len(llm.tokenizer.encode(texts[0]))

    return lambda texts: answer(texts) and None, lambda text, tokens: answer([text], tokens)


def llama_runs(file: str, threads: int) -> tuple[Callable[[list[str]], None], Complete]:
    """Do what `whorl_runs` does with llama.cpp."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = file
    params.n_parallel, params.n_ctx, params.cache_prompt = max(COUNTS), 1024 * max(COUNTS), False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)

    def complete(text: str, tokens: int) -> int:
        request = {"prompt": text, "n_predict": tokens, "max_tokens": tokens, "temperature": 0}
        request |= {"ignore_eos": True, "cache_prompt": False}
        answer = server.handle_completions(request)
        answer = json.loads(answer) if isinstance(answer, (str, bytes)) else answer
        assert answer["usage"]["completion_tokens"] == tokens, answer
        return int(answer["usage"]["prompt_tokens"])

    def answer_all(texts: list[str]) -> None:
        with ThreadPoolExecutor(len(texts)) as pool:
            list(pool.map(lambda text: complete(text, OUTPUT), texts))

    return answer_all, complete


def timed(run: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds that a call takes by the clock and of all CPUs together."""
    started = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - started[0], time.process_time() - started[1]


def measure(engine: str, file: str, threads: int) -> dict[str, Any]:
    """Measure one engine in this process."""
    started = time.perf_counter()
    quantize = None if engine == "fp32" else engine
    answer_all, complete = llama_runs(file, threads) if engine == "llama.cpp" else whorl_runs(quantize, threads)
    row: dict[str, Any] = {"engine": engine, "threads": threads, "load": time.perf_counter() - started}
    row |= {"output": {}, "output_cpu": {}}
    complete("Hello", 4)
    answer_all(prompts(2, 900))
    for count in COUNTS:
        wall, cpu = timed(lambda count=count: answer_all(prompts(count, 100 * count)))  # type: ignore[misc]
        row["output"][str(count)], row["output_cpu"][str(count)] = (count * OUTPUT / s for s in (wall, cpu))
    row["prompt_tokens"] = complete(long_prompt(0), 1)
    row["prompt"], row["prompt_cpu"] = timed(lambda: complete(long_prompt(1), 1))
    return row | {"memory": peak_megabytes(), "load_average": os.getloadavg()[0]}


def loop_times(threads: int) -> None:
    """Print the milliseconds of one row by torch's kernel, by its plain loop, and in fp32 as `ops.linear` runs it."""
    import torch

    from whorl import ops
    from whorl.nn.weights import cpu4

    torch.set_num_threads(threads)
    for rows, columns in ((3072, 576), (576, 1536), (49152, 576)):
        shape = rows, columns
        words = torch.randint(-(2**31), 2**31, (rows, columns // 8), dtype=torch.int32)
        scales, x, weight = torch.rand(rows, columns // 32), torch.randn(1, columns), torch.randn(shape)
        codes = words.view(torch.uint8)
        # Scales in fp32 are what torch's kernel does not take, so that its loop runs on this machine, too.
        loop = torch.ops.aten._dyn_quant_pack_4bit_weight(codes, scales, None, 32, columns, rows)
        kernel = cpu4._pack(words, scales)
        runs = {
            "kernel": functools.partial(cpu4._product, x, kernel, shape),
            "loop": functools.partial(cpu4._product, x, loop, shape),
            "fp32": functools.partial(ops.linear, x, weight),
        }
        medians = {name: _median_milliseconds(run) for name, run in runs.items()}
        print(shape, {name: round(value, 3) for name, value in medians.items()})


def _median_milliseconds(run: Callable[[], object]) -> float:
    run()
    times = []
    for _ in range(9):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e3


def medians(path: Path) -> None:
    """Print the median of each figure over the rounds of a file, as JSON and as rows of a table."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    result = {}
    for engine in dict.fromkeys(row["engine"] for row in rows):
        mine = [row for row in rows if row["engine"] == engine]
        keys = ("load", "prompt", "prompt_cpu", "prompt_tokens", "load_average")
        middle = {key: statistics.median(row[key] for row in mine) for key in keys}
        middle["peak"] = statistics.median(row["memory"]["peak"] for row in mine)
        for key in ("output", "output_cpu"):
            middle[key] = {n: statistics.median(row[key][n] for row in mine) for n in mine[0][key]}
        result[engine] = {**middle, "rounds": len(mine)}
    print(json.dumps(result, indent=1))
    for engine, figures in result.items():
        for kind in ("", "_cpu"):
            output = " / ".join(f"{value:.1f}" for value in figures[f"output{kind}"].values())
            print(f"| {engine}{kind} | {output} | {figures[f'prompt{kind}']:.2f} | {figures['peak']:.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-python", help="an interpreter that has xllamacpp")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--engines", default="fp32,cpu4,llama.cpp")
    parser.add_argument("--medians", type=Path)
    parser.add_argument("--loop", action="store_true")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--measure", nargs=2, metavar=("ENGINE", "FILE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print("result", json.dumps(measure(*args.measure, args.threads)), flush=True)
        return
    if args.medians:
        return medians(args.medians)
    if args.loop:
        return loop_times(args.threads)
    from whorl.engine.weights import resolve

    for _ in range(args.rounds):
        for engine in args.engines.split(","):
            python = args.llama_python if engine == "llama.cpp" else sys.executable
            if python is None:
                continue  # see --llama-python
            command = [python, __file__, "--measure", engine, str(resolve(None)), "--threads", str(args.threads)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            line = next(line for line in done.stdout.splitlines() if line.startswith("result "))
            print(line.removeprefix("result "), flush=True)


if __name__ == "__main__":
    main()
