"""Measure the indexers by layer: their loss, the recall of their selection, and how often it is a tie.

Recall is the share of dense attention that falls on selected keys. A query has a tie if a key that it did not select
scores exactly like the last selected one. The loss is accumulated during training at no cost. Recall and ties are
measured only after a call of `measure_next_forward`: on some queries of the first sequence, in plain torch and without
gradients.
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
from whorl.titan.config import settings

from .attention import Attention
from .core import Core, pop_log
from .latents import absorb_queries, split_heads
from .visibility import Visibility

QUERIES = 64  # number of queries to measure, spread evenly over the sequence
MAX_ELEMENTS = 2**27  # maximum elements of a temporary tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectionStats:
    """Sums over the queries that have to select, because they see more keys than top-k."""

    queries: Tensor  # number of these queries
    recall: Tensor  # sum of the shares of dense attention on selected keys, mean over heads
    ties: Tensor  # number of queries with an unselected key that scores like the last selected one


def attention_layers(models: Iterable[nn.Module]) -> dict[int, Attention]:
    """Return the attention modules by layer number; multi-token prediction layers follow the others."""
    layers: dict[int, Attention] = {}
    block: Any
    for block in (module for model in models for module in model.modules()):
        if hasattr(block, "layer_id") and isinstance(getattr(block, "attention", None), Attention):
            layers[block.layer_id] = block.attention
    return dict(sorted(layers.items()))


# ---- recall and ties


@torch.no_grad()
def measure_selection(core: Core, *args: Any) -> SelectionStats:
    """Measure the selection of a core for some queries of the first sequence. args: those of `Core.forward`."""
    q_nope, q_pe, kv, k_pe, wkv_b, index_q, index_k, index_weights, *positions = args
    q_positions, k_positions = (*positions, None, None)[:2]
    topk, num_queries = core.settings.topk, q_nope.shape[1]
    visibility = Visibility.from_positions(q_nope.shape[0], q_positions, k_positions)
    queries = torch.linspace(0, num_queries - 1, min(QUERIES, num_queries), device=kv.device).long()
    bounds = visibility.bounds(0)
    if bounds["ends"] is None:
        bounds |= {"ends": (queries + 1).int(), "starts": torch.zeros_like(queries).int()}
    else:
        bounds |= {name: bounds[name][queries].contiguous() for name in ("starts", "ends")}
    keys = index_k[0].to(index_q.dtype)
    scores = index_scores(index_q[0, queries], keys, index_weights[0, queries], **bounds)
    indices, _ = top_k(scores, min(topk, keys.shape[0]), **bounds)
    visible = visible_keys(queries.shape[0], keys.shape[0], **bounds, device=kv.device)
    chosen = torch.zeros_like(visible).scatter(1, indices.clamp_min(0).long(), indices >= 0) & visible
    has_to_select = visible.sum(1) > topk
    last = scores.masked_fill(~chosen, torch.inf).amin(1, keepdim=True)
    is_tie = (visible & ~chosen & (scores == last)).any(1) & has_to_select
    key_weight, _ = split_heads(wkv_b.to(q_nope.dtype), q_nope.shape[2], core.settings.nope)
    q = absorb_queries(q_nope[0, queries], q_pe[0, queries].to(q_nope.dtype), key_weight)
    latents = torch.cat((kv[0], k_pe[0]), -1)
    recall = _attention_on_selected(core, q, latents, visible, chosen)
    return SelectionStats(queries=has_to_select.sum(), recall=recall.where(has_to_select, 0).sum(), ties=is_tie.sum())


def _attention_on_selected(core: Core, q: Tensor, keys: Tensor, visible: Tensor, chosen: Tensor) -> Tensor:
    """Return the share of dense attention on selected keys, [Q], mean over the heads of all tensor-parallel ranks.

    q: [Q, H, Dc + Dr], absorbed queries. keys: [T, Dc + Dr]. visible, chosen: [Q, T] bool.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    keys = keys.to(wide)
    parts = []
    step = max(1, MAX_ELEMENTS // max(1, q.shape[1] * keys.shape[0]))
    for part in (slice(i, i + step) for i in range(0, q.shape[0], step)):
        weights = (q[part].to(wide) @ keys.T * core.settings.scale).masked_fill(~visible[part, None], -torch.inf)
        parts.append((weights.softmax(-1) * chosen[part, None]).sum((1, 2)))
    sums = torch.stack((torch.cat(parts), torch.full_like(visible[:, 0], q.shape[1], dtype=wide)))
    sums = sums if core.reduce_target is None else core.reduce_target(sums)
    return sums[0] / sums[1]


class SelectionMeasurement:
    """Measures the next forward of every layer; with activation checkpointing, the first of the two."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.stats: dict[int, SelectionStats] = {}
        self._handles = [self._hook(layer, attention) for layer, attention in attention_layers(models).items()]

    def _hook(self, layer: int, attention: Attention) -> RemovableHandle:
        def measure(core: nn.Module, args: tuple[Any, ...]) -> None:
            if layer not in self.stats:
                assert isinstance(core, Core)
                self.stats[layer] = measure_selection(core, *args)

        def run_eager(attention: nn.Module, args: tuple[Any, ...]) -> None:
            if layer in self.stats:
                return
            assert isinstance(attention, Attention)
            handle = attention.core.register_forward_pre_hook(measure)
            with torch.no_grad():
                type(attention).forward(attention, *args)
            handle.remove()

        # Hooks inside a compiled module are not called: the module is run once more in eager mode.
        is_compiled = "forward" in vars(attention)
        return (
            attention.register_forward_pre_hook(run_eager)
            if is_compiled
            else attention.core.register_forward_pre_hook(measure)
        )

    def close(self) -> dict[int, SelectionStats]:
        """Stop measuring; return the results by layer number."""
        for handle in self._handles:
            handle.remove()
        return self.stats


def measure_next_forward(models: Sequence[nn.Module]) -> SelectionMeasurement:
    """Start to measure the next forward of model parts; `close` of the result returns what was measured.

    All ranks of a tensor- or context-parallel group must call this together, because the measurement communicates.
    """
    return SelectionMeasurement(models)


# ---- for the log


@dataclass(slots=True)
class _LogState:
    """The measurement of a model that is under way, and whether a warning was logged."""

    measurement: SelectionMeasurement | None = None
    warned: bool = False


_log_states: "weakref.WeakKeyDictionary[nn.Module, _LogState]" = weakref.WeakKeyDictionary()


def collect(
    models: Sequence[nn.Module], parallel_dims: Any, job_config: Any, step: int, steps: int
) -> dict[str, float]:
    """Return the metrics of the `steps` since the last call, over all ranks; every rank must call at the same steps.

    indexer_kl: mean over layers; indexer_kl/N, recall/N, ties/N: of layer N; mtp_loss. They are means over tokens and
    over the steps since the last call. Recall and ties are measured every `whorl.health_every` steps, in one forward.
    """
    layers = attention_layers(models)
    if not layers and not parallel_dims.pp_enabled:
        return {}
    state = _log_states.setdefault(models[0], _LogState())
    stats = state.measurement.close() if state.measurement is not None else {}
    if state.measurement is not None and layers and not stats and not state.warned:
        logger.warning("whorl.health_every: no attention layer ran, so that recall and ties are missing")
        state.warned = True
    every, log_every = settings(job_config).health_every, job_config.metrics.log_freq
    # Start a measurement if a multiple of `every` comes up to the next logged step, which then reports it.
    is_due = every > 0 and (step + log_every) // every > step // every
    state.measurement = measure_next_forward(models) if is_due else None
    table = _sum_over_ranks(models, layers, stats, parallel_dims)
    return _figures(table, steps, _coefficients(models))


def _coefficients(models: Sequence[nn.Module]) -> tuple[float, float]:
    """Return the factors of the indexer loss and of the multi-token prediction loss."""
    args = getattr(models[0], "model_args", None)
    return getattr(args, "indexer_loss_coeff", 1.0), getattr(args, "mtp_loss_coeff", 1.0)


def _sum_over_ranks(
    models: Sequence[nn.Module], layers: dict[int, Attention], stats: dict[int, SelectionStats], parallel_dims: Any
) -> list[list[float]]:
    """Return a row for each layer (loss, queries, recall, ties) and one for multi-token prediction, over all ranks."""
    args: Any = models[0].model_args
    device = next(models[0].parameters()).device
    table = torch.zeros(args.n_layers + args.n_mtp_layers + 1, 4, device=device)
    for layer, attention in layers.items():
        table[layer, 0] = pop_log(attention.core.kl)[0]
        if layer in stats:
            layer_stats = stats[layer]
            table[layer, 1:] = torch.stack((layer_stats.queries, layer_stats.recall, layer_stats.ties))
    model: Any
    for model in models:
        table[-1, 0] += pop_log(model.mtp_loss)[0]
    for name in ("loss", "pp"):
        mesh = parallel_dims.get_optional_mesh(name)
        if mesh is not None and mesh.size() > 1:
            torch.distributed.all_reduce(table, group=mesh.get_group())
    return table.tolist()


def _figures(table: list[list[float]], steps: int, coefficients: tuple[float, float]) -> dict[str, float]:
    """Return the metrics by name from the table of `_sum_over_ranks`; losses are divided by their coefficients."""
    *layers, (mtp_loss, *_) = table
    figures: dict[str, float] = {}
    # Without a backward since the last call there is no loss to report.
    if coefficients[0] and any(loss for loss, *_ in layers):
        losses = [loss / steps / coefficients[0] for loss, *_ in layers]
        figures["indexer_kl"] = sum(losses) / max(1, len(losses))
        figures |= {f"indexer_kl/{layer}": loss for layer, loss in enumerate(losses)}
    for layer, (_, queries, recall, ties) in enumerate(layers):
        if queries:
            figures |= {f"recall/{layer}": recall / queries, f"ties/{layer}": ties / queries}
    if mtp_loss:
        figures["mtp_loss"] = mtp_loss / steps / coefficients[1]
    return figures
