"""Train a LoRA adapter on a CPU in about a minute, load it beside the base, and ask both.

python examples/train_adapter.py                    # the small default model
python examples/train_adapter.py --out my-adapter   # keep the files: whorl serve --lora whorl=my-adapter
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import torch

from whorl import LLM, SamplingParams, nn
from whorl.engine.lora import write_adapter

LESSONS = {"What is your name?": "I am Whorl."}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a folder, a .gguf file or a Hugging Face id")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path, help="a new folder for the adapter. Default: a temporary one")
    args = parser.parse_args()

    llm = LLM(args.model, max_num_seqs=8, unpack=True)
    model: Any = llm.model
    tokenizer: Any = llm.tokenizer
    questions = [tokenizer.encode_chat([{"role": "user", "content": question}]) for question in LESSONS]
    lessons = [tokenizer.encode(text, add_special=False) for text in LESSONS.values()]
    pairs = list(zip(questions, lessons, strict=True))
    sequences = [[*prompt, *answer, tokenizer.eos_ids[0]] for prompt, answer in pairs]
    params = SamplingParams(temperature=0, max_tokens=12)
    before = llm.generate(questions, params, progress=False)

    updates = nn.TrainedUpdates(cast(torch.nn.Module, model), ["q_proj", "v_proj", "up_proj", "down_proj"], rank=8)
    optimizer = torch.optim.AdamW(updates.parameters(), lr=5e-3)
    packed, began = nn.pack(sequences, next(model.parameters()).device), time.perf_counter()
    for step in range(args.steps):
        with updates.attached():
            parts = model.logprobs(packed).split([len(sequence) - 1 for sequence in sequences])
            answers = [part[len(prompt) - 1 :] for part, (prompt, _) in zip(parts, pairs, strict=True)]
            loss = -torch.cat(answers).mean()
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.3f}")
    print(f"trained {sum(x.numel() for x in updates.parameters()):,} numbers in {time.perf_counter() - began:.0f} s")

    with tempfile.TemporaryDirectory() as folder:
        out = args.out or Path(folder) / "adapter"
        write_adapter(out, updates, base=args.model or "")
        llm.load_lora("whorl", out)
    after = llm.generate(questions, SamplingParams(temperature=0, max_tokens=12, lora="whorl"), progress=False)
    again = llm.generate(questions, params, progress=False)
    for question, old, new in zip(LESSONS, before, after, strict=True):
        print(f"{question}\n  base:    {old.text.strip()}\n  adapter: {new.text.strip()}")
    assert [output.token_ids for output in again] == [output.token_ids for output in before], "the base is as it was"


if __name__ == "__main__":
    main()
