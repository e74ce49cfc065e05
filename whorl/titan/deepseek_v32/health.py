"""How the indexers do, by layer: their loss, how much of dense attention their choice keeps, how often it is a tie.

The loss is added up as it is trained on and costs nothing. Recall and ties are looked at when asked: `watch` does it in
the next forward, on some queries of the first sequence, in plain torch and without a gradient.
"""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torchtitan.tools.logging import logger

from whorl.ops.indexer import index_scores, top_k
from whorl.ops.indexer.bounds import visible_keys

from .attention import Attention
from .core import Core, pop_log
from .latents import absorbed, by_head
from .visibility import Sees

QUERIES = 64  # that are looked at
AT_ONCE = 2**27  # elements of the largest tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Of the queries that had to choose, i.e. that see more keys than they may take."""

    queries: Tensor  # how many
    recall: Tensor  # sum over them of the share of dense attention that falls on chosen keys, mean over heads
    ties: Tensor  # how many left out a key that scores like the last one taken


def layers_of(models: Iterable[nn.Module]) -> dict[int, Attention]:
    """Attention by the number of its layer; those of multi-token prediction count on."""
    found: dict[int, Attention] = {}
    block: Any
    for block in (module for model in models for module in model.modules()):
        if hasattr(block, "layer_id") and isinstance(getattr(block, "attention", None), Attention):
            found[block.layer_id] = block.attention
    return dict(sorted(found.items()))


# ---- recall and ties


@torch.no_grad()
def look(core: Core, *args: Any) -> Choice:
    """`args` are those of the core's forward."""
    q_nope, q_pe, kv, k_pe, wkv_b, index_q, index_k, index_weights, *positions = args
    q_positions, k_positions = (*positions, None, None)[:2]
    settings, num_queries = core.settings, q_nope.shape[1]
    sees = Sees.of(q_nope.shape[0], q_positions, k_positions)
    rows = torch.linspace(0, num_queries - 1, min(QUERIES, num_queries), device=kv.device).long()
    bounds = sees.bounds(0)
    if bounds["ends"] is None:
        bounds |= {"ends": (rows + 1).int(), "starts": torch.zeros_like(rows).int()}
    else:
        bounds |= {name: bounds[name][rows].contiguous() for name in ("starts", "ends")}
    keys = index_k[0].to(index_q.dtype)
    scores = index_scores(index_q[0, rows], keys, index_weights[0, rows], **bounds)
    indices, _ = top_k(scores, min(settings.topk, keys.shape[0]), **bounds)
    seen = visible_keys(rows.shape[0], keys.shape[0], **bounds, device=kv.device)
    chosen = torch.zeros_like(seen).scatter(1, indices.clamp_min(0).long(), indices >= 0) & seen
    chooses = seen.sum(1) > settings.topk
    last = scores.masked_fill(~chosen, torch.inf).amin(1, keepdim=True)
    is_tie = (seen & ~chosen & (scores == last)).any(1) & chooses
    key_weight, _ = by_head(wkv_b.to(q_nope.dtype), q_nope.shape[2], settings.nope)
    q = absorbed(q_nope[0, rows], q_pe[0, rows].to(q_nope.dtype), key_weight)
    latents = torch.cat((kv[0], k_pe[0]), -1)
    mass = _mass(core, q, latents, seen, chosen)
    return Choice(queries=chooses.sum(), recall=mass.where(chooses, 0).sum(), ties=is_tie.sum())


def _mass(core: Core, q: Tensor, keys: Tensor, seen: Tensor, chosen: Tensor) -> Tensor:
    """[Q]: the share of dense attention on chosen keys, mean over the heads of all tensor-parallel ranks."""
    wide = torch.promote_types(q.dtype, torch.float32)
    keys = keys.to(wide)
    parts = []
    step = max(1, AT_ONCE // max(1, q.shape[1] * keys.shape[0]))
    for part in (slice(i, i + step) for i in range(0, q.shape[0], step)):
        weights = (q[part].to(wide) @ keys.T * core.settings.scale).masked_fill(~seen[part, None], -torch.inf)
        parts.append((weights.softmax(-1) * chosen[part, None]).sum((1, 2)))
    both = torch.stack((torch.cat(parts), torch.full_like(seen[:, 0], q.shape[1], dtype=wide)))
    both = both if core.reduce_target is None else core.reduce_target(both)
    return both[0] / both[1]


class Watch:
    """Looks at the next forward of every layer; under activation checkpointing it is the first of the two."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.found: dict[int, Choice] = {}
        self._handles = [self._hook(layer, attention) for layer, attention in layers_of(models).items()]

    def _hook(self, layer: int, attention: Attention) -> RemovableHandle:
        def see(core: nn.Module, args: tuple[Any, ...]) -> None:
            if layer not in self.found:
                assert isinstance(core, Core)
                self.found[layer] = look(core, *args)

        def run_apart(attention: nn.Module, args: tuple[Any, ...]) -> None:
            if layer in self.found:
                return
            assert isinstance(attention, Attention)
            handle = attention.core.register_forward_pre_hook(see)
            with torch.no_grad():
                type(attention).forward(attention, *args)
            handle.remove()

        # What is compiled takes no notice of hooks inside: it is run once more, as it was written.
        is_compiled = "forward" in vars(attention)
        return (
            attention.register_forward_pre_hook(run_apart)
            if is_compiled
            else attention.core.register_forward_pre_hook(see)
        )

    def close(self) -> dict[int, Choice]:
        for handle in self._handles:
            handle.remove()
        return self.found


def watch(models: Sequence[nn.Module]) -> Watch:
    """Every rank of a sequence or of a tensor-parallel group must ask, since the heads of all are needed."""
    return Watch(models)


# ---- for the log


@dataclass(slots=True)
class _Since:
    step: int = 0
    watch: Watch | None = None
    warned: bool = False


_since: "weakref.WeakKeyDictionary[nn.Module, _Since]" = weakref.WeakKeyDictionary()


def collect(
    models: Sequence[nn.Module], parallel_dims: Any, job_config: Any, step: int, steps: int | None = None
) -> dict[str, float]:
    """What happened in the `steps` since the last call, over all ranks: every rank calls, at the same steps.

    indexer_kl: mean over layers; indexer_kl/N, recall/N, ties/N: of layer N; mtp_loss. Means over tokens, and over the
    steps since the last call. Recall and ties come every `whorl.health_every` steps, from one forward shortly before.
    """
    layers = layers_of(models)
    if not layers and not parallel_dims.pp_enabled:
        return {}
    since = _since.setdefault(models[0], _Since())
    steps, since.step = steps or max(1, step - since.step), step
    choices = since.watch.close() if since.watch is not None else {}
    if since.watch is not None and layers and not choices and not since.warned:
        logger.warning("whorl.health_every: no layer's attention was seen to run; no recall, no ties")
        since.warned = True
    settings = getattr(job_config, "whorl", None)
    every, log_every = getattr(settings, "health_every", 0), job_config.metrics.log_freq
    is_due = every > 0 and (step + log_every) // every > step // every
    since.watch = watch(models) if is_due else None
    table = _added_up(models, layers, choices, parallel_dims)
    return _figures(table, steps, _coefficients(models))


def _coefficients(models: Sequence[nn.Module]) -> tuple[float, float]:
    args = getattr(models[0], "model_args", None)
    return getattr(args, "indexer_loss_coeff", 1.0), getattr(args, "mtp_loss_coeff", 1.0)


def _added_up(
    models: Sequence[nn.Module], layers: dict[int, Attention], choices: dict[int, Choice], parallel_dims: Any
) -> list[list[float]]:
    """A row for each layer: loss, queries, recall, ties; and a last one for multi-token prediction."""
    args: Any = models[0].model_args
    device = next(models[0].parameters()).device
    table = torch.zeros(args.n_layers + args.n_mtp_layers + 1, 4, device=device)
    for layer, attention in layers.items():
        table[layer, 0] = pop_log(attention.core.kl)[0]
        if layer in choices:
            choice = choices[layer]
            table[layer, 1:] = torch.stack((choice.queries, choice.recall, choice.ties))
    model: Any
    for model in models:
        table[-1, 0] += pop_log(model.mtp_loss)[0]
    for name in ("loss", "pp"):
        mesh = parallel_dims.get_optional_mesh(name)
        if mesh is not None and mesh.size() > 1:
            torch.distributed.all_reduce(table, group=mesh.get_group())
    return table.tolist()


def _figures(table: list[list[float]], steps: int, coefficients: tuple[float, float]) -> dict[str, float]:
    *layers, (further, *_) = table
    figures: dict[str, float] = {}
    # Without a backward since the last call there is nothing to say.
    if coefficients[0] and any(loss for loss, *_ in layers):
        losses = [loss / steps / coefficients[0] for loss, *_ in layers]
        figures["indexer_kl"] = sum(losses) / max(1, len(losses))
        figures |= {f"indexer_kl/{layer}": loss for layer, loss in enumerate(losses)}
    for layer, (_, queries, recall, ties) in enumerate(layers):
        if queries:
            figures |= {f"recall/{layer}": recall / queries, f"ties/{layer}": ties / queries}
    if further:
        figures["mtp_loss"] = further / steps / coefficients[1]
    return figures
