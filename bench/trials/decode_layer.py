"""Layers of Qwen3-30B-A3B without their attention, for few tokens on a GPU: tiles and kernels of the experts in turn.

    python bench/trials/decode_layer.py      # one, two and four tokens
    python bench/trials/decode_layer.py 1 3  # these numbers of tokens

Prints us of a layer in a recorded step, whose kernels start early. All variants give the same bits, which is asserted.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from whorl import ops
from whorl.device import ahead
from whorl.ops.moe import experts_triton
from whorl.timing import measure

LAYERS, CHANNELS, WIDTH, EXPERTS, CHOICES = 12, 2048, 768, 128, 8
# Columns, channels at once, warps and stages of the first product.
PLANS = ((32, 128, 2, 4), (32, 128, 2, 5), (32, 128, 2, 3), (16, 256, 2, 3), (16, 128, 1, 6), (32, 128, 4, 4))
Layer = dict[str, Tensor]


def weight(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16, device="cuda").normal_(0, shape[-1] ** -0.5)


def layer() -> Layer:
    norms = {name: torch.ones(CHANNELS, dtype=torch.bfloat16, device="cuda") for name in ("norm", "second_norm")}
    products = {"qkv": weight(5120, CHANNELS), "out": weight(CHANNELS, 4096), "router": 4 * weight(EXPERTS, CHANNELS)}
    experts = {"gate_up": weight(EXPERTS, 2 * WIDTH, CHANNELS), "down": weight(EXPERTS, CHANNELS, WIDTH)}
    return norms | products | experts


def run(layers: list[Layer], x: Tensor, residual: Tensor) -> Tensor:
    """Return what the last layer gives; the output product takes channels of q in place of attention's result."""
    for w in layers:
        qkv, _, residual = ops.norm_linear(x, residual, w["norm"], w["qkv"], backend="triton")
        out = ops.linear(qkv[:, :4096], w["out"], backend="triton")
        logits, normed, residual = ops.norm_linear(out, residual, w["second_norm"], w["router"], backend="triton")
        weights, ids = ops.route(logits, CHOICES, backend="triton")
        x = ops.experts(normed, w["gate_up"], w["down"], weights, ids, backend="triton")
    return x


@contextmanager
def changed(**functions: Callable[..., Any]) -> Iterator[None]:
    """Replace functions of the experts' module."""
    before = {name: getattr(experts_triton, name) for name in functions}
    for name, function in functions.items():
        setattr(experts_triton, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(experts_triton, name, function)


def variants() -> Iterator[tuple[str, dict[str, Callable[..., Any]]]]:
    """Yield names and the functions that they replace."""
    yield "in use", {}
    yield "the choices summed by a kernel", {"few_tokens_on_hopper": lambda down, ids: None}
    for columns, block, num_warps, num_stages in PLANS:
        sizes = {"COLUMNS": columns, "BLOCK_C": block, "num_warps": num_warps, "num_stages": num_stages}
        second = experts_triton.few_plan(CHANNELS, 1)[1]
        plans = sizes | {"EVEN": True}, second
        yield f"first product by {sizes}", {"few_plan": lambda channels, tokens, plans=plans: plans}


def main() -> None:
    layers = [layer() for _ in range(LAYERS)]
    for num_tokens in map(int, sys.argv[1:] or (1, 2, 4)):
        x, residual = (torch.randn(num_tokens, CHANNELS, device="cuda").bfloat16() for _ in range(2))
        step = functools.partial(run, layers, x, residual)
        expected: Tensor | None = None
        for name, functions in variants():
            with torch.inference_mode(), ahead(), changed(**functions):
                y, us = step(), measure([step], "cuda").us / LAYERS
            expected = y if expected is None else expected
            assert torch.equal(y, expected), name
            print(f"{num_tokens} tokens: {us:6.2f} us a layer, {name}", flush=True)


if __name__ == "__main__":
    main()
