"""The indexer's loss in fp16: derivatives far below what fp16 can hold, and scores beyond it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_ops import backends_here
from torch import Tensor

from whorl.ops import indexer_kl_loss
from whorl.ops.indexer import indexer_kl, kl

BACKENDS = backends_here(indexer_kl)
LOST = 2e-3  # of a gradient's norm; observed 4e-4, and above 0.5 where nothing is lifted
Values = dict[str, Any]
Calls = dict[str, Callable[[Values, str], tuple[Tensor, ...]]]


def made(scale: float, weights_scale: float, device: str) -> Values:
    """6 queries, 40 keys, all of them chosen; main attention beside it."""
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int, times: float = 1.0) -> Tensor:
        return (times * torch.randn(*shape, generator=generator)).half().to(device)

    return {
        "q": normal(6, 4, 16, times=scale),
        "k": normal(40, 16, times=scale),
        "weights": normal(6, 4, times=weights_scale),
        "target": torch.rand(6, 40, generator=generator).square().to(device),
    }


def exact(v: Values, grad_scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """By autograd in fp64, of the same numbers."""
    q, k, weights = (v[name].double().requires_grad_() for name in ("q", "k", "weights"))
    scores = torch.einsum("ths,th->ts", torch.einsum("thd,sd->ths", q, k).relu(), weights)
    p = v["target"].double() / v["target"].double().sum(-1, keepdim=True)
    loss = (torch.xlogy(p, p) - p * scores.log_softmax(-1)).sum(-1)
    dq, dk, dweights = torch.autograd.grad(grad_scale * loss.sum(), (q, k, weights))
    return loss.detach(), dq, dk, dweights


def selected(v: Values, backend: str, grad_scale: float, *, deterministic: bool) -> tuple[Tensor, ...]:
    indices = torch.arange(40, dtype=torch.int32, device=v["q"].device).expand(6, 40)
    more: Values = {"grad_scale": grad_scale, "deterministic": deterministic, "backend": backend}
    return indexer_kl(v["q"], v["k"], v["weights"], indices, v["target"], **more)


def dense(v: Values, backend: str, grad_scale: float) -> tuple[Tensor, ...]:
    ends = torch.full((6,), 40, dtype=torch.int32, device=v["q"].device)
    tensors = (v["q"], v["k"], v["weights"], None, v["target"], torch.zeros_like(ends), ends)
    return indexer_kl(*tensors, grad_scale=grad_scale, backend=backend)


WAYS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "selected": lambda *arguments: selected(*arguments, deterministic=False),
    "in a fixed order": lambda *arguments: selected(*arguments, deterministic=True),
    "dense": dense,
}


def lost(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


# Weights of 2**-17: the derivative by a product q . k is about 1e-7, fp16's least number 6e-8.
SMALL = {"scale": 1.0, "weights_scale": 2.0**-17}
GRAD_SCALE = 2.0**14  # the results themselves are in fp16's range


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", WAYS)
def test_small_derivatives_are_not_lost(way: str, backend: str, device: str) -> None:
    v = made(**SMALL, device=device)
    actual, expected = WAYS[way](v, backend, GRAD_SCALE), exact(v, GRAD_SCALE)
    for name, a, b in zip(("loss", "dq", "dk", "dweights"), actual, expected, strict=True):
        assert lost(a, b) < LOST, name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", WAYS)
def test_without_the_lift_they_are(way: str, backend: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above sees it."""
    if backend == "triton":
        from whorl.ops.indexer import key_gradient_triton

        monkeypatch.setattr(key_gradient_triton, "lift", lambda dtype: 1.0)
    else:
        monkeypatch.setattr(kl, "round_operand", lambda ddots, dtype: ddots.to(dtype).to(ddots.dtype))
    v = made(**SMALL, device=device)
    actual, expected = WAYS[way](v, backend, GRAD_SCALE), exact(v, GRAD_SCALE)
    for a, b in zip(actual[1:3], expected[1:3], strict=True):
        assert lost(a, b) > 50 * LOST


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", WAYS)
def test_scores_beyond_fp16(way: str, backend: str, device: str) -> None:
    """Sums of products beyond 65,504: exponentials and logarithms are of fp32."""
    v = made(scale=60.0, weights_scale=4.0, device=device)
    expected = exact(v, 2.0**-10)
    assert expected[0].max() > 65504
    actual = WAYS[way](v, backend, 2.0**-10)
    for name, a, b in zip(("loss", "dq", "dk", "dweights"), actual, expected, strict=True):
        assert a.isfinite().all(), name
        assert lost(a, b) < LOST, name


@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize("is_dense", [False, True])
def test_the_losses_for_training(is_dense: bool, when: Any, device: str) -> None:
    """Through autograd; the coefficient goes into the gradients before they are rounded to fp16."""
    v = made(**SMALL, device=device)
    main_q = torch.randn(6, 2, 8, generator=torch.Generator().manual_seed(6)).half().to(device)
    main_k = torch.randn(40, 1, 8, generator=torch.Generator().manual_seed(7)).half().to(device)
    logits = torch.einsum("thd,sd->ths", main_q.double(), main_k[:, 0].double()) * 0.3
    lse = logits.logsumexp(-1).float()
    v["target"] = (logits - lse.double().unsqueeze(-1)).exp().sum(1)
    leaves = [v[name].clone().requires_grad_() for name in ("q", "k", "weights")]
    options: Values = {"scale": 0.3, "coefficient": GRAD_SCALE, "reduction": "sum", "when": when}
    ends = torch.full((6,), 40, dtype=torch.int32, device=device)
    indices = torch.arange(40, dtype=torch.int32, device=device).expand(6, 40).contiguous()
    selection = (
        (None, main_q, main_k, lse, torch.zeros_like(ends), ends) if is_dense else (indices, main_q, main_k, lse)
    )
    loss = indexer_kl_loss(*leaves, *selection, **options)
    assert loss.dtype == torch.float32
    actual = torch.autograd.grad(loss, leaves)
    for a, b in zip(actual, exact(v, GRAD_SCALE)[1:], strict=True):
        assert a.dtype == torch.float16
        assert lost(a, b) < LOST
