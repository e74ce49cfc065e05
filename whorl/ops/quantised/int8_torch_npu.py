"""Linear layer and experts with int8 weights and int8 activations on Ascend."""

import torch
from torch import Tensor

from whorl.contracts import (
    dynamic_quant_limit,
    moe_init_routing_limit,
    quant_grouped_matmul_limit,
    quant_matmul_limit,
)

from .. import _torch_npu
from .._torch_npu import dtype_name
from ..moe.experts_torch_npu import grouped_product, run_routed

Part = tuple[Tensor, Tensor]  # codes and scales of all experts


def reason(x: Tensor, codes: Tensor, **_: object) -> str | None:
    """Return None, or the reason that torch_npu's operators cannot compute `int8_linear`."""
    return dynamic_quant_limit(shape=x.shape, dtype=dtype_name(x)) or quant_matmul_limit(
        shape=x.shape, weight_shape=codes.shape[::-1], dtype=dtype_name(codes), output_dtype=dtype_name(x)
    )


def _quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 codes and fp32 scales of the rows of x, as `dynamic_quant` does."""
    q, scales = _torch_npu.call("npu_dynamic_quant", input=x.contiguous(), dst_type=torch.int8)
    return q, scales


def linear(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    q, token_scales = _quantise(x)
    y: Tensor = _torch_npu.call(
        "npu_quant_matmul",
        x1=q,
        x2=codes.t(),
        scale=scales.float().contiguous(),
        pertoken_scale=token_scales,
        bias=None if bias is None else bias.float().contiguous(),
        output_dtype=x.dtype,
    )
    return y


def experts_reason(x: Tensor, ids: Tensor, weights: Tensor, **stored: Tensor) -> str | None:
    """Return None, or the reason that torch_npu's operators cannot compute `int8_experts`."""
    if not ids.numel():
        return "empty tensors are not taken"
    count, dtype = len(stored["gate_up"]), dtype_name(x)
    refusal = dynamic_quant_limit(shape=x.shape, dtype=dtype)
    refusal = refusal or moe_init_routing_limit(shape=x.shape, dtype=dtype, ids_dtype="int32", expert_num=count)
    for codes, scales in _parts(**stored):
        refusal = refusal or quant_grouped_matmul_limit(
            weight_shape=(count, codes.shape[2], codes.shape[1]),
            dtype=dtype_name(codes),
            scale_dtype=dtype_name(scales),
            output_dtype=dtype,
        )
    return refusal


def experts(x: Tensor, weights: Tensor, ids: Tensor, **stored: Tensor) -> Tensor:
    return run_routed(x, weights, ids, len(stored["gate_up"]), _product, *_parts(**stored))


def _parts(gate_up: Tensor, gate_up_scales: Tensor, down: Tensor, down_scales: Tensor) -> tuple[Part, Part]:
    return (gate_up, gate_up_scales), (down, down_scales)


def _product(rows: Tensor, weight: Part, counts: Tensor) -> Tensor:
    codes, scales = weight
    q, token_scales = _quantise(rows)
    options = {"scale": [scales.contiguous()], "per_token_scale": [token_scales], "output_dtype": rows.dtype}
    return grouped_product(q, codes.mT, counts, **options)
