"""Dynamic quantisation to int8 and int4."""

import torch
from torch import Tensor

from whorl import contracts, ops

from .calling import Misfit, operator

# The format of each dst_type. A dst_type is a torch.dtype, or the number of one, as torch_npu's schema declares it.
_FORMATS = {None: "int8", torch.int8: "int8", 1: "int8", torch.quint4x2: "quint4x2", 16: "quint4x2"}
_PACKED = 8  # int4 codes in one int32


@operator(
    contracts.dynamic_quant_limit,
    no_gradient="input",
    npu_only="quant_mode dst_type_max",
    choices={"dst_type": _FORMATS},
    format=lambda call: _FORMATS.get(call["dst_type"], call["dst_type"]),
)
def npu_dynamic_quant(
    input: Tensor,
    *,
    smooth_scales: Tensor | None = None,
    group_index: Tensor | None = None,
    dst_type: int | None = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Quantise symmetrically to int8 or int4 with one scale per token: y = round(input / scale).

    scale is the token's largest magnitude divided by 127 (int8) or 7 (int4). input: [..., C], multiplied first by
    smooth_scales [C], or, with group_index, by smooth_scales[g] for the tokens from group_index[g - 1] to
    group_index[g]. Returns y like input in int8 or, for dst_type torch.quint4x2, packed [..., C / 8] int32 with the
    first of eight codes in the lowest bits; and scale [...] fp32. Raises RuntimeError when a gradient is needed. Off
    the NPU other types and modes raise ValueError.

    Example: codes, scale = npu_dynamic_quant(x)
    """
    if smooth_scales is not None:
        input = input.float() * _token_smooth_scales(input, smooth_scales, group_index)
    return ops.dynamic_quant(input) if _FORMATS[dst_type] == "int8" else _quantise_int4(input)


def _quantise_int4(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise to codes of -7 to 7, eight packed into an int32.

    A token whose scale is 0 or not finite gets codes 0, as in `ops.dynamic_quant`.
    """
    if x.shape[-1] % _PACKED:
        raise Misfit(f"input is {list(x.shape)}, expected a last dim that is a multiple of {_PACKED}")
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = wide.abs().amax(-1, keepdim=True) / wide.new_full((1,), 7.0)
    codes = torch.where((scale > 0) & (scale < torch.inf), wide / scale, 0.0).round().clamp(-7, 7).to(torch.int32)
    nibbles = (codes & 15).unflatten(-1, (-1, _PACKED)) << torch.arange(0, 32, 4, dtype=torch.int32, device=x.device)
    return nibbles.sum(-1, dtype=torch.int64).to(torch.int32), scale.squeeze(-1)


def _token_smooth_scales(x: Tensor, scales: Tensor, group_index: Tensor | None) -> Tensor:
    """Return the smooth scales in fp32: [C], or with group_index those of each token's group in the shape of x."""
    if scales.shape[-1] != x.shape[-1] or scales.dim() != (1 if group_index is None else 2):
        raise Misfit(
            f"smooth_scales is {list(scales.shape)}, input {list(x.shape)}; expected [C], or [G, C] with groups"
        )
    if group_index is None:
        return scales.float()
    tokens = torch.arange(x[..., 0].numel(), device=x.device)
    group = torch.searchsorted(group_index.long(), tokens, right=True)
    return scales.float()[group].view(x.shape)
