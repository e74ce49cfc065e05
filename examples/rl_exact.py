"""GRPO with the same arithmetic on both sides: whorl samples, and whorl's model is trained. A CPU is enough.

A small model learns a task whose answers a program checks: count on from the number in the prompt. In every step the
sampled log-probabilities are compared with those of the first training forward: with equal weights the ratio of the two
policies is exactly 1 for every token. `--round` plants one rounding in the trainer, of its attention's output to bf16,
as if its kernels were others than the engine's, and shows what becomes of the ratio.

    python examples/rl_exact.py --seeds 0 1 2 --plot rl_exact.png
    python examples/rl_exact.py --round
"""

import argparse
import itertools
import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whorl import LLM, SamplingParams, nn
from whorl.device import synchronize
from whorl.engine.output import Output
from whorl.engine.weights import random_model
from whorl.models.qwen3 import Qwen3
from whorl.nn.training import trainable

NUMBERS, START = 16, 16  # numbers are tokens below 16
CLIP, STEPS, BLOCK = 0.2, 70, 16
CONFIG = Qwen3.tiny(
    vocab_size=NUMBERS + 1, hidden_size=64, intermediate_size=128, num_hidden_layers=1, max_position_embeddings=32
)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The model and the sizes of a run: these learn on a CPU in minutes. prompt, answer: their tokens."""

    config: dict[str, Any] = field(default_factory=lambda: CONFIG)
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    prompt: int = 2
    answer: int = 6
    prompts: int = 4
    copies: int = 8
    learning_rate: float = 2e-3

    def random_policy(self) -> Any:
        return random_model(self.config, device=self.device, dtype=self.dtype)

    def engine(self) -> LLM:
        num_seqs = self.prompts * self.copies
        num_blocks = num_seqs * (2 + (self.prompt + self.answer) // BLOCK)
        policy = self.random_policy()
        return LLM(model=policy, device=self.device, num_blocks=num_blocks, block_size=BLOCK, max_num_seqs=num_seqs)


@dataclass
class Curve:
    """What a run has shown, a number for each step."""

    rewards: list[float] = field(default_factory=list)
    mismatches: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    largest_ratio: list[float] = field(default_factory=list)
    sync_seconds: list[float] = field(default_factory=list)
    rollout_seconds: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)

    @property
    def first(self) -> float:
        return sum(self.rewards[:20]) / len(self.rewards[:20])

    @property
    def last(self) -> float:
        return sum(self.rewards[-20:]) / len(self.rewards[-20:])


def prompt(rng: random.Random, length: int) -> list[int]:
    """Signs of a start, and a number."""
    return [START] * (length - 1) + [rng.randrange(NUMBERS)]


def reward(prompt_ids: Sequence[int], answer: Sequence[int]) -> float:
    """The share of tokens that are one more than the token before, with 0 after the highest."""
    tokens = [prompt_ids[-1], *answer]
    return sum(b == (a + 1) % NUMBERS for a, b in itertools.pairwise(tokens)) / len(answer)


def advantages(rewards: Sequence[float]) -> list[float]:
    """Rewards against the mean of their group, in units of its standard deviation."""
    mean = sum(rewards) / len(rewards)
    spread = math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards))
    return [(r - mean) / (spread + 1e-4) for r in rewards]


class Policy:
    """The model that is trained, and the engine that samples from it."""

    def __init__(self, seed: int, setup: Setup, *, is_rounded: bool) -> None:
        torch.manual_seed(seed)
        self.setup, self.model = setup, trainable(setup.random_policy())
        with torch.no_grad():  # small, so that the first policy is close to uniform
            for parameter in self.model.parameters():
                parameter.copy_(parameter if parameter.dim() < 2 else 0.5 * torch.randn_like(parameter) / 8)
        self.llm = setup.engine()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=setup.learning_rate, weight_decay=0.0)
        if is_rounded:
            for mixer in self.model.mixers:
                mixer.o_proj.register_forward_pre_hook(lambda module, inputs: (inputs[0].bfloat16().float(),))

    def sync(self, version: str) -> None:
        """Give the engine the present weights."""
        named = ((name, place.into.detach()) for name, place in nn.destinations(self.model).items())
        self.llm.update_weights(named, version=version)
        synchronize(self.setup.device)

    def sample(self, prompts: Sequence[list[int]], seed: int) -> list[Output]:
        """Return `copies` answers to each prompt."""
        first = SamplingParams(n=self.setup.copies, max_tokens=self.setup.answer, logprobs=0)
        params = [replace(first, seed=seed * len(prompts) + i) for i in range(len(prompts))]
        return self.llm.generate(list(prompts), params, progress=False)

    def logprobs(self, outputs: Sequence[Output]) -> list[Tensor]:
        """Return the log-probabilities of each answer's tokens, with a gradient."""
        packed = nn.pack([output.prompt_ids + output.token_ids for output in outputs], self.setup.device)
        values = self.model.logprobs(packed)
        lengths = [len(output.prompt_ids) + len(output.token_ids) - 1 for output in outputs]
        parts = values.split(lengths)
        return [part[-len(output.token_ids) :] for part, output in zip(parts, outputs, strict=True)]


def loss(new: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
    """Return GRPO's clipped objective, for every token."""
    ratio = (new - old).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()


def step(policy: Policy, number: int, rng: random.Random, seed: int, curve: Curve) -> None:
    """Sync, sample, compare, train."""
    began = time.perf_counter()
    policy.sync(f"step {number}")
    synced = time.perf_counter()
    setup = policy.setup
    outputs = policy.sample([prompt(rng, setup.prompt) for _ in range(setup.prompts)], seed * 10_000 + number)
    sampled_at = time.perf_counter()
    assert all(output.weight_versions == ((f"step {number}", 0),) for output in outputs)
    rewards = [reward(output.prompt_ids, output.token_ids) for output in outputs]
    groups = [rewards[i : i + setup.copies] for i in range(0, len(rewards), setup.copies)]
    per_output = [value for group in groups for value in advantages(group)]
    new = torch.cat(policy.logprobs(outputs))
    old = torch.tensor([each.logprob for output in outputs for each in output.logprobs], device=setup.device)
    lengths = torch.tensor([len(output.token_ids) for output in outputs])
    policy.optimizer.zero_grad()
    loss(new, old, torch.tensor(per_output).repeat_interleave(lengths).to(setup.device)).backward()
    torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
    policy.optimizer.step()
    curve.rewards.append(sum(rewards) / len(rewards))
    curve.mismatches.append(int((new.detach() != old).sum()))
    curve.tokens.append(len(old))
    curve.largest_ratio.append(float((new.detach() - old).abs().max().exp()))
    curve.sync_seconds.append(synced - began)
    curve.rollout_seconds.append(sampled_at - synced)
    curve.step_seconds.append(time.perf_counter() - began)


def run(seed: int, setup: Setup | None = None, *, steps: int = STEPS, is_rounded: bool = False) -> Curve:
    """Train one model and return its curve."""
    policy, rng, curve = Policy(seed, setup or Setup(), is_rounded=is_rounded), random.Random(seed), Curve()
    for number in range(steps):
        step(policy, number, rng, seed, curve)
    return curve


def report(seed: int, curve: Curve) -> str:
    total, other = sum(curve.tokens), sum(curve.mismatches)
    share = sum(curve.rollout_seconds) / sum(curve.step_seconds)
    return (
        f"seed {seed}: reward {curve.first:.3f} (first 20 steps) to {curve.last:.3f} (last 20); mismatches {other} of "
        f"{total} tokens; largest ratio {max(curve.largest_ratio):.6f}; step "
        f"{1000 * sum(curve.step_seconds) / len(curve.step_seconds):.0f} ms, rollout {share:.0%}, sync "
        f"{1000 * sum(curve.sync_seconds) / len(curve.sync_seconds):.1f} ms"
    )


def plot(curves: dict[str, Curve], path: Path) -> None:
    """Draw rewards and the distance of the ratio from 1."""
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, figsize=(7, 5), sharex=True)
    for name, curve in curves.items():
        above.plot(curve.rewards, label=name)
        below.plot([ratio - 1 for ratio in curve.largest_ratio], label=name)
    above.set_ylabel("mean reward")
    below.set_ylabel("largest ratio - 1")
    below.set_xlabel("step")
    above.legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> int:
    """Run every seed; return 1 if one does not learn or has a mismatch."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--round", action="store_true", help="round in the trainer once, and show what it does")
    parser.add_argument("--plot", type=Path, help="write the curves to this picture")
    parser.add_argument("--json", type=Path, help="write the curves to this file")
    options = parser.parse_args()
    curves = {f"seed {seed}": run(seed, steps=options.steps) for seed in options.seeds}
    for seed in options.seeds:
        print(report(seed, curves[f"seed {seed}"]))
    if options.round:
        curves["one rounding"] = rounded = run(options.seeds[0], steps=options.steps, is_rounded=True)
        print("with one rounding,", report(options.seeds[0], rounded))
    if options.plot is not None:
        plot(curves, options.plot)
    if options.json is not None:
        options.json.write_text(json.dumps({name: vars(curve) for name, curve in curves.items()}))
    exact = [curves[f"seed {seed}"] for seed in options.seeds]
    is_good = all(sum(curve.mismatches) == 0 and curve.last >= 2 * curve.first for curve in exact)
    return 0 if is_good else 1


if __name__ == "__main__":
    raise SystemExit(main())
