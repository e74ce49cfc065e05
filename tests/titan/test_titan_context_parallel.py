"""Context parallelism: whose tokens go where, what travels, and that the sum over ranks is one rank's."""

import pytest
import torch
from ranks import shared
from titan_layouts import LENGTH, TIMEOUT, Degrees, build, cases, check, collectives, dims, job
from torch import Tensor, nn

FOUR_RANKS = {
    "cp": Degrees(cp=4),
    "cp x fsdp": Degrees(cp=2),
    "cp x fsdp, in order": Degrees(cp=2, balancer=None),
    "cp x tp": Degrees(cp=2, tp=2),
    "cp x tp x ep": Degrees(cp=2, tp=2, ep=4),
    "cp x tp x ep, over context": Degrees(cp=2, tp=2, ep=2),
    "cp x tp x ep, fused": Degrees(cp=2, tp=2, ep=4, core="absorbed"),
    "cp x ep x etp": Degrees(cp=2, tp=2, ep=2, etp=2),
}
TWO_RANKS = {
    "in order": Degrees(cp=2, balancer=None),
    "absorbed": Degrees(cp=2, core="absorbed"),
}
MORE_ON_TWO_RANKS = {
    "masked": Degrees(cp=2, core="masked"),
    "absorbed, warm-up": Degrees(cp=2, core="absorbed", stage="warmup"),
    "checkpointing": Degrees(cp=2, checkpointing="full"),
    "accumulating": Degrees(cp=2, micro_batches=2),
}
SLOW = (*cases(2, MORE_ON_TWO_RANKS, pytest.mark.slow), *cases(4, FOUR_RANKS, pytest.mark.slow))


@pytest.mark.parametrize(("ranks", "layout"), [*cases(2, TWO_RANKS), *SLOW])
def test_as_one_rank(ranks: int, layout: Degrees) -> None:
    check(ranks, layout)


@pytest.mark.slow
def test_heads_and_context() -> None:
    """The fused core under tensor parallelism: its target is added up in backward."""
    check(2, Degrees(tp=2, core="absorbed"))


# ---- the base class


def _gather(balancer: str | None) -> dict[str, Tensor]:
    """Cut by TorchTitan, gathered by us; the gradient of a weighted sum comes back to whom it belongs."""
    from torchtitan.distributed.context_parallel import cp_shard

    from whorl.titan.context_parallel import ContextParallelAttention

    class Bare(ContextParallelAttention):
        def apply(self, attention: nn.Module) -> None:
            pass

    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    whole = torch.arange(2 * LENGTH * 3, dtype=torch.float32).view(2, LENGTH, 3)
    positions = torch.arange(LENGTH).expand(2, -1)
    (x, places), _ = cp_shard(mesh, (whole, positions.contiguous()), None, balancer)
    x = x.detach().requires_grad_()
    rank = torch.distributed.get_rank()
    heads = x[..., None].expand(-1, -1, -1, 2)
    gathered, with_heads, found_places = Bare(mesh, balancer).gather(x, heads, places)
    (gathered * whole * (rank + 1)).sum().backward()
    ranks = torch.distributed.get_world_size()
    assert torch.equal(gathered, whole)
    assert torch.equal(with_heads, whole[..., None].expand(-1, -1, -1, 2))
    assert torch.equal(found_places, positions)
    assert torch.equal(x.grad, x.detach() * ranks * (ranks + 1) / 2)
    return {"places": places}


@pytest.mark.parametrize(("balancer", "first"), [("headtail", [*range(8), *range(24, 32)]), (None, [*range(16)])])
def test_gathered_in_order_and_summed_back(balancer: str | None, first: list[int]) -> None:
    answers = shared(2).run(_gather, balancer, timeout=TIMEOUT)
    assert answers[0]["places"][0].tolist() == first


@pytest.mark.slow
def test_gathered_from_four_ranks() -> None:
    answers = shared(4).run(_gather, "headtail", timeout=TIMEOUT)
    assert answers[1]["places"][0].tolist() == [4, 5, 6, 7, 24, 25, 26, 27]


def _another_attention() -> None:
    """A subclass for an attention that is not ours, here softmax over keys and values, against one rank."""
    from torchtitan.distributed.context_parallel import cp_shard

    from whorl.titan.context_parallel import ContextParallelAttention

    class Plain(nn.Module):
        whole = staticmethod(lambda *tensors: tensors)

        def forward(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
            k, v, places = self.whole(k, v, positions)
            seen = places[:, None] <= positions[..., None]
            return ((q @ k.mT).masked_fill(~seen, float("-inf"))).softmax(-1) @ v

    class ContextParallelPlain(ContextParallelAttention):
        def apply(self, attention: nn.Module) -> None:
            attention.whole = self.gather  # type: ignore[assignment]

    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    torch.manual_seed(1)
    inputs = [torch.randn(2, LENGTH, 4, requires_grad=True) for _ in range(3)]
    positions = torch.arange(LENGTH).expand(2, -1).contiguous()
    out = Plain()(*inputs, positions)
    out.square().sum().backward()
    cut, _ = cp_shard(mesh, (*(x.detach() for x in inputs), positions, out.detach()), None)
    cut = [x.detach().requires_grad_() for x in cut[:3]] + list(cut[3:])
    attention = Plain()
    ContextParallelPlain(mesh).apply(attention)
    own = attention(*cut[:4])
    own.square().sum().backward()
    torch.testing.assert_close(own, cut[4])
    gradients, _ = cp_shard(mesh, tuple(x.grad for x in inputs), None)
    for x, want in zip(cut[:3], gradients, strict=True):
        torch.testing.assert_close(x.grad, want)


def test_another_attention_extends_it() -> None:
    shared(2).run(_another_attention, timeout=TIMEOUT)


# ---- what travels


def _layer_counts() -> dict[str, dict[str, int]]:
    from torchtitan.distributed.context_parallel import cp_shard

    from whorl.titan.cpu import install

    install()
    from whorl.titan.deepseek_v32.infra.context_parallel import ContextParallelDSA

    layout = Degrees(cp=2)
    model = build(job(layout))
    attention = model.layers["1"].attention
    mesh = dims(layout).get_mesh("cp")
    ContextParallelDSA(mesh).apply(attention)
    (positions,), _ = cp_shard(mesh, (torch.arange(LENGTH).expand(2, -1).contiguous(),), None)
    x, kept = torch.randn(2, LENGTH // 2, 32, requires_grad=True), []
    forward = collectives(lambda: kept.append(attention(x, model.cos_sin, None, positions)))
    return {"forward": forward, "backward": collectives(lambda: kept[0].sum().backward())}


def test_keys_travel_together() -> None:
    """One gather of keys and one of positions; one scatter of gradients."""
    counts = shared(2).run(_layer_counts, timeout=TIMEOUT)[0]
    assert counts == {"forward": {"all_gather_into_tensor": 2}, "backward": {"reduce_scatter_tensor": 1}}


def _without_positions() -> str:
    from whorl.titan.cpu import install

    install()
    from whorl.titan.deepseek_v32.infra.parallelize import parallelize_deepseek_v32

    config = job(Degrees(cp=2))
    model = parallelize_deepseek_v32(build(config), dims(Degrees(cp=2)), config)
    with pytest.raises(ValueError, match="called without positions") as caught:
        model(torch.zeros(1, LENGTH // 2, dtype=torch.long))
    return str(caught.value)


def test_positions_are_needed() -> None:
    assert "TorchTitan shards with the tokens" in shared(2).run(_without_positions, timeout=TIMEOUT)[0]
