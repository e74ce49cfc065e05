"""The optimizer with moments on the host against torch's fused AdamW, bit for bit, and against its own checkpoints."""

import copy
import gc
import random
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from late_lane import Late
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from whorl.titan import swap_optimizer
from whorl.titan.moments import FORMATS, Int8
from whorl.titan.swap_memory import ALIGNMENT, split_into_buckets
from whorl.titan.swap_optimizer import SwapAdamW

SETTINGS: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    random.seed(0)
    monkeypatch.setattr(swap_optimizer, "Stream", Late)


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Larger than a chunk, odd, transposed, tiny, empty, a scalar."""
    torch.manual_seed(1)
    shapes = [(3, 61, 911), (77,), (1,), (0, 4), (), (130, 515)]
    tensors = [torch.randn(shape).to(dtype) for shape in shapes]
    tensors.append(torch.randn(300, 211).to(dtype).t())
    return [nn.Parameter(x) for x in tensors]


def give_gradients(params: Iterable[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype).mul_(10.0 ** (step % 5 - 3)).to(p.device)
        p.grad = torch.empty_like(p).copy_(p.grad)  # as autograd does: in the layout of the parameter


def assert_same(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.detach().cpu(), b.detach().cpu())


def moments(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    state = optimizer.state_dict()["state"]
    return [state[i][name] for i in sorted(state) for name in ("step", "exp_avg", "exp_avg_sq")]


@pytest.mark.parametrize(("dtype", "steps"), [(torch.float32, 100), (torch.float64, 20), (torch.bfloat16, 20)])
def test_steps_are_fused_adamws_to_the_bit(dtype: torch.dtype, steps: int, late: None) -> None:
    ours, theirs = parameters(dtype), parameters(dtype)
    swapped = SwapAdamW(ours, chunk=ALIGNMENT, ring=3, **SETTINGS)
    fused = torch.optim.AdamW(theirs, fused=True, **SETTINGS)
    for step in range(steps):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        swapped.step()
        fused.step()
    assert len(swapped._buckets) >= 5
    assert_same(ours, theirs)
    assert_same(moments(swapped), moments(fused))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_hundred_steps_on_a_gpu(dtype: torch.dtype) -> None:
    ours, theirs = ([nn.Parameter(p.detach().cuda()) for p in parameters(dtype)] for _ in range(2))
    swapped = SwapAdamW(ours, chunk=ALIGNMENT, **SETTINGS)
    fused = torch.optim.AdamW(theirs, fused=True, **SETTINGS)
    for step in range(100):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        swapped.step()
        fused.step()
    assert_same(ours, theirs)
    assert_same(moments(swapped), moments(fused))
    assert all(host.is_pinned() for h in swapped._hosts.values() for host in h.parts if host.numel())


@pytest.mark.parametrize("ring", [2, 3, 5])
def test_groups_schedules_and_missing_gradients(ring: int, late: None) -> None:
    def build(cls: Any, **more: Any) -> tuple[list[nn.Parameter], Any]:
        params = parameters()
        groups = [{"params": params[:2], "lr": 1e-2}, {"params": params[2:], "weight_decay": 0.0, "betas": (0.8, 0.9)}]
        return params, cls(groups, maximize=True, **SETTINGS, **more)

    ours, swapped = build(SwapAdamW, chunk=ALIGNMENT, ring=ring)
    theirs, fused = build(torch.optim.AdamW, fused=True)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (swapped, fused)]
    for step in range(12):
        for params, optimizer in ((ours, swapped), (theirs, fused)):
            give_gradients(params, step)
            params[step % 3].grad = None
            optimizer.step()
        for schedule in schedules:
            schedule.step()
    assert_same(ours, theirs)
    assert_same(moments(swapped), moments(fused))


def model(width: int = 200) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 8))


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    for step in steps:
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()


def test_loading_starts_before_backward_ends(late: None, monkeypatch: pytest.MonkeyPatch) -> None:
    net = model(600)
    optimizer = SwapAdamW(net.parameters(), chunk=ALIGNMENT, ring=2, prefetch=0.4, **SETTINGS)
    train(net, optimizer, range(1))
    loaded: list[int] = []
    next(net.parameters()).register_post_accumulate_grad_hook(lambda _: loaded.append(optimizer._next))
    train(net, optimizer, range(1, 2))
    assert loaded == [2], "the ring is being filled when the last gradient arrives"
    reference = model(600)
    train(reference, torch.optim.AdamW(reference.parameters(), fused=True, **SETTINGS), range(2))
    assert_same(net.parameters(), reference.parameters())


def test_load_update_and_store_are_in_flight_together(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    params = [nn.Parameter(torch.zeros(ALIGNMENT)) for _ in range(5)]
    optimizer = SwapAdamW(params, chunk=ALIGNMENT, ring=3)

    def logging(lane: Any, name: str) -> None:
        run = lane.run

        def log(work: Callable[[], None], after: Iterable[Any] = ()) -> Any:
            events.append(name)
            return run(work, after)

        monkeypatch.setattr(lane, "run", log)

    logging(optimizer._load, "L")
    logging(optimizer._store, "S")
    give_gradients(params, 0)
    optimizer.step()
    assert "".join(events) == "LLLSLSLSSS", "loads run two chunks ahead of the stores"


def test_the_first_loads_wait_for_what_the_caller_launched(late: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ring is given memory that kernels launched before may still read."""
    params = [nn.Parameter(torch.zeros(ALIGNMENT)) for _ in range(5)]
    optimizer = SwapAdamW(params, chunk=ALIGNMENT, ring=3)
    launched: list[Any] = []
    waits: list[bool] = []
    compute, load = optimizer._compute.run, optimizer._load.run

    def computing(work: Callable[[], None], after: Iterable[Any] = ()) -> Any:
        launched.append(compute(work, after))
        return launched[-1]

    def loading(work: Callable[[], None], after: Iterable[Any] = ()) -> Any:
        waits.append(any(mark in launched for mark in after))
        return load(work, after)

    monkeypatch.setattr(optimizer._compute, "run", computing)
    monkeypatch.setattr(optimizer._load, "run", loading)
    give_gradients(params, 0)
    optimizer.step()
    assert waits[:3] == [True] * 3


def test_chunks_cover_every_element_once_and_cut_where_kernels_do() -> None:
    params = [*parameters(), nn.Parameter(torch.zeros(1000)), nn.Parameter(torch.zeros(5 * ALIGNMENT + 3))]
    chunks = split_into_buckets([params[:2], params[2:]], 2 * ALIGNMENT)
    spans = [piece for chunk in chunks for piece in chunk.spans]
    for param in params:
        mine = [piece for piece in spans if piece.param is param]
        ends = [0, *(piece.stop for piece in mine)]
        assert [piece.start for piece in mine] == ends[:-1]
        assert ends[-1] == param.numel()
        assert all(piece.start % ALIGNMENT == 0 for piece in mine)
    for chunk in chunks:
        assert chunk.size <= 2 * ALIGNMENT
        ends = [0, *(piece.offset + piece.stop - piece.start for piece in chunk.spans)]
        assert all(piece.offset >= end for piece, end in zip(chunk.spans, ends, strict=False))


def test_the_device_holds_the_ring_during_a_step_and_nothing_between() -> None:
    params = [nn.Parameter(torch.zeros(ALIGNMENT)) for _ in range(6)]
    optimizer = SwapAdamW(params, chunk=ALIGNMENT, ring=2, prefetch=None)
    sizes: list[int] = []
    update = optimizer._update

    def spy(*arguments: Any) -> None:
        sizes.append(sum(part.nbytes for slot in optimizer._buffers for part in slot.parts))
        update(*arguments)

    optimizer._update = spy  # type: ignore[method-assign]
    give_gradients(params, 0)
    optimizer.step()
    assert set(sizes) == {2 * 2 * ALIGNMENT * 4}
    assert optimizer._buffers == []


def test_frozen_parameters_hold_no_state_until_they_learn() -> None:
    net = model()
    for p in net[0].parameters():
        p.requires_grad_(False)
    optimizer = SwapAdamW(net.parameters(), chunk=ALIGNMENT, **SETTINGS)
    train(net, optimizer, range(2))
    assert not any(p in optimizer.state or p in optimizer._hosts for p in net[0].parameters())
    assert set(optimizer.state_dict()["state"]) == {2, 3, 4, 5}
    for p in net[0].parameters():
        p.requires_grad_(True)
    train(net, optimizer, range(2, 4))
    assert optimizer.state_dict()["state"][0]["step"] == 2
    assert optimizer.state_dict()["state"][2]["step"] == 4


def test_a_dropped_optimizer_is_let_go() -> None:
    net = model()
    optimizer = SwapAdamW(net.parameters())
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    net(torch.randn(2, 64)).sum().backward()


# ---- checkpoints


def test_states_are_exchanged_with_torchs_adamw() -> None:
    swapped_net, fused_net = model(), model()
    swapped = SwapAdamW(swapped_net.parameters(), chunk=ALIGNMENT, **SETTINGS)
    train(swapped_net, swapped, range(3))
    fused = torch.optim.AdamW(fused_net.parameters(), fused=True)
    fused.load_state_dict(copy.deepcopy(swapped.state_dict()))
    fused_net.load_state_dict(swapped_net.state_dict())
    train(fused_net, fused, range(3, 6))
    train(swapped_net, swapped, range(3, 6))
    assert_same(swapped_net.parameters(), fused_net.parameters())
    back_net = model()
    back = SwapAdamW(back_net.parameters(), chunk=ALIGNMENT)
    back.load_state_dict(fused.state_dict())
    back_net.load_state_dict(fused_net.state_dict())
    train(back_net, back, range(6, 8))
    train(fused_net, fused, range(6, 8))
    assert_same(back_net.parameters(), fused_net.parameters())
    assert back.state_dict()["param_groups"] == fused.state_dict()["param_groups"]


def carry_over(net: nn.Module, saved: SwapAdamW, to: nn.Module, resumed: SwapAdamW, path: Path) -> None:
    """Save a model and its optimizer as torch does, and load them into others."""
    dcp.save(get_optimizer_state_dict(net, saved, options=FLAT), checkpoint_id=path)
    state = get_optimizer_state_dict(to, resumed, options=FLAT)
    dcp.load(state, checkpoint_id=path)
    set_optimizer_state_dict(to, resumed, state, options=FLAT)
    to.load_state_dict(net.state_dict())


@pytest.mark.parametrize("kind", FORMATS)
def test_resume_is_exact(kind: str, tmp_path: Path) -> None:
    whole, first, second = model(), model(), model(200)
    settings = {**SETTINGS, "chunk": ALIGNMENT, "moments": kind}
    train(whole, SwapAdamW(whole.parameters(), **settings), range(8))
    saved = SwapAdamW(first.parameters(), **settings)
    train(first, saved, range(5))
    resumed = SwapAdamW(second.parameters(), **settings)
    carry_over(first, saved, second, resumed, tmp_path)
    train(second, resumed, range(5, 8))
    assert_same(second.parameters(), whole.parameters())


def test_a_state_dict_keeps_its_values_while_training_goes_on(late: None, tmp_path: Path) -> None:
    net = model()
    optimizer = SwapAdamW(net.parameters(), chunk=ALIGNMENT, **SETTINGS)
    train(net, optimizer, range(3))
    state = get_optimizer_state_dict(net, optimizer, options=FLAT)
    before = {name: x.clone() for name, x in state.items() if isinstance(x, Tensor)}
    saving = dcp.async_save(state, checkpoint_id=tmp_path)
    train(net, optimizer, range(3, 6))
    saving.result(timeout=60)
    assert_same((state[name] for name in before), before.values())
    read = {name: torch.zeros_like(x) for name, x in before.items()}
    dcp.load(read, checkpoint_id=tmp_path)
    assert_same((read[name] for name in before), before.values())
    later = optimizer.state_dict()["state"][0]["exp_avg"]
    kept = later.clone()
    train(net, optimizer, range(6, 8))
    assert torch.equal(later, kept)
    reference = model()
    train(reference, torch.optim.AdamW(reference.parameters(), fused=True, **SETTINGS), range(8))
    assert_same(net.parameters(), reference.parameters())


def test_a_state_dict_waits_for_the_last_store(late: None) -> None:
    params = [nn.Parameter(torch.zeros(8))]
    optimizer = SwapAdamW(params, betas=(0.5, 0.5))
    run = optimizer._store.run

    def slow(work: Callable[[], None], after: Iterable[Any] = ()) -> Any:
        return run(lambda: (time.sleep(0.3), work())[1], after)

    optimizer._store.run = slow  # type: ignore[method-assign]
    params[0].grad = torch.ones(8)
    optimizer.step()
    assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"].clone(), torch.full((8,), 0.5))


def test_what_was_loaded_for_a_step_is_not_used_after_load_state_dict() -> None:
    net, reference = model(), model()
    optimizer = SwapAdamW(net.parameters(), chunk=ALIGNMENT, **SETTINGS)
    fused = torch.optim.AdamW(reference.parameters(), fused=True, **SETTINGS)
    train(net, optimizer, range(2))
    train(reference, fused, range(2))
    early = copy.deepcopy(fused.state_dict())
    train(net, optimizer, range(2, 4))
    train(reference, fused, range(2, 4))
    for m, o in ((net, optimizer), (reference, fused)):
        m(torch.ones(8, 64)).square().mean().backward()
        o.load_state_dict(copy.deepcopy(early))
        o.step()
    assert_same(net.parameters(), reference.parameters())


def test_memory_of_a_state_dict_that_is_gone_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    params = [nn.Parameter(torch.zeros(ALIGNMENT)) for _ in range(6)]
    optimizer = SwapAdamW(params, chunk=ALIGNMENT)
    held = [weakref.ref(part) for host in optimizer._hosts.values() for part in host.parts]
    alive: list[int] = []
    fresh, new_host = 0, swap_optimizer.new_host

    def spy(*args: Any) -> Any:
        nonlocal fresh
        fresh += 1
        alive.append(sum(ref() is not None for ref in held) // 2 + fresh)
        return new_host(*args)

    monkeypatch.setattr(swap_optimizer, "new_host", spy)
    optimizer.state_dict()
    give_gradients(params, 0)
    optimizer.step()
    assert fresh == 6
    assert max(alive) <= 6 + 3, "not twice the moments"
    optimizer.step()
    assert fresh == 6, "once for each state dict"


# ---- moments in fewer bits


@pytest.mark.parametrize(("kind", "bound"), [("bfloat16", 2**-7), ("int8", 2 ** (16 / 126) - 1)])
def test_the_stated_error_of_a_stored_moment(kind: str, bound: float) -> None:
    generator = torch.Generator().manual_seed(0)
    for form, signed in zip(FORMATS[kind], (True, False), strict=True):
        x = torch.randn(4000, generator=generator)
        x = x if signed else x.square()
        parts = [torch.zeros(4096 // values, dtype=dtype) for dtype, values in form.parts(torch.float32)]
        total = torch.zeros(4000)
        for _ in range(200):
            form.encode(x, parts, generator)
            y = form.decode(parts, 4000)
            total += y
            is_large = x.abs() > x.abs().max() * 2**-15
            assert ((y - x).abs() <= x.abs() * bound * (1 + 1e-4))[is_large].all()
        drift = (total / 200 - x).abs() / x.abs()
        assert drift[is_large].mean() < bound / 20, "right on average"
        form.encode(y, parts, None)
        assert torch.equal(form.decode(parts, 4000), y), "what was stored once is stored again"


def test_a_second_moment_never_becomes_zero() -> None:
    form = Int8(signed=False)
    x = torch.logspace(-37, 0, 256)
    parts = [torch.zeros(256 // values, dtype=dtype) for dtype, values in form.parts(torch.float32)]
    form.encode(x, parts, torch.Generator().manual_seed(0))
    y = form.decode(parts, 256)
    assert (y > 0).all()
    assert (y[x < 2**-33] > x[x < 2**-33]).all()


@pytest.mark.parametrize(("kind", "distance", "share"), [("bfloat16", 0.05, 0.5), ("int8", 0.2, 0.27)])
def test_training_in_fewer_bits_stays_near(kind: str, distance: float, share: float) -> None:
    exact, compact = model(), model()
    train(exact, torch.optim.AdamW(exact.parameters(), fused=True, lr=1e-3), range(50))
    optimizer = SwapAdamW(compact.parameters(), lr=1e-3, moments=kind, chunk=ALIGNMENT)
    train(compact, optimizer, range(50))
    start = model()
    moved, apart = 0.0, 0.0
    for a, b, s in zip(exact.parameters(), compact.parameters(), start.parameters(), strict=True):
        moved += float((a - s).square().sum().detach())
        apart += float((a - b).square().sum().detach())
    assert 0 < apart / moved < distance**2
    held = sum(part.nbytes for host in optimizer._hosts.values() for part in host.parts)
    assert held < share * 8 * sum(p.numel() for p in compact.parameters()) + 1


# ---- what is refused


def test_refusals() -> None:
    params = [nn.Parameter(torch.zeros(4))]
    for settings, message in (
        ({"moments": "int4"}, "moments is 'int4', expected one of exact, bfloat16, int8"),
        ({"chunk": 1000}, "multiple of 65536"),
        ({"ring": 1}, "ring is 1"),
        ({"prefetch": 2.0}, "prefetch is 2.0"),
    ):
        with pytest.raises(ValueError, match=message):
            SwapAdamW(params, **settings)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"needs float32, bfloat16 or float16 parameters, and one is torch\.float64"):
        SwapAdamW([nn.Parameter(torch.zeros(4, dtype=torch.float64))], moments="int8")
    with pytest.raises(ValueError, match="has holes or overlaps"):
        SwapAdamW([nn.Parameter(torch.zeros(4, 4)[:, ::2])])
    amsgrad = torch.optim.AdamW(params, amsgrad=True)
    with pytest.raises(ValueError, match="amsgrad=True"):
        SwapAdamW(params).load_state_dict(amsgrad.state_dict())
    state = SwapAdamW(params).state_dict()
    with pytest.raises(ValueError, match="shape \\(4,\\), expected \\(5,\\)"):
        SwapAdamW([nn.Parameter(torch.zeros(5))]).load_state_dict(state)
    del state["state"][0]["exp_avg_sq"]
    with pytest.raises(ValueError, match="has no exp_avg_sq"):
        SwapAdamW(params).load_state_dict(state)
    embedding = nn.Embedding(8, 4, sparse=True)
    optimizer = SwapAdamW(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="sparse gradient"):
        optimizer.step()
