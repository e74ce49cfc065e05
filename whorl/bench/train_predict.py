"""What `whorl bench train` compares its rows with: the planner's peak memory, and the peak FLOP/s of the device."""

import torch

from whorl import device as devices
from whorl.bench.train_model import CHUNK, host_format
from whorl.plan import layout as plan_layout
from whorl.plan.hardware import HARDWARE
from whorl.plan.memory import GB, memory_of
from whorl.plan.model_shape import from_hugging_face
from whorl.titan.deepseek_v32.args import DeepSeekV32Args
from whorl.titan.deepseek_v32.hf import to_hf_config
from whorl.titan.moments import FORMATS


def predict(args: DeepSeekV32Args, seq: int, switches: frozenset[str], dtype: torch.dtype, ring: int = 3) -> float:
    """Return the planner's peak bytes of a step. dtype: of weights and gradients, and of moments on the device."""
    size, moments = dtype.itemsize, host_format(switches)
    settings = plan_layout.PlanSettings(
        seq=seq,
        batch=1,
        weight=size,
        gradient=size,
        moment=sum(part.itemsize / values for part, values in FORMATS[moments or "exact"][0].parts(dtype)),
        compute=size,
        checkpoint="checkpoint" in switches,
        fused="dsa" in switches,
        chunk=CHUNK,
        ring=ring,
    )
    alone = plan_layout.Parallelism(pp=1, tp=1, cp=1, dp=1, ep=1, swap=moments is not None)
    return memory_of(from_hugging_face(to_hf_config(args), "trained here"), alone, settings).allocated * GB


def peak_flops(device: str) -> float | None:
    """Return the dense bf16 peak of the device; None for hardware that the planner does not know."""
    name = devices.device_name(device).lower()
    return next((hardware.flops for hardware in HARDWARE.values() if hardware.name in name), None)
