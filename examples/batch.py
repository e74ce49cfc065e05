"""Complete many prompts at once: the engine batches them.

python examples/batch.py                                # the small default model
python examples/batch.py Qwen/Qwen3-0.6B --max-tokens 64
"""

import argparse

from whorl import LLM, SamplingParams

PROMPTS = [
    "The capital of France is",
    "Three colours are red,",
    "One, two, three, four,",
    "The planet closest to the Sun is",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a folder, a .gguf file or a Hugging Face id")
    parser.add_argument("--max-tokens", type=int, default=24)
    args = parser.parse_args()

    llm = LLM(args.model, max_num_seqs=len(PROMPTS))
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=args.max_tokens), progress=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        print(f"{prompt} ... {output.text.strip()!r} [{len(output.token_ids)} tokens, {output.finish_reason}]")


if __name__ == "__main__":
    main()
