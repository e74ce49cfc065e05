"""Sequence parallelism for prompts: between attentions and matmuls each rank holds its share of the tokens.

The model's own layers do it (`whorl.nn.ranks`); this module says for which calls, and reports what ranks exchange. A
call of any prompts, chunks, prefix hits and images runs so.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from whorl import collectives
from whorl.nn import SharedTokens, Step, sharing

from .settings import EngineSettings

Mode = Literal["auto", "on", "off"]
_EXAMPLE = 32  # tokens of the call that counts what ranks exchange
_NEVER = float("inf")


@dataclass(frozen=True, kw_only=True, slots=True)
class SPSettings:
    """The settings of sequence parallelism that every rank receives; `EngineSettings` validates them.

    mode: "on" applies to every prompt, "auto" to calls with so many tokens that it pays by `whorl.passes.cost`.
    min_tokens: with "on", the fewest tokens of a call that it applies to; None: any number. fuse: a matrix product and
    the collective next to it run as one operator.
    """

    mode: Mode = "off"
    quantize: Literal["int8"] | None = None
    min_tokens: int | None = None
    fuse: bool = False


def for_ranks(settings: EngineSettings, size: int, *, device: str, model: Any = None) -> dict[str, Any] | None:
    """Return the `SPSettings` fields for a runner of `size` ranks; None if sequence parallelism is off."""
    is_moe = getattr(getattr(model, "config", None), "experts", None) is not None
    sp = _sp_settings(settings, device, is_moe=is_moe)
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What ranks exchange in a call with sequence parallelism; `str(report)` is for people.

    size: number of ranks. min_tokens: the fewest tokens of a call that it applies to, infinite where it never pays.
    summed, gathered: the bytes of a token in each sum over ranks and in each gather. num_fused: how many of these run
    beside a matmul. predicted_gain: by the cost model, how many times as fast as all-reduces.
    """

    size: int
    min_tokens: float
    summed: tuple[int, ...]
    gathered: tuple[int, ...]
    num_fused: int = 0
    is_quantized: bool = False
    predicted_gain: float | None = None

    def bytes_before(self, tokens: int = _EXAMPLE) -> int:
        """Return the bytes that a rank sends for so many tokens with all-reduces."""
        return sum(collectives.wire_bytes("all_reduce", num_bytes, tokens, self.size) for num_bytes in self.summed)

    def bytes_after(self, tokens: int = _EXAMPLE) -> int:
        """Return the bytes that a rank sends for so many tokens with reduce-scatters and gathers."""
        halves = (*self.summed, *self.gathered)
        return sum(collectives.wire_bytes("all_gather", num_bytes, tokens, self.size) for num_bytes in halves)

    def __str__(self) -> str:
        before, after, num_sums = self.bytes_before(), self.bytes_after(), len(self.summed)
        start = "never" if self.min_tokens == _NEVER else f"from {self.min_tokens:.0f} tokens"
        equality = "rounds: activations are gathered in 8 bits" if self.is_quantized else "bitwise"
        lines = [
            f"sequence parallelism over {self.size} ranks, {start}: {num_sums} of {num_sums} collectives rewritten, "
            f"{len(self.gathered)} gathers, {self.num_fused} of both beside a matmul",
            f"bytes sent by a rank for {_EXAMPLE} tokens: {before} before, {after} after ({after / before:.2f})",
            f"equality: {equality}",
        ]
        if self.predicted_gain is not None:
            lines.append(f"predicted: communication {self.predicted_gain:.2f} times as fast")
        return "\n".join(lines)


def describe(report: Report | None) -> str:
    """Return a readable text on what ranks exchange."""
    return str(report or "sequence parallelism is off: it takes --sp, and --tp of 2 or more")


class PromptForward:
    """A model's sequence-parallel forward for prompts. All ranks create it at the same time, after they are connected.

    The bits of the logits equal those of the plain model unless `quantize` rounds what ranks exchange. Each token is
    rounded by itself, so with mode "on" and no min_tokens the result still does not depend on the rest of the batch.
    report: what ranks exchange; last: what they exchanged in the last call.
    """

    last: SharedTokens

    def __init__(self, model: Any, device: str, settings: SPSettings) -> None:
        if not hasattr(model, "hidden"):
            raise ValueError(
                f"sequence parallelism: {type(model).__name__} has no `hidden`, its forward without attention; "
                "use sp=off"
            )
        self._model, self._group, self._settings = model, collectives.group_name(None), settings
        self.report = self._count(device)
        self.min_tokens = self.report.min_tokens

    @torch.inference_mode()
    def _count(self, device: str) -> Report:
        """Run a call with an attention that returns zeros, so that no cache is needed, and report its exchanges."""
        token_ids, shared = torch.arange(_EXAMPLE, device=device) % 2, self._shared(_EXAMPLE)
        with sharing(shared):
            self._model.hidden(token_ids, lambda mixer, x, *_: x.new_zeros(x.shape[0], mixer.mixed_size))
        size, is_auto = collectives.group_size(self._group), self._settings.mode == "auto"
        least, gain = _measured(shared, size) if is_auto else (self._settings.min_tokens or 1, None)
        return Report(
            size=size,
            min_tokens=least,
            summed=tuple(shared.summed),
            gathered=tuple(shared.gathered),
            num_fused=shared.num_fused,
            is_quantized=shared.quantize,
            predicted_gain=gain,
        )

    def _shared(self, tokens: int) -> SharedTokens:
        is_quantized = self._settings.quantize is not None
        return SharedTokens(tokens=tokens, group=self._group, quantize=is_quantized, fuse=self._settings.fuse)

    def takes(self, step: Step) -> bool:
        """Return whether the step has enough tokens for sequence parallelism."""
        return step.token_ids.shape[0] >= self.min_tokens

    def __call__(self, step: Step, caches: Sequence[Any]) -> Tensor:
        self.last = self._shared(step.token_ids.shape[0])
        with sharing(self.last):
            return self._model.forward(step, caches)  # type: ignore[no-any-return]


def _measured(shared: SharedTokens, size: int) -> tuple[float, float | None]:
    """Return the number of tokens from which sharing them pays between these ranks, and the gain with `_EXAMPLE`."""
    from whorl.passes.cost import Traffic, measure

    gathered = tuple(map(float, shared.gathered))
    quantized = gathered if shared.quantize else None
    traffic = Traffic(reduced=tuple(map(float, shared.summed)), gathered=gathered, quantized=quantized)
    gain, threshold = measure(shared.group).gain(_EXAMPLE, size, traffic)
    return _NEVER if threshold is None else threshold, gain
