"""The linear layer on Ascend, where a row's bits should not depend on the other rows.

With AscendC's npu_mm_batch_invariant they do not. It has no bias: that is added to the rounded product, so that y is
rounded twice. Without it every product has 64 or 512 rows, so that a row has one of two possible results.
"""

import torch
from torch import Tensor

from whorl.contracts import linear_limit

from . import _torch_npu
from ._torch_npu import dtype_name

# The row counts of products. CANN chooses a schedule by the shape, so one shape has one schedule.
FEW, MANY = 64, 512


def reason(x: Tensor, weight: Tensor, bias: Tensor | None, **_: object) -> str | None:
    """Return None, or the reason that npu_linear cannot take these arguments."""
    if not x.numel():
        return "empty tensors are not taken"
    bias_dtype = None if bias is None else dtype_name(bias)
    return linear_limit(shape=x.shape, weight_shape=weight.shape, dtype=dtype_name(x), bias_dtype=bias_dtype)


def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if (mm := _torch_npu.batch_invariant("npu_mm")) is not None:
        y: Tensor = mm(x.contiguous(), weight.t())
        return (y if bias is None else (y + bias).to(x.dtype)).contiguous()
    count = x.shape[0]
    tile = FEW if count <= FEW else MANY
    padded = torch.nn.functional.pad(x, (0, 0, 0, -count % tile)).contiguous()
    parts = [_torch_npu.call("npu_linear", input=part, weight=weight, bias=bias) for part in padded.split(tile)]
    return torch.cat(parts)[:count].contiguous() if len(parts) > 1 else parts[0][:count].contiguous()
