"""Train a tiny DeepSeek-V3.2 with TorchTitan on this machine, without network access, and print its losses.

    python examples/train_tiny.py --steps 20 --out /tmp/tiny

The same from the command line: `whorl train tiny --training.steps 20 --job.dump_folder /tmp/tiny`.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("outputs/tiny_example"))
    args = parser.parse_args()

    command = [sys.executable, "-m", "whorl", "train", "tiny"]  # any option of TorchTitan may follow
    command += ["--training.steps", str(args.steps), "--job.dump_folder", str(args.out)]
    done = subprocess.run(command, check=False)
    if done.returncode != 0:
        return done.returncode

    lines = [json.loads(line) for line in (args.out / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    first, last = steps[0], steps[-1]
    print(f"loss {first['loss']:.3f} -> {last['loss']:.3f} in {last['step']} steps")
    print(f"indexer KL {first['indexer_kl']:.4f} -> {last['indexer_kl']:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
