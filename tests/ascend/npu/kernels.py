"""The vendor's published formulas in plain torch, written apart from whorl: they stand behind the real npu:: schemas.

fp32 inside and one rounding at the end. `KERNELS` are the functional operators by name; `IN_PLACE` those that write
their arguments.
"""

import torch
from npu.bound import Call, by_schema, dtype_of
from torch import Tensor
from torch.nn.functional import silu


def rotated(x: Tensor, mode: str) -> Tensor:
    if mode == "interleave":
        out = torch.empty_like(x)
        out[..., 0::2], out[..., 1::2] = -x[..., 1::2], x[..., 0::2]
        return out
    assert mode == "half", mode
    return x.roll(x.shape[-1] // 2, -1) * torch.where(torch.arange(x.shape[-1]) < x.shape[-1] // 2, -1.0, 1.0)


def rotary_mul(
    input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    assert r1.shape[-1] == input.shape[-1], (r1.shape, input.shape)
    x, cos, sin = input.float(), r1.to(input.dtype).float(), r2.to(input.dtype).float()
    turned = rotated(x, rotary_mode) if rotate is None else x @ rotate.float()
    return (cos * x + sin * turned).to(input.dtype)


def rotary_mul_backward(
    grad: Tensor, input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half"
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.enable_grad():
        leaves = [t.detach().float().requires_grad_() for t in (input, r1, r2)]
        out = leaves[1] * leaves[0] + leaves[2] * rotated(leaves[0], rotary_mode)
    dx, dr1, dr2 = torch.autograd.grad(out, leaves, grad.float())
    return dx.to(input.dtype), dr1.to(input.dtype), dr2.to(input.dtype)


def merged_table(positions: Tensor, table: Tensor, sections: list[int] | None, cache_mode: str) -> Tensor:
    """[T, R]: rows by position; with sections each channel from its own row of positions."""
    if not sections or not any(sections):
        return table[positions]
    half = table.shape[-1] // 2
    assert sum(sections) == half, (sections, half)
    rows = table[positions]  # [A, T, R]
    halves = []
    for part in (rows[..., :half], rows[..., half:]):
        if cache_mode == "interleave":
            merged = part[0].clone()
            merged[:, 1 : 3 * sections[1] : 3] = part[1, :, 1 : 3 * sections[1] : 3]
            merged[:, 2 : 3 * sections[1] : 3] = part[2, :, 2 : 3 * sections[1] : 3]
        else:
            merged = torch.cat([band[axis] for axis, band in enumerate(part.split(sections, -1))], -1)
        halves.append(merged)
    return torch.cat(halves, -1)


@by_schema("npu_mrope")
def mrope(call: Call) -> tuple[Tensor, Tensor]:
    table, head_size, mode = call.cos_sin_cache, call.head_size, call.rotary_mode or "half"
    assert call.query.dtype == table.dtype, (call.query.dtype, table.dtype)
    merged = merged_table(call.positions, table.float(), call.mrope_section, call.cache_mode or "default")
    cos, sin = merged.chunk(2, -1)
    if mode == "interleave":
        cos, sin = cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
    else:
        cos, sin = cos.repeat(1, 2), sin.repeat(1, 2)
    rotary = cos.shape[-1]

    def turn(x: Tensor) -> Tensor:
        heads = x.reshape(x.shape[0], x.shape[1] // head_size, head_size).clone()
        heads[..., :rotary] = rotary_mul(heads[..., :rotary], cos[:, None], sin[:, None], mode)
        return heads.reshape(x.shape)

    return turn(call.query), turn(call.key)


def interleave_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half_order = torch.cat((x[..., 0::2], x[..., 1::2]), -1)
    return rotary_mul(half_order, cos, sin)


def apply_rotary_pos_emb(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: str = "BSND", rotary_mode: str = "half"
) -> tuple[Tensor, Tensor]:
    for x in (query, key):
        x.copy_(rotary_mul(x, cos, sin, rotary_mode))
    return query, key


def rotary_embedding(
    positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox_style: bool
) -> None:
    mode = "half" if is_neox_style else "interleave"
    for x, out in zip(
        (query, key), mrope(positions, query, key, cos_sin_cache, head_size, rotary_mode=mode), strict=True
    ):
        x.copy_(out)


def rotary_position_embedding(x: Tensor, cos: Tensor, sin: Tensor, mode: int = 0) -> Tensor:
    return rotary_mul(x, cos, sin, ["half", "interleave"][mode])


def rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    dims = list(range(input.dim() - gamma.dim(), input.dim()))
    x = input.float()
    rstd = (x.pow(2).mean(dims, keepdim=True) + epsilon).pow(-0.5)
    return (x * rstd * gamma.float()).to(input.dtype), rstd


def rms_norm_backward(dy: Tensor, input: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    dims = list(range(input.dim() - gamma.dim(), input.dim()))
    unit = input.float() * rstd
    scaled = dy.float() * gamma.float()
    dx = rstd * (scaled - unit * (scaled * unit).mean(dims, keepdim=True))
    dgamma = (dy.float() * unit).sum(list(range(input.dim() - gamma.dim())))
    return dx.to(input.dtype), dgamma


def add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    x = (x1.float() + x2.float()).to(x1.dtype)
    y, rstd = rms_norm(x, gamma, epsilon)
    return y, rstd, x


def swiglu(input: Tensor, dim: int = -1) -> Tensor:
    gate, up = input.float().chunk(2, dim)
    return (silu(gate) * up).to(input.dtype)


def clipped_swiglu(
    x: Tensor,
    *,
    group_index: Tensor | None = None,
    dim: int = -1,
    alpha: float = 1.702,
    limit: float = 7.0,
    bias: float = 1.0,
    interleaved: bool = True,
) -> Tensor:
    assert group_index is None
    assert interleaved
    assert dim == -1
    gate, up = x.float()[..., ::2].clamp(max=limit), x.float()[..., 1::2].clamp(-limit, limit)
    return ((up + bias) * gate * torch.sigmoid(alpha * gate)).to(x.dtype)


def swiglu_backward(grad_output: Tensor, input: Tensor, dim: int = -1) -> Tensor:
    with torch.enable_grad():
        x = input.detach().float().requires_grad_()
        gate, up = x.chunk(2, dim)
        y = silu(gate) * up
    (dx,) = torch.autograd.grad(y, x, grad_output.float())
    return dx.to(input.dtype)


def geglu(input: Tensor, dim: int = -1, approximate: int = 1, activate_left: bool = False) -> tuple[Tensor, Tensor]:
    left, right = input.float().chunk(2, dim)
    gate, other = (left, right) if activate_left else (right, left)
    gelu = torch.nn.functional.gelu(gate, approximate="tanh" if approximate else "none")
    return (gelu * other).to(input.dtype), gelu.to(input.dtype)


def gelu_backward(grad_output: Tensor, input: Tensor, *, approximate: str = "none") -> Tensor:
    with torch.enable_grad():
        x = input.detach().float().requires_grad_()
        y = torch.nn.functional.gelu(x, approximate=approximate)
    (dx,) = torch.autograd.grad(y, x, grad_output.float())
    return dx.to(input.dtype)


@by_schema("npu_dynamic_quant")
def dynamic_quant(call: Call) -> tuple[Tensor, Tensor]:
    input = call.input
    assert call.smooth_scales is call.group_index is None
    assert call.quant_mode == "pertoken"
    if call.dst_type in (torch.quint4x2, 16):
        scale = input.float().abs().amax(-1) / 7
        codes = (input.float() / scale[..., None]).round().to(torch.int8).view(torch.uint8) & 15
        return (codes[..., ::2] | codes[..., 1::2] << 4).contiguous().view(torch.int32), scale
    assert call.dst_type in (None, 1, torch.int8)
    scale = input.float().abs().amax(-1) / 127
    return (input.float() / scale[..., None]).nan_to_num(0).round().to(torch.int8), scale


@by_schema("npu_quant_matmul")
def quant_matmul(call: Call) -> Tensor:
    assert call.x1.dtype == call.x2.dtype == torch.int8
    sums = (call.x1.long() @ call.x2.long()).float()
    y = sums * call.scale.float() * call.pertoken_scale[:, None]
    if call.bias is not None:
        assert call.bias.dtype in (torch.float32, torch.bfloat16)  # of int32 it would be added before the scales
        y = y + call.bias.float()
    return y.to(dtype_of(call.output_dtype))


def convert_weight_to_int4pack(weight: Tensor, inner_k_tiles: int = 0) -> Tensor:
    """As op-plugin does it on the host: eight neighbours become one word, the first in the lowest four bits."""
    assert weight.dtype == torch.int32
    assert weight.is_contiguous()
    assert weight.dim() in (2, 3)
    assert weight.shape[-1] % 8 == 0
    assert -8 <= weight.min() <= weight.max() <= 7
    words = sum((weight.long()[..., i::8] & 15) << 4 * i for i in range(8))
    return torch.where(words < 2**31, words, words - 2**32).to(torch.int32)


def antiquant_weight(weight: Tensor) -> Tensor:
    """[.., K, N] in fp32; of int32 [.., K, N / 8] each word has eight numbers in two's complement."""
    if weight.dtype == torch.int8:
        return weight.float()
    assert weight.dtype == torch.int32
    nibbles = torch.stack([weight >> 4 * i & 15 for i in range(8)], -1).flatten(-2)
    return torch.where(nibbles < 8, nibbles, nibbles - 16).float()


@by_schema("npu_weight_quant_batchmatmul")
def weight_quant_matmul(call: Call) -> Tensor:
    weight, scale, offset = antiquant_weight(call.weight), call.antiquant_scale.float(), call.antiquant_offset
    assert call.inner_precise == 0
    group = call.antiquant_group_size or len(weight)
    assert len(scale) == -(-len(weight) // group), (scale.shape, weight.shape, group)

    def wide(x: Tensor) -> Tensor:
        return x.repeat_interleave(group, 0)[: len(weight)]

    weight = weight if offset is None else weight + wide(offset.float())
    y = call.x.float() @ (weight * wide(scale))
    if call.bias is not None:
        assert call.bias.dtype == (torch.float32 if call.x.dtype == torch.bfloat16 else call.x.dtype)
        y = y + call.bias.float()
    return y.to(call.x.dtype)


KERNELS = {
    "npu_rotary_mul": rotary_mul,
    "npu_rotary_mul_backward": rotary_mul_backward,
    "npu_mrope": mrope,
    "npu_interleave_rope": interleave_rope,
    "npu_rotary_position_embedding": rotary_position_embedding,
    "npu_rms_norm": rms_norm,
    "npu_rms_norm_backward": rms_norm_backward,
    "npu_add_rms_norm": add_rms_norm,
    "npu_swiglu": swiglu,
    "npu_clipped_swiglu": clipped_swiglu,
    "npu_swiglu_backward": swiglu_backward,
    "npu_geglu": geglu,
    "npu_gelu_backward": gelu_backward,
    "npu_dynamic_quant": dynamic_quant,
    "npu_quant_matmul": quant_matmul,
    "npu_weight_quant_batchmatmul": weight_quant_matmul,
    "npu_convert_weight_to_int4pack": convert_weight_to_int4pack,
}
IN_PLACE = {"npu_apply_rotary_pos_emb": apply_rotary_pos_emb, "_npu_rotary_embedding": rotary_embedding}
