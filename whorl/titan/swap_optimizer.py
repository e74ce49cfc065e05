"""AdamW whose moments live in pinned host memory and visit the device a chunk at a time, during `step` alone.

    load of chunk n+1  |  update of chunk n  |  store of chunk n-1       three lanes, a ring of device buffers

The update is torch's own fused kernel, so its bits are torch.optim.AdamW(fused=True)'s.
"""

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from whorl.device import HOST, FinishedEvent, Stream
from whorl.titan.moments import FORMATS, Format
from whorl.titan.swap_memory import (
    CUT,
    Bucket,
    Host,
    Slot,
    cut,
    flat,
    flat_gradient,
    flat_parameter,
    local,
    memory_order,
    move,
    new_host,
    same,
    shaped,
    views,
)

MOMENTS = ("exp_avg", "exp_avg_sq")
# What torch.optim.AdamW has and this has not, with the values that ask for nothing; a group may have its own.
FIXED: dict[str, tuple[object, ...]] = {
    "amsgrad": (False,),
    "foreach": (None, False),
    "capturable": (False,),
    "differentiable": (False,),
    "fused": (True,),
    "decoupled_weight_decay": (True,),
}
# Of these, how a step is computed, which is no part of a saved state.
COMPUTED = {"foreach": None, "capturable": False, "differentiable": False, "fused": True}


class SwapAdamW(torch.optim.AdamW):
    """torch.optim.AdamW(fused=True) with the moments on the host.

    moments: "exact", "bfloat16" or "int8" (float32 parameters; rounded at random, right on average).
    chunk: elements that travel together, a multiple of 65536. ring: chunks on the device at once.
    prefetch: loading starts when the gradient of the parameter at this share of the list arrives; the first parameters
    get theirs last. None: when `step` starts.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        moments: str = "exact",
        chunk: int = 1 << 25,
        ring: int = 3,
        prefetch: float | None = 0.1,
    ) -> None:
        self._prepare(moments, chunk, ring, prefetch)
        super().__init__(params, lr, betas, eps, weight_decay, maximize=maximize, fused=True)
        self._start_lanes()

    def _prepare(self, moments: str, chunk: int, ring: int, prefetch: float | None) -> None:
        if moments not in FORMATS:
            raise ValueError(f"moments is {moments!r}: use one of {', '.join(FORMATS)}")
        if chunk < CUT or chunk % CUT:
            raise ValueError(f"chunk is {chunk} elements: use a positive multiple of {CUT}")
        if ring < 2:
            raise ValueError(f"ring is {ring} chunks: 2 overlap loads with updates, 3 overlap stores, too")
        if prefetch is not None and not 0 <= prefetch <= 1:
            raise ValueError(f"prefetch is {prefetch}: use a share of the parameters, 0 to 1, or None")
        self._settings = {"moments": moments, "chunk": chunk, "ring": ring, "prefetch": prefetch}
        self.formats, self.room = FORMATS[moments], chunk
        self._hosts: dict[Tensor, Host] = {}
        self._targets: dict[Tensor, Host] = {}  # where the moments of a lent one go in this step
        self._chunks: list[Bucket] = []
        self._planned: list[list[Tensor]] = []
        self._slots: list[Slot] = []
        self._ring, self._next, self._updates = ring, 0, 0  # the next chunk to load; updates made, for the rounding
        self._written: Any = FinishedEvent()  # the last store

    def _start_lanes(self) -> None:
        self._step_supports_amp_scaling = False  # GradScaler unscales and skips by itself
        trainable = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        kind = (trainable or self.param_groups[0]["params"])[0].device.type
        self._load, self._compute, self._store = Stream(kind), Stream(kind, beside=False), Stream(kind)
        prefetch = cast(float | None, self._settings["prefetch"])
        if prefetch is not None and trainable:
            me = weakref.ref(self)
            trigger = trainable[min(int(prefetch * len(trainable)), len(trainable) - 1)]
            trigger.register_post_accumulate_grad_hook(lambda _: _prefetch(me()))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if isinstance(param_group, dict):
            check_group(self.defaults | param_group)
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            if param.requires_grad:
                self._open(param)

    # ---- copies and pickles

    def __getstate__(self) -> dict[str, Any]:
        """With the moments as they are kept: what is made of it goes on by itself, to the bit."""
        self._written.synchronize()
        steps = {param: {"step": state["step"].clone()} for param, state in self.state.items()}
        kept = {param: host.moments for param, host in self._hosts.items()}
        swap = {"settings": self._settings, "updates": self._updates, "kept": kept}
        return super().__getstate__() | {"state": steps, "swap": swap}

    def __setstate__(self, state: dict[str, Any]) -> None:
        swap = state.get("swap")
        super().__setstate__({name: value for name, value in state.items() if name != "swap"})
        if swap is None:  # torch's own load_state_dict comes this way
            return
        self._prepare(**swap["settings"])
        steps, self.state = self.state, defaultdict(dict)
        for param, parts in swap["kept"].items():
            self._open(param)
            self.state[param]["step"].copy_(steps[param]["step"])
            for mine, theirs in zip(self._hosts[param].moments, parts, strict=True):
                for to, value in zip(mine, theirs, strict=True):
                    to.copy_(value)
        self._updates = swap["updates"]
        self._start_lanes()

    # ---- memory on the host

    def _open(self, param: Tensor) -> None:
        """Moments of zero. Made at once, so that a checkpoint has them before the first step."""
        here = local(param)
        order = memory_order(here)
        if not here.permute(order).is_contiguous():
            raise ValueError(
                f"a parameter of shape {tuple(here.shape)} and strides {here.stride()} has holes or overlaps: "
                "make it contiguous"
            )
        if here.dtype != torch.float32 and not self.formats[0].is_exact:
            name = self.formats[0].name
            raise ValueError(f"moments={name!r} takes float32 parameters, got {here.dtype}: use 'exact'")
        other = next(iter(self._hosts), param)
        if other.device != param.device:
            raise ValueError(f"parameters are on {other.device} and {param.device}: use an optimizer for each device")
        self._hosts[param] = new_host(param, self.formats)
        self.state[param]["step"] = torch.zeros((), dtype=torch.float32, device=here.device)
        self._show(param)

    def _show(self, param: Tensor) -> None:
        """What `state` has of the moments: torch's checkpoints look there for the names of what is to be loaded."""
        for name, form, parts in zip(MOMENTS, self.formats, self._hosts[param].moments, strict=True):
            shown = parts[0] if len(form.parts(param.dtype)) == 1 else None
            self.state[param][name] = shaped(param, shown)

    def kept(self, param: Tensor) -> list[Tensor]:
        """What is on the host of a parameter's moments, in the form it is kept in."""
        self._written.synchronize()
        return [part for parts in self._hosts[param].moments for part in parts] if param in self._hosts else []

    # ---- the step

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = [[p for p in group["params"] if p.grad is not None] for group in self.param_groups]
        params = [p for group in groups for p in group]
        if not params:
            return loss
        for param in params:
            if param not in self._hosts:  # it was frozen
                self._open(param)
        for group in self.param_groups:
            check_group(group)  # it may have been changed since
        self._plan(groups)
        grads = {param: flat_gradient(param) for param in params}
        torch._foreach_add_([self.state[param]["step"] for param in params], 1)
        self._updates += 1
        for n, chunk in enumerate(self._chunks):
            self._start_loading(n)
            self._pass_through(n, chunk, grads)
        self._drop()
        return loss

    def _plan(self, groups: list[list[Tensor]]) -> None:
        """Chunks of the parameters that have gradients; another set than last time, and what was loaded is not it."""
        if not same(groups, self._planned):
            self._drop()
            self._chunks, self._planned = cut(groups, self.room), groups

    def _start_loading(self, n: int) -> None:
        """Load what the ring has room for while chunk n is the one to update."""
        if not self._slots and self._chunks:
            self._make_slots()
        while self._next < min(n + self._ring, len(self._chunks)):
            chunk, slot = self._chunks[self._next], self._slots[self._next % self._ring]
            self._next += 1
            copy = functools.partial(move, self.formats, chunk, slot, self._hosts)
            slot.loaded = self._load.run(copy, after=(slot.stored, self._written))

    def _make_slots(self) -> None:
        room = max(chunk.size for chunk in self._chunks)
        itemsize = max(chunk.dtype.itemsize for chunk in self._chunks)
        device = local(self._chunks[0].pieces[0].param).device

        def part(form: Format, index: int) -> Tensor:
            dtype, values = form.parts(torch.float32)[index]
            num_bytes = room // values * (itemsize if form.is_exact else dtype.itemsize)
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            self._load.uses(memory)
            self._store.uses(memory)
            return memory

        for _ in range(min(self._ring, len(self._chunks))):
            memory = [[part(form, i) for i in range(len(form.parts(torch.float32)))] for form in self.formats]
            # What the caller launched before may still use the memory that these were given.
            self._slots.append(Slot(memory, stored=self._compute.run(lambda: None)))

    def _pass_through(self, n: int, chunk: Bucket, grads: dict[Tensor, Tensor]) -> None:
        slot = self._slots[n % self._ring]
        updated = self._compute.run(lambda: self._update(n, chunk, slot, grads), after=(slot.loaded,))
        for piece in chunk.pieces:
            if self._hosts[piece.param].is_lent and piece.param not in self._targets:
                self._targets[piece.param] = new_host(piece.param, self.formats)
        copy = functools.partial(move, self.formats, chunk, slot, self._hosts | self._targets, back=True)
        slot.stored = self._written = self._store.run(copy, after=(updated,))
        for piece in chunk.pieces:
            # One parameter at a time: a state dict that is gone already gives its memory to the next.
            if piece.param in self._targets and piece.stop == local(piece.param).numel():
                self._hosts[piece.param] = self._targets.pop(piece.param)
                self._show(piece.param)

    def _update(self, n: int, chunk: Bucket, slot: Slot, grads: dict[Tensor, Tensor]) -> None:
        group = self.param_groups[chunk.group]
        parts = [views(self.formats, chunk, slot, piece) for piece in chunk.pieces]
        sizes = [piece.stop - piece.start for piece in chunk.pieces]
        first, second = (
            [form.decode(view[i], size) for view, size in zip(parts, sizes, strict=True)]
            for i, form in enumerate(self.formats)
        )
        beta1, beta2 = map(float, group["betas"])
        lr = group["lr"]
        if isinstance(lr, Tensor) and lr.device.type != HOST:  # one on the host is a number to the kernel
            lr = lr.to(first[0].device)
        torch._fused_adamw_(
            [flat_parameter(piece.param)[piece.start : piece.stop] for piece in chunk.pieces],
            [grads[piece.param][piece.start : piece.stop] for piece in chunk.pieces],
            first,
            second,
            [],
            [self.state[piece.param]["step"] for piece in chunk.pieces],
            amsgrad=False,
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )
        if not self.formats[0].is_exact:
            # A function of the update and the chunk: a resumed run draws what an unbroken one would have.
            generator = torch.Generator(first[0].device)
            generator.manual_seed((self._updates << 20) + n)
            for i, values in enumerate((first, second)):
                for view, x in zip(parts, values, strict=True):
                    self.formats[i].encode(x, view[i], generator)

    def _drop(self) -> None:
        """Give the ring back; what was loaded and not updated is on the host still."""
        self._slots, self._next = [], 0

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """torch.optim.AdamW's, with the moments on the host. It keeps its values: later updates write elsewhere."""
        self._written.synchronize()
        packed = super().state_dict()
        for param, index in self._indices(packed):
            if param in self._hosts:
                state = {"step": self.state[param]["step"].clone()}
                packed["state"][index] = state | dict(zip(MOMENTS, self._give(param), strict=True))
        return packed

    def _indices(self, packed: dict[str, Any]) -> Iterable[tuple[Tensor, int]]:
        for group, saved in zip(self.param_groups, packed["param_groups"], strict=True):
            yield from zip(group["params"], saved["params"], strict=True)

    def _give(self, param: Tensor) -> list[Tensor]:
        host, size = self._hosts[param], local(param).numel()
        given = []
        for form, parts in zip(self.formats, host.moments, strict=True):
            if len(parts) == 1:
                host.is_lent = True
            given.append(shaped(param, parts[0] if len(parts) == 1 else form.decode(parts, size)))
        return given

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._written.synchronize()
        self._drop()
        steps = {index: {"step": state["step"]} for index, state in state_dict["state"].items()}
        if any(group.get("amsgrad") for group in state_dict["param_groups"]):
            raise ValueError("the state was saved with amsgrad=True, which SwapAdamW does not have")
        super().load_state_dict(state_dict | {"state": steps})
        for group in self.param_groups:
            group.update({name: value for name, value in COMPUTED.items() if group[name] not in FIXED[name]})
        self._hosts = {}
        for param, index in self._indices(state_dict):
            saved = state_dict["state"].get(index)
            if saved is not None:
                step = self.state[param]["step"]
                self._open(param)
                self.state[param]["step"].copy_(step)
                self._take(param, saved)
            elif param.requires_grad:
                self._open(param)
        self._updates = max((int(self.state[param]["step"]) for param in self._hosts), default=0)

    def _take(self, param: Tensor, saved: dict[str, Any]) -> None:
        order = memory_order(local(param))
        for name, form, parts in zip(MOMENTS, self.formats, self._hosts[param].moments, strict=True):
            if name not in saved:
                raise ValueError(f"the saved state of a parameter of shape {tuple(param.shape)} has no {name}")
            value = local(saved[name])
            if value.shape != local(param).shape:
                raise ValueError(
                    f"the saved {name} has shape {tuple(value.shape)} here, the parameter {tuple(local(param).shape)}: "
                    "torch.distributed.checkpoint loads what was sharded otherwise"
                )
            dtype = param.dtype if form.is_exact else torch.float32
            form.encode(flat(value, order).to(device=parts[0].device, dtype=dtype), parts, None)


def check_group(group: Mapping[str, Any]) -> None:
    """That nothing is asked for which the step would not do."""
    for name, values in FIXED.items():
        if name in group and group[name] not in values:
            raise ValueError(
                f"{name} is {group[name]} in a group of parameters, and SwapAdamW has {values[0]} alone: leave it out, "
                "or take torch.optim.AdamW"
            )


def _prefetch(optimizer: SwapAdamW | None) -> None:
    if optimizer is not None:
        optimizer._start_loading(0)
