"""AdamW with its moments in pinned host memory; `step` moves them to the device and back, one bucket at a time.

    load of bucket n+1  |  update of bucket n  |  store of bucket n-1       three streams, a ring of device buffers

A bucket is a fixed number of elements of consecutive parameters, with both moments. With exact moments the update is
torch's fused kernel, so that bits are equal to those of torch.optim.AdamW(fused=True). `swap_memory.py` has the memory
on both sides, `moments.py` the formats in which the host stores moments, `swap_update.py` the update of a bucket.
"""

import functools
import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from whorl.streams import FinishedEvent, Stream
from whorl.titan import swap_update
from whorl.titan.moments import FORMATS
from whorl.titan.swap_memory import (
    ALIGNMENT,
    Bucket,
    DeviceBuffer,
    HostMoments,
    are_same_groups,
    by_moment,
    flat_gradient,
    flat_parameter,
    flatten,
    local,
    memory_order,
    move,
    new_host,
    parts_of,
    split_into_buckets,
    unflatten,
    views,
)
from whorl.titan.swap_update import Piece

MOMENTS = ("exp_avg", "exp_avg_sq")
# Options of torch.optim.AdamW that SwapAdamW accepts only with these values, also in a parameter group.
FIXED_OPTIONS: dict[str, tuple[object, ...]] = {
    "amsgrad": (False,),
    "foreach": (None, False),
    "capturable": (False,),
    "differentiable": (False,),
    "fused": (True,),
    "decoupled_weight_decay": (True,),
}
# Those of them that only say how a step is computed, with our values: loading a state dict does not change them.
COMPUTE_OPTIONS = {"foreach": None, "capturable": False, "differentiable": False, "fused": True}
Prefetch = float | Literal["auto"] | None


class SwapAdamW(torch.optim.AdamW):
    """torch.optim.AdamW(fused=True) with the moments in host memory.

    moments: format on the host, "exact", "bfloat16" or "int8"; the last two update in float32 and round stochastically,
    which is unbiased. chunk: number of elements of a bucket, a multiple of 65536. ring: number of buckets on the device
    at once, at least 2. prefetch: a share of the list of parameters; the first loads start in backward when the
    parameter at this place gets its gradient (0.1: one tenth from the front, which backward reaches near its end);
    "auto": three times the share of all buckets that the ring holds, at least 0.1; None: they start with `step`.
    backend: "torch", or "triton" for int8 moments in one kernel; None: the kernel for 16-bit parameters on CUDA. The
    other arguments are those of torch.optim.AdamW. Raises ValueError for a value out of range or an option that it does
    not support.

        optimizer = SwapAdamW(model.parameters(), lr=1e-4, moments="bfloat16")
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
        prefetch: Prefetch = "auto",
        backend: str | None = None,
    ) -> None:
        self._initialize(moments=moments, chunk=chunk, ring=ring, prefetch=prefetch, backend=backend)
        super().__init__(params, lr, betas, eps, weight_decay, maximize=maximize, fused=True)
        self._create_streams()

    def _initialize(self, **settings: Any) -> None:
        """Check our own arguments and create empty state; called by the constructor and when a copy is unpickled."""
        moments, chunk, ring, prefetch = (settings[name] for name in ("moments", "chunk", "ring", "prefetch"))
        if moments not in FORMATS:
            raise ValueError(f"moments is {moments!r}, expected one of {', '.join(FORMATS)}")
        if chunk < ALIGNMENT or chunk % ALIGNMENT:
            raise ValueError(f"chunk is {chunk} elements, expected a positive multiple of {ALIGNMENT}")
        if ring < 2:
            raise ValueError(
                f"ring is {ring} buckets, expected at least 2: 2 overlap loads with updates, 3 also overlap stores"
            )
        if prefetch is not None and prefetch != "auto" and not 0 <= prefetch <= 1:
            raise ValueError(f"prefetch is {prefetch}, expected a share of the parameters from 0 to 1, 'auto' or None")
        swap_update.check_backend(settings["backend"], moments)
        self._settings = settings
        self.formats, self.capacity = FORMATS[moments], chunk
        self._hosts: dict[Tensor, HostMoments] = {}  # by parameter
        # While a step is under way, by parameter: where it stores new moments if a state dict refers to the old ones.
        self._targets: dict[Tensor, HostMoments] = {}
        self._buckets: list[Bucket] = []
        self._planned: list[list[Tensor]] = []  # the parameters of each group that the buckets were made of
        self._buffers: list[DeviceBuffer] = []  # bucket n uses buffer n % ring
        self._ring = ring
        self._next = 0  # the next bucket to load
        self._updates = 0  # the number of updates, which seeds the stochastic rounding
        self._last_store: Any = FinishedEvent()  # the event after the last store

    def _create_streams(self) -> None:
        """Create the three streams, and the hook that starts loading during backward."""
        self._step_supports_amp_scaling = False  # GradScaler then unscales gradients and skips steps itself
        trainable = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        device_type = (trainable or self.param_groups[0]["params"])[0].device.type
        self._load, self._store = Stream(device_type), Stream(device_type)
        self._compute = Stream(device_type, beside=False)
        prefetch = self._settings["prefetch"]
        if prefetch == "auto":
            num_buckets = sum(local(p).numel() for p in trainable) / self.capacity
            prefetch = prefetch_share(self._ring, num_buckets)
        # Buffers that are filled from the first half of backward on are kept between steps: memory that is freed while
        # stores still read it is not used again in the next forward, and the allocator would get more.
        self._are_buffers_kept = prefetch is not None and prefetch >= 0.5
        if prefetch is not None and trainable:
            weak_self = weakref.ref(self)  # the hook of a parameter must not keep the optimizer alive
            trigger = trainable[min(int(prefetch * len(trainable)), len(trainable) - 1)]
            trigger.register_post_accumulate_grad_hook(lambda _: _prefetch(weak_self()))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if isinstance(param_group, dict):
            check_group(self.defaults | param_group)
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            if param.requires_grad:
                self._create_state(param)

    # ---- copies and pickles

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy or pickle, with the moments as the host stores them: bits stay equal."""
        self._last_store.synchronize()
        steps = {param: {"step": state["step"].clone()} for param, state in self.state.items()}
        host_parts = {param: by_moment(host.parts) for param, host in self._hosts.items()}
        swap = {"settings": self._settings, "updates": self._updates, "kept": host_parts}
        return super().__getstate__() | {"state": steps, "swap": swap}

    def __setstate__(self, state: dict[str, Any]) -> None:
        swap = state.get("swap")
        super().__setstate__({name: value for name, value in state.items() if name != "swap"})
        if swap is None:  # torch's load_state_dict also calls __setstate__
            return
        self._initialize(**swap["settings"])
        steps, self.state = self.state, defaultdict(dict)
        for param, parts in swap["kept"].items():
            self._create_state(param)
            self.state[param]["step"].copy_(steps[param]["step"])
            for host_part, value in zip(self._hosts[param].parts, itertools.chain(*parts), strict=True):
                host_part.copy_(value)
        self._updates = swap["updates"]
        self._create_streams()

    # ---- memory on the host

    def _create_state(self, param: Tensor) -> None:
        """Create the state of a parameter with zero moments, so that a checkpoint has it before the first step.

        Raises ValueError when the parameter is not dense, its dtype does not fit the format, or its device differs.
        """
        shard = local(param)
        order = memory_order(shard)
        if not shard.permute(order).is_contiguous():
            raise ValueError(
                f"a parameter of shape {tuple(shard.shape)} and strides {shard.stride()} has holes or overlaps; "
                "make it contiguous"
            )
        if shard.dtype not in (torch.float32, *swap_update.HALF) and not self.formats[0].is_exact:
            name = self.formats[0].name
            raise ValueError(
                f"moments is {name!r}, which needs float32, bfloat16 or float16 parameters, and one is {shard.dtype}; "
                "use 'exact'"
            )
        self.backend_of(shard.dtype, shard.device.type)
        first_param = next(iter(self._hosts), param)
        if first_param.device != param.device:
            raise ValueError(
                f"parameters are on {first_param.device} and {param.device}; use one optimizer for each device"
            )
        self._hosts[param] = new_host(param, self.formats)
        self.state[param]["step"] = torch.zeros((), dtype=torch.float32, device=shard.device)
        self._expose_moments(param)

    def _expose_moments(self, param: Tensor) -> None:
        """Put the moments into `state`, where torch's checkpoints look for the names of the tensors to load.

        They are views of host memory, or tensors on the meta device for a format that has no tensor of the values.
        """
        for name, parts in zip(MOMENTS, by_moment(self._hosts[param].parts), strict=True):
            self.state[param][name] = unflatten(param, parts[0] if len(parts) == 1 else None)

    def host_parts(self, param: Tensor) -> list[Tensor]:
        """Return the tensors on the host that store the moments of a parameter, in their stored format."""
        self._last_store.synchronize()
        return self._hosts[param].parts if param in self._hosts else []

    def backend_of(self, dtype: torch.dtype, device: str) -> str:
        """Return the backend that updates parameters of this dtype on this device, "torch" or "triton"."""
        return swap_update.choose_backend(self._settings["backend"], self._settings["moments"], dtype, device)

    @property
    def bytes_each_way(self) -> int:
        """Return the bytes of moments that a step loads from the host, and as many that it stores there."""
        return sum(
            -(-(span.stop - span.start) // values) * dtype.itemsize
            for bucket in self._buckets
            for dtype, values in parts_of(self.formats, bucket.dtype)
            for span in bucket.spans
        )

    # ---- the step

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient. closure: computes the loss, which is then returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = [[p for p in group["params"] if p.grad is not None] for group in self.param_groups]
        params = [p for group in groups for p in group]
        if not params:
            return loss
        for param in params:
            if param not in self._hosts:  # the parameter was frozen before
                self._create_state(param)
        for group in self.param_groups:
            check_group(group)  # a scheduler or the user may have changed it
        self._plan(groups)
        grads = {param: flat_gradient(param) for param in params}
        torch._foreach_add_([self.state[param]["step"] for param in params], 1)
        self._updates += 1
        for n, bucket in enumerate(self._buckets):
            self._start_loading(n)
            self._process_bucket(n, bucket, grads)
        self._next = 0
        if not self._are_buffers_kept:
            self._release_buffers()
        return loss

    def _plan(self, groups: list[list[Tensor]]) -> None:
        """Divide the parameters with gradients into buckets; if they changed, discard what was loaded."""
        if not are_same_groups(groups, self._planned):
            self._release_buffers()
            self._buckets, self._planned = split_into_buckets(groups, self.capacity), groups

    def _start_loading(self, n: int) -> None:
        """Start to load all buckets that have a buffer in the ring while bucket n is updated: up to n + ring - 1."""
        if not self._buffers and self._buckets:
            self._make_buffers()
        while self._next < min(n + self._ring, len(self._buckets)):
            bucket, buffer = self._buckets[self._next], self._buffers[self._next % self._ring]
            self._next += 1
            copy = functools.partial(move, self.formats, bucket, buffer, self._hosts)
            buffer.loaded = self._load.run(copy, after=(buffer.stored, self._last_store))

    def _make_buffers(self) -> None:
        """Allocate a ring of device buffers, each large enough for every bucket, as bytes without a dtype.

        The parts of a format are listed for float32; the exact format has the dtype of the parameters instead.
        """
        capacity = max(bucket.size for bucket in self._buckets)
        itemsize = max(bucket.dtype.itemsize for bucket in self._buckets)
        device = local(self._buckets[0].spans[0].param).device
        sizes = [
            capacity // values * (itemsize if self.formats[0].is_exact else dtype.itemsize)
            for dtype, values in parts_of(self.formats, torch.float32)
        ]
        for _ in range(min(self._ring, len(self._buckets))):
            parts = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
            for part in parts:
                self._load.uses(part)
                self._store.uses(part)
            # Kernels that the caller launched earlier may still use this memory: the first load waits for them, as it
            # waits for an earlier store.
            self._buffers.append(DeviceBuffer(parts, stored=self._compute.run(lambda: None)))

    def _process_bucket(self, n: int, bucket: Bucket, grads: dict[Tensor, Tensor]) -> None:
        """Launch the update of bucket n after its load, and its store after its update. grads: flat, by parameter."""
        buffer = self._buffers[n % self._ring]
        updated = self._compute.run(lambda: self._update(n, bucket, buffer, grads), after=(buffer.loaded,))
        for span in bucket.spans:
            if self._hosts[span.param].is_lent and span.param not in self._targets:
                self._targets[span.param] = new_host(span.param, self.formats)
        copy = functools.partial(move, self.formats, bucket, buffer, self._hosts | self._targets, back=True)
        buffer.stored = self._last_store = self._store.run(copy, after=(updated,))
        for span in bucket.spans:
            # After its last span a parameter uses the new memory. The old memory is freed at once, if its state dict is
            # gone, so that the next parameter can use it.
            if span.param in self._targets and span.stop == local(span.param).numel():
                self._hosts[span.param] = self._targets.pop(span.param)
                self._expose_moments(span.param)

    def _update(self, n: int, bucket: Bucket, buffer: DeviceBuffer, grads: dict[Tensor, Tensor]) -> None:
        """Update the moments in a device buffer and the parameters of its bucket in place."""
        group = self.param_groups[bucket.group]
        pieces = [
            Piece(
                flat_parameter(span.param)[span.start : span.stop],
                grads[span.param][span.start : span.stop],
                self.state[span.param]["step"],
                by_moment(views(self.formats, bucket, buffer, span)),
                span.offset,
            )
            for span in bucket.spans
        ]
        device = pieces[0].param.device
        # Rounding depends on the update and the bucket, so that a resumed run rounds like an uninterrupted one.
        if self.backend_of(bucket.dtype, device.type) == "triton":
            from whorl.titan import moments_triton

            moments_triton.update(group, pieces, self._updates, n)
            return
        generator = None
        if not self.formats[0].is_exact:
            generator = torch.Generator(device).manual_seed((self._updates << 20) + n)
        swap_update.update(self.formats, group, pieces, generator)

    def _release_buffers(self) -> None:
        """Free the device buffers; moments that were loaded and not updated are still on the host."""
        self._buffers, self._next = [], 0

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of torch.optim.AdamW with the moments on the host; later updates do not change it."""
        self._last_store.synchronize()
        packed = super().state_dict()
        for param, index in self._indices(packed):
            if param in self._hosts:
                state = {"step": self.state[param]["step"].clone()}
                packed["state"][index] = state | dict(zip(MOMENTS, self._lend(param), strict=True))
        return packed

    def _indices(self, packed: dict[str, Any]) -> Iterable[tuple[Tensor, int]]:
        """Yield each parameter and its number in a state dict."""
        for group, saved in zip(self.param_groups, packed["param_groups"], strict=True):
            yield from zip(group["params"], saved["params"], strict=True)

    def _lend(self, param: Tensor) -> list[Tensor]:
        """Return both moments of a parameter for a state dict.

        They share memory with the host moments, which are marked as lent; those of `int8` are decoded copies.
        """
        host, size = self._hosts[param], local(param).numel()
        moments = []
        for moment_format, parts in zip(self.formats, by_moment(host.parts), strict=True):
            if len(parts) == 1:
                host.is_lent = True
            moments.append(unflatten(param, parts[0] if len(parts) == 1 else moment_format.decode(parts, size)))
        return moments

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of any torch.optim.AdamW without amsgrad, and round the moments to this format.

        Raises ValueError when the state has amsgrad, lacks a moment, or was sharded differently.
        """
        self._last_store.synchronize()
        self._release_buffers()
        steps = {index: {"step": state["step"]} for index, state in state_dict["state"].items()}
        if any(group.get("amsgrad") for group in state_dict["param_groups"]):
            raise ValueError("the state was saved with amsgrad=True, which SwapAdamW does not support")
        super().load_state_dict(state_dict | {"state": steps})
        for group in self.param_groups:
            group |= {n: value for n, value in COMPUTE_OPTIONS.items() if group[n] not in FIXED_OPTIONS[n]}
        self._hosts = {}
        for param, index in self._indices(state_dict):
            saved = state_dict["state"].get(index)
            if saved is not None:
                step = self.state[param]["step"]
                self._create_state(param)
                self.state[param]["step"].copy_(step)
                self._load_moments(param, saved)
            elif param.requires_grad:
                self._create_state(param)
        self._updates = max((int(self.state[param]["step"]) for param in self._hosts), default=0)

    def _load_moments(self, param: Tensor, saved: dict[str, Any]) -> None:
        order = memory_order(local(param))
        host_moments = by_moment(self._hosts[param].parts)
        for name, moment_format, parts in zip(MOMENTS, self.formats, host_moments, strict=True):
            if name not in saved:
                raise ValueError(f"the saved state of a parameter of shape {tuple(param.shape)} has no {name}")
            value = local(saved[name])
            if value.shape != local(param).shape:
                raise ValueError(
                    f"the saved {name} has shape {tuple(value.shape)}, expected {tuple(local(param).shape)}; use "
                    "torch.distributed.checkpoint to load a state that was sharded differently"
                )
            dtype = param.dtype if moment_format.is_exact else torch.float32
            moment_format.encode(flatten(value, order).to(device=parts[0].device, dtype=dtype), parts, None)


def check_group(group: Mapping[str, Any]) -> None:
    """Raise ValueError when a parameter group sets an option that SwapAdamW does not support."""
    for name, values in FIXED_OPTIONS.items():
        if name in group and group[name] not in values:
            raise ValueError(
                f"{name} is {group[name]} in a parameter group, SwapAdamW expects {values[0]}; remove the option, "
                "or use torch.optim.AdamW"
            )


def prefetch_share(ring: int, num_buckets: float) -> float:
    """Return where in the list of parameters the first loads start, as a share, so that the ring is full in time.

    Filling the ring takes its share of the time that all moments need over the link, which is up to three times the
    backward for a step of one sequence. More than that would hold memory while the activations need it.
    """
    return min(1.0, max(0.1, 3 * ring / max(1.0, num_buckets)))


def _prefetch(optimizer: SwapAdamW | None) -> None:
    """Start to load the first buckets, if there are buckets of an earlier step."""
    if optimizer is not None:
        optimizer._start_loading(0)
