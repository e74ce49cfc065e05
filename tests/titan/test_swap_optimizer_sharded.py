"""Moments on the host under FSDP2: saved by one rank and resumed by two, and back."""

from pathlib import Path

import ranks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from test_swap_optimizer import FLAT, SETTINGS, assert_same, train
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from whorl.titan.swap_memory import ALIGNMENT
from whorl.titan.swap_optimizer import SwapAdamW


def uneven_model() -> nn.Module:
    """An odd number of rows, so that two ranks' parts differ, each a multiple of any CPU's vector.

    torch's fused kernel rounds the last elements, which fill no vector, otherwise on some CPUs: with other parts other
    elements are last.
    """
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(64, 301, bias=False), nn.ReLU(), nn.Linear(301, 64, bias=False))


def sharded() -> tuple[nn.Module, SwapAdamW]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net = uneven_model()
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net, SwapAdamW(net.parameters(), chunk=ALIGNMENT, **SETTINGS)


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def resume_sharded(folder: str, weights: dict[str, Tensor]) -> tuple[list[Tensor], dict[str, Tensor], list[str], int]:
    net, optimizer = sharded()
    state = get_optimizer_state_dict(net, optimizer, options=FLAT)
    dcp.load(state, checkpoint_id=folder)
    set_optimizer_state_dict(net, optimizer, state, options=FLAT)
    loaded = get_optimizer_state_dict(net, optimizer, options=FLAT)
    kinds = sorted({type(x).__name__ for name, x in loaded.items() if "exp_avg" in name})
    states = {name: whole(x).clone() for name, x in loaded.items() if isinstance(x, Tensor)}
    with torch.no_grad():
        for name, p in net.named_parameters():
            p.copy_(dist.tensor.distribute_tensor(weights[name], p.device_mesh, p.placements))
    # Each rank has the whole batch: the mean of equal gradients is the gradient, exactly.
    train(net, optimizer, range(3, 6))
    dcp.save(get_optimizer_state_dict(net, optimizer, options=FLAT), checkpoint_id=f"{folder}_two")
    net(torch.ones(8, 64)).sum().backward()
    return [whole(p).detach() for p in net.parameters()], states, kinds, optimizer._next


def test_one_rank_resumes_as_two_and_two_as_one(tmp_path: Path) -> None:
    net = uneven_model()
    optimizer = SwapAdamW(net.parameters(), chunk=ALIGNMENT, **SETTINGS)
    train(net, optimizer, range(3))
    state = get_optimizer_state_dict(net, optimizer, options=FLAT)
    dcp.save(state, checkpoint_id=tmp_path / "one")
    weights = {name: p.detach().clone() for name, p in net.named_parameters()}
    answers = ranks.shared(2).run(resume_sharded, str(tmp_path / "one"), weights)
    for _, states, kinds, loading in answers:
        assert kinds == ["DTensor"]
        assert loading > 0, "FSDP's backward starts the loads, too"
        assert_same((states[name] for name in states), (state[name] for name in states))
    train(net, optimizer, range(3, 6))
    for params, *_ in answers:
        assert_same(params, net.parameters())
    after = get_optimizer_state_dict(net, optimizer, options=FLAT)
    read = {name: torch.zeros_like(x) for name, x in after.items() if isinstance(x, Tensor)}
    dcp.load(read, checkpoint_id=tmp_path / "one_two")
    assert_same(read.values(), (after[name] for name in read))
