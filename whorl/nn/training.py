"""Running a model under autograd: packed sequences, with the same numbers that the engine computes for them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from whorl import ops

from .weight import Matrix
from .weights.dense import Dense

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """An image or video of a sequence: its patches [P, V] and their grid, as `whorl.media.MediaItem` has them, and the
    indices of its tokens, [N] int64."""

    patches: Tensor
    grid: tuple[int, int, int]
    tokens: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """B sequences of tokens one after the other, T tokens in all."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, from 0 in each sequence, or [A, T] where they have several axes
    starts: Tensor  # [B + 1] int32
    scored: Tensor  # [T - B] int64: indices of the tokens that are not the first of their sequence
    max_position: int
    pictures: tuple[Picture, ...] = ()  # `tokens` are indices into all T


def pack(
    sequences: Sequence[Sequence[int]],
    device: torch.device | str,
    *,
    positions: Sequence[Tensor] | None = None,
    pictures: Sequence[Sequence[Picture]] = (),
) -> Packed:
    """Pack sequences of token ids for `Llama.logprobs`.

    positions: of each sequence, [A, n], as `whorl.positions.multimodal_positions` returns them; by default they are
    counted. pictures: those of each sequence. Raises ValueError without sequences, for an empty one, and for positions
    or pictures that do not fit them. Example: model.logprobs(pack([[1, 2, 3], [4, 5]], "cpu"))
    """
    lengths = [len(sequence) for sequence in sequences]
    if not lengths or min(lengths) < 1:
        raise ValueError(f"pack: sequences have {lengths} tokens, expected at least one sequence and no empty ones")
    starts = torch.tensor([0, *lengths]).cumsum(0)
    counted = [torch.arange(length) for length in lengths]
    if positions is not None and [each.shape[-1] for each in positions] != lengths:
        raise ValueError(f"pack: positions are {[list(x.shape) for x in positions]}, sequences have {lengths} tokens")
    if pictures and len(pictures) != len(lengths):
        raise ValueError(f"pack: pictures are of {len(pictures)} sequences, expected {len(lengths)}")
    joined = torch.cat(counted if positions is None else list(positions), -1)
    return Packed(
        token_ids=torch.tensor([token for sequence in sequences for token in sequence]).to(device),
        positions=joined.to(device),
        starts=starts.int().to(device),
        scored=torch.cat(counted).nonzero().flatten().to(device),
        max_position=int(joined.max()) + 1,
        pictures=tuple(
            _placed(picture, int(first), length, device)
            for first, length, group in zip(starts, lengths, pictures, strict=False)
            for picture in group
        ),
    )


def _placed(picture: Picture, first: int, length: int, device: torch.device | str) -> Picture:
    """Return the picture of a sequence of `length` tokens that begins at token `first`."""
    tokens = picture.tokens
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < length:
        raise ValueError(f"pack: a picture's tokens reach from {tokens.min()} to {tokens.max()} of {length} tokens")
    return Picture(patches=picture.patches, grid=picture.grid, tokens=tokens.to(device) + first)


def scores(logits: Tensor, packed: Packed) -> Tensor:
    """Return the log-probability [T - B] of every token that is not the first of its sequence, with a gradient.

    logits: [T - B, V], before each of these tokens.
    """
    return ops.token_logprobs(logits, packed.token_ids[packed.scored])  # type: ignore[no-any-return]


def tempered(logits: Tensor, temperature: float) -> Tensor:
    """Return logits divided by the temperature as the engine does for `processed_logprobs`."""
    if temperature == 1:
        return logits
    # By a tensor: torch multiplies by the inverse of a number, which has other bits.
    return logits.float() / torch.tensor([temperature], device=logits.device)


def trainable(model: M) -> M:
    """Make the model's parameters require gradients and return the model.

    Raises ValueError when a weight is quantised: only plain weights are trained.
    """
    for name, layer in model.named_modules():
        if isinstance(layer, Matrix) and not isinstance(layer.format, Dense):
            raise ValueError(
                f"trainable: {name} is quantized, expected plain weights. Load the model with unpack=True (--unpack)"
            )
    return model.requires_grad_(True)


def check_training(device: str) -> None:
    """Check that autocast and the compiler do not change where numbers are rounded.

    Raises RuntimeError when they do: the model's numbers would not be the engine's.
    """
    if torch.is_autocast_enabled(device):
        raise RuntimeError(
            "under autocast residuals are fp32, and the model's numbers are not the engine's: load it in bf16, or keep "
            "its weights in fp32 and shard it with FSDP2's MixedPrecisionPolicy(param_dtype=torch.bfloat16)"
        )
    check_compiled()


def check_compiled() -> None:
    """Check that Inductor rounds where the engine does; for what is compiled without the model around it.

    Raises RuntimeError when it does not.
    """
    if torch.compiler.is_compiling():
        _check_compiler()


def _check_compiler() -> bool:
    import torch._inductor.config as config

    if not config.emulate_precision_casts:
        raise RuntimeError(
            "Inductor does not round between the operations that it fuses, so the model's numbers are not the "
            "engine's: set torch._inductor.config.emulate_precision_casts = True before torch.compile"
        )
    return True


# This is what torch.compiler.assume_constant_result sets; calling that would import the compiler. With it the check
# runs while a model is traced. Without it the tracer, on meeting a `raise`, would only leave this function uncompiled
# and go on compiling the model.
_check_compiler._dynamo_marked_constant = True  # type: ignore[attr-defined]
