"""Log-probabilities: right, of a row alone, and of one token the same bits as of all."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import special
from torch import Tensor

from whorl.device import unavailable
from whorl.engine.sampler import Sampler
from whorl.ops import OPS, log_softmax, token_logprobs
from whorl.ops._rows import row_view
from whorl.ops.log_softmax_triton import LARGEST_BLOCK, token_forward

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ["torch"] if unavailable("triton", DEVICE, by_name=True) else ["torch", "triton"]
BACKWARD = OPS["log_softmax_backward"]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


def draw(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 4.0) -> Tensor:
    return (scale * torch.randn(*shape)).to(DEVICE, dtype)


def peaked(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """One token has about half of the probability: its logprob is small, and shows the last digit of the sum."""
    logits = draw(*shape, dtype=dtype)
    logits[..., shape[-1] // 2] = logits.float().logsumexp(-1).to(dtype)
    return logits


def masked(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The first token and every third are not there."""
    logits = draw(*shape, dtype=dtype)
    logits[..., ::3] = -torch.inf
    return logits


def bits_differ(a: Tensor, b: Tensor) -> int:
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    return int((a.view(torch.int32) != b.view(torch.int32)).sum())


# ---- against others


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_agrees_with_torch_and_scipy(backend: str, dtype: torch.dtype) -> None:
    logits = draw(4, 1003, dtype=dtype)
    got = log_softmax(logits, backend=backend)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, torch.log_softmax(logits.float(), -1), rtol=1e-6, atol=2e-6)
    wide = torch.from_numpy(special.log_softmax(logits.double().cpu().numpy(), axis=-1))
    torch.testing.assert_close(got.double().cpu(), wide, rtol=1e-6, atol=2e-6)


def test_fp64_stays_fp64() -> None:
    logits = draw(3, 70).double()
    wide = torch.from_numpy(special.log_softmax(logits.cpu().numpy(), axis=-1))
    torch.testing.assert_close(log_softmax(logits).cpu(), wide, rtol=1e-14, atol=1e-14)
    assert token_logprobs(logits, torch.tensor([0, 5, 69], device=DEVICE)).dtype == torch.float64


def test_logits_of_any_size(backend: str) -> None:
    """Neither do large ones overflow, nor does the highest lose its digits in the row's sum."""
    logits = torch.tensor([[1e4, 1e4 - 20, -1e4], [-1e38, -1e38, 1e38], [5000.0, 0, 0]], device=DEVICE)
    got = log_softmax(logits, backend=backend)
    expected = torch.log_softmax(logits.double(), -1)
    torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=1e-8)


def test_gradients_in_fp64_are_those_of_torch() -> None:
    check_gradients("torch", torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_those_of_torch(backend: str, dtype: torch.dtype) -> None:
    check_gradients(backend, dtype)


def check_gradients(backend: str, dtype: torch.dtype) -> None:
    logits = draw(3, 170, dtype=dtype).requires_grad_()
    ids = torch.tensor([0, 169, 33], device=DEVICE)
    wide = logits.detach().double().requires_grad_()
    dy = torch.randn(3, 170, dtype=torch.float64, device=DEVICE)
    (expected,) = torch.autograd.grad(torch.log_softmax(wide, -1), wide, dy)
    got = gradient(lambda x: log_softmax(x, backend=backend), logits, dy)
    nearly = {"rtol": torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps}
    nearly = nearly if dtype == torch.bfloat16 else {"rtol": 64 * nearly["rtol"], "atol": 64 * nearly["atol"]}
    torch.testing.assert_close(got.double(), expected, **nearly)
    (expected,) = torch.autograd.grad(-torch.nn.functional.cross_entropy(wide, ids, reduction="none"), wide, dy[:, 0])
    got = gradient(lambda x: token_logprobs(x, ids, backend=backend), logits, dy[:, 0])
    torch.testing.assert_close(got.double(), expected, **nearly)


def gradient(function: Callable[[Tensor], Tensor], logits: Tensor, dy: Tensor) -> Tensor:
    """Of the dtype of logits, and left so by the operator: autograd would convert it."""
    logits = logits.detach().requires_grad_()
    out = function(logits)
    (grad,) = torch.autograd.grad(out, logits, dy.to(out.dtype))
    assert grad.dtype == logits.dtype
    return grad


# ---- a row alone


def wider(logits: Tensor) -> Tensor:
    """The same rows, of odd length and at odd places."""
    memory = torch.full((*logits.shape[:-1], logits.shape[-1] + 4), 77.0, device=DEVICE).to(logits.dtype)
    memory[..., 3:-1] = logits
    return memory[..., 3:-1]


STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "wider": wider,
    "columns first": lambda x: x.mT.contiguous().mT,
    "every second": lambda x: torch.stack((x, x.flip(0)), 1)[:, 0],
    "in reverse": lambda x: x.flip(0).contiguous().flip(0),
}


def check_rows(logits: Tensor, backend: str, counts: tuple[int, ...]) -> None:
    """Each row of a batch of `count` has the bits that it has alone, whatever its place."""
    ids = torch.tensor([0, 500, 501, 501, 501, 17, 1002], device=DEVICE)
    alone = torch.cat([log_softmax(row[None], backend=backend) for row in logits[:7]])
    for count in counts:
        batch = logits[:7].repeat(count // 7 + 1, 1)[:count]
        expected = alone.repeat(count // 7 + 1, 1)[:count]
        assert not bits_differ(log_softmax(batch, backend=backend), expected), count
        tokens = ids[torch.arange(count, device=DEVICE) % 7]
        assert not bits_differ(
            token_logprobs(batch, tokens, backend=backend), expected.gather(1, tokens[:, None])[:, 0]
        )


SIZES = [1003, pytest.param(151936, marks=pytest.mark.slow)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_in_any_number(size: int, dtype: torch.dtype) -> None:
    check_rows(peaked(7, size, dtype=dtype), "torch", (1, 2, 7, 64, 300))


@pytest.mark.skipif("triton" not in BACKENDS, reason="Triton does not run here")
@pytest.mark.parametrize("counts", [(1, 2, 7), pytest.param((64, 300), marks=pytest.mark.slow)])
def test_a_row_has_the_same_bits_in_any_number_in_triton(counts: tuple[int, ...]) -> None:
    check_rows(peaked(7, 1003), "triton", counts)


@pytest.mark.parametrize("how", STRIDES)
def test_a_row_has_the_same_bits_at_any_strides(backend: str, how: str) -> None:
    logits = peaked(3, 1003)
    moved, ids = STRIDES[how](logits), torch.tensor([4, 1002, 501], device=DEVICE)
    assert torch.equal(moved, logits)
    assert not bits_differ(log_softmax(moved, backend=backend), log_softmax(logits, backend=backend))
    actual = [token_logprobs(x, ids, backend=backend) for x in (moved, logits)]
    assert not bits_differ(*actual)


def test_shape_changes_no_bit(backend: str) -> None:
    logits = peaked(2, 4, 129, dtype=torch.bfloat16)
    expected = log_softmax(logits.reshape(8, 129), backend=backend).reshape(2, 4, 129)
    assert not bits_differ(log_softmax(logits, backend=backend), expected)
    assert not bits_differ(log_softmax(logits[:, :-1], backend=backend), expected[:, :-1].contiguous())
    assert not bits_differ(log_softmax(logits[1, 2], backend=backend), expected[1, 2])


def test_rows_apart_are_read_where_they_lie() -> None:
    """A trainer leaves out each sequence's last row, and a sampler the padding of the vocabulary."""
    logits = draw(2, 5, 40)
    for view in (logits[:, :-1], logits[..., :37], logits[:, 1:, 2:], logits[0, ::2]):
        assert row_view(view).untyped_storage().data_ptr() == logits.untyped_storage().data_ptr()


THREADS = """
import json, torch
from whorl.ops import log_softmax
torch.set_num_threads(3)
torch.manual_seed(0)
x = torch.randn(9, 151936)
x[:, 7] = x.logsumexp(-1)
batch = log_softmax(x)
alone = [log_softmax(x[i : i + 1]) for i in range(9)]
print(json.dumps([torch.get_num_threads(), [bool(torch.equal(a[0], b)) for a, b in zip(alone, batch)]]))
"""


@pytest.mark.slow
def test_threads_of_the_host_do_not_share_a_row() -> None:
    """In a process of its own: what a test forks would wait for these threads for ever."""
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [3, [True] * 9]


def in_written_order(row: np.ndarray) -> np.ndarray:
    """What the kernels promise, in numpy: columns of a block each add up their own, then neighbours."""
    block = min(LARGEST_BLOCK, 1 << (len(row) - 1).bit_length())
    padded = np.full(-(-len(row) // block) * block, -np.inf, np.float32)
    padded[: len(row)] = row
    tops, totals = np.full(block, np.finfo(np.float32).min), np.zeros(block, np.float32)
    for x in padded.reshape(-1, block):
        above = x - tops
        part = np.exp(-np.abs(above))
        totals = np.where(above > 0, totals * part + np.float32(1), totals + part)
        tops = np.maximum(tops, x)
    top = tops.max()
    totals = totals * np.exp(tops - top)
    while len(totals) > 1:
        totals = totals[::2] + totals[1::2]
    return row - top - np.log(totals[0])


@pytest.mark.skipif(BACKENDS == ["torch"] or DEVICE != "cpu", reason="the interpreter's exponential is numpy's")
@pytest.mark.parametrize("size", [64, 1003, LARGEST_BLOCK + 809])
def test_the_order_is_the_one_written_down(size: int) -> None:
    logits = peaked(1, size)
    with np.errstate(over="ignore"):
        expected = torch.from_numpy(in_written_order(logits[0].numpy()))
    assert not bits_differ(log_softmax(logits, backend="triton")[0], expected)


# ---- one token


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1, 40, 1003, LARGEST_BLOCK + 809])
def test_one_token_has_the_bits_that_it_has_among_all(backend: str, size: int, dtype: torch.dtype) -> None:
    logits = masked(4, size, dtype=dtype) if size == 1003 else peaked(4, size, dtype=dtype)
    ids = torch.tensor([0, size // 2, size - 1, size // 3], device=DEVICE)
    dy = torch.randn(4, device=DEVICE)

    def among_all(x: Tensor) -> Tensor:
        return log_softmax(x, backend=backend).gather(1, ids[:, None])[:, 0]

    def alone(x: Tensor) -> Tensor:
        return token_logprobs(x, ids.int(), backend=backend)

    assert not bits_differ(alone(logits), among_all(logits))
    assert torch.equal(gradient(alone, logits, dy), gradient(among_all, logits, dy))


def test_nothing_of_a_rows_length_is_kept_but_logits(backend: str) -> None:
    logits, ids = draw(3, 50, dtype=torch.bfloat16).requires_grad_(), torch.tensor([1, 2, 3], device=DEVICE)
    kept: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        token_logprobs(logits, ids, backend=backend)
    assert [x.dtype for x in kept if x.dim() == 2] == [torch.bfloat16]
    assert {x.data_ptr() for x in kept} == {logits.data_ptr(), ids.data_ptr()}


def test_ids_that_do_not_exist_are_refused() -> None:
    logits, ids = draw(2, 8), torch.tensor([3, -100], device=DEVICE)
    if DEVICE == "cpu":
        with pytest.raises(ValueError, match="token_logprobs: ids has values from -100 to 3, expected 0 to 7"):
            token_logprobs(logits, ids)
    else:  # reading the ids would wait for the device
        assert token_logprobs(logits, ids).isnan().tolist() == [False, True]
    with pytest.raises(ValueError, match=r"token_logprobs: ids is \[2, 1\] torch.int64, expected \[2\]"):
        token_logprobs(logits, torch.zeros(2, 1, dtype=torch.int64, device=DEVICE))
    with pytest.raises(ValueError, match=r"log_softmax: logits is \[2, 0\] torch.float32, expected \[..., V > 0\]"):
        log_softmax(logits[:, :0])
    with pytest.raises(ValueError, match=r"log_softmax: logits is .* torch.int64, expected .* floating point"):
        log_softmax(logits.long())
    with pytest.raises(ValueError, match=r"dtype is torch.float64, which has no log-probabilities in torch.float32"):
        BACKWARD(logits, logits, dtype=torch.float64)


@pytest.mark.skipif("triton" not in BACKENDS, reason="Triton does not run here")
def test_kernels_read_nothing_past_a_row() -> None:
    got = token_forward(draw(3, 8), torch.tensor([8, -100, 0], device=DEVICE))
    assert got.isnan().tolist() == [True, True, False]


# ---- tokens that are not there


def test_a_masked_token_has_no_probability_and_no_gradient(backend: str) -> None:
    logits = masked(2, 100)
    is_there = logits[0] > -torch.inf
    got, expected = log_softmax(logits, backend=backend), log_softmax(logits[:, is_there], backend="torch")
    assert (got[:, ~is_there] == -torch.inf).all()
    torch.testing.assert_close(got[:, is_there], expected)
    dy = torch.randn(2, 100, device=DEVICE)
    dy[:, 3] = torch.nan  # as 0 * -inf is, where a loss is made of probabilities and their logarithms
    grad = gradient(lambda x: log_softmax(x, backend=backend), logits, dy)
    assert (grad[:, ~is_there] == 0).all()
    right = gradient(lambda x: log_softmax(x, backend="torch"), logits[:, is_there], dy[:, is_there])
    torch.testing.assert_close(grad[:, is_there], right)


def test_a_masked_token_that_is_asked_for(backend: str) -> None:
    logits, ids = masked(2, 100), torch.tensor([1, 3], device=DEVICE)
    assert token_logprobs(logits, ids, backend=backend).isinf().tolist() == [False, True]
    grad = gradient(lambda x: token_logprobs(x, ids, backend=backend), logits, torch.ones(2, device=DEVICE))
    assert grad.isfinite().all()
    assert grad[0].any()
    assert not grad[1].any()


def test_a_row_of_nothing_has_no_nan(backend: str) -> None:
    logits = torch.full((2, 70), -torch.inf, device=DEVICE)
    assert (log_softmax(logits, backend=backend) == -torch.inf).all()
    assert not gradient(lambda x: log_softmax(x, backend=backend), logits, torch.randn(2, 70, device=DEVICE)).any()
    ids, dy = torch.tensor([0, 69], device=DEVICE), torch.ones(2, device=DEVICE)
    assert (token_logprobs(logits, ids, backend=backend) == -torch.inf).all()
    assert not gradient(lambda x: token_logprobs(x, ids, backend=backend), logits, dy).any()


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_row_without_probabilities_is_nan(backend: str, value: float) -> None:
    logits = torch.tensor([[1.0, value, 2.0, -torch.inf], [1.0, 2.0, 3.0, -torch.inf]], device=DEVICE)
    got = log_softmax(logits, backend=backend)
    assert got.isnan().tolist() == [[True, True, True, False], [False] * 4]
    assert (got[:, 3] == -torch.inf).all()


def test_no_rows_and_one_token(backend: str) -> None:
    assert log_softmax(draw(0, 7), backend=backend).shape == (0, 7)
    assert token_logprobs(draw(0, 7), torch.zeros(0, dtype=torch.int64, device=DEVICE), backend=backend).shape == (0,)
    assert not log_softmax(draw(3, 1), backend=backend).any()
    assert not gradient(lambda x: log_softmax(x, backend=backend), draw(3, 1), torch.randn(3, 1, device=DEVICE)).any()


# ---- who uses it


def test_the_samplers_numbers_are_the_trainers() -> None:
    logits, ids = draw(5, 1003), torch.tensor([3, 1002, 0, 77, 500], device=DEVICE)
    model: Any = None
    actual = Sampler(model, vocab_size=1000)._logprobs(logits, ids, [2, None, 0, 1, 3])
    mine = token_logprobs(logits, ids).tolist()
    assert [None if each is None else each.logprob for each in actual] == [mine[0], None, *mine[2:]]
