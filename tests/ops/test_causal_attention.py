"""Attention of training: the bits of attention over pages, torch's gradients, sequences that do not see each other."""

import itertools
from typing import Any

import pytest
import torch
from test_inference_ops import assert_equal_bits, backends, is_slow
from test_ops import backends_here
from torch import Tensor

from whorl.ops import OPS, causal_attention, paged_attention
from whorl.ops.attention import tiles

Values = dict[str, Any]
DTYPES = (torch.float32, torch.bfloat16)
BLOCK = 8


def packed(lengths: tuple[int, ...], device: str, dtype: torch.dtype = torch.float32, **case: Any) -> Values:
    shape = {"heads": 6, "kv_heads": 2, "dim": 32}
    return OPS["causal_attention"].make(**shape | case, lengths=lengths, dtype=dtype, device=device)


def sequences(values: Values) -> list[Values]:
    """Each as a call of its own."""
    parts = []
    for start, end in itertools.pairwise(values["starts"].tolist()):
        starts = values["starts"].new_tensor([0, end - start])
        parts.append(values | {n: values[n][start:end] for n in ("q", "k", "v")} | {"starts": starts})
    return parts


def served(one: Values, cuts: tuple[int, ...], backend: str) -> Tensor:
    """One sequence as the engine computes it: keys in shuffled pages, the prompt cut at `cuts`."""
    length, device = len(one["q"]), one["q"].device
    blocks = torch.randperm(-(-length // BLOCK) + 3, device=device)
    table = blocks[: -(-length // BLOCK)]
    caches = [torch.full((len(blocks), BLOCK, *one[n].shape[1:]), 3e4, device=device) for n in ("k", "v")]
    for cache, name in zip(caches, ("k", "v"), strict=True):
        at = torch.arange(length, device=device)
        cache[table[at // BLOCK], at % BLOCK] = one[name].float()
    outputs = []
    for start, end in itertools.pairwise((0, *cuts, length)):
        lengths = [torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, end - start], [end])]
        k_cache, v_cache = (c.to(one["q"].dtype) for c in caches)
        more = {"scale": one["scale"], "window": one["window"], "backend": backend}
        outputs.append(paged_attention(one["q"][start:end], k_cache, v_cache, table[None].int(), *lengths, **more))
    return torch.cat(outputs)


def assert_bits_of_the_engine(values: Values, cuts: tuple[int, ...], backend: str) -> None:
    out, _ = causal_attention(**values, backend=backend)
    lengths = [len(one["q"]) for one in sequences(values)]
    for one, got in zip(sequences(values), out.split(lengths), strict=True):
        length = len(got)
        assert_equal_bits(got, served(one, (), backend), f"{length} in one piece")
        assert_equal_bits(got, served(one, tuple(c for c in cuts if c < length), backend), f"{length} cut at {cuts}")
        last = served(one, tuple(range(max(1, length - 3), length)), backend)
        assert_equal_bits(got[-3:], last[-3:], f"the last of {length} one at a time")


INTERPRETED = {"lengths": (35, 2), "heads": 2, "kv_heads": 1, "dim": 16}


def by_turns(*windows: int) -> list[Any]:
    """Backend, window and dtype; interpreted kernels take each window with one dtype in the quick tests."""
    return [
        pytest.param(
            backend,
            window,
            dtype,
            marks=[pytest.mark.slow] if is_slow(backend) and (i + j) % 2 else [],
            id=f"{backend}-{window}-{dtype}",
        )
        for backend in backends_here(OPS["causal_attention"])
        for i, window in enumerate(windows)
        for j, dtype in enumerate(DTYPES)
    ]


@pytest.mark.parametrize(("backend", "window", "dtype"), by_turns(0, 13))
def test_bits_are_those_of_the_engine(backend: str, window: int, dtype: torch.dtype, device: str) -> None:
    """Cut at no multiples of a tile or of a cut of the keys."""
    case = INTERPRETED if is_slow(backend) else {"lengths": (290, 77, 1)}
    cuts = (1, 19) if is_slow(backend) else (1, 2, 40, 41, 200, 261)
    assert_bits_of_the_engine(packed(**case, device=device, dtype=dtype, window=window), cuts, backend)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_token_alone_has_the_bits(dtype: torch.dtype, device: str) -> None:
    (one,) = sequences(packed((70,), device, dtype, sliced=True))
    alone = served(one, tuple(range(1, 70)), "torch")
    assert_equal_bits(causal_attention(**one, backend="torch")[0], alone, "one at a time")


def test_another_cut_of_the_keys_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    values = packed((290,), "cpu")
    whole = served(values, (), "torch")
    assert_equal_bits(causal_attention(**values, backend="torch")[0], whole, "as it is")
    monkeypatch.setattr(tiles, "KEYS", 128)
    with pytest.raises(AssertionError, match=r"rows .* differ"):
        assert_equal_bits(causal_attention(**values, backend="torch")[0], whole, "cut elsewhere")


def test_another_cut_of_the_keys_shows_in_the_kernels(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    from whorl.ops.attention import prompt_triton

    values = packed(**INTERPRETED | {"lengths": (37,)}, device=device)
    monkeypatch.setattr(prompt_triton, "cut_of", lambda dtype: 16)  # of prompts; decoded tokens keep theirs
    with pytest.raises(AssertionError, match=r"rows .* differ"):
        assert_equal_bits(causal_attention(**values, backend="triton")[0][-3:], decoded(values), "cut elsewhere")
    monkeypatch.undo()
    assert_equal_bits(causal_attention(**values, backend="triton")[0][-3:], decoded(values), "as it is")


def decoded(one: Values) -> Tensor:
    """The last three tokens, each by the kernel of decoded ones."""
    return served(one, tuple(range(len(one["q"]) - 3, len(one["q"]))), "triton")[-3:]


# ---- numbers


def dense(one: Values) -> tuple[Tensor, Tensor]:
    """torch's own attention of one sequence, in fp64, and the logarithm of its sum."""
    group = one["q"].shape[1] // one["k"].shape[1]
    q, k, v = (one[n].double().transpose(0, 1) for n in ("q", "k", "v"))
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    at = torch.arange(q.shape[1], device=q.device)
    visible = at <= at[:, None]
    if one["window"]:
        visible &= at > at[:, None] - one["window"]
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=one["scale"])
    scores = (q @ k.transpose(1, 2) * one["scale"]).masked_fill(~visible, -torch.inf)
    return out.transpose(0, 1), torch.logsumexp(scores, -1).T


def wanting(values: Values) -> tuple[Values, list[Tensor]]:
    leaves = [values[n].detach().clone().requires_grad_() for n in ("q", "k", "v")]
    return values | dict(zip(("q", "k", "v"), leaves, strict=True)), leaves


@pytest.mark.parametrize("window", [0, 1, 5])
@pytest.mark.parametrize("backend", backends("causal_attention"))
def test_gradients_are_torchs(backend: str, window: int, device: str) -> None:
    """Of out and of lse; packed here, one call for each sequence there."""
    lengths = (12, 1, 9) if is_slow(backend) else (60, 1, 35)
    dtype = torch.float64 if backend == "torch" else torch.float32
    values, leaves = wanting(packed(lengths, device, dtype, window=window))
    out, lse = causal_attention(**values, backend=backend)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    got = torch.autograd.grad([out, lse], leaves, [dout, dlse])
    results = [dense(one) for one in sequences(values)]
    expected_out, expected_lse = (torch.cat(parts) for parts in zip(*results, strict=True))
    expected = torch.autograd.grad([expected_out, expected_lse], leaves, [dout.double(), dlse.double()])
    close = {"rtol": 1e-10, "atol": 1e-10} if backend == "torch" else {"rtol": 1e-4, "atol": 2e-5}
    torch.testing.assert_close(out.double(), expected_out, **close)
    torch.testing.assert_close(lse.double(), expected_lse, **close)
    for name, g, e in zip(("dq", "dk", "dv"), got, expected, strict=True):
        torch.testing.assert_close(g, e.to(g.dtype), **close, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", backends("causal_attention", slow=True))
def test_packed_is_one_by_one(backend: str, dtype: torch.dtype, device: str) -> None:
    """To the bit, the gradient too; what is behind the last sequence is zero, whatever it holds."""
    values = packed((23, 0, 8), device, dtype, idle=2, window=9)
    for name in ("q", "k", "v"):
        values[name][-2:] = torch.nan
    whole, leaves = wanting(values)
    out, lse = causal_attention(**whole, backend=backend)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, leaves, dout)
    for one, (start, end) in zip(sequences(values), ((0, 23), (23, 23), (23, 31)), strict=True):
        alone, inputs = wanting(one)
        part, logs = causal_attention(**alone, backend=backend)
        assert torch.equal(part, out[start:end])
        assert torch.equal(logs, lse[start:end])
        for g, e in zip(grads, torch.autograd.grad(part, inputs, dout[start:end]), strict=True):
            assert torch.equal(g[start:end], e)
    assert not any(x[31:].any() for x in (out, *grads))
    assert (lse[31:] == -torch.inf).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", backends("causal_attention"))
def test_lse_has_all_its_digits(backend: str, dtype: torch.dtype, device: str) -> None:
    """Weights are rounded to 16 bits before they meet the values; their sum in lse is not."""
    values = packed((37,) if is_slow(backend) else (290,), device, dtype)
    _, lse = causal_attention(**values, backend=backend)
    torch.testing.assert_close(lse.double(), dense(values)[1], rtol=1e-5, atol=1e-5)


def test_a_window_as_long_as_the_sequence_hides_nothing(device: str) -> None:
    values = packed((20,), device)
    (whole, _), (same, _), (less, _) = (causal_attention(**values | {"window": n}) for n in (0, 20, 19))
    assert torch.equal(whole, same)
    assert torch.equal(whole[:19], less[:19])
    assert not torch.equal(whole[19], less[19])


# ---- refusals

WRONG: list[tuple[str, Values, str]] = [
    ("heads", {"q": torch.zeros(5, 3, 32)}, r"q is \[5, 3, 32\] torch.float32, expected \[5, G\*2, 32\]"),
    (
        "dtype",
        {"v": torch.zeros(5, 2, 32).half()},
        r"v is \[5, 2, 32\] torch.float16, expected \[5, 2, 32\] torch.float32",
    ),
    (
        "keys elsewhere",
        {"k": torch.zeros(6, 2, 32), "v": torch.zeros(6, 2, 32)},
        r"k is \[6, 2, 32\] torch.float32, expected \[5, HK > 0, 32\]",
    ),
    ("starts long", {"starts": torch.tensor([0, 5])}, r"starts is \[2\] torch.int64"),
    ("none", {"starts": torch.zeros(0, dtype=torch.int32)}, r"starts is \[0\] torch.int32, expected \[B \+ 1\]"),
    ("falling", {"starts": torch.tensor([0, 4, 3]).int()}, "none below the one before"),
    ("past the end", {"starts": torch.tensor([0, 6]).int()}, "5 tokens at most"),
    ("not from 0", {"starts": torch.tensor([1, 5]).int()}, "expected 0 first"),
    ("scale", {"scale": 0.0}, "scale is 0.0, expected a positive number"),
    ("window", {"window": -1}, "window is -1, expected 0 or more"),
]


@pytest.mark.parametrize(("change", "message"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_what_cannot_be_is_refused(change: Values, message: str) -> None:
    with pytest.raises(ValueError, match=f"causal_attention: .*{message}"):
        causal_attention(**packed((5,), "cpu") | change)
