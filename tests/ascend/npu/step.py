"""Whole training steps of `whorl train`'s own trainer, every converter on, the CPU in the place of an NPU.

Torch's own operators run as they are, but for products of matrices, which are computed in fp32 and rounded; behind the
npu:: schemas are the kernels of this folder. Loss and gradients of a step are compared with those of the same converted
model on a CPU that is one.
"""

import collections
import dataclasses
import os
import socket
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from here import cpu_is_npu
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Values = dict[str, Any]
STAGES = ("warmup", "sparse")
CONVERTERS = ("npu_rms_norm", "npu_rope", "npu_permute", "npu_gmm", "npu_dsa")
STEPS = 2
PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm)
FLAGS = [
    *("--job.custom_config_module", "whorl.titan.config", "--model.name", "deepseek_v32", "--model.flavor", "npu"),
    *("--model.converters", ",".join(CONVERTERS), "--whorl.data", "synthetic", "--whorl.tokenizer", "bytes"),
    *("--training.dtype", "bfloat16", "--training.seq_len", "40", "--training.local_batch_size", "2"),
    *("--training.steps", str(STEPS), "--lr_scheduler.warmup_steps", "1", "--optimizer.lr", "2e-2"),
    *("--activation_checkpoint.mode", "full", "--metrics.log_freq", "1000", "--debug.seed", "7"),
    # Rounding may not decide which expert a token goes to: half of an expert's gradient would follow.
    "--debug.moe_force_load_balance",
]


class Recorded(TorchDispatchMode):
    """Names of the operators of torch that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten":
            self.names.add(func.name())
        return func(*args, **(kwargs or {}))


class InFloat32(TorchDispatchMode):
    """Multiplies 16-bit matrices in fp32 and rounds: a CPU without instructions for bf16 takes fifty times as long."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket not in PRODUCTS or args[-1].dtype != torch.bfloat16:
            return func(*args, **kwargs)
        out = kwargs.pop("out", None)
        y = func.overloadpacket(*(x.float() for x in args), **kwargs).to(torch.bfloat16)
        return y if out is None else out.copy_(y)


def prepare() -> None:
    """One rank, TorchTitan ready for it, and a model of the smallest sizes that the fused operators take."""
    from whorl.titan import cpu

    cpu.install()
    from whorl.titan.deepseek_v32.args import FLAVOURS
    from whorl.titan.register import register

    register()
    torch.npu.is_bf16_supported = lambda: True  # activation checkpointing asks, and the stand-in of CANN cannot say
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(port)}
    FLAVOURS["npu"] = dataclasses.replace(
        FLAVOURS["tiny"],
        n_layers=2,
        n_heads=32,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        index_n_heads=8,  # 1 / sqrt(8 * 128) is a power of two: rounding the weights to bf16 changes no choice
        index_head_dim=128,
    )


def stages(called: list[str]) -> Iterator[Values]:
    prepare()
    for stage in STAGES:
        with tempfile.TemporaryDirectory() as folder, InFloat32():
            row = run(stage, folder, called)
        yield {"stage": stage} | row


def run(stage: str, folder: str, called: list[str]) -> Values:
    from torchtitan.config import ConfigManager

    from whorl.titan.trainer import WhorlTrainer

    config = ConfigManager().parse_args([*FLAGS, "--whorl.stage", stage, "--job.dump_folder", folder])
    with cpu_is_npu() as fallbacks:
        trainer = WhorlTrainer(config)  # converters compare samples with float64: those fall back, and may
        called.clear()
        fallbacks.clear()
        batch = a_batch(trainer)
        actual = loss_and_gradients(trainer, batch)
    row: Values = {"compared": compared(actual, loss_and_gradients(trainer, batch))}
    with cpu_is_npu() as more:
        called.clear()
        before = {name: p.detach().clone() for name, p in trainer.model_parts[0].named_parameters()}
        with Recorded() as recorded:
            trainer.train()
        row["called"] = dict(collections.Counter(called))
    row["fallbacks"] = sorted({str(f) for f in (*fallbacks, *more)})
    row["moved"], row["frozen"] = moved(trainer, before)
    row["not_on_npu"] = [name for name in sorted(recorded.names) if not is_on_npu(name)]
    trainer.close()
    torch.distributed.destroy_process_group()
    return row


def a_batch(trainer: Any) -> Values:
    inputs, labels = next(iter(trainer.batch_generator(trainer.dataloader)))
    return {"input_dict": inputs, "labels": labels, "global_valid_tokens": torch.tensor(float(labels.numel()))}


def loss_and_gradients(trainer: Any, batch: Values) -> dict[str, Tensor]:
    from whorl.titan.deepseek_v32.core import Core, pop_log

    (model,) = trainer.model_parts
    trainer.optimizers.zero_grad()
    loss = trainer.forward_backward_step(**batch | {"input_dict": dict(batch["input_dict"])})
    values = {"loss": loss.detach().float()}
    for name, module in model.named_modules():
        if isinstance(module, Core):
            values[f"{name}.kl"] = pop_log(module.kl)
    values |= {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    trainer.optimizers.zero_grad()
    return values


def compared(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """By name, the norm of the difference as a part of what was expected."""
    assert actual.keys() == expected.keys()
    differences = {name: float((actual[name].double() - x.double()).norm()) for name, x in expected.items()}
    return {name: d / max(float(expected[name].double().norm()), 1e-12) for name, d in differences.items()}


def moved(trainer: Any, before: dict[str, Tensor]) -> tuple[list[str], list[str]]:
    """Which parameters the optimizer changed, and which it did not."""
    now = dict(trainer.model_parts[0].named_parameters())
    changed = [name for name, old in before.items() if not torch.equal(now[name], old)]
    return changed, [name for name in before if name not in changed]


def is_on_npu(name: str) -> bool:
    """Whether torch_npu has a kernel for an operator of torch, or torch makes it of others, judged themselves."""
    keys = (
        "PrivateUse1",
        "CompositeExplicitAutograd",
        "CompositeImplicitAutograd",
        "CompositeExplicitAutogradNonFunctional",
    )
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in keys)
