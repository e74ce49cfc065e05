"""The heart of the attention, without parameters, so that it can be replaced: which keys, their sum, and the loss of
the indexer that chose them.

`SmallOps` is plain torch and materialises every score; `fused.py` has the one to train with.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .args import DeepSeekV32Args, Path, Stage


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSettings:
    scale: float
    topk: int
    nope: int
    value: int
    coefficient: float
    global_tokens: int  # 0: the tokens of a call
    stage: Stage
    path: Path = "auto"

    @staticmethod
    def of(args: DeepSeekV32Args) -> "AttentionSettings":
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
        """What the sum of the tokens' losses is multiplied by; ranks and micro-batches then only need to be added."""
        return self.coefficient / (self.global_tokens or max(1, num_tokens))


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, loss: Tensor, log: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return grads[0], torch.ones_like(loss), loss.detach()


def attach_loss(value: Tensor, loss: Tensor, log: Tensor) -> Tensor:
    """`value`, unchanged; its gradient also starts that of `loss`, with weight 1 whatever the gradient is.

    loss, log: [1] fp32. What has been trained on is added up in log.grad: once for each backward, however often
    activation checkpointing computes the loss, and without a write that torch.compile would have to order.
    """
    return _Attach.apply(value, loss, log)


def new_log(device: torch.device | None = None) -> Tensor:
    return torch.zeros(1, dtype=torch.float32, device=device, requires_grad=True)


class _Count(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, log: Tensor) -> tuple[Tensor, Tensor]:
        ctx.log = log
        return weights.view_as(weights), log.view_as(log)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.log.grad = grads[1] if ctx.log.grad is None else ctx.log.grad + grads[1]
        return grads[0], None


def count_with(weights: Tensor, log: Tensor) -> tuple[Tensor, Tensor]:
    """Both, unchanged: what comes back for `log` is counted when `weights` get their gradient.

    A pipeline schedule that splits backward (zero bubble, DualPipeV) asks for gradients of inputs, then for those of
    parameters, and never for a log's; a node that both need runs twice. The indexer's weights lead to parameters only:
    their gradient is computed once, in every schedule. torch.compile has no write in backward: there `log` gets its
    gradient as a leaf does.
    """
    return (weights, log) if torch.compiler.is_compiling() else _Count.apply(weights, log)


def pop_log(log: Tensor) -> Tensor:
    """What was added up since the last time; [1]."""
    found = torch.zeros_like(log) if log.grad is None else log.grad
    log.grad = None
    return found.detach()


class _Carry(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, *sources: Tensor) -> Tensor:
        ctx.shapes = [source.shape for source in sources]
        return value.clone()  # no view: a pipeline that splits backward detaches it in place

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0]
        nothing = grad.new_zeros(())
        return None, *(grad if shape == grad.shape else nothing.expand(shape) for shape in ctx.shapes)


def carry(value: Tensor, *sources: Tensor) -> Tensor:
    """`value`, from which backward reaches `sources` without computing: their gradient matters to no parameter.

    In warm-up only indexers learn, each from its own loss; what lies between them need not be differentiated.
    """
    return _Carry.apply(value.detach(), *sources)


class Given(NamedTuple):
    """What a core is called with, in this order."""

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
    """Called with what `Given` lists; gives [B, S, H, Dv].

    A query sees keys at its own position and before; without positions tokens are in order and T = S. Gradients of the
    first five come from the result, in warm-up there are none; those of the indexer's three come from its loss alone.
    """

    def __init__(self, settings: AttentionSettings) -> None:
        super().__init__()
        self.settings = settings
        # Adds the head sums of tensor-parallel ranks, [queries, keys], before they are normalised.
        self.reduce_target: Callable[[Tensor], Tensor] | None = None
        # Log of this rank's share of the loss. No buffer: casting a model, or moving it, would cut it off.
        self.kl = new_log()

    def forward(self, *given: Any) -> Tensor:
        return self.attend(Given(*given))

    def attend(self, given: Given) -> Tensor:
        raise NotImplementedError

    def reset(self, device: torch.device | None) -> None:
        self.kl = new_log(device)

    def log_on(self, device: torch.device) -> Tensor:
        if self.kl.device != device:  # the model was moved since it was built
            self.reset(device)
        return self.kl

    def extra_repr(self) -> str:
        return f"{self.settings.stage}, top {self.settings.topk}"


def visible(num_queries: int, q_positions: Tensor | None, k_positions: Tensor | None, like: Tensor) -> Tensor:
    """[B or 1, S, T] bool."""
    if q_positions is None or k_positions is None:
        places = torch.arange(num_queries, device=like.device)
        return (places <= places[:, None])[None]
    return k_positions[:, None] <= q_positions[..., None]


class SmallOps(Core):
    def attend(self, given: Given) -> Tensor:
        q_nope, q_pe, kv, k_pe, wkv_b, index_q, index_k, index_weights, q_positions, k_positions = given
        settings, heads = self.settings, q_nope.shape[2]
        up = nn.functional.linear(kv, wkv_b).unflatten(-1, (heads, -1))
        k_nope, v = up.split((settings.nope, settings.value), -1)
        q = torch.cat((q_nope, q_pe), -1)
        k = torch.cat((k_nope, k_pe.unsqueeze(2).expand(-1, -1, heads, -1)), -1)
        seen = visible(q.shape[1], q_positions, k_positions, q)
        wide = torch.promote_types(q.dtype, torch.float32)
        dots = torch.einsum("bshd,btd->bsht", index_q.to(wide), index_k.to(wide)).relu()
        index_weights, log = count_with(index_weights, self.log_on(q.device))
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
        """The highest of those seen; equal scores go to the lowest index."""
        masked = scores.masked_fill(~seen, float("-inf"))
        order = torch.sort(masked, dim=-1, descending=True, stable=True).indices[..., : self.settings.topk]
        return torch.zeros_like(masked, dtype=torch.bool).scatter(-1, order, True) & seen

    def _divergence(self, target: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        if self.reduce_target is not None:
            target = self.reduce_target(target.flatten(0, 1)).view_as(target)
        p = target / target.sum(-1, keepdim=True)
        log_q = scores.masked_fill(~chosen, float("-inf")).log_softmax(-1)
        each = torch.where(chosen, torch.xlogy(p, p) - p * torch.where(chosen, log_q, 0), 0)
        return each.sum() * self.settings.factor(target.shape[0] * target.shape[1])
