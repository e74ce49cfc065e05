"""A trial: transformers' forward on the meta device, before weights are read, which shows what the model asks for."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from . import interface
from .interface import QKV
from .row_invariant import ELEMENTWISE, MIXERS, PRODUCTS, SUMS
from .skeleton import RefusedError

TOKENS = 7  # of the trial's sequence
_FEW = 32  # numbers that every library adds in one order
_FAR = 1 << 24  # a position past any window


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """One layer's call of attention. window: keys that a query sees; None: all."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    softcap: float


@dataclass(slots=True)
class Trial:
    """What a model asked for. attentions: the calls, by module and in their order. guards: the modules that call
    functions with row-invariant forms. doubts: module and function whose bits may depend on the other tokens.
    per_token: how many experts a token uses, by the module of experts."""

    attentions: dict[nn.Module, Attention] = field(default_factory=dict)
    guards: dict[nn.Module, set[str]] = field(default_factory=dict)
    doubts: dict[nn.Module, set[str]] = field(default_factory=dict)
    per_token: dict[nn.Module, int] = field(default_factory=dict)
    windows: tuple[int, ...] = ()

    def attend(self, module: nn.Module, qkv: QKV, mask: Any, options: dict[str, Any]) -> Tensor:
        (q, k, v), options, kind = qkv, dict(options), type(module).__name__
        scale, softcap = options.pop("scaling", None), options.pop("softcap", None)
        options.pop("sliding_window", None)  # as in transformers' own attention, the mask decides
        if options:
            raise RefusedError(f"{kind} calls attention with {', '.join(sorted(options))}, which is not known")
        if module in self.attentions:
            raise RefusedError(f"{kind} calls attention twice in one layer")
        if q.shape[-1] != v.shape[-1] or k.shape[-1] != v.shape[-1]:
            raise RefusedError(
                f"{kind} has heads of {q.shape[-1]} channels for queries and of {v.shape[-1]} for values, which differ"
            )
        if k.shape[2] != q.shape[2]:
            raise RefusedError(f"{kind} attends to {k.shape[2]} keys with {q.shape[2]} queries: cross attention")
        if not getattr(module, "is_causal", True):
            raise RefusedError(f"{kind} is not causal")
        self.attentions[module] = Attention(
            num_heads=q.shape[1],
            num_kv_heads=k.shape[1],
            head_dim=q.shape[3],
            scale=float(q.shape[3] ** -0.5 if scale is None else scale),
            window=self._window(kind, mask),
            softcap=float(softcap or 0),
        )
        return q.new_empty(1, q.shape[2], q.shape[1], q.shape[3])

    def mask(self, function: Any) -> Any:
        return function

    def experts(self, module: nn.Module, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        kind, own = type(module).__name__, module
        has = [name for name in ("has_bias", "is_transposed", "has_post_expert_norm") if getattr(own, name, False)]
        if has or not (getattr(own, "has_gate", True) and getattr(own, "is_concatenated", True)):
            raise RefusedError(f"{kind}: experts of this form are not known ({', '.join(has) or 'no gate of halves'})")
        self.per_token[module] = ids.shape[-1]
        return torch.empty_like(x)

    def _window(self, kind: str, mask: Any) -> int | None:
        """Return the window that a mask function means, by asking it about positions."""
        if mask is None:
            return None
        for window in (None, *self.windows):
            if _means(mask, window):
                return window
        raise RefusedError(f"{kind} has a mask that is neither causal nor a sliding window")


def _means(mask: Callable[..., Any], window: int | None) -> bool:
    """Return whether a mask function hides all but the keys up to a query's own, or the last `window` of them."""
    edge = window or 3
    for position in (0, 1, edge - 1, edge, edge + 1, 2 * edge + 1, _FAR):
        low = max(0, position - 2 * edge - 2)
        key, query = torch.arange(low, position + 3)[None], torch.tensor([[position]])
        zero = torch.zeros(1, 1, dtype=torch.int64)
        expected = (key <= query) & (key > query - window) if window else key <= query
        try:
            seen = mask(zero, zero, query, key)
            if not torch.equal(torch.as_tensor(seen).expand(expected.shape), expected):
                return False
        except (RuntimeError, IndexError, TypeError, NotImplementedError):
            return False
    if window is not None:
        return True
    first = mask(zero, zero, torch.tensor([[_FAR]]), torch.tensor([[0]]))  # a window larger than those asked for
    return bool(torch.as_tensor(first).all())


class _Watch(TorchFunctionMode):
    """Notes which functions modules call. inside: the modules whose forward runs, the innermost last."""

    def __init__(self, trial: Trial, inside: list[nn.Module]) -> None:
        super().__init__()
        self.trial, self.inside = trial, inside

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if func in MIXERS:
            raise RefusedError(
                f"{type(self.inside[-1]).__name__} mixes tokens by {name}, without transformers' attention interface"
            )
        product = _is_product_with_weight(args) if func in PRODUCTS else None
        if product or func in ELEMENTWISE:
            self.trial.guards.setdefault(self.inside[-1], set()).add(name)
        elif (product is False and args[0].shape[-1] > 1) or (func in SUMS and _adds_many(func, args, kwargs)):
            self.trial.doubts.setdefault(self.inside[-1], set()).add(name)
        return func(*args, **kwargs)


def _is_product_with_weight(args: tuple[Any, ...]) -> bool:
    """Return whether the right operand is one matrix; a product with a scalar or a stack is none."""
    return isinstance(args[1], Tensor) and args[1].dim() == 2


def _adds_many(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a sum may have so many summands that their order matters."""
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if func.__name__ not in ("mean", "sum", "var") or not isinstance(dim, int):
        return True
    return bool(args[0].shape[dim] > _FEW)


@contextmanager
def _followed(hf: nn.Module, inside: list[nn.Module]) -> Iterator[None]:
    """Keep `inside` up to date while forwards run."""
    hooks = []
    for module in hf.modules():
        hooks.append(module.register_forward_pre_hook(lambda module, _: inside.append(module)))
        hooks.append(module.register_forward_hook(lambda *_: _leave(inside)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _leave(inside: list[nn.Module]) -> None:
    inside.pop()


def run(hf: Any) -> Trial:
    """Run a model on the meta device and return what it asked for. Raises RefusedError if the engine cannot give it."""
    config, trial = hf.config, Trial()
    sizes = (getattr(config, name, None) for name in ("sliding_window", "attention_window_size", "window_size"))
    trial.windows = tuple(size for size in sizes if isinstance(size, int) and size > 0)
    tokens = torch.zeros(1, TOKENS, dtype=torch.int64, device="meta")
    inside: list[nn.Module] = [hf]
    try:
        with interface.calling(trial), _followed(hf, inside), _Watch(trial, inside), torch.no_grad():
            hf(input_ids=tokens, position_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False)
    except RefusedError:
        raise
    except Exception as error:  # whatever transformers' code raises is the reason that this road ends
        where = type(inside[-1]).__name__
        raise RefusedError(f"{where}: its forward fails in a trial without transformers' cache: {error}") from error
    _check_layers(hf, trial)
    return trial


def _check_layers(hf: Any, trial: Trial) -> None:
    """Raise RefusedError unless every decoder layer calls attention."""
    if not trial.attentions:
        raise RefusedError(f"{type(hf).__name__} does not ask transformers' attention interface")
    count = hf.config.num_hidden_layers
    stacks = [each for each in hf.modules() if isinstance(each, nn.ModuleList) and len(each) == count]
    for stack in stacks[:1]:
        for i, layer in enumerate(stack):
            if not any(module in trial.attentions for module in layer.modules()):
                parts = ", ".join(type(each).__name__ for each in layer.children())
                raise RefusedError(f"layer {i} ({parts}) mixes tokens without attention: it keeps a state of its own")
