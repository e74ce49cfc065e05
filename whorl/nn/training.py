"""A model under autograd: whole sequences, side by side, with the numbers that the engine has of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from .weight import Matrix
from .weights.dense import Dense

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """Sequences of tokens, one behind the other, T in all."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, from 0 on in each
    starts: Tensor  # [B + 1] int32
    scored: Tensor  # [T - B] int64: where the tokens stand that have others before them
    max_position: int


def pack(sequences: Sequence[Sequence[int]], device: torch.device | str) -> Packed:
    lengths = [len(sequence) for sequence in sequences]
    if not lengths or min(lengths) < 1:
        raise ValueError(f"pack: sequences of {lengths} tokens, expected at least one sequence and none that is empty")
    starts = torch.tensor([0, *lengths]).cumsum(0)
    positions = torch.cat([torch.arange(length) for length in lengths])
    return Packed(
        token_ids=torch.tensor([token for sequence in sequences for token in sequence]).to(device),
        positions=positions.to(device),
        starts=starts.int().to(device),
        scored=positions.nonzero().flatten().to(device),
        max_position=max(lengths),
    )


def trainable(model: M) -> M:
    """The model, whose parameters now take gradients. They must be held as they are, not quantised."""
    for name, layer in model.named_modules():
        if isinstance(layer, Matrix) and not isinstance(layer.format, Dense):
            raise ValueError(f"{name} is held as {layer.format}, and only plain weights are trained: load such a model")
    return model.requires_grad_(True)


def check_training(device: str) -> None:
    """That nothing changes where numbers are rounded."""
    if torch.is_autocast_enabled(device):
        raise RuntimeError(
            "a model under autocast has residuals in fp32, and its numbers are not the engine's: hold it in bf16, or "
            "its weights in fp32 and shard it with FSDP2's MixedPrecisionPolicy(param_dtype=torch.bfloat16)"
        )
    if torch.compiler.is_compiling():
        _check_compiler()


def _check_compiler() -> bool:
    import torch._inductor.config as config

    if not config.emulate_precision_casts:
        raise RuntimeError(
            "Inductor leaves out roundings between the operations that it fuses, and the model's numbers are not the "
            "engine's: set torch._inductor.config.emulate_precision_casts = True before torch.compile"
        )
    return True


# What torch.compiler.assume_constant_result sets; calling it would import the compiler. So it runs while a model is
# traced: a tracer that meets a `raise` gives the function up, and runs the rest of the model compiled all the same.
_check_compiler._dynamo_marked_constant = True  # type: ignore[attr-defined]
