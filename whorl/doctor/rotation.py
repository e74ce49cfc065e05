"""The rotation of a live model: what its rotary object gives, watching its calls, and plain torch to compare with.

torch is imported inside functions: the rest of the doctor runs without it.
"""

import contextlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from whorl.doctor.live_model import Live
from whorl.rope_config import RopeConfig

if TYPE_CHECKING:
    from torch import Tensor

ROTATES: Final = re.compile(r"_?(?:npu_)?apply_(?:multimodal_)?rotary_(?:pos_)?emb\w*")
NOT_TEXT: Final = re.compile(r"(?i)vision|audio")


class PositionsTravel(Exception):
    """The rotary object hands positions on, and the operator looks them up: there are no angles to look at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One call of a function that rotates, with its arguments by name. Megatron's takes one tensor, others q and k."""

    function: Callable[..., Any]
    given: dict[str, Any]

    @property
    def takes_angles(self) -> bool:
        return {"t", "freqs"} <= set(self.given)

    @property
    def takes_cos_sin(self) -> bool:
        return {"q", "k", "cos", "sin"} <= set(self.given)

    def again(self, **changes: Any) -> Any:
        return self.function(**(self.given | changes))


@dataclass(slots=True)
class Watched:
    """What one forward did: its output or how it failed, the arguments of the rotary object, the rotations."""

    output: "Tensor | None" = None
    failure: str | None = None
    rotary: list[dict[str, Any]] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)


Place = tuple[Any, str]  # a Python module and the name of a function in it


def rotating_functions(model: Any) -> list[Place]:
    """Where the model's modules look their rotating functions up."""
    names = {base.__module__ for module in model.modules() for base in type(module).__mro__}
    homes = [sys.modules[name] for name in sorted(names) if not name.startswith("torch") and name in sys.modules]
    found = ((home, name) for home in homes for name in vars(home) if ROTATES.fullmatch(name))
    return [
        (home, name)
        for home, name in found
        if callable(getattr(home, name)) and not NOT_TEXT.search(name) and not inspect.isclass(getattr(home, name))
    ]


@contextlib.contextmanager
def replaced(places: Sequence[Place], make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Have every place hold make(function) for the time of the block."""
    before = [(home, name, getattr(home, name)) for home, name in places]
    try:
        for home, name, function in before:
            setattr(home, name, make(function))
        yield
    finally:
        for home, name, function in before:
            setattr(home, name, function)


def by_name(function: Callable[..., Any], positional: Sequence[Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
    names = [name for name in inspect.signature(function).parameters if name != "self"]
    return dict(zip(names, positional, strict=False)) | dict(keywords)


def watch(model: Any, live: Live, batch: Any) -> Watched:
    """One forward of `batch`, with the rotary object and the rotating functions watched."""
    seen = Watched()

    def note_rotary(module: Any, positional: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        seen.rotary.append(by_name(type(module).forward, positional, keywords))

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*positional: Any, **keywords: Any) -> Any:
            seen.calls.append(Call(function=function, given=by_name(function, positional, keywords)))
            return function(*positional, **keywords)

        return noted

    handle = live.rotary.register_forward_pre_hook(note_rotary, with_kwargs=True)
    try:
        with replaced(rotating_functions(model), noting):
            seen.output = run(model, batch)
    except Exception as error:  # whatever a model raises is what the checklist reports
        seen.failure = f"{type(error).__name__}: {error}"
    finally:
        handle.remove()
    return seen


def run(model: Any, batch: Any) -> "Tensor":
    """The model's first output for a batch, in evaluation mode and without a graph; its modes are put back."""
    import torch

    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            output = model(**batch) if isinstance(batch, Mapping) else model(*batch)
    finally:
        for module, mode in modes.items():
            module.training = mode
    return first_tensor(output)


def rotated(model: Any, batch: Any) -> "list[Tensor]":
    """q and k of every core attention in one forward; the output of a model that has none."""
    found: list[Tensor] = []

    def note(module: Any, positional: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        given = by_name(type(module).forward, positional, keywords)
        found.extend(given[name].clone() for name in ("query", "key") if name in given)

    cores = [module for name, module in model.named_modules() if name.rsplit(".", 1)[-1] == "core_attention"]
    handles = [core.register_forward_pre_hook(note, with_kwargs=True) for core in cores]
    try:
        output = run(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return found or [output]


@contextlib.contextmanager
def in_dtype(model: Any, dtype: Any) -> Iterator[None]:
    """The model's weights in another dtype for the time of the block; frequencies stay as they are."""
    named = [*model.named_parameters(), *model.named_buffers()]
    before = [(tensor, tensor.data) for name, tensor in named if tensor.is_floating_point() and "inv_freq" not in name]
    try:
        for tensor, data in before:
            tensor.data = data.to(dtype)
        yield
    finally:
        for tensor, data in before:
            tensor.data = data


def first_tensor(output: Any) -> "Tensor":
    import torch

    if isinstance(output, torch.Tensor):
        return output
    values = output.values() if isinstance(output, Mapping) else output
    return next(value for value in values if isinstance(value, torch.Tensor))


def style_of(live: Live) -> str:
    """Which channels form a pair, by the configuration."""
    if hasattr(live.config, "rotary_interleaved"):
        return "pairs" if live.config.rotary_interleaved else "half"
    rope = rope_config(live)
    return rope.style if rope is not None else "half"


def rope_config(live: Live) -> RopeConfig | None:
    """Of a transformers model; None for other configurations, and for ones RopeConfig cannot read."""
    if not hasattr(live.config, "to_dict"):
        return None
    try:
        return RopeConfig.from_hf(live.config.to_dict())
    except ValueError:
        return None


def turned(x: "Tensor", cos: "Tensor", sin: "Tensor", style: str) -> "Tensor":
    """Plain torch: the first 2 x cos.shape[-1] channels of x turned, the rest passed through."""
    import torch

    size = 2 * cos.shape[-1]
    head, rest = x[..., :size], x[..., size:]
    first, second = (head[..., ::2], head[..., 1::2]) if style == "pairs" else head.chunk(2, -1)
    both = (first * cos - second * sin, second * cos + first * sin)
    out = torch.stack(both, -1).flatten(-2) if style == "pairs" else torch.cat(both, -1)
    return torch.cat((out, rest), -1)


def half_width(full: "Tensor", style: str) -> "Tensor":
    """One column a pair, of angles, cos or sin that hold every pair's twice: side by side or as two halves."""
    import torch

    doubled = style == "pairs" and torch.equal(full[..., ::2], full[..., 1::2])
    return full[..., ::2] if doubled else full[..., : full.shape[-1] // 2]


def reference(call: Call, style: str) -> "tuple[Tensor, ...]":
    """What the call should give, in float32."""
    if call.takes_angles:
        angles, scale = half_width(call.given["freqs"].float(), style), call.given.get("mscale", 1.0)
        return (turned(call.given["t"].float(), angles.cos() * scale, angles.sin() * scale, style),)
    axis = call.given.get("unsqueeze_dim", 1)
    cos, sin = (half_width(call.given[name].float(), style).unsqueeze(axis) for name in ("cos", "sin"))
    return tuple(turned(call.given[name].float(), cos, sin, style) for name in ("q", "k"))


def plainly(function: Callable[..., Any], style: str) -> Callable[..., Any]:
    """In place of a rotating function: plain torch in float32, the result in the input's dtype."""

    def plain(*positional: Any, **keywords: Any) -> Any:
        call = Call(function=function, given=by_name(function, positional, keywords))
        if call.given.get("cu_seqlens") is not None or not (call.takes_angles or call.takes_cos_sin):
            return function(*positional, **keywords)
        dtype = call.given["t" if call.takes_angles else "q"].dtype
        out = tuple(value.to(dtype) for value in reference(call, style))
        return out[0] if call.takes_angles else out

    return plain


def angles_of(live: Live, positions: "Tensor", **more: Any) -> "Tensor":
    """What the rotary object gives for positions [3, B, S] or [B, S], as [B, S, C]: angles, or cos and sin joined."""
    import torch

    names = list(inspect.signature(type(live.rotary).forward).parameters)[1:]
    device = live.rotary.inv_freq.device
    positions = positions.to(device)
    with torch.no_grad():
        if names[0] == "position_ids":
            sections = {"mrope_section": list(live.sections or ())} if "mrope_section" in names else {}
            out = live.rotary(positions, **sections, **{key: value for key, value in more.items() if key in names})
            if not out.is_floating_point():
                raise PositionsTravel("positions travel to the operator, which looks them up token by token")
            return out.squeeze(2).transpose(0, 1)
        if "position_ids" in names:
            x = torch.zeros(1, device=device, dtype=torch.float32)
            cos, sin = live.rotary(x, position_ids=positions)
            return torch.cat((cos, sin), -1)
        out = live.rotary(int(positions.max()) + 1)
        table = (out[0] if isinstance(out, tuple) else out).flatten(1)
        return table[positions]
