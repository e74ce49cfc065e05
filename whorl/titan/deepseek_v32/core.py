"""The core of the attention, a replaceable module without parameters.

A core selects keys by the indexer, computes the attention over them, and trains the indexer by its loss. `SmallOps` is
plain torch and materialises every score; `fused.py` has the core for training.

Sizes: B sequences, S queries and T keys of each (T > S only with context parallelism), H heads of this rank. A head has
Dn channels that are not rotated ("nope"), Dr rotated ones ("pe") and Dv values; a latent has Dc channels. The indexer
has HI heads of D channels.

A loss is not returned but attached to the output, and recorded in a *log*: a [1] tensor whose gradient accumulates it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .args import AttentionPath, DeepSeekV32Args, Stage


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSettings:
    """The sizes and options of a core."""

    scale: float  # of the softmax
    topk: int  # number of keys that the indexer selects for each query
    nope: int  # Dn
    value: int  # Dv
    coefficient: float  # factor of the indexer loss; 0: no loss
    global_tokens: int  # tokens that the loss is averaged over; 0: the tokens of a call
    stage: Stage
    path: AttentionPath = "auto"  # how `FusedDSA` computes the attention

    @staticmethod
    def from_args(args: DeepSeekV32Args) -> "AttentionSettings":
        return AttentionSettings(
            scale=args.softmax_scale,
            topk=args.index_topk,
            nope=args.qk_nope_head_dim,
            value=args.v_head_dim,
            coefficient=args.indexer_loss_coeff,
            global_tokens=args.global_tokens,
            stage=args.stage,
            path=args.attention,
        )

    def factor(self, num_tokens: int) -> float:
        """Return the factor of the sum of the token losses in a call with this many tokens.

        With it, the results of ranks and micro-batches only have to be added.
        """
        return self.coefficient / (self.global_tokens or max(1, num_tokens))


class _Attach(torch.autograd.Function):
    """See `attach_loss`."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, loss: Tensor, log: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return grads[0], torch.ones_like(loss), loss.detach()


def attach_loss(value: Tensor, loss: Tensor, log: Tensor) -> Tensor:
    """Return `value` unchanged; its backward also starts the backward of `loss` with a gradient of 1.

    loss, log: [1] fp32. The loss is added to log.grad once for each backward, however often activation checkpointing
    recomputes it, and without an in-place write that torch.compile would have to order.
    """
    return _Attach.apply(value, loss, log)


def new_log(device: torch.device | None = None) -> Tensor:
    """Return a [1] fp32 tensor whose gradient accumulates a loss."""
    return torch.zeros(1, dtype=torch.float32, device=device, requires_grad=True)


class _LogWithWeights(torch.autograd.Function):
    """See `log_with_weights`."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, log: Tensor) -> tuple[Tensor, Tensor]:
        ctx.log = log
        return weights.view_as(weights), log.view_as(log)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.log.grad = grads[1] if ctx.log.grad is None else ctx.log.grad + grads[1]
        return grads[0], None


def log_with_weights(weights: Tensor, log: Tensor) -> tuple[Tensor, Tensor]:
    """Return both unchanged; the gradient of `log` is accumulated when `weights` get their gradient.

    A pipeline schedule that splits backward (zero bubble, DualPipeV) computes gradients of inputs, then those of
    parameters, and never that of a log; a node that both need runs twice. The indexer's weights lead only to
    parameters, so that their gradient is computed exactly once in every schedule. torch.compile does not support the
    write in backward; there `log` gets its gradient as a leaf.
    """
    return (weights, log) if torch.compiler.is_compiling() else _LogWithWeights.apply(weights, log)


def pop_log(log: Tensor) -> Tensor:
    """Return the loss accumulated since the last call, [1], and reset it."""
    total = torch.zeros_like(log) if log.grad is None else log.grad
    log.grad = None
    return total.detach()


class _Carry(torch.autograd.Function):
    """See `carry`."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, *sources: Tensor) -> Tensor:
        ctx.shapes = [source.shape for source in sources]
        return value.clone()  # not a view, because a pipeline that splits backward detaches it in place

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0]
        zero = grad.new_zeros(())
        return None, *(grad if shape == grad.shape else zero.expand(shape) for shape in ctx.shapes)


def carry(value: Tensor, *sources: Tensor) -> Tensor:
    """Return `value` detached from what computed it; its backward goes on directly to `sources`.

    In warm-up only the indexers train, each on a loss that is attached to the output of its attention. Backward has to
    reach these outputs, but nothing between them has to be differentiated. The gradient that a source gets has the
    right shape and no meaning; no parameter uses it.
    """
    return _Carry.apply(value.detach(), *sources)


class CoreInputs(NamedTuple):
    """The arguments of a core, in this order."""

    q_nope: Tensor  # [B, S, H, Dn]
    q_pe: Tensor  # [B, S, H, Dr]
    kv: Tensor  # [B, T, Dc]
    k_pe: Tensor  # [B, T, Dr]
    wkv_b: Tensor  # [H (Dn + Dv), Dc]
    index_q: Tensor  # [B, S, HI, D]
    index_k: Tensor  # [B, T, D]
    index_weights: Tensor  # [B, S, HI]
    q_positions: Tensor | None = None  # [B, S]
    k_positions: Tensor | None = None  # [B, T]


class Core(nn.Module):
    """The base class of cores: takes the arguments that `CoreInputs` lists and returns [B, S, H, Dv].

    A query sees keys at its own position and before; without positions tokens are in order and T = S. Gradients of the
    first five arguments come from the output (none in warm-up); those of the three indexer arguments come only from the
    indexer loss.
    """

    def __init__(self, settings: AttentionSettings) -> None:
        super().__init__()
        self.settings = settings
        # With tensor parallelism, a function that sums the targets of the indexer [queries, keys], which this rank has
        # for its own heads, over the ranks, before they are normalised.
        self.reduce_target: Callable[[Tensor], Tensor] | None = None
        # The log of this rank's share of the indexer loss. Not a buffer: casting or moving the model would replace it.
        self.kl = new_log()

    def forward(self, *inputs: Any) -> Tensor:
        return self.attend(CoreInputs(*inputs))

    def attend(self, inputs: CoreInputs) -> Tensor:
        """Return the attention output [B, S, H, Dv]; each core implements this."""
        raise NotImplementedError

    def reset(self, device: torch.device | None) -> None:
        """Start a new log of the loss on a device."""
        self.kl = new_log(device)

    def log_on(self, device: torch.device) -> Tensor:
        """Return the log of the loss, which is on the device of the inputs."""
        if self.kl.device != device:  # the model was moved after it was built
            self.reset(device)
        return self.kl

    def extra_repr(self) -> str:
        return f"{self.settings.stage}, top {self.settings.topk}"


def visible(num_queries: int, q_positions: Tensor | None, k_positions: Tensor | None, like: Tensor) -> Tensor:
    """Return which keys each query sees, [B or 1, S, T] bool."""
    if q_positions is None or k_positions is None:
        positions = torch.arange(num_queries, device=like.device)
        return (positions <= positions[:, None])[None]
    return k_positions[:, None] <= q_positions[..., None]


class SmallOps(Core):
    """The reference core, in plain torch operators."""

    def attend(self, inputs: CoreInputs) -> Tensor:
        q_nope, q_pe, kv, k_pe, wkv_b, index_q, index_k, index_weights, q_positions, k_positions = inputs
        settings, heads = self.settings, q_nope.shape[2]
        up = nn.functional.linear(kv, wkv_b).unflatten(-1, (heads, -1))
        k_nope, v = up.split((settings.nope, settings.value), -1)
        q = torch.cat((q_nope, q_pe), -1)
        k = torch.cat((k_nope, k_pe.unsqueeze(2).expand(-1, -1, heads, -1)), -1)
        seen = visible(q.shape[1], q_positions, k_positions, q)
        wide = torch.promote_types(q.dtype, torch.float32)
        dots = torch.einsum("bshd,btd->bsht", index_q.to(wide), index_k.to(wide)).relu()
        index_weights, log = log_with_weights(index_weights, self.log_on(q.device))
        scores = torch.einsum("bsht,bsh->bst", dots, index_weights.to(wide))
        if settings.stage == "warmup":
            chosen, q, k, v = seen, q.detach(), k.detach(), v.detach()
        else:
            chosen = self._choose(scores.detach(), seen)
        logits = torch.einsum("bshd,bthd->bhst", q, k).to(wide) * settings.scale
        weights = logits.masked_fill(~chosen.unsqueeze(1), float("-inf")).softmax(-1)
        out = torch.einsum("bhst,bthd->bshd", weights.to(q.dtype), v)
        if not torch.is_grad_enabled() or not settings.coefficient:
            return out
        loss = self._divergence(weights.detach().sum(1), scores, chosen)
        return attach_loss(out, loss.float().reshape(1), log)

    def _choose(self, scores: Tensor, seen: Tensor) -> Tensor:
        """Return the mask [B, S, T] of the top-k visible keys; of equal scores the lowest index is selected."""
        masked = scores.masked_fill(~seen, float("-inf"))
        order = torch.sort(masked, dim=-1, descending=True, stable=True).indices[..., : self.settings.topk]
        return torch.zeros_like(masked, dtype=torch.bool).scatter(-1, order, True) & seen

    def _divergence(self, target: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        """Return the KL divergence of the indexer's distribution from the attention, times `AttentionSettings.factor`.

        target: [B, S, T], the attention weights summed over heads. Both are distributions over the keys in `chosen`.
        """
        if self.reduce_target is not None:
            target = self.reduce_target(target.flatten(0, 1)).view_as(target)
        p = target / target.sum(-1, keepdim=True)
        log_q = scores.masked_fill(~chosen, float("-inf")).log_softmax(-1)
        terms = torch.where(chosen, torch.xlogy(p, p) - p * torch.where(chosen, log_q, 0), 0)
        return terms.sum() * self.settings.factor(target.shape[0] * target.shape[1])
