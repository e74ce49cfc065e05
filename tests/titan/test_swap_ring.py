"""The ring of the optimizer with moments on the host: long ones, filled in backward while earlier stores go on."""

import random
import threading
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from late_lane import Late
from test_swap_optimizer import SETTINGS, assert_same, model, moments, train
from torch import nn

from whorl.titan import swap_optimizer
from whorl.titan.moments import FORMATS
from whorl.titan.swap_memory import ALIGNMENT
from whorl.titan.swap_optimizer import SwapAdamW, prefetch_share


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    random.seed(0)
    monkeypatch.setattr(swap_optimizer, "Stream", Late)


@pytest.mark.parametrize(("ring", "prefetch"), [(64, 0.9), (64, "auto"), (4, 0.9), (5, 0.5), (64, None)])
def test_a_long_ring_has_the_same_bits(ring: int, prefetch: Any, late: None) -> None:
    net, reference = model(600), model(600)
    optimizer = SwapAdamW(net.parameters(), chunk=ALIGNMENT, ring=ring, prefetch=prefetch, **SETTINGS)
    fused = torch.optim.AdamW(reference.parameters(), fused=True, **SETTINGS)
    train(net, optimizer, range(8))
    train(reference, fused, range(8))
    assert len(optimizer._buckets) > 5
    assert_same(net.parameters(), reference.parameters())
    assert_same(moments(optimizer), moments(fused))


@pytest.mark.parametrize("kind", FORMATS)
def test_the_ring_does_not_change_what_is_rounded(kind: str, late: None) -> None:
    nets = [model(600) for _ in range(2)]
    for net, settings in zip(nets, ({"ring": 2, "prefetch": None}, {"ring": 64, "prefetch": 0.9}), strict=True):
        optimizer = SwapAdamW(net.parameters(), chunk=ALIGNMENT, moments=kind, **SETTINGS, **settings)
        train(net, optimizer, range(4))
    assert_same(nets[0].parameters(), nets[1].parameters())


def test_a_step_ends_before_its_stores_and_the_next_loads_wait_for_them(late: None) -> None:
    net, reference = model(600), model(600)
    optimizer = SwapAdamW(net.parameters(), chunk=ALIGNMENT, ring=64, prefetch=0.9, **SETTINGS)
    gate, run = threading.Event(), optimizer._store.run

    def gated(work: Callable[[], None], after: Iterable[Any] = ()) -> Any:
        return run(lambda: (gate.wait(60), work())[1], after)

    optimizer._store.run = gated  # type: ignore[method-assign]
    train(net, optimizer, range(1))  # would wait for the gate if it waited for a store
    assert not optimizer._last_store.event.is_set()
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    optimizer.zero_grad()
    net(x).square().mean().backward()
    loads = [buffer.loaded for buffer in optimizer._buffers]
    assert len(loads) == optimizer._next == len(optimizer._buckets), "all are under way"
    assert not any(load.event.is_set() for load in loads), "what they read is not stored yet"
    gate.set()
    optimizer.step()
    train(reference, torch.optim.AdamW(reference.parameters(), fused=True, **SETTINGS), range(2))
    assert_same(net.parameters(), reference.parameters())


def test_loads_start_where_the_ring_can_be_filled() -> None:
    assert prefetch_share(3, 127) == 0.1, "as before: near the end of backward"
    assert prefetch_share(16, 127) == pytest.approx(48 / 127)
    assert prefetch_share(64, 127) == 1
    assert prefetch_share(3, 0.01) == 1, "all moments fit into the ring"
    net = model(600)
    optimizer = SwapAdamW(net.parameters(), chunk=ALIGNMENT, ring=64)
    train(net, optimizer, range(1))
    started: list[int] = []
    [*net.parameters()][-2].register_post_accumulate_grad_hook(lambda _: started.append(optimizer._next))
    net(torch.ones(8, 64)).square().mean().backward()
    assert started == [len(optimizer._buckets)], "begun by the last parameter, which is the first with a gradient"


def test_a_ring_is_no_longer_than_all_buckets() -> None:
    net = model(600)
    optimizer = SwapAdamW(net.parameters(), chunk=ALIGNMENT, ring=64, prefetch=0.9)
    train(net, optimizer, range(1))
    net(torch.ones(8, 64)).square().mean().backward()
    assert len(optimizer._buffers) == len(optimizer._buckets) < 64


def test_buffers_that_are_filled_early_are_kept_between_steps() -> None:
    for prefetch, is_kept in ((0.9, True), (0.1, False), (None, False)):
        net = model(600)
        optimizer = SwapAdamW(net.parameters(), chunk=ALIGNMENT, ring=4, prefetch=prefetch)
        train(net, optimizer, range(1))
        buffers = [id(buffer) for buffer in optimizer._buffers]
        train(net, optimizer, range(1, 3))
        assert bool(buffers) == is_kept
        assert [id(buffer) for buffer in optimizer._buffers] == buffers


# ---- options of TorchTitan


@pytest.mark.parametrize(
    ("arguments", "ring", "prefetch"),
    [
        ((), 3, "auto"),
        (("--optimizer.swap_ring", "16"), 16, "auto"),
        (("--optimizer.swap_prefetch", "0.5", "--optimizer.moments", "int8"), 3, 0.5),
    ],
)
def test_options_of_a_job_reach_the_optimizer(arguments: tuple[str, ...], ring: int, prefetch: Any) -> None:
    pytest.importorskip("torchtitan")
    from whorl.titan import cpu

    cpu.install()
    from whorl.titan import job_options, optimizer

    job: Any = job_options.read(["--job.custom_config_module", "whorl.titan.config", "--optimizer.swap", *arguments])
    plain = torch.optim.AdamW([nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))], lr=0.5)
    swapped = optimizer._swap_optimizer(plain, job.optimizer)
    assert swapped.defaults["lr"] == 0.5
    settings = swapped._settings
    assert (settings["ring"], settings["prefetch"], settings["moments"]) == (ring, prefetch, job.optimizer.moments)


def test_a_job_without_our_section_has_the_defaults() -> None:
    pytest.importorskip("torchtitan")
    from whorl.titan import cpu

    cpu.install()
    from whorl.titan import optimizer

    plain = torch.optim.AdamW([nn.Parameter(torch.zeros(3))])
    settings = optimizer._swap_optimizer(plain, SimpleNamespace())._settings  # type: ignore[arg-type]
    assert settings == SwapAdamW([nn.Parameter(torch.zeros(3))])._settings
