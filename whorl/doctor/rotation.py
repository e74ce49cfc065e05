"""The live model that a checklist examines: its rotations are recorded and computed again.

The module calls the model's rotary object, records the calls of its rotating functions, and has the plain torch code
that they are compared with. torch is imported inside functions, because the other parts of the doctor run without it.
"""

import contextlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from whorl.doctor.live_model import RotaryOwner, arguments_by_name, own_forward
from whorl.rope_config import RopeConfig

if TYPE_CHECKING:
    from torch import Tensor

# Names of functions that rotate q and k, in Megatron, transformers and the Ascend libraries.
ROTATES: Final = re.compile(r"_?(?:npu_)?apply_(?:multimodal_)?rotary_(?:pos_)?emb\w*")
# Names of rotary classes and functions that belong to a vision or audio tower.
NOT_TEXT: Final = re.compile(r"(?i)vision|audio")


class AnglesUnavailable(Exception):
    """Raised where the rotary object returns positions, because the operator looks up cos and sin itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One call of a rotating function, with its arguments by name.

    Megatron's function rotates one tensor by angles (`t`, `freqs`); the others rotate q and k by cos and sin (`q`, `k`,
    `cos`, `sin`).
    """

    function: Callable[..., Any]
    arguments: dict[str, Any]

    @property
    def takes_angles(self) -> bool:
        return {"t", "freqs"} <= set(self.arguments)

    @property
    def takes_cos_sin(self) -> bool:
        return {"q", "k", "cos", "sin"} <= set(self.arguments)

    def repeat(self, **changes: Any) -> Any:
        """Make the call again with some arguments changed."""
        return self.function(**(self.arguments | changes))


@dataclass(kw_only=True, slots=True)
class Subject:
    """The model under test, its inputs, and what one forward did; see `record_forward`.

    owner: the module that owns the language model's rotary object; switch: the user's object that turns a fused path on
    and off by its attribute `enabled`, or None. failure: the name and message of the forward's exception; rotary: the
    arguments, by name, of each call of the rotary object; calls: those of rotating functions whose signature is known.
    """

    model: Any
    batch: Any
    owner: RotaryOwner
    switch: Any
    failure: str | None = None
    rotary: list[dict[str, Any]] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)

    @property
    def is_mrope(self) -> bool:
        return self.sections is not None or self.owner.branch == "mrope"

    @property
    def sections(self) -> list[int] | None:
        if self.owner.sections:
            return self.owner.sections
        return list(self.rope.sections) if self.rope is not None and self.rope.sections else None

    @property
    def rope(self) -> RopeConfig | None:
        """The RopeConfig of a transformers model; None for other configs, and for those RopeConfig cannot read."""
        if not hasattr(self.owner.config, "to_dict"):
            return None
        try:
            return RopeConfig.from_hf(self.owner.config.to_dict())
        except ValueError:
            return None

    @property
    def style(self) -> str:
        """Which channels form a rotary pair according to the config: "pairs" (neighbours) or "half"."""
        if hasattr(self.owner.config, "rotary_interleaved"):
            return "pairs" if self.owner.config.rotary_interleaved else "half"
        return self.rope.style if self.rope is not None else "half"

    @property
    def positions(self) -> Any:
        """The position ids, positions or sequence length that the rotary object's first call got; None without one."""
        arguments = self.rotary[0] if self.rotary else {}
        return arguments.get("position_ids", arguments.get("positions", arguments.get("max_seq_len")))


@contextlib.contextmanager
def replace_rotations(model: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replace every rotating function that the model's modules reach by wrap(function) while the block runs."""
    names = {base.__module__ for module in model.modules() for base in type(module).__mro__}
    scopes = [sys.modules[name] for name in sorted(names) if not name.startswith("torch") and name in sys.modules]
    originals = [
        (scope, name, function)
        for scope in scopes
        for name, function in list(vars(scope).items())
        if ROTATES.fullmatch(name)
        and not NOT_TEXT.search(name)
        and callable(function)
        and not inspect.isclass(function)
    ]
    try:
        for scope, name, function in originals:
            setattr(scope, name, wrap(function))
        yield
    finally:
        for scope, name, function in originals:
            setattr(scope, name, function)


def record_forward(subject: Subject) -> None:
    """Run one forward and record the calls of the rotary object and of the rotating functions."""

    def record_rotary(module: Any, positional: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        subject.rotary.append(arguments_by_name(own_forward(module), positional, keywords))

    def recording(function: Callable[..., Any]) -> Callable[..., Any]:
        def call_and_record(*positional: Any, **keywords: Any) -> Any:
            call = Call(function=function, arguments=arguments_by_name(function, positional, keywords))
            subject.calls += [call] if call.takes_angles or call.takes_cos_sin else []
            return function(*positional, **keywords)

        return call_and_record

    handle = subject.owner.rotary.register_forward_pre_hook(record_rotary, with_kwargs=True)
    try:
        with replace_rotations(subject.model, recording):
            run(subject.model, subject.batch)
    except Exception as error:  # the checklist reports any exception that a model raises
        subject.failure = f"{type(error).__name__}: {error}"
    finally:
        handle.remove()


def run(model: Any, batch: Any) -> "Tensor":
    """Return the model's output, or its first tensor, in evaluation mode without autograd; its modes are restored."""
    import torch

    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            output = model(**batch) if isinstance(batch, Mapping) else model(*batch)
    finally:
        for module, mode in modes.items():
            module.training = mode
    if isinstance(output, torch.Tensor):
        return output
    values = output.values() if isinstance(output, Mapping) else output
    return next(value for value in values if isinstance(value, torch.Tensor))


def rotated_tensors(model: Any, batch: Any) -> "list[Tensor]":
    """Return q and k of every core attention in one forward; of a model without core attention, its output."""
    tensors: list[Tensor] = []

    def record(module: Any, positional: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        arguments = arguments_by_name(own_forward(module), positional, keywords)
        tensors.extend(arguments[name].clone() for name in ("query", "key") if name in arguments)

    cores = [module for name, module in model.named_modules() if name.rsplit(".", 1)[-1] == "core_attention"]
    handles = [core.register_forward_pre_hook(record, with_kwargs=True) for core in cores]
    try:
        output = run(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return tensors or [output]


@contextlib.contextmanager
def in_dtype(model: Any, dtype: Any) -> Iterator[None]:
    """Cast the model's weights to another dtype while the block runs; inv_freq is not cast."""
    named = [*model.named_parameters(), *model.named_buffers()]
    originals = [
        (tensor, tensor.data) for name, tensor in named if tensor.is_floating_point() and "inv_freq" not in name
    ]
    try:
        for tensor, data in originals:
            tensor.data = data.to(dtype)
        yield
    finally:
        for tensor, data in originals:
            tensor.data = data


def rotate(x: "Tensor", cos: "Tensor", sin: "Tensor", style: str) -> "Tensor":
    """Rotate the first 2 * cos.shape[-1] channels of x in plain torch; the remaining channels pass through."""
    import torch

    size = 2 * cos.shape[-1]
    rotary, unrotated = x[..., :size], x[..., size:]
    first, second = (rotary[..., ::2], rotary[..., 1::2]) if style == "pairs" else rotary.chunk(2, -1)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    out = torch.stack(rotated, -1).flatten(-2) if style == "pairs" else torch.cat(rotated, -1)
    return torch.cat((out, unrotated), -1)


def half_width(full: "Tensor", style: str) -> "Tensor":
    """Return the angles, cos or sin with one column per rotary pair; in `full` every pair's value stands twice.

    The two copies are neighbours, or in the two halves of the last dimension.
    """
    import torch

    are_neighbours = style == "pairs" and torch.equal(full[..., ::2], full[..., 1::2])
    return full[..., ::2] if are_neighbours else full[..., : full.shape[-1] // 2]


def reference(call: Call, style: str) -> "tuple[Tensor, ...]":
    """Return the expected result of the call, computed in plain torch in float32."""
    if call.takes_angles:
        angles, scale = half_width(call.arguments["freqs"].float(), style), call.arguments.get("mscale", 1.0)
        return (rotate(call.arguments["t"].float(), angles.cos() * scale, angles.sin() * scale, style),)
    axis = call.arguments.get("unsqueeze_dim", 1)
    cos, sin = (half_width(call.arguments[name].float(), style).unsqueeze(axis) for name in ("cos", "sin"))
    return tuple(rotate(call.arguments[name].float(), cos, sin, style) for name in ("q", "k"))


def in_plain_torch(function: Callable[..., Any], style: str) -> Callable[..., Any]:
    """Return a replacement for a rotating function: plain torch in float32, its result cast to the input's dtype.

    Calls with cu_seqlens, and calls of an unknown signature, still go to `function`.
    """

    def plain(*positional: Any, **keywords: Any) -> Any:
        call = Call(function=function, arguments=arguments_by_name(function, positional, keywords))
        if call.arguments.get("cu_seqlens") is not None or not (call.takes_angles or call.takes_cos_sin):
            return function(*positional, **keywords)
        dtype = call.arguments["t" if call.takes_angles else "q"].dtype
        out = tuple(value.to(dtype) for value in reference(call, style))
        return out[0] if call.takes_angles else out

    return plain


def compute_angles(owner: RotaryOwner, positions: "Tensor") -> "Tensor":
    """Call the rotary object with positions [3, B, S] or [B, S]; return [B, S, C] angles, or cos and sin concatenated.

    Raises AnglesUnavailable when the rotary object returns integer positions instead of angles.
    """
    import torch

    names = list(inspect.signature(own_forward(owner.rotary)).parameters)
    device = owner.rotary.inv_freq.device
    positions = positions.to(device)
    with torch.no_grad():
        if names[0] == "position_ids":  # Megatron's and Bridge's MRoPE classes return angles [S, B, 1, C]
            sections = {"mrope_section": list(owner.sections or ())} if "mrope_section" in names else {}
            out = owner.rotary(positions, **sections)
            if not out.is_floating_point():
                raise AnglesUnavailable(
                    "the rotary object passes positions on; the operator looks up cos and sin itself"
                )
            return out.squeeze(2).transpose(0, 1)
        if "position_ids" in names:  # transformers: (x, position_ids), where x gives only dtype and device
            x = torch.zeros(1, device=device, dtype=torch.float32)
            cos, sin = owner.rotary(x, position_ids=positions)
            return torch.cat((cos, sin), -1)
        out = owner.rotary(int(positions.max()) + 1)  # Megatron's plain RoPE takes a length and returns a table
        table = (out[0] if isinstance(out, tuple) else out).flatten(1)
        return table[positions]
