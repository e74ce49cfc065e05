"""Mixtures of experts on CPUs, by the products and the activation of `linear` and `glu`."""

import torch
from torch import Tensor

from ..moe.routed import run_routed
from .glu import glu
from .linear import linear


def experts(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    def run_expert(e: int, rows: Tensor) -> Tensor:
        return linear(glu(linear(rows, gate_up[e])), down[e])

    return run_routed(x, weights, ids, run_expert)


def grouped_matmul(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    products, start = [x.new_empty(0, weight.shape[1])], 0
    for matrix, count in zip(weight, counts.tolist(), strict=True):
        if count:
            products.append(linear(x[start : start + count], matrix))
        start += count
    return torch.cat(products)
