"""Sample, score the samples under autograd, take a step, sample again: one model, whose logprobs have the same bits.

python examples/train_on_samples.py                           # the small default model
python examples/train_on_samples.py Qwen/Qwen3-0.6B --steps 8
"""

import argparse
from typing import Any, cast

import torch

from whorl import LLM, SamplingParams, nn
from whorl.engine.output import Output

PROMPTS = ["The capital of France is", "Three colours are red,", "One, two, three, four,", "My favourite animal is"]


def reward(output: Output) -> float:
    """Return the share of the letter e in the output, as a simple reward."""
    return output.text.count("e") / max(1, len(output.text))


def logprobs(model: Any, outputs: list[Output]) -> list[torch.Tensor]:
    """Return the logprobs of the sampled tokens, with gradients; all sequences run in one forward pass."""
    sequences = [output.prompt_ids + output.token_ids for output in outputs]
    device = next(model.parameters()).device
    parts = model.logprobs(nn.pack(sequences, device)).split([len(sequence) - 1 for sequence in sequences])
    return [part[len(output.prompt_ids) - 1 :] for part, output in zip(parts, outputs, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a folder, a .gguf file or a Hugging Face id")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=16)
    args = parser.parse_args()

    llm = LLM(args.model, max_num_seqs=2 * len(PROMPTS), unpack=True)
    model = nn.trainable(cast(torch.nn.Module, llm.model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(args.steps):
        params = SamplingParams(temperature=1.0, seed=step, max_tokens=args.max_tokens, logprobs=0, n=2)
        outputs = llm.generate(PROMPTS, params, progress=False)
        scored = logprobs(model, outputs)
        sampled = torch.tensor([token.logprob for output in outputs for token in output.logprobs or []])
        difference = (torch.cat(scored).detach().cpu() - sampled).abs().max().item()
        rewards = torch.tensor([reward(output) for output in outputs])
        advantages = rewards - rewards.mean()
        loss = -sum(a * part.mean() for a, part in zip(advantages.tolist(), scored, strict=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: reward {rewards.mean():.3f}, largest difference of {len(sampled)} logprobs {difference}")


if __name__ == "__main__":
    main()
