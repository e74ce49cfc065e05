"""Every option of torch.optim.AdamW in the optimizer with moments on the host: the same bits, or a refusal; copies."""

import copy
import inspect
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_swap_optimizer import SETTINGS, assert_same, give_gradients, model, moments, parameters, train
from torch import nn

from whorl.titan.moments import FORMATS
from whorl.titan.swap_memory import ALIGNMENT
from whorl.titan.swap_optimizer import FIXED_OPTIONS, SwapAdamW

SAME: dict[str, dict[str, Any]] = {
    "lr": {"lr": 2e-2},
    "lr, a tensor": {"lr": torch.tensor(2e-2)},
    "betas": {"betas": (0.7, 0.8)},
    "betas, tensors": {"betas": (torch.tensor(0.7), torch.tensor(0.8))},
    "eps": {"eps": 1e-3},
    "weight_decay": {"weight_decay": 0.5},
    "maximize": {"maximize": True},
    "foreach": {"foreach": False},
    "no amsgrad": {"amsgrad": False},
}
REFUSED: dict[str, Any] = {
    "amsgrad": True,
    "foreach": True,
    "capturable": True,
    "differentiable": True,
    "fused": False,
    "decoupled_weight_decay": False,
}


def test_no_option_is_forgotten() -> None:
    theirs = {*torch.optim.AdamW([nn.Parameter(torch.zeros(1))]).defaults}
    assert theirs == {name.split()[0].strip(",") for name in SAME} - {"no"} | {*REFUSED}
    assert {*FIXED_OPTIONS} == {*REFUSED}
    taken = {*inspect.signature(SwapAdamW).parameters}
    assert theirs - taken == {*REFUSED}, "what is not taken is an unexpected keyword, never ignored"


@pytest.mark.parametrize("name", SAME)
def test_an_option_of_one_group(name: str) -> None:
    """Its own in the first group, the rest as everyone's; and a group that comes when some steps are over."""

    def build(cls: Any, **more: Any) -> tuple[list[nn.Parameter], Any]:
        params = parameters()
        groups = [{"params": params[:2], **copy.deepcopy(SAME[name])}, {"params": params[2:5]}]
        return params, cls(groups, **SETTINGS, **more)

    both = [build(SwapAdamW, chunk=ALIGNMENT), build(torch.optim.AdamW, fused=True)]
    for step in range(5):
        for params, optimizer in both:
            if step == 2:
                optimizer.add_param_group({"params": params[5:], **copy.deepcopy(SAME[name])})
            give_gradients(params, step)
            optimizer.step()
    assert_same(both[0][0], both[1][0])
    assert_same(moments(both[0][1]), moments(both[1][1]))


@pytest.mark.parametrize("name", REFUSED)
def test_an_option_that_it_has_not(name: str) -> None:
    params = parameters()[:3]
    group = {"params": params[:1], name: REFUSED[name]}
    message = f"{name} is {REFUSED[name]} in a parameter group, SwapAdamW expects"
    with pytest.raises(ValueError, match=message):
        SwapAdamW([group])
    optimizer = SwapAdamW(params[1:])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1
    optimizer.param_groups[0][name] = REFUSED[name]
    give_gradients(params, 0)
    before = [p.detach().clone() for p in params]
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert_same(params, before)
    with pytest.raises(TypeError, match=name):
        SwapAdamW(params, **{name: REFUSED[name]})


@pytest.mark.parametrize("how", ["foreach", "capturable", "for-loop"])
def test_a_state_of_another_way_to_compute(how: str) -> None:
    """What was computed is taken; how it is computed is this optimizer's own, and its state is fused AdamW's again."""
    net = model()
    options = {"foreach": {"foreach": True}, "capturable": {"capturable": True}, "for-loop": {"foreach": False}}[how]
    other = torch.optim.AdamW(net.parameters(), **SETTINGS)
    train(net, other, range(2))
    saved = copy.deepcopy(other.state_dict())
    for group in saved["param_groups"]:
        group.update(options)
    nets = [copy.deepcopy(net) for _ in range(2)]
    both = [SwapAdamW(nets[0].parameters(), chunk=ALIGNMENT), torch.optim.AdamW(nets[1].parameters(), fused=True)]
    both[0].load_state_dict(copy.deepcopy(saved))
    for group in saved["param_groups"]:
        group.update({"foreach": None, "capturable": False, "fused": True})
    both[1].load_state_dict(saved)
    for each, optimizer in zip(nets, both, strict=True):
        train(each, optimizer, range(2, 4))
    assert_same(nets[0].parameters(), nets[1].parameters())
    assert both[0].param_groups[0]["fused"] is True
    assert not both[0].param_groups[0]["capturable"]


# ---- copies


def through_pickle(x: Any) -> Any:
    return pickle.loads(pickle.dumps(x))


def through_torch(x: Any) -> Any:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("through", [copy.deepcopy, through_pickle, through_torch])
def test_a_copy_goes_on_by_itself(through: Callable[[Any], Any], kind: str) -> None:
    """Model and optimizer together, in the middle of training: both go on to the same bits, each with its own."""
    net = model()
    groups = [{"params": net[0].parameters(), "maximize": True}, {"params": net[2:].parameters(), "lr": 1e-2}]
    optimizer = SwapAdamW(groups, **SETTINGS, chunk=ALIGNMENT, ring=2, prefetch=0.4, moments=kind)
    frozen = net[4].bias.requires_grad_(False)
    train(net, optimizer, range(3))
    other_net, other = through((net, optimizer))
    at_copy = [p.detach().clone() for p in net.parameters()]
    train(other_net, other, range(3, 6))
    assert_same(net.parameters(), at_copy)
    assert other._next > 0 or other._buffers == []
    train(net, optimizer, range(3, 6))
    assert_same(other_net.parameters(), net.parameters())
    assert_same(moments(other), moments(optimizer))
    assert other._settings == optimizer._settings
    assert not torch.equal(net[0].weight, at_copy[0])
    assert frozen in optimizer.state
    assert torch.equal(frozen, at_copy[-1])
    other.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    other.load_state_dict(other.state_dict())
    train(other_net, other, range(6, 7))


def test_a_copy_loads_ahead_too() -> None:
    net = model(600)
    net, optimizer = copy.deepcopy((net, SwapAdamW(net.parameters(), chunk=ALIGNMENT, ring=2, prefetch=0.4)))
    train(net, optimizer, range(1))
    net(torch.ones(8, 64)).sum().backward()
    assert optimizer._next == 2


def test_a_shallow_copy_shares_no_moments() -> None:
    net = model()
    optimizer = SwapAdamW(net.parameters(), chunk=ALIGNMENT, **SETTINGS)
    train(net, optimizer, range(2))
    other = copy.copy(optimizer)
    before = [x.clone() for x in moments(optimizer)]
    give_gradients(net.parameters(), 0)
    other.step()
    assert_same(moments(optimizer), before)
