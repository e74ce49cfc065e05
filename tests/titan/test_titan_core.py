"""The heart of DeepSeek-V3.2's attention: fused against plain torch, whole and in slices, and its loss."""

import contextlib
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("torchtitan")

from torch.utils.checkpoint import checkpoint

from whorl.device import BACKENDS
from whorl.ops import OPS
from whorl.ops.indexer import kl
from whorl.titan.deepseek_v32 import fused
from whorl.titan.deepseek_v32.core import AttentionSettings, Core, SmallOps, attach_loss, new_log, pop_log
from whorl.titan.deepseek_v32.fused import FusedDSA

T, H, TOP = 24, 4, 7
SETTINGS = AttentionSettings(scale=0.3, topk=TOP, nope=16, value=12, coefficient=0.5, global_tokens=100, stage="sparse")
HEAD_TAIL = [0, 1, 2, 3, 4, 19, 20, 21, 22, 23]  # the first of two context-parallel ranks might hold these


def make_inputs(batch: int, dtype: torch.dtype, queries: list[int] | None = None, seed: int = 0) -> list[Tensor]:
    """Of the core. The indexer's are small multiples of 1/8: sums are exact, so every dtype chooses the same keys."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(shape, generator=generator, dtype=torch.float64)

    def exact(*shape: int) -> Tensor:
        return torch.randint(-6, 7, shape, generator=generator) / 8

    inputs = [
        *(normal(batch, T, H, 16), normal(batch, T, H, 8), normal(batch, T, 32), normal(batch, T, 8)),
        normal(H * 28, 32, scale=0.3),
        *(exact(batch, T, 4, 16), exact(batch, T, 16), exact(batch, T, 4)),
    ]
    if queries is not None:
        inputs = [x[:, queries] if i in (0, 1, 5, 7) else x for i, x in enumerate(inputs)]
    return [x.to(dtype).requires_grad_() for x in inputs]


def positions(batch: int, queries: list[int] | None) -> tuple[Tensor | None, Tensor | None]:
    if queries is None:
        return None, None
    return torch.tensor(queries).expand(batch, -1), torch.arange(T).expand(batch, -1)


def run(core: Core, inputs: list[Tensor], queries: list[int] | None = None) -> list[Tensor]:
    """Output, gradients, logged loss."""
    out = core(*inputs, *positions(inputs[0].shape[0], queries))
    flow = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    out.backward(flow.to(out.dtype))
    return [out.detach(), *(x.grad for x in inputs if x.grad is not None), pop_log(core.kl)]


def core_of(path: str, **more: Any) -> Core:
    settings = dataclasses.replace(SETTINGS, **({} if path == "small" else {"path": path}), **more)
    return (SmallOps if path == "small" else FusedDSA)(settings)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("queries", [None, HEAD_TAIL], ids=["in-order", "slice"])
@pytest.mark.parametrize("stage", ["sparse", "warmup"])
@pytest.mark.parametrize("path", ["masked", "absorbed"])
def test_fused_equals_small_operators(path: str, stage: str, queries: list[int] | None, batch: int) -> None:
    """In fp64 to its last digits; in fp32 its error is at most twice that of the small operators in fp32."""
    how = {"stage": stage}
    exact = run(core_of("small", **how), make_inputs(batch, torch.float64, queries), queries)
    same = run(core_of(path, **how), make_inputs(batch, torch.float64, queries), queries)
    small = run(core_of("small", **how), make_inputs(batch, torch.float32, queries), queries)
    actual = run(core_of(path, **how), make_inputs(batch, torch.float32, queries), queries)
    assert len(exact) == len(actual) == (10 if stage == "sparse" else 5)
    for number, (truth, a, b, c) in enumerate(zip(exact, same, small, actual, strict=True)):
        size = truth.double().norm()
        is_log = number == len(exact) - 1  # added up in fp32 in all of them
        assert (a - truth).norm() <= (1e-6 if is_log else 1e-12) * size, number
        errors = [(x - truth).norm() / size for x in (b, c)]
        assert errors[1] <= 2 * errors[0] + 1e-6, (number, errors)  # 8 roundings of fp32: norms of few numbers


KERNELS = (
    *("lightning_indexer", "selection_mask", "masked_attention", "masked_attention_backward", "sparse_attention"),
    *("sparse_attention_backward", "indexer_target", "indexer_kl", "indexer_kl_gradients"),
)


@pytest.mark.parametrize(
    ("path", "stage"),
    [("masked", "sparse"), ("absorbed", "sparse"), pytest.param("masked", "warmup", marks=pytest.mark.slow)],
)
def test_fused_on_triton(path: str, stage: str) -> None:
    """The kernels take what the core hands them: views, strides, bounds."""
    exact = run(core_of("small", stage=stage), make_inputs(1, torch.float64, HEAD_TAIL), HEAD_TAIL)
    with contextlib.ExitStack() as stack:
        for name in KERNELS:
            stack.enter_context(OPS[name].using("triton"))
        actual = run(core_of(path, stage=stage), make_inputs(1, torch.float32, HEAD_TAIL), HEAD_TAIL)
    for truth, a in zip(exact, actual, strict=True):
        assert (a - truth).norm() < 2e-6 * truth.norm()  # fp32; observed 5e-7


def test_all_keys_chosen_is_dense_attention() -> None:
    dense = core_of("small", stage="warmup")(*make_inputs(2, torch.float64))
    for path in ("small", "masked", "absorbed"):
        out = core_of(path, topk=T)(*make_inputs(2, torch.float64))
        assert torch.allclose(out, dense, atol=1e-12), path


@pytest.mark.parametrize("path", ["small", "masked", "absorbed"])
def test_slices_add_up(path: str) -> None:
    """Two ranks of one sequence: outputs are the rows of one rank's, key gradients and losses add up to its."""
    whole = run(core_of(path), make_inputs(1, torch.float64))
    flow = torch.randn(whole[0].shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    rest = [i for i in range(T) if i not in HEAD_TAIL]
    total: list[Any] = [0] * 9
    for queries in (HEAD_TAIL, rest):
        core, inputs = core_of(path), make_inputs(1, torch.float64)
        mine = [x[:, queries] if i in (0, 1, 5, 7) else x for i, x in enumerate(inputs)]
        out = core(*mine, *positions(1, queries))
        assert torch.allclose(out, whole[0][:, queries], atol=1e-12)
        out.backward(flow[:, queries])
        total = [a + b for a, b in zip(total, (*(x.grad for x in inputs), pop_log(core.kl)), strict=True)]
    for a, b in zip(total, whole[1:], strict=True):
        assert torch.allclose(a, b, atol=1e-10)


@pytest.mark.parametrize("path", ["small", "masked", "absorbed"])
def test_heads_of_two_ranks_are_one_target(path: str) -> None:
    """Tensor parallelism: targets of half of the heads add up, and with the sum each rank has the same gradient."""
    seen: list[Tensor] = []

    def keep(target: Tensor) -> Tensor:
        seen.append(target)
        return target

    def half(inputs: list[Tensor], part: slice) -> list[Tensor]:
        q_nope, q_pe, kv, k_pe, weight, *index = (x.detach() for x in inputs)
        own = weight.unflatten(0, (H, -1))[part].flatten(0, 1)
        return [x.clone().requires_grad_() for x in (q_nope[:, :, part], q_pe[:, :, part], kv, k_pe, own, *index)]

    inputs, results = make_inputs(1, torch.float64), []
    for each in (inputs, half(inputs, slice(0, 2)), half(inputs, slice(2, 4))):
        core = core_of(path)
        core.reduce_target = keep
        results.append(run(core, each))
    assert torch.allclose(seen[0], seen[1] + seen[2], atol=1e-12)
    core = core_of(path)
    core.reduce_target = lambda _: seen[0]
    actual = run(core, half(inputs, slice(0, 2)))
    for a, b in zip(actual[6:], results[0][6:], strict=True):
        assert torch.allclose(a, b, atol=1e-12)


def test_path_is_chosen_by_length(monkeypatch: pytest.MonkeyPatch) -> None:
    core = FusedDSA(dataclasses.replace(SETTINGS, topk=2048))
    assert [core._path(n) for n in (4096, 32768)] == ["masked", "absorbed"]
    core.settings = dataclasses.replace(core.settings, path="absorbed")
    assert core._path(4096) == "absorbed"


def test_path_is_chosen_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch_npu is at home, 4096 keys go to npu_sparse_flash_attention."""
    monkeypatch.setattr("whorl.device.is_installed", lambda package: package == "torch_npu")
    monkeypatch.setitem(BACKENDS, "torch_npu", dataclasses.replace(BACKENDS["torch_npu"], home="meta"))
    core = FusedDSA(dataclasses.replace(SETTINGS, topk=2048))
    assert [core._path(4096, torch.device(kind)) for kind in ("cpu", "meta")] == ["masked", "absorbed"]


@pytest.mark.parametrize("stage", ["sparse", "warmup"])
@pytest.mark.parametrize("path", ["masked", "absorbed"])
def test_loss_is_computed_once_under_checkpointing(path: str, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, module = ("indexer_kl", fused) if (path, stage) == ("masked", "sparse") else ("indexer_kl_gradients", kl)
    calls: list[int] = []
    real = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *a, **k: calls.append(1) or real(*a, **k))
    plain = run(core_of(path, stage=stage), make_inputs(1, torch.float32))
    core, inputs = core_of(path, stage=stage), make_inputs(1, torch.float32)
    out = checkpoint(core, *inputs, use_reentrant=False)
    flow = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    out.backward(flow.float())
    checkpointed = [out.detach(), *(x.grad for x in inputs if x.grad is not None), pop_log(core.kl)]
    assert len(calls) == 2  # one for each of the two runs
    assert all(torch.equal(a, b) for a, b in zip(plain, checkpointed, strict=True))


def test_attached_loss_is_logged_once_for_each_backward() -> None:
    log, x = new_log(), torch.ones(3, requires_grad=True)
    for _ in range(2):
        attach_loss(5 * x, (x * x).sum().reshape(1), log).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2 * (5.0 + 2.0)))
    assert pop_log(log).item() == 6
    assert pop_log(log).item() == 0
