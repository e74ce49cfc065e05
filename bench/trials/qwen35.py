"""Qwen3.5 on one GPU: its bits, its speeds on random weights of the real shape, and the cost of a prefix hit.

python bench/trials/qwen35.py [--seconds 480]    # parts that would begin after so many seconds are left out
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from whorl import ops
from whorl.bench.random_config import PRESETS
from whorl.device import synchronize
from whorl.engine.llm import LLM
from whorl.engine.sequence import SamplingParams
from whorl.engine.weights import random_model
from whorl.nn import States, StateSpec
from whorl.ops.attention import prompt_triton
from whorl.timing import measure

NAME = "Qwen3.5-35B-A3B"
TESTS = [sys.executable, "-m", "pytest", "-q", "-x", "tests/engine/test_delta_states_gpu.py"]
TESTS += ["tests/engine/test_one_arithmetic_gpu.py", "-k", "delta or qwen3_5_moe or schedule or state"]
DECODE = ["whorl", "bench", "decode", "--random-config", NAME, "--repeats", "3", "--tokens", "64"]
PARTS = [
    TESTS,
    [*DECODE, "--batch", "1", "--context", "4096,131072", "--prompt-tokens", "8192"],
    [*DECODE, "--batch", "64", "--context", "4096", "--prompt-tokens", "32768"],
    [*DECODE, "--batch", "1", "--context", "4096", "--profile"],
]


def moves() -> None:
    """Print the device time of loading a snapshot, and of saving one, beside the time of a plain copy of as much."""
    config = PRESETS[NAME] | {"text_config": PRESETS[NAME]["text_config"] | {"num_experts": 8}}
    model = random_model(config, device="cuda", dtype=torch.bfloat16)
    specs = [spec for spec in model.cache_specs() if isinstance(spec, StateSpec)]
    states = States(specs, 9, 8, "cuda")
    kept = sum(spec.snapshot_bytes for spec in specs)
    source, copy = (torch.empty(kept, dtype=torch.uint8, device="cuda") for _ in range(2))
    jobs = {
        "load": lambda i: states.load(i % 8, i % 8),
        "save": lambda i: states.save(i % 8, i % 8),
        "copy": lambda i: copy.copy_(source),
    }
    print(f"a lane {sum(spec.lane_bytes for spec in specs) / 1e6:.1f} MB, a snapshot {kept / 1e6:.1f} MB")
    for name, job in jobs.items():
        times = []
        for i in range(40):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            job(i)
            end.record()
            synchronize("cuda")
            times.append(begin.elapsed_time(end) * 1e3)
        print(f"{name}: {statistics.median(times[5:]):.1f} us")


def by_kernel(what: str, run: Callable[[], Any], num_steps: int = 1) -> None:
    """Print the device time of each kernel in `run`, the longest first."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(num_steps):
            run()
        synchronize("cuda")
    totals: dict[str, list[float]] = {}
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            totals.setdefault(event.name[:70], []).append(event.time_range.elapsed_us() / num_steps)
    rows = sorted(totals.items(), key=lambda row: -sum(row[1]))
    print(f"== {what}: {sum(map(sum, totals.values())) / 1e3:.3f} ms in kernels", flush=True)
    for name, times in rows[:28]:
        print(
            f"{sum(times):10.1f} us {len(times) / num_steps:6.0f} x {sum(times) / len(times) * num_steps:8.2f} {name}"
        )


def profiles(batches: Sequence[int] = (1, 64), prompt: int = 8192) -> None:
    """Decode steps and a prompt of the whole model, by kernel."""
    with torch.inference_mode():
        model = random_model(PRESETS[NAME], device="cuda", dtype=torch.bfloat16)
    for batch in batches:
        sizes: dict[str, Any] = {"max_num_seqs": batch, "max_model_len": 9216, "use_prefix_cache": False}
        sizes |= {"max_num_batched_tokens": prompt, "num_blocks": batch * 320 + 600, "num_snapshots": 2}
        llm = LLM(model=model, device="cuda", **sizes)
        params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
        tokens = torch.randint(200000, (batch, 4096), generator=torch.Generator().manual_seed(0)).tolist()
        if batch == 1:
            for i in range(2):
                llm.add(torch.randint(200000, (prompt,)).tolist(), SamplingParams(max_tokens=1, ignore_eos=True))
                started = time.perf_counter()
                llm.step() if i == 0 else by_kernel(f"a prompt of {prompt}", llm.step)
                while llm.has_work:
                    llm.step()
                synchronize("cuda")
                print(f"prompt: {time.perf_counter() - started:.3f} s", flush=True)
        sequences = [llm.add(ids, params)[0] for ids in tokens]
        while not all(seq.num_outputs > 4 for seq in sequences):
            llm.step()
        synchronize("cuda")
        started = time.perf_counter()
        for _ in range(32):
            llm.step()
        synchronize("cuda")
        print(f"batch {batch}: {32 * batch / (time.perf_counter() - started):.1f} tok/s", flush=True)
        by_kernel(f"a decode step of {batch}", llm.step, 8)
        del llm


class Replanned:
    """The kernel of attention for prompts with another plan. tokens: of the call's one sequence."""

    def __init__(self, kernel: Any, tokens: int, plan: dict[str, int]) -> None:
        self.kernel, self.tokens, self.plan = kernel, tokens, plan

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        queries = self.plan["QUERIES"]
        return lambda *args, **kwargs: self.kernel[(-(-self.tokens // queries) + 1, grid[1])](
            *args, **kwargs | self.plan
        )


def attention(tokens: int = 8192, block_size: int = 64) -> None:
    """Plans of attention for a prompt with heads of 256 channels."""
    kind: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    count = tokens // block_size
    q, (k, v) = torch.randn(tokens, 16, 256, **kind), (torch.randn(count, block_size, 2, 256, **kind) for _ in "kv")
    tables = torch.arange(count, dtype=torch.int32, device="cuda")[None]
    starts, lengths = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([0, tokens], [tokens]))
    flops, expected, kernel = 2 * 2 * tokens**2 / 2 * 256 * 16, None, prompt_triton._prompt_kernel

    def run() -> torch.Tensor:
        return ops.paged_attention(q, k, v, tables, starts, lengths, scale=256**-0.5)  # type: ignore[no-any-return]

    for queries, warps, stages in ((32, 4, 1), (64, 8, 1), (64, 4, 1), (64, 8, 2), (128, 8, 1), (128, 16, 1)):
        plan = {"QUERIES": queries, "num_warps": warps, "num_stages": stages}
        prompt_triton._prompt_kernel = Replanned(kernel, tokens, plan)
        try:
            y = run()
            expected = y if expected is None else expected
            us = measure([run], "cuda").us
            print(f"{tuple(plan.values())}: {us:.0f} us, {flops / us / 1e6:.0f} TFLOP/s, {bool((y == expected).all())}")
        except Exception as error:
            print(f"{tuple(plan.values())}: {type(error).__name__} {str(error)[:120]}")
    prompt_triton._prompt_kernel = kernel


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--profile", action="store_true", help="nothing but decode steps and a prompt by kernel")
    parser.add_argument("--attention", action="store_true", help="nothing but plans of attention")
    if parser.parse_args().attention:
        attention()
        return 0
    if parser.parse_args().profile:
        profiles()
        return 0
    end, failed = time.monotonic() + parser.parse_args().seconds, 0
    moves()
    torch.cuda.empty_cache()
    for part in PARTS:
        if (left := end - time.monotonic()) < 20:
            print(f"left out: {' '.join(part)}")
            continue
        print(f"$ {' '.join(part)}", flush=True)
        try:
            failed += subprocess.run(part, check=False, timeout=left).returncode != 0
        except subprocess.TimeoutExpired:
            print("stopped: no time is left")
            failed += 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
