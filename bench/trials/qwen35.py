"""Qwen3.5 on one GPU: its bits, its speeds on random weights of the real shape, and the cost of a prefix hit.

python bench/trials/qwen35.py [--seconds 480]    # parts that would begin after so many seconds are left out
"""

import argparse
import statistics
import subprocess
import sys
import time

import torch

from whorl.bench.random_config import PRESETS
from whorl.device import synchronize
from whorl.engine.weights import random_model
from whorl.nn import States, StateSpec

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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=480)
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
