"""What the default on a CPU costs in quality: a GGUF file in its own bits with tokens in 16 or 8 bits, against fp32.

All are given the same text, the pages of docs/, in windows. The table has the mean Kullback-Leibler divergence of the
next token's distribution from that of fp32, the perplexities, and how often the most likely token is the same.

    python -m bench.cpu_quality --out bench/results/cpu_quality.md
"""

import math
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from whorl.bench.provenance import commit
from whorl.engine.tokenizer import Tokenizer
from whorl.engine.weights import load_model, resolve
from whorl.nn import Step
from whorl.ops.cpu import library

BITS = 16, 8
WINDOW, BLOCK = 512, 16  # tokens of a window, and of a block of the cache


def texts(tokenizer: Any, count: int) -> list[list[int]]:
    """Return windows of the documentation."""
    pages = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    ids = tokenizer.encode("\n\n".join(page.read_text() for page in pages))
    return [ids[i * WINDOW : (i + 1) * WINDOW] for i in range(min(count, len(ids) // WINDOW))]


@torch.inference_mode()
def log_probabilities(model: Any, ids: list[int]) -> Tensor:
    """Return the log-probabilities [T, V] of what follows each token."""
    blocks = -(-len(ids) // BLOCK)
    caches = [spec.empty(blocks, BLOCK, "cpu") for spec in model.cache_specs()]
    positions = torch.arange(len(ids))
    step = Step(
        token_ids=torch.tensor(ids),
        positions=positions,
        slots=positions,
        block_tables=torch.arange(blocks, dtype=torch.int32)[None],
        query_starts=torch.tensor([0, len(ids)], dtype=torch.int32),
        context_lens=torch.tensor([len(ids)], dtype=torch.int32),
        max_position=len(ids),
    )
    return model.logits(model.forward(step, caches)).double().log_softmax(-1)  # type: ignore[no-any-return]


def with_token_bits(model: Any, bits: int, ids: list[int]) -> Tensor:
    """Return what the model computes with tokens of so many bits."""
    for module in model.modules():
        for product in getattr(module, "products", []):
            product.matrix.planes = bits // 8
    return log_probabilities(model, ids)


app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    model: Annotated[str, typer.Option(help="A .gguf file. Default: the default model.")] = "",
    windows: Annotated[int, typer.Option(min=1, help=f"How many windows of {WINDOW} tokens.")] = 16,
    out: Annotated[Path | None, typer.Option(help="A file for the table.")] = None,
) -> None:
    path = model or str(resolve(None))
    parts = texts(Tokenizer.from_path(Path(path)), windows)
    exact = load_model(path, device="cpu", unpack=True, progress=False)
    rounded = load_model(path, device="cpu", progress=False)
    divergences, losses, same, count = [0.0, 0.0], [0.0, 0.0, 0.0], [0, 0], 0
    for ids in parts:
        expected = log_probabilities(exact, ids)
        results = [with_token_bits(rounded, bits, ids) for bits in BITS]
        following = torch.tensor(ids[1:])[:, None]
        for i, each in enumerate((expected, *results)):
            losses[i] -= float(each[:-1].gather(1, following).sum())
        for i, each in enumerate(results):
            divergences[i] += float((expected.exp() * (expected - each)).sum())
            same[i] += int((expected.argmax(-1) == each.argmax(-1)).sum())
        count += len(ids)
    perplexities = [math.exp(loss / (count - len(parts))) for loss in losses]
    rows = [
        ("perplexity", *(f"{each:.4f}" for each in perplexities)),
        ("mean KL divergence from fp32, nats", "0", *(f"{each / count:.2g}" for each in divergences)),
        ("same most likely token", "100%", *(f"{100 * each / count:.2f}%" for each in same)),
    ]
    text = "\n".join(
        [
            f"{Path(path).name}, {count} tokens of docs/, kernels {library.variant()}, commit {commit()}.",
            "",
            "| | fp32 | the file's bits, tokens in 16 bits | in 8 bits |",
            "|---|---|---|---|",
            *(f"| {' | '.join(row)} |" for row in rows),
        ]
    )
    print(text)
    if out is not None:
        out.write_text(f"# Quality of the default on a CPU\n\n{text}\n")


if __name__ == "__main__":
    app()
