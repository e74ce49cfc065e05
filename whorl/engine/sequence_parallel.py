"""Prompts through `whorl.passes`: between its attentions each rank keeps its share of the tokens.

The model is captured once, as one graph over any number of tokens. What tokens see of each other stays outside of it:
attention is one opaque node, which finds the call's step and caches here. So the graph has no inputs but token ids and
weights, writes to nothing, and serves every batch, chunk and prefix hit. Calls with pictures have a graph of their own,
whose further inputs are the features; between layers each rank adds its share of their rows.
"""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.library import custom_op

from whorl.nn import Inserted, Step

from .settings import EngineSettings

if TYPE_CHECKING:  # passes and torch's symbolic shapes take a second to import; one rank needs neither
    from whorl.passes import Compiled, Report

Mode = Literal["auto", "on", "off"]
_EXAMPLE = 32  # tokens of the capture; no guard depends on them
_ATTEND: ContextVar[Callable[[int, Tensor, int], Tensor]] = ContextVar("attend")


@dataclass(frozen=True, kw_only=True, slots=True)
class SPSettings:
    """What every rank is told; `EngineSettings` checks it.

    mode: "on" for every prompt, "auto" from as many tokens of a call on as pay by the passes' cost model. min_tokens:
    of a call, with "on"; None: any number. fuse: a product and the collective beside it run as one operator.
    """

    mode: Mode = "off"
    quantize: Literal["int8"] | None = None
    min_tokens: int | None = None
    fuse: bool = False


def for_ranks(asked: EngineSettings, size: int, *, device: str, model: Any = None) -> dict[str, Any] | None:
    """What a runner of `size` ranks is told; None: nothing to do."""
    found = _settings(asked, device, is_moe=_has_experts(model))
    if size == 1 and found.mode == "on":
        raise ValueError("sequence parallelism: sp is on, and there is one rank: share the model among 2 or more (tp)")
    return None if size == 1 or found.mode == "off" else asdict(found)


def _settings(asked: EngineSettings, device: str, *, is_moe: bool) -> SPSettings:
    if asked.compilation_config is None:
        options = {"quantize": asked.sp_quantize, "min_tokens": asked.sp_min_tokens, "fuse": asked.sp_fuse}
        return SPSettings(mode=asked.sp, **options)  # type: ignore[arg-type]
    from whorl.passes.settings import resolve

    found = resolve(asked.compilation_config, is_moe=is_moe, device=device, max_tokens=asked.step_tokens)
    if found is None:
        return SPSettings()
    assert isinstance(found.min_tokens, int)
    return SPSettings(mode="on", min_tokens=found.min_tokens, fuse=found.fuse)


def _has_experts(model: Any) -> bool:
    return getattr(getattr(model, "config", None), "experts", None) is not None


def describe(report: "Report | None") -> str:
    """What was rewritten, for people."""
    return str(report or "sequence parallelism is off: it takes --sp, and --tp of 2 or more")


# In a namespace of its own, so that the passes take its result for what it is: different on every rank.
@custom_op("whorl_engine::attention", mutates_args=())
def _attention(qkv: Tensor, layer: int, width: int) -> Tensor:
    """What `Attention.mix` of this layer makes of qkv [T, ...] in the call at hand: [T, width]."""
    return _ATTEND.get()(layer, qkv, width)


@_attention.register_fake
def _(qkv: Tensor, layer: int, width: int) -> Tensor:
    return qkv.new_empty(qkv.shape[0], width)


class _Prompt(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        # torch counts captures by code object and refuses the ninth: each model of a process has one of its own.
        code, how = _Prompt.forward.__code__.replace(), (_Prompt.forward.__name__, _Prompt.forward.__defaults__)
        self.forward = MethodType(FunctionType(code, globals(), *how), self)  # type: ignore[method-assign]

    def forward(self, token_ids: Tensor, mask: Tensor | None = None, *features: Tensor) -> Tensor:
        inserted = None if mask is None else Inserted(mask=mask, features=features)
        return self.model.hidden(token_ids, _mix, inserted)  # type: ignore[no-any-return]


def _mix(attention: Any, qkv: Tensor) -> Tensor:
    return _attention(qkv, attention.layer, attention.o_proj.shape[1])  # type: ignore[no-any-return]


class PromptForward:
    """A model's forward call for prompts. Every rank makes one at the same time, once the ranks are connected.

    Logits are those of the model itself, bit for bit, unless `quantize` rounds what travels between ranks. Each row is
    rounded by itself, so with mode "on" and any number of tokens it is still nobody's affair what runs beside it.
    """

    def __init__(self, model: Any, device: str, settings: SPSettings) -> None:
        from whorl import passes

        self._attentions = [layer.self_attn for layer in _layers(model)]
        self._rope = model.rope
        # One token is a graph of its own to torch, and without rounding it has the same bits in the plain one.
        least = max(settings.min_tokens or 1, 1 if settings.quantize else 2)
        config = passes.SequenceParallel(
            min_tokens="auto" if settings.mode == "auto" else least, quantize=settings.quantize, fuse=settings.fuse
        )
        self._compiled = passes.compile(_Prompt(model), config, backend="eager", dynamic=True)
        self._capture(self._compiled, device)
        self.with_pictures: Compiled | None = None
        if getattr(model, "tower", None) is not None:
            self.with_pictures = passes.compile(_Prompt(model), config, backend="eager", dynamic=True)
            self._capture(self.with_pictures, device, *_example(model, device))
        found = self._compiled.reports[0].min_tokens
        self.min_tokens: float = float("inf") if found == "never" else float(found)

    @torch.inference_mode()
    def _capture(self, compiled: "Compiled", device: str, *shown: Tensor) -> None:
        """On tokens that attend to nothing: no cache is needed, and none is written."""
        token_ids = torch.arange(_EXAMPLE, device=device) % 2
        self._run(compiled, lambda layer, qkv, width: qkv.new_zeros(qkv.shape[0], width), token_ids, *shown)

    @property
    def report(self) -> "Report":
        return self._compiled.reports[0]

    def takes(self, step: Step) -> bool:
        return step.token_ids.shape[0] >= self.min_tokens

    def __call__(self, step: Step, caches: Sequence[Any]) -> Tensor:
        rotary = self._rope.rows(step)

        def attend(layer: int, qkv: Tensor, width: int) -> Tensor:
            return self._attentions[layer].mix(qkv, rotary, step, caches[layer])  # type: ignore[no-any-return]

        if (inserted := step.inserted) is None:
            return self._run(self._compiled, attend, step.token_ids)
        assert self.with_pictures is not None
        return self._run(self.with_pictures, attend, step.token_ids, inserted.mask, *inserted.features)

    def _run(self, compiled: "Compiled", attend: Callable[[int, Tensor, int], Tensor], *given: Tensor) -> Tensor:
        token = _ATTEND.set(attend)
        try:
            return compiled(*given)  # type: ignore[no-any-return]
        finally:
            _ATTEND.reset(token)


@torch.inference_mode()  # as calls are: a graph that was captured of other tensors is captured anew
def _example(model: Any, device: str) -> list[Tensor]:
    """A mask and features. All of their values differ and are every rank's: the passes see that ranks have the same."""
    width, count = model.config.hidden_size, 1 + len(model.tower.config.deepstack_visual_indexes)
    mask = torch.arange(_EXAMPLE, device=device)[:, None] % 3 == 1
    values = torch.arange(_EXAMPLE * width, device=device).view(_EXAMPLE, width) / (_EXAMPLE * width)
    return [mask, *((values + i).to(model.dtype) for i in range(count))]


def _layers(model: Any) -> Any:
    if not hasattr(model, "hidden"):
        raise ValueError(
            f"sequence parallelism: {type(model).__name__} has no `hidden`, its forward call apart from attention"
        )
    return model.decoder.layers
