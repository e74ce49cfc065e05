"""The tiny DeepSeek-V3.2 of the tests, its attention sharp enough to prefer some keys."""

import copy
import dataclasses
from typing import Any

import torch

from whorl.titan.deepseek_v32.args import FLAVOURS, DeepSeekV32Args
from whorl.titan.deepseek_v32.fused import FusedDSA
from whorl.titan.deepseek_v32.model import DeepSeekV32Model


def tiny(**more: Any) -> DeepSeekV32Args:
    args = copy.deepcopy(FLAVOURS["tiny"])
    args.moe_args.use_grouped_mm = False
    return dataclasses.replace(args, **more)


def make_model(args: DeepSeekV32Args, path: str = "small") -> DeepSeekV32Model:
    torch.manual_seed(0)
    model = DeepSeekV32Model(args)
    model.init_weights()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".attention." in name and parameter.dim() == 2:
                parameter.mul_(4)  # initial attention is nearly even: which keys it looks at would not matter
    for module in [m for m in model.modules() if hasattr(m, "core")]:
        if path != "small":
            module.core = FusedDSA(dataclasses.replace(module.core.settings, path=path))
    return model
