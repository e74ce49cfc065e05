"""Compact moments of 16-bit parameters: the kernel against torch's operators, which one runs, and what is learned."""

import copy
import importlib.util
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_swap_optimizer import SETTINGS, assert_same, carry_over, give_gradients, moments
from torch import Tensor, nn

from whorl.titan import swap_update
from whorl.titan.moments import BLOCK, FORMATS, Int8
from whorl.titan.swap_memory import ALIGNMENT
from whorl.titan.swap_optimizer import SwapAdamW
from whorl.titan.swap_update import Piece, choose_backend

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
GROUP: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "maximize": False}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "maximize": {"maximize": True},
    "no decay": {"weight_decay": 0.0},
    "a tensor": {"lr": torch.tensor(3e-2)},
    "betas": {"betas": (0.0, 0.5), "eps": 1e-3},
}
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def piece(size: int, dtype: torch.dtype, device: str, steps: int = 3, seed: int = 0) -> Piece:
    """A parameter whose moments have been stored before, over many octaves and with zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    grad = torch.randn(size, generator=generator) * 10 ** (2 * torch.randn(size, generator=generator)).clamp(-3, 3)
    grad[::7] = 0
    stored: list[list[Tensor]] = []
    for form, x in zip(FORMATS["int8"], (grad * 0.1, grad.square() * 1e-3), strict=True):
        stored.append([torch.zeros(-(-size // values), dtype=kind) for kind, values in form.parts(dtype)])
        form.encode(x, stored[-1], generator)
    param = torch.randn(size, generator=generator).to(dtype)
    new = (grad + torch.randn(size, generator=generator) * 0.1).to(dtype)
    step = torch.tensor(float(steps), device=device)
    return Piece(param.to(device), new.to(device), step, [[x.to(device) for x in m] for m in stored], 2 * BLOCK)


def parameters(dtype: torch.dtype, device: str) -> list[nn.Parameter]:
    """One over two buckets, one transposed, a tiny one and an empty one."""
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(shape, generator=generator) for shape in ((ALIGNMENT + 77,), (31, 50), (1,), (0, 4))]
    tensors[1] = tensors[1].t()
    return [nn.Parameter(x.to(device, dtype)) for x in tensors]


def on_host(one: Piece) -> Piece:
    moments = [[part.cpu() for part in parts] for parts in one.moments]
    return Piece(one.param.cpu(), one.grad.cpu(), one.step.cpu(), moments, one.offset)


def by_kernel(group: dict[str, Any], pieces: list[Piece], number: int = 5, bucket: int = 2) -> None:
    from whorl.titan import moments_triton

    moments_triton.update(group, pieces, number, bucket)


def decoded(one: Piece) -> list[Tensor]:
    return [form.decode(m, one.param.numel()) for form, m in zip(FORMATS["int8"], one.moments, strict=True)]


# ---- the kernel


# In the quick tests every option with one dtype, by turns.
UPDATES = [
    pytest.param(name, dtype, marks=[pytest.mark.slow] if (i + j) % 3 else [], id=f"{name}-{dtype}")
    for i, name in enumerate(OPTIONS)
    for j, dtype in enumerate(DTYPES)
]


@needs_triton
@pytest.mark.parametrize(("name", "dtype"), UPDATES)
def test_the_kernel_updates_as_torch_does(name: str, dtype: torch.dtype, device: str) -> None:
    """As on the CPU: torch's kernel on CUDA rounds 1 - beta2 to fp32, which is 5e-5 off."""
    group, sizes = GROUP | OPTIONS[name], (1, 77, 256, 5 * BLOCK + 3, 9000)
    theirs, ours = ([piece(size, dtype, where, seed=size) for size in sizes] for where in ("cpu", device))
    swap_update.update(FORMATS["int8"], group, theirs, torch.Generator().manual_seed(0))
    by_kernel(group, ours)
    for a, b in zip(map(on_host, ours), theirs, strict=True):
        # One step of a 16-bit parameter where both are near the middle of two.
        assert torch.allclose(a.param.float(), b.param.float(), rtol=max(3e-6, torch.finfo(dtype).eps), atol=1e-6)
        assert dtype == torch.float32 or (a.param == b.param).float().mean() > 0.99
        for mine, reference in zip(a.moments, b.moments, strict=True):
            assert torch.allclose(mine[1], reference[1], rtol=1e-5, atol=0), "scales"
            assert (mine[0].int() - reference[0].int()).abs().max() <= 1, "codes"


@needs_triton
@pytest.mark.parametrize("steps", [1, 2, 10, 10_000])
def test_bias_corrections_are_those_of_torch(steps: int, device: str) -> None:
    """In fp32 the second one would be wrong by 5e-5 at the first step."""
    theirs, ours = (piece(1000, torch.float32, where, steps) for where in ("cpu", device))
    swap_update.update(FORMATS["int8"], GROUP, [theirs], torch.Generator().manual_seed(0))
    by_kernel(GROUP, [ours])
    assert torch.allclose(ours.param.cpu(), theirs.param, rtol=2e-6, atol=2e-7)


@pytest.mark.slow
@needs_triton
def test_the_kernel_rounds_without_bias(device: str) -> None:
    start = piece(4096, torch.bfloat16, device)
    group = GROUP | {"lr": 0.0}
    first, second = decoded(start)
    grad = start.grad.float()
    exact = [first + (grad - first) * 0.1, second + (grad.square() - second) * 1e-3]
    total = [torch.zeros_like(x) for x in exact]
    count = 60
    for number in range(count):
        one = copy.deepcopy(start)
        by_kernel(group, [one], number)
        for sum_, x in zip(total, decoded(one), strict=True):
            sum_ += x
    for sum_, x, octaves in zip(total, exact, (16, 32), strict=True):
        is_large = x.abs() > x.abs().view(-1, BLOCK).amax(1).repeat_interleave(BLOCK) * 2.0 ** -(octaves - 1)
        error = ((sum_ / count - x) / x)[is_large]
        # A stored value is at most one level, 9.2 %, off, with a standard deviation of at most half of that.
        assert error.abs().max() < 5 * 0.046 / count**0.5
        assert error.mean().abs() < 4 * 0.046 / (count * len(error)) ** 0.5


@needs_triton
def test_random_numbers_follow_update_bucket_and_place(device: str) -> None:
    start = piece(4096 + 256, torch.bfloat16, device)

    def codes(number: int, bucket: int, offset: int) -> Tensor:
        moved = copy.deepcopy(start)
        one = Piece(moved.param, moved.grad, moved.step, moved.moments, offset)
        by_kernel(GROUP, [one], number, bucket)
        return torch.cat([one.moments[0][0].int(), one.moments[1][0].int()])

    assert torch.equal(codes(1, 2, 256), codes(1, 2, 256))
    for other in ((2, 2, 256), (1, 3, 256), (1, 2, 512), (1 << 12, 2, 256)):
        assert not torch.equal(codes(1, 2, 256), codes(*other))


@needs_triton
def test_a_gradient_that_is_not_finite_stays_visible(device: str) -> None:
    one = piece(1024, torch.bfloat16, device)
    one.grad[300], one.grad[800] = float("nan"), float("inf")
    by_kernel(GROUP, [one])
    assert not torch.isfinite(one.param[[300, 800]]).any()
    for scales in (m[1] for m in one.moments):
        assert torch.isfinite(scales).tolist() == [True, False, True, False]
    for values in decoded(one):
        assert torch.isfinite(values[:256]).all()
        assert torch.isnan(values[256:512]).all()


@needs_triton
def test_a_second_moment_never_becomes_zero_in_the_kernel(device: str) -> None:
    size = 256
    grad = torch.logspace(-15, 0, size, device=device)
    stored = [[torch.zeros(size // v, dtype=d, device=device) for d, v in f.parts(grad.dtype)] for f in FORMATS["int8"]]
    one = Piece(torch.zeros(size, device=device), grad, torch.tensor(1.0, device=device), stored, 0)
    by_kernel(GROUP, [one])
    assert (one.moments[1][0] > 0).all()


# ---- which of both runs


def test_the_choice_of_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap_update, "unavailable", lambda name, device, by_name=False: None)
    for dtype in swap_update.HALF:
        assert choose_backend(None, "int8", dtype, "cuda") == "triton"
        assert choose_backend(None, "bfloat16", dtype, "cuda") == "torch"
        assert choose_backend(None, "exact", dtype, "cuda") == "torch"
        assert choose_backend("torch", "int8", dtype, "cuda") == "torch"
    assert choose_backend(None, "int8", torch.float32, "cuda") == "torch", "the bits that it always had"
    assert choose_backend("triton", "int8", torch.float32, "cuda") == "triton"
    monkeypatch.setattr(swap_update, "unavailable", lambda name, device, by_name=False: f"runs on cuda, got {device}")
    assert choose_backend(None, "int8", torch.bfloat16, "npu") == "torch"
    with pytest.raises(ValueError, match="backend is 'triton', and parameters are on npu: it runs on cuda, got npu"):
        choose_backend("triton", "int8", torch.bfloat16, "npu")


def test_refusals_of_a_backend() -> None:
    params = [nn.Parameter(torch.zeros(4))]
    with pytest.raises(ValueError, match="backend is 'cuda', expected one of torch, triton, or None"):
        SwapAdamW(params, backend="cuda")
    with pytest.raises(ValueError, match="has only moments='int8', and moments is 'exact'"):
        SwapAdamW(params, backend="triton")


@needs_triton
@pytest.mark.parametrize("backend", ["triton", None])
def test_the_optimizer_takes_the_kernel(backend: str | None, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from whorl.titan import moments_triton

    calls: list[int] = []
    update = moments_triton.update

    def spy(*arguments: Any) -> None:
        calls.append(arguments[-1])
        update(*arguments)

    monkeypatch.setattr(moments_triton, "update", spy)
    params = parameters(torch.bfloat16, device)
    optimizer = SwapAdamW(params, chunk=ALIGNMENT, moments="int8", backend=backend, **SETTINGS)
    give_gradients(params, 0)
    optimizer.step()
    is_interpreted_without_a_name = backend is None and device == "cpu"
    assert calls == ([] if is_interpreted_without_a_name else [*range(len(optimizer._buckets))])


# ---- in the optimizer


def backends() -> list[Any]:
    return ["torch", pytest.param("triton", marks=needs_triton)]


@pytest.mark.parametrize("dtype", swap_update.HALF)
@pytest.mark.parametrize(("kind", "backend"), [("bfloat16", "torch"), ("int8", "torch"), ("int8", "triton")])
def test_sixteen_bits_follow_an_update_in_float32(kind: str, backend: str, dtype: torch.dtype, device: str) -> None:
    """The first update is exact up to the rounding of the parameter: moments start at zero."""
    if backend == "triton":
        pytest.importorskip("triton")
    ours = parameters(dtype, device)
    wide = [nn.Parameter(p.detach().float()) for p in ours]
    optimizer = SwapAdamW(ours, chunk=ALIGNMENT, moments=kind, backend=backend, **SETTINGS)
    give_gradients(ours, 0)
    for p, w in zip(ours, wide, strict=True):
        assert p.grad is not None
        w.grad = p.grad.float()
    optimizer.step()
    torch.optim.AdamW(wide, fused=True, **SETTINGS).step()
    different = [(p != w.to(dtype)).float().mean() for p, w in zip(ours, wide, strict=True) if p.numel()]
    assert max(different) < (0.01 if backend == "triton" else 1e-9)
    state = optimizer.state_dict()["state"][0]
    assert state["exp_avg"].dtype == (torch.float32 if kind == "int8" else torch.bfloat16)


def sixteen(width: int = 60) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 8)).to(torch.bfloat16)


def learn(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step)).to(next(net.parameters()))
        optimizer.zero_grad()
        net(x).float().square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("backend", backends())
def test_resume_of_sixteen_bits_is_exact(backend: str, device: str, tmp_path: Path) -> None:
    whole, first, second = (sixteen().to(device) for _ in range(3))
    settings: dict[str, Any] = {**SETTINGS, "chunk": ALIGNMENT, "moments": "int8", "backend": backend}
    unbroken = SwapAdamW(whole.parameters(), **settings)
    learn(whole, unbroken, range(4))
    saved = SwapAdamW(first.parameters(), **settings)
    learn(first, saved, range(3))
    resumed = SwapAdamW(second.parameters(), **settings)
    carry_over(first, saved, second, resumed, tmp_path)
    assert_same(moments(resumed), moments(saved))
    learn(second, resumed, range(3, 4))
    assert_same(second.parameters(), whole.parameters())
    assert_same(moments(resumed), moments(unbroken))


@pytest.mark.parametrize(("kind", "dtype", "bytes_"), [("exact", 2, 4), ("exact", 4, 8), ("int8", 2, 2 + 8 / BLOCK)])
def test_the_bytes_that_a_step_moves(kind: str, dtype: int, bytes_: float) -> None:
    params = [nn.Parameter(torch.zeros(2 * ALIGNMENT, dtype={2: torch.bfloat16, 4: torch.float32}[dtype]))]
    optimizer = SwapAdamW(params, chunk=ALIGNMENT, moments=kind)
    assert optimizer.bytes_each_way == 0, "before the first step there are no buckets"
    give_gradients(params, 0)
    optimizer.step()
    assert optimizer.bytes_each_way == 2 * ALIGNMENT * bytes_


# ---- what is learned


class WideAdamW:
    """AdamW of 16-bit parameters with moments in fp32, which are never rounded."""

    def __init__(self, params: Iterable[Tensor], **group: Any) -> None:
        self.params, self.group, self.count = [*params], GROUP | group, torch.zeros(())
        self.first, self.second = ([torch.zeros_like(p, dtype=torch.float32) for p in self.params] for _ in range(2))

    @torch.no_grad()
    def step(self) -> None:
        self.count += 1
        wide, grads = [p.float() for p in self.params], [p.grad.float() for p in self.params if p.grad is not None]
        counts = [self.count] * len(wide)
        swap_update._fused_adamw(self.group, wide, grads, self.first, self.second, counts)
        for p, w in zip(self.params, wide, strict=True):
            p.copy_(w)


def two_layers(seed: int) -> nn.ParameterList:
    torch.manual_seed(seed)
    return nn.ParameterList([torch.randn(96, 32) / 32**0.5, torch.randn(16, 96) / 96**0.5]).to(torch.bfloat16)


def answers(net: nn.ParameterList, x: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, net[0].float())), net[1].float())


def final_loss(make: Callable[..., Any], **settings: Any) -> float:
    """The mean loss of the last 50 of 500 steps of a network that learns what another one answers."""
    net, teacher = two_layers(0), two_layers(99).requires_grad_(False)
    optimizer = make(net.parameters(), lr=2e-3, weight_decay=0.01, **settings)
    losses = []
    for step in range(500):
        x = torch.randn(64, 32, generator=torch.Generator().manual_seed(step))
        for p in net.parameters():
            p.grad = None
        loss = (answers(net, x) - answers(teacher, x)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return sum(losses[-50:]) / 50


# With three seeds the loss was within 1.1 % for int8 and 0.1 % for bfloat16, and 11 to 13 % off where the second moment
# was rounded to the nearest: it then stays what it was after some ten steps, and the steps are too long.
TOLERANCE = 0.03


@pytest.fixture(scope="module")
def reference_loss() -> float:
    return final_loss(WideAdamW)


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_learning_with_compact_moments_is_that_of_moments_in_fp32(kind: str, reference_loss: float) -> None:
    assert final_loss(SwapAdamW, moments=kind) == pytest.approx(reference_loss, rel=TOLERANCE)


@pytest.mark.slow
def test_learning_shows_a_second_moment_that_is_rounded_to_the_nearest(
    reference_loss: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = Int8.encode

    def to_the_nearest(self: Int8, x: Tensor, parts: Any, generator: torch.Generator | None) -> None:
        encode(self, x, parts, generator if self.signed else None)

    monkeypatch.setattr(Int8, "encode", to_the_nearest)
    assert final_loss(SwapAdamW, moments="int8") != pytest.approx(reference_loss, rel=2 * TOLERANCE)
