"""The gradient of the gated delta rule.

With the names of `arithmetic.py` for one chunk, E = e^G, W_j = e^(G_63 - G_j), S' the state after it, and dO and dS' as
they arrive:

    dD = scale P^T dO + W K dS';  dR = (I + L)^-T dD
    dS = e^(G_63) dS' + scale (E Q)^T dO - (beta E K)^T dR
    dL = -dR D^T below the diagonal, dP = scale dO D^T up to it; of each entry, as of G: M = dL L + dP P
    dQ = scale E dO S^T + (decay dP) K;  dV = beta dR
    dK = -beta E dR S^T + W D dS'^T + (decay dP)^T Q + (beta decay dL) K + (beta decay dL)^T K

The state of every chunk is computed again. Operands of products are rounded to q's dtype, as in the forward.
"""

from collections.abc import Iterator
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from .._draw import Draw
from .._op import Values, narrow, operator, widen
from ..attention.packed import Starts, check_starts, head_reason, read, sequences
from .arithmetic import Rows, rounded
from .layout import BLOCK, CHUNK
from .rule import BENCH, CASES, GATES, KEYS, QUERIES, SCALE, VALUES, WITHOUT, gated_delta, special_inputs

_LIKE_KEYS = Annotated[Tensor, "[T, HK>0, D] q"]


@operator(check=lambda q, starts, **_: check_starts("gated_delta_backward", q, starts), without=WITHOUT)
def gated_delta_backward(
    dout: VALUES, q: QUERIES, k: KEYS, v: VALUES, g: GATES, beta: GATES, starts: Starts, *, scale: SCALE
) -> tuple[_LIKE_KEYS, _LIKE_KEYS, VALUES, GATES, GATES]:
    """Gradients of `gated_delta` with respect to q, k, v, g and beta; zero for padding tokens.

    Operands of products are in q's dtype and sums in fp32; dq, dk and dv are rounded once.
    """
    like = (q, k, v, g, beta)
    grads = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in like]
    for part in sequences("gated_delta_backward", read(starts, len(q)), len(q)):
        rows = Rows(*(widen(x[part]) for x in like))
        for total, grad in zip(grads, _of_sequence(rows, widen(dout[part]), q.dtype, scale), strict=True):
            total[part] = narrow(grad, total.dtype)
    dq, dk, dv, dg, dbeta = grads
    return dq, dk, dv, dg, dbeta


class _Chunks(NamedTuple):
    """A sequence by chunks, [chunks, HV, CHUNK, ...], with zeros after its end; gates are [chunks, HV, CHUNK, 1]."""

    q: Tensor
    k: Tensor
    v: Tensor
    decays: Tensor
    beta: Tensor

    @classmethod
    def of(cls, rows: Rows) -> "_Chunks":
        group = rows.v.shape[1] // rows.k.shape[1]
        q, k = (_chunked(x.repeat_interleave(group, 1)) for x in (rows.q, rows.k))
        g, beta = (_chunked(x[:, :, None]) for x in (rows.g, rows.beta))
        return cls(q, k, _chunked(rows.v), g.cumsum(2), beta)


def _chunked(x: Tensor) -> Tensor:
    """Return x [n, H, C] as [chunks, H, CHUNK, C]."""
    padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -len(x) % CHUNK))
    return padded.unflatten(0, (-1, CHUNK)).transpose(1, 2)


def _of_sequence(rows: Rows, dout: Tensor, dtype: torch.dtype, scale: float) -> Iterator[Tensor]:
    """Yield the gradients of one sequence: of q, k, v, g and beta, not rounded."""

    def near(x: Tensor) -> Tensor:
        return rounded(x, dtype)

    q, k, v, decays, beta = _Chunks.of(rows)
    dout = _chunked(dout)
    growth, last = decays.exp(), decays[:, :, -1:]
    rest = (last - decays).exp()
    hidden = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    decay = (decays - decays.transpose(2, 3)).masked_fill(hidden, -torch.inf).exp()
    below = decay.tril(-1)
    products = k @ k.transpose(2, 3)
    lower, weights = beta * below * products, decay * (q @ k.transpose(2, 3))
    system = _System(lower, dtype)

    count = len(q)
    states, deltas, read = [], [], []
    state = q.new_zeros(q.shape[1], q.shape[3], v.shape[3])
    for c in range(count):
        states.append(near(state))
        read.append(k[c] @ states[c])
        deltas.append(system.solve(c, beta[c] * (v[c] - growth[c] * read[c])))
        state = last[c].exp() * state + k[c].transpose(1, 2) @ near(rest[c] * deltas[c])

    dstate = torch.zeros_like(state)
    dstates, derrors, dlast = [dstate] * count, [dstate] * count, [dstate] * count
    for c in reversed(range(count)):
        dstates[c] = near(dstate)
        ddeltas = scale * near(weights[c]).transpose(1, 2) @ dout[c] + near(rest[c] * k[c]) @ dstates[c]
        derrors[c] = system.solve_transposed(c, ddeltas)
        dlast[c] = last[c].exp() * (states[c] * dstates[c]).sum((1, 2), keepdim=True)
        of_out = near(scale * growth[c] * q[c]).transpose(1, 2) @ dout[c]
        of_errors = near(beta[c] * growth[c] * k[c]).transpose(1, 2) @ derrors[c]
        dstate = last[c].exp() * dstate + of_out - of_errors

    s, ds, d, dr, ks = (torch.stack(x) for x in (states, dstates, deltas, derrors, read))
    dweights = scale * (dout @ d.transpose(2, 3)).masked_fill(hidden, 0)
    dlower = -(dr @ d.transpose(2, 3)).tril(-1)
    of_queries, of_keys = near(decay * dweights), near(beta * below * dlower)
    dq_state = scale * growth * (dout @ s.transpose(2, 3))
    dk_state = rest * (d @ ds.transpose(2, 3))
    dk = dk_state - beta * growth * (dr @ s.transpose(2, 3)) + of_queries.transpose(2, 3) @ q
    dk = dk + of_keys @ k + of_keys.transpose(2, 3) @ k
    moved = dweights * weights + dlower * lower
    read_errors = (dr * ks).sum(3, keepdim=True)
    ddecays = (dq_state * q - dk_state * k).sum(3, keepdim=True) - beta * growth * read_errors
    ddecays = ddecays + moved.sum(3, keepdim=True) - moved.sum(2)[..., None]
    ddecays[:, :, -1:] += torch.stack(dlast) + (dk_state * k).sum((2, 3), keepdim=True)
    dbeta = (dr * v).sum(3, keepdim=True) - growth * read_errors + (dlower * below * products).sum(3, keepdim=True)
    num_tokens, group = len(rows.q), v.shape[1] // rows.k.shape[1]
    for grad in (dq_state + of_queries @ k, dk):
        yield _joined(grad, num_tokens).unflatten(1, (-1, group)).sum(2)
    yield _joined(beta * dr, num_tokens)
    for grad in (ddecays.flip(2).cumsum(2).flip(2), dbeta):
        yield _joined(grad, num_tokens)[:, :, 0]


class _System:
    """I + L of every chunk, solved by blocks as `arithmetic.py` does. lower: L [chunks, HV, CHUNK, CHUNK]."""

    def __init__(self, lower: Tensor, dtype: torch.dtype) -> None:
        self._dtype, self._lower = dtype, rounded(lower, dtype)
        unit = torch.eye(BLOCK, dtype=lower.dtype, device=lower.device)
        inside = (lower[:, :, b : b + BLOCK, b : b + BLOCK] + unit for b in range(0, CHUNK, BLOCK))
        solve = torch.linalg.solve_triangular
        self._inverses = [rounded(solve(x, unit, upper=False, unitriangular=True), dtype) for x in inside]

    def solve(self, c: int, x: Tensor) -> Tensor:
        """Return (I + L)^-1 x, rounded, for chunk c; x: [HV, CHUNK, DV]."""
        solved: list[Tensor] = []
        for b, inverse in enumerate(self._inverses):
            rows = slice(b * BLOCK, (b + 1) * BLOCK)
            part = x[:, rows]
            if solved:
                part = part - self._lower[c, :, rows, : rows.start] @ torch.cat(solved, 1)
            solved.append(rounded(inverse[c] @ rounded(part, self._dtype), self._dtype))
        return torch.cat(solved, 1)

    def solve_transposed(self, c: int, x: Tensor) -> Tensor:
        """Return (I + L)^-T x, rounded, for chunk c."""
        solved: list[Tensor] = []
        for b in reversed(range(len(self._inverses))):
            rows = slice(b * BLOCK, (b + 1) * BLOCK)
            part = x[:, rows]
            if solved:
                part = part - self._lower[c, :, rows.stop :, rows].transpose(1, 2) @ torch.cat(solved, 1)
            inverse = self._inverses[b][c].transpose(1, 2)
            solved.insert(0, rounded(inverse @ rounded(part, self._dtype), self._dtype))
        return torch.cat(solved, 1)


def _joined(x: Tensor, num_tokens: int) -> Tensor:
    """Return x [chunks, H, CHUNK, C] as [n, H, C]."""
    return x.transpose(1, 2).flatten(0, 1)[:num_tokens]


@gated_delta.gradient(save=("q", "k", "v", "g", "beta", "starts"))
def _(grads: tuple[Tensor, ...], args: Values, outputs: dict[int, Tensor]) -> dict[str, Tensor]:
    names = ("q", "k", "v", "g", "beta")
    tensors = (args[name] for name in (*names, "starts"))
    gradients = gated_delta_backward(grads[0], *tensors, scale=args["scale"], backend=args["backend"])
    return dict(zip(names, gradients, strict=True))


gated_delta_backward.impl("triton", "rule_backward_triton:backward", accepts=head_reason)


@gated_delta_backward.inputs(cases=CASES, bench=BENCH)
def _(draw: Draw, lengths: tuple[int, ...], HK: int, G: int, D: int, DV: int, idle: int = 0) -> Values:
    return special_inputs(draw, lengths, HK, G, D, DV, idle)
