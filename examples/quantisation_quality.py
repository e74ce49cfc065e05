"""Compare the next-token distributions of a text with quantised weights, or an 8-bit KV cache, and without.

python examples/quantisation_quality.py                                    # the small default model, a page of docs/
python examples/quantisation_quality.py Qwen/Qwen3-0.6B --text book.txt --tokens 2048 --dtype bfloat16 --formats fp8
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor

from whorl import LLM
from whorl.engine.memory import by_token, cache_specs
from whorl.nn import Step

TEXT = Path(__file__).parents[1] / "docs" / "engine.md"
BLOCK = 16
WEIGHTS = ("fp8", "w8a8", "w4a16", "cpu4")  # as --quantize
CACHES = ("kv-fp8", "kv-int8")  # as --kv-cache-dtype


@torch.inference_mode()
def distributions(llm: LLM, ids: list[int], kv_cache_dtype: str) -> Tensor:
    """Return the log-probabilities [T, V] after each token of one prompt, computed through a KV cache of this dtype."""
    model, device = llm.model, llm.runner.device
    num_blocks, count = -(-len(ids) // BLOCK), len(ids)
    positions = torch.arange(count, device=device)
    step = Step(
        token_ids=torch.tensor(ids, device=device),
        positions=positions,
        slots=positions,
        block_tables=torch.arange(num_blocks, dtype=torch.int32, device=device)[None],
        query_starts=torch.tensor([0, count], dtype=torch.int32, device=device),
        context_lens=torch.tensor([count], dtype=torch.int32, device=device),
        max_position=count,
    )
    caches = [spec.empty(num_blocks, BLOCK, device) for spec in by_token(cache_specs(model, kv_cache_dtype))]
    return model.logits(model.forward(step, caches)).double().log_softmax(-1)


def load(args: argparse.Namespace, quantize: str | None = None) -> LLM:
    return LLM(args.model, dtype=args.dtype, num_blocks=8, quantize=quantize)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a folder, a .gguf file or a Hugging Face id")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of the text, from its beginning")
    parser.add_argument("--dtype", help="dtype of the model; default: that of the checkpoint, float32 on a CPU")
    parser.add_argument("--formats", default=",".join((*CACHES, *WEIGHTS)), help="which to compare")
    args = parser.parse_args()

    llm = load(args)
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode(args.text.read_text())[: args.tokens]
    print(f"{len(ids)} tokens of {args.text.name}, model in {str(llm.model.dtype).removeprefix('torch.')}")
    print("format    perplexity  mean KL   largest KL  largest difference of a logprob  same top token")
    plain = distributions(llm, ids, "auto")
    next_ids = torch.tensor(ids[1:], device=plain.device)[:, None]
    for name in ("plain", *args.formats.split(",")):
        cache = name.removeprefix("kv-") if name in CACHES else "auto"
        other = llm if name in (*CACHES, "plain") else load(args, name)
        quantised = plain if name == "plain" else distributions(other, ids, cache)
        divergence = (plain.exp() * (plain - quantised)).sum(-1)
        logprob, plain_logprob = (logprobs[:-1].gather(1, next_ids) for logprobs in (quantised, plain))
        same = (quantised.argmax(-1) == plain.argmax(-1)).double().mean()
        print(
            f"{name:12}{(-logprob.mean()).exp():8.4f}{divergence.mean():10.2e}{divergence.max():12.2e}"
            f"{(logprob - plain_logprob).abs().max():33.4f}{same:16.1%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
