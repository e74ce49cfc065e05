"""Sequence parallelism for prompts, by `whorl.passes`: between attentions each rank holds its shard of the tokens.

The model is captured once, as one graph over any number of tokens. Attention stays outside of the graph: it is one
opaque node, which reads the call's step and caches from this module. So the inputs of the graph are token ids and
weights only, it writes to nothing, and it serves every batch, chunk and prefix hit. Calls with images have a second
graph, which takes the image features as further inputs; between layers each rank adds its shard of the features.
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
_EXAMPLE = 32  # tokens of the capture; no guard depends on this number
_ATTEND: ContextVar[Callable[[int, Tensor, int], Tensor]] = ContextVar("attend")


@dataclass(frozen=True, kw_only=True, slots=True)
class SPSettings:
    """The settings of sequence parallelism that every rank receives; `EngineSettings` validates them.

    mode: "on" applies to every prompt, "auto" to calls with so many tokens that it pays by the passes' cost model.
    min_tokens: with "on", the fewest tokens of a call that it applies to; None: any number. fuse: a matrix product and
    the collective next to it run as one operator.
    """

    mode: Mode = "off"
    quantize: Literal["int8"] | None = None
    min_tokens: int | None = None
    fuse: bool = False


def for_ranks(settings: EngineSettings, size: int, *, device: str, model: Any = None) -> dict[str, Any] | None:
    """Return the `SPSettings` fields for a runner of `size` ranks; None if sequence parallelism is off."""
    sp = _sp_settings(settings, device, is_moe=_has_experts(model))
    if size == 1 and sp.mode == "on":
        raise ValueError("sequence parallelism: sp is on, and there is one rank; shard the model over 2 or more (tp)")
    return None if size == 1 or sp.mode == "off" else asdict(sp)


def _sp_settings(settings: EngineSettings, device: str, *, is_moe: bool) -> SPSettings:
    """Return the settings, from the sp options or from vLLM's compilation config."""
    if settings.compilation_config is None:
        options = {"quantize": settings.sp_quantize, "min_tokens": settings.sp_min_tokens, "fuse": settings.sp_fuse}
        return SPSettings(mode=settings.sp, **options)  # type: ignore[arg-type]
    from whorl.passes.settings import resolve

    config = resolve(settings.compilation_config, is_moe=is_moe, device=device, max_tokens=settings.step_tokens)
    if config is None:
        return SPSettings()
    assert isinstance(config.min_tokens, int)
    return SPSettings(mode="on", min_tokens=config.min_tokens, fuse=config.fuse)


def _has_experts(model: Any) -> bool:
    return getattr(getattr(model, "config", None), "experts", None) is not None


def describe(report: "Report | None") -> str:
    """Return a readable text on what the pass has rewritten."""
    return str(report or "sequence parallelism is off: it takes --sp, and --tp of 2 or more")


# In its own namespace, so that the passes do not assume its result to be equal on all ranks: it differs.
@custom_op("whorl_engine::attention", mutates_args=())
def _attention(qkv: Tensor, layer: int, width: int) -> Tensor:
    """Apply `Mixer.mix` of this layer to qkv [T, ...] in the current call; returns [T, width]."""
    return _ATTEND.get()(layer, qkv, width)


@_attention.register_fake
def _(qkv: Tensor, layer: int, width: int) -> Tensor:
    return qkv.new_empty(qkv.shape[0], width)


class _Prompt(nn.Module):
    """The part of the model's forward that is captured: everything but attention."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        # torch refuses a ninth capture of one code object, so each model in the process gets a copy of the code.
        plain = _Prompt.forward
        copy = FunctionType(plain.__code__.replace(), globals(), plain.__name__, plain.__defaults__)
        self.forward = MethodType(copy, self)  # type: ignore[method-assign]

    def forward(self, token_ids: Tensor, mask: Tensor | None = None, *features: Tensor) -> Tensor:
        inserted = None if mask is None else Inserted(mask=mask, features=features)
        return self.model.hidden(token_ids, _mix, inserted)  # type: ignore[no-any-return]


def _mix(mixer: Any, qkv: Tensor) -> Tensor:
    return _attention(qkv, mixer.layer, mixer.mixed_size)  # type: ignore[no-any-return]


class PromptForward:
    """A model's sequence-parallel forward for prompts. All ranks create it at the same time, after they are connected.

    The bits of the logits equal those of the plain model unless `quantize` rounds what ranks exchange. Each token is
    rounded by itself, so with mode "on" and no min_tokens the result still does not depend on the rest of the batch.
    """

    def __init__(self, model: Any, device: str, settings: SPSettings) -> None:
        from whorl import passes

        self._mixers = _mixers(model)
        self._rope = model.rope
        # torch would capture one token as a separate graph; without rounding the plain model gives the same bits.
        min_tokens = max(settings.min_tokens or 1, 1 if settings.quantize else 2)
        config = passes.SequenceParallel(
            min_tokens="auto" if settings.mode == "auto" else min_tokens, quantize=settings.quantize, fuse=settings.fuse
        )
        self._compiled = passes.compile(_Prompt(model), config, backend="eager", dynamic=True)
        self._capture(self._compiled, device)
        self.with_pictures: Compiled | None = None
        if getattr(model, "tower", None) is not None:
            self.with_pictures = passes.compile(_Prompt(model), config, backend="eager", dynamic=True)
            self._capture(self.with_pictures, device, *_example(model, device))
        reported = self._compiled.reports[0].min_tokens
        self.min_tokens: float = float("inf") if reported == "never" else float(reported)

    @torch.inference_mode()
    def _capture(self, compiled: "Compiled", device: str, *image_inputs: Tensor) -> None:
        """Capture the graph with an attention that returns zeros, so that no cache is needed or written."""
        token_ids = torch.arange(_EXAMPLE, device=device) % 2
        self._run(compiled, lambda layer, qkv, width: qkv.new_zeros(qkv.shape[0], width), token_ids, *image_inputs)

    @property
    def report(self) -> "Report":
        return self._compiled.reports[0]

    def takes(self, step: Step) -> bool:
        """Return whether the step has enough tokens for sequence parallelism."""
        return step.token_ids.shape[0] >= self.min_tokens

    def __call__(self, step: Step, caches: Sequence[Any]) -> Tensor:
        rotary = self._rope.rows(step)

        def attend(layer: int, qkv: Tensor, width: int) -> Tensor:
            return self._mixers[layer].mix(qkv, rotary, step, caches[layer])  # type: ignore[no-any-return]

        if (inserted := step.inserted) is None:
            return self._run(self._compiled, attend, step.token_ids)
        assert self.with_pictures is not None
        return self._run(self.with_pictures, attend, step.token_ids, inserted.mask, *inserted.features)

    def _run(self, compiled: "Compiled", attend: Callable[[int, Tensor, int], Tensor], *inputs: Tensor) -> Tensor:
        token = _ATTEND.set(attend)
        try:
            return compiled(*inputs)  # type: ignore[no-any-return]
        finally:
            _ATTEND.reset(token)


@torch.inference_mode()  # as calls do: other tensors would make torch capture the graph again
def _example(model: Any, device: str) -> list[Tensor]:
    """Return an example mask and features: values that differ, equal on all ranks, as the passes expect of inputs."""
    width, count = model.config.hidden_size, 1 + len(model.tower.config.deepstack_visual_indexes)
    mask = torch.arange(_EXAMPLE, device=device)[:, None] % 3 == 1
    values = torch.arange(_EXAMPLE * width, device=device).view(_EXAMPLE, width) / (_EXAMPLE * width)
    return [mask, *((values + i).to(model.dtype) for i in range(count))]


def _mixers(model: Any) -> Any:
    if not hasattr(model, "hidden"):
        raise ValueError(
            f"sequence parallelism: {type(model).__name__} has no `hidden`, its forward without attention; use sp=off"
        )
    return model.mixers
