"""Who learns from what, in both stages; and what is told of the indexers' health."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("torchtitan")

from tiny_deepseek import make_model, tiny

from whorl.titan.deepseek_v32 import health
from whorl.titan.deepseek_v32.core import Core, pop_log
from whorl.titan.deepseek_v32.model import DeepSeekV32Model
from whorl.titan.deepseek_v32.stages import apply_stage, is_indexer

S = 40
PATHS = ["small", "masked", "absorbed"]


def gradients(model: DeepSeekV32Model, weight: float = 1.0) -> dict[str, Tensor | None]:
    """Of `weight` times the language model's loss."""
    tokens = torch.randint(0, 512, (2, S), generator=torch.Generator().manual_seed(5))
    model.zero_grad(set_to_none=True)
    logits = model(tokens)
    (weight * torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())).backward()
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def is_none(grad: Tensor | None) -> bool:
    return grad is None or not grad.any()


@pytest.mark.parametrize("path", PATHS)
def test_indexers_learn_from_their_loss_alone(path: str) -> None:
    """Any weight of the language model's loss, also none, gives them the same gradient, to the bit."""
    model = make_model(tiny(), path)
    one, thousand, none = (gradients(model, weight) for weight in (1.0, 1000.0, 0.0))
    assert sum(map(is_indexer, one)) == 3 * 5
    for name, grad in one.items():
        if is_indexer(name):
            assert grad is not None
            assert grad.any(), name
            assert torch.equal(grad, thousand[name]), name
            assert torch.equal(grad, none[name]), name
        else:
            assert is_none(none[name]), name


@pytest.mark.parametrize("path", PATHS)
def test_the_model_learns_nothing_from_the_indexers_loss(path: str) -> None:
    coefficients = (0.0, 1.0, 1000.0)
    off, one, thousand = (gradients(make_model(tiny(indexer_loss_coeff=c), path)) for c in coefficients)
    for name, grad in one.items():
        if is_indexer(name):
            assert is_none(off[name]), name
            assert (thousand[name] - 1000 * grad).norm() < 1e-5 * thousand[name].norm(), name
        else:
            assert torch.equal(grad, off[name]), name
            assert torch.equal(grad, thousand[name]), name


@pytest.mark.parametrize("mtp", [0, 1])
@pytest.mark.parametrize("path", PATHS)
def test_warm_up_trains_indexers_only(path: str, mtp: int) -> None:
    model = make_model(tiny(stage="warmup", n_mtp_layers=mtp), path)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {name for name in dict(model.named_parameters()) if is_indexer(name)}
    grads = gradients(model)
    for name, grad in grads.items():
        assert (grad is not None) == is_indexer(name), name
        assert grad is None or grad.any(), name
    assert all(torch.equal(g, gradients(model, 1000.0)[n]) for n, g in grads.items() if g is not None)


@pytest.mark.parametrize("path", PATHS)
def test_warm_up_is_dense_attention(path: str) -> None:
    """Logits are those of a model whose indexer may choose every key, in training as without a gradient."""
    tokens = torch.randint(0, 512, (2, S))
    warm = make_model(tiny(stage="warmup"), path)
    logits = warm(tokens)
    with torch.no_grad():
        expected = make_model(tiny(index_topk=64), path)(tokens)
        assert torch.allclose(warm(tokens), expected, atol=1e-5)
        assert not torch.allclose(make_model(tiny(), path)(tokens), expected, atol=1e-2)
    assert torch.allclose(logits, expected, atol=1e-5)


def test_warm_up_learns() -> None:
    """The loss falls, nothing else moves, and experts' biases are not told of any tokens."""
    model = make_model(tiny(stage="warmup"), "masked")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    losses = []
    for step in range(30):
        gradients(model)
        optimizer.step()
        losses.append(collect(model, step + 1)["indexer_kl"])
    assert losses[-1] < 0.5 * losses[0]
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) != is_indexer(name), name
    assert not any(layer.moe.tokens_per_expert.any() for layer in model.layers.values() if layer.moe_enabled)


def test_stage_is_a_switch() -> None:
    model = make_model(tiny(), "masked")
    sparse = gradients(model)
    apply_stage(model, "warmup")
    assert sum(p.requires_grad for p in model.parameters()) == 15
    apply_stage(model, "sparse")
    for name, grad in gradients(model).items():
        assert torch.equal(grad, sparse[name]), name
    with pytest.raises(ValueError, match="stage is 'dense', expected one of sparse, warmup"):
        apply_stage(model, "dense")


@pytest.mark.parametrize("stage", ["sparse", "warmup"])
@pytest.mark.parametrize("path", PATHS)
def test_gradients_of_inputs_and_of_parameters_apart(path: str, stage: str) -> None:
    """As zero-bubble schedules take them: the same gradients, and every layer's loss is counted once."""
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    model = make_model(tiny(n_layers=2, stage=stage), path)
    x, flow = torch.randn(2, 1, S, 64).unbind(0)
    logs = [layer.attention.core for layer in model.layers.values()]

    def forward() -> tuple[Tensor, Tensor]:
        h = start = x.clone().requires_grad_()
        for layer in model.layers.values():
            h = layer(h, model.cos_sin)
        return start, h

    start, out = forward()
    out.backward(flow)
    expected = {name: p.grad for name, p in model.layers.named_parameters()}
    losses = [pop_log(core.kl).item() for core in logs]
    assert min(losses) > 0
    model.zero_grad(set_to_none=True)
    again, out = forward()
    (grad,), groups = stage_backward_input([out], [flow], [again], model.layers.parameters())
    stage_backward_weight(model.layers.parameters(), groups)
    assert torch.allclose(grad, start.grad, atol=1e-5)
    for name, parameter in model.layers.named_parameters():
        if expected[name] is None:
            assert parameter.grad is None, name
        else:
            assert torch.allclose(parameter.grad, expected[name], atol=1e-5), name
    assert [pop_log(core.kl).item() for core in logs] == pytest.approx(losses)


# ---- health


class Alone:
    """Parallel dimensions of one rank."""

    pp_enabled = False

    def get_optional_mesh(self, name: str) -> None:
        return None


def collect(model: torch.nn.Module, step: int, every: int = 0, log_every: int = 1, steps: int = 1) -> dict[str, float]:
    job = SimpleNamespace(whorl=SimpleNamespace(health_every=every), metrics=SimpleNamespace(log_freq=log_every))
    return health.collect([model], Alone(), job, step, steps)


@pytest.mark.parametrize("path", PATHS)
def test_recall_and_ties_by_brute_force(path: str) -> None:
    model = make_model(tiny(index_topk=8), path)
    attention = model.layers["1"].attention
    kept: list[Any] = []
    attention.core.register_forward_pre_hook(lambda _, args: kept.append([x.detach() for x in args if x is not None]))
    eyes = health.measure_next_forward([model])
    gradients(model)
    stats = eyes.close()
    assert sorted(stats) == [0, 1, 2]
    q_nope, q_pe, kv, k_pe, wkv_b, index_q, index_k, weights = (x[0] if x.dim() > 2 else x for x in kept[0])
    recall, ties, chose = 0.0, 0, 0
    for t in range(8, S):
        scores = torch.tensor([(weights[t] * (index_q[t] @ index_k[s]).relu()).sum() for s in range(t + 1)])
        order = scores.argsort(descending=True, stable=True)
        ties += int(scores[order[7]] == scores[order[8]])
        up = (kv[: t + 1] @ wkv_b.T).unflatten(-1, (4, 32))
        k = torch.cat((up[..., :16], k_pe[: t + 1, None].expand(-1, 4, -1)), -1)
        logits = torch.einsum("hd,shd->hs", torch.cat((q_nope[t], q_pe[t]), -1), k) * attention.core.settings.scale
        recall += logits.softmax(-1)[:, order[:8]].sum(-1).mean().item()
        chose += 1
    assert stats[1].queries.item() == chose
    assert stats[1].recall.item() == pytest.approx(recall, rel=1e-4)
    assert stats[1].ties.item() == ties
    gradients(model)
    assert len(eyes.stats) == 3  # closed: it looks no more


def test_compiled_attention_is_watched_too() -> None:
    """As `whorl.titan.deepseek_v32.infra.compiled` compiles it: the same figures, and hooks leave nothing behind."""
    model = make_model(tiny(index_topk=8), "masked")
    stats = []
    for compiled in (False, True):
        for layer in model.layers.values():
            if compiled:
                layer.attention.forward = torch.compile(layer.attention.forward, fullgraph=True, backend="eager")
        eyes = health.measure_next_forward([model])
        gradients(model)
        stats.append(eyes.close())
        assert not any(layer.attention.core._forward_pre_hooks for layer in model.layers.values())
    assert sorted(stats[1]) == [0, 1, 2]
    for layer, choice in stats[0].items():
        assert choice.recall.item() == pytest.approx(stats[1][layer].recall.item(), rel=1e-4)
        assert choice.queries == stats[1][layer].queries


def test_ties_are_found() -> None:
    """An indexer whose weights are all negative gives its best, 0, to many."""
    model = make_model(tiny(index_topk=8), "masked")
    with torch.no_grad():
        for layer in model.layers.values():
            layer.attention.indexer.wk.weight.zero_()
            layer.attention.indexer.k_norm.bias.zero_()
    eyes = health.measure_next_forward([model])
    gradients(model)
    assert all(choice.ties == choice.queries > 0 for choice in eyes.close().values())


def test_collect() -> None:
    """Losses are means over the steps since the last call; recall comes when it is due."""
    model = make_model(tiny(index_topk=8, indexer_loss_coeff=0.5, n_mtp_layers=1), "masked")
    gradients(model)
    one = collect(model, 1)
    gradients(model)
    gradients(model)
    two = collect(model, 3, every=4, steps=2)
    assert set(one) == {"indexer_kl", *(f"indexer_kl/{i}" for i in range(4)), "mtp_loss"}
    assert two == pytest.approx(one)
    assert one["indexer_kl"] == pytest.approx(sum(one[f"indexer_kl/{i}"] for i in range(4)) / 4)
    gradients(model)
    due = collect(model, 4, every=4)
    assert 0 < due["recall/1"] < 1
    assert {"recall/0", "ties/0", "recall/3"} <= set(due)
    gradients(model)
    assert "recall/1" not in collect(model, 5, every=4)
    assert collect(torch.nn.Linear(2, 2), 1) == {}


def test_logged_loss_is_the_divergence() -> None:
    """By hand, for one layer, from what the core is given."""
    model = make_model(tiny(index_topk=8, n_layers=1), "small")
    kept: list[Any] = []
    core = next(m for m in model.modules() if isinstance(m, Core))
    core.register_forward_pre_hook(lambda _, args: kept.append([x.detach() for x in args if x is not None]))
    gradients(model)
    logged = collect(model, 1)["indexer_kl"]
    q_nope, q_pe, kv, k_pe, wkv_b, index_q, index_k, weights = kept[0]
    total = 0.0
    for b in range(2):
        for t in range(S):
            scores = torch.stack([(weights[b, t] * (index_q[b, t] @ index_k[b, s]).relu()).sum() for s in range(t + 1)])
            chosen = scores.argsort(descending=True, stable=True)[:8]
            up = (kv[b, : t + 1] @ wkv_b.T).unflatten(-1, (4, 32))
            k = torch.cat((up[..., :16], k_pe[b, : t + 1, None].expand(-1, 4, -1)), -1)[chosen]
            q = torch.cat((q_nope[b, t], q_pe[b, t]), -1)
            p = (torch.einsum("hd,shd->hs", q, k) * core.settings.scale).softmax(-1).mean(0)
            total += (p * (p.log() - scores[chosen].log_softmax(-1))).sum().item()
    assert logged == pytest.approx(total / (2 * S), rel=1e-4)
