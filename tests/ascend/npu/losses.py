"""The indexer's losses over torch_npu's fused operators: numbers on kernels of the tests, shapes on FakeTensors."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from whorl.ops import causal_bounds, indexer_kl_loss
from whorl.ops.sparse_attention.cases import select

Values = dict[str, Any]
LOSSES = ("selected keys", "visible keys")
LEAVES = ("q", "k", "weights")
SIZES = ((6, 40), (9, 9))  # queries and keys


def inputs(name: str, queries: int, keys: int, device: str = "cpu") -> Values:
    """Inside the documented limits, in bf16."""
    more: Values = {"dtype": torch.bfloat16, "device": device}
    is_dense = name == "visible keys"
    dim = 192 if is_dense else 576
    values: Values = {
        "q": torch.randn(queries, 8, 128, **more),
        "k": torch.randn(keys, 128, **more),
        "weights": torch.randn(queries, 8, **more) * (8 * 128) ** -0.5,
        "main_q": torch.randn(queries, 32, dim, **more),
        "main_k": torch.randn(keys, 32 if is_dense else 1, dim, **more),
        "main_lse": 2 + torch.rand(queries, 32, device=device),
    }
    if is_dense:
        return values | {"indices": None}
    if device == "cpu":
        return values | {"indices": select(queries, keys, 17, causal=True, device=device)}
    return values | {"indices": torch.zeros(queries, 17, dtype=torch.int32, device=device)}


def gradients(values: Values, **options: Any) -> tuple[Tensor, ...]:
    leaves = {n: values[n].detach().requires_grad_() for n in LEAVES}
    loss = indexer_kl_loss(**values | leaves, scale=values["main_q"].shape[2] ** -0.5, coefficient=0.3, **options)
    return loss.detach(), *torch.autograd.grad(loss, list(leaves.values()))


def elsewhere(name: str, values: Values) -> Values:
    """The option that the fused operators do not have: with it, target and divergence are computed one by one."""
    if name == "selected keys":
        return {"deterministic": True}
    return dict(zip(("starts", "ends"), causal_bounds(len(values["q"]), len(values["k"])), strict=True))


def rows(called: list[str], worst: Callable[..., Values]) -> Iterator[Values]:
    for name in LOSSES:
        for sizes in SIZES:
            called.clear()
            values = inputs(name, *sizes)
            got = gradients(values)
            fused = sorted(set(called))
            other = elsewhere(name, values)
            expected = gradients(values, **other)
            wide = {n: v.double() if v is not None and v.is_floating_point() else v for n, v in values.items()}
            gold = gradients(wide, **other)
            yield {"loss": name, "sizes": sizes, "called": fused, "found": worst(got, expected, gold)}


def on_fake(fake: Callable[[], AbstractContextManager[None]], reads: Callable[..., Any], device: str) -> Iterator[str]:
    """Names of losses whose results on a fake NPU have the shapes and the device of what they were made of."""
    for name in LOSSES:
        with fake(), reads([], read=lambda _: [1]):
            values = inputs(name, *SIZES[0], device=device)
            loss, *grads = gradients(values)
            made = [(g.shape, g.dtype, g.device) for g in grads]
            if loss.shape == () and made == [(values[n].shape, values[n].dtype, values[n].device) for n in LEAVES]:
                yield name
