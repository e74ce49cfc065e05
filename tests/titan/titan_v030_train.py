"""Run by test_titan_plugin.py with TorchTitan 0.3 on the path: its trainer on a CPU, with the overrides that are named.

Prints the losses. Imported, not run as a file: an override is named by its module. 0.3 does not run on a CPU either:
what is changed for that is here and serves this test alone.
"""

import collections
import json
import os
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

STEPS, BATCH, LENGTH, LAYERS = 4, 2, 16, 2


def use_cpu() -> None:
    """Before TorchTitan is imported: it looks for a device as it is loaded."""
    host = types.ModuleType("torch_cpu_for_torchtitan")
    host.__dict__.update({name: value for name, value in vars(torch.cpu).items() if not name.startswith("__")})
    answers: dict[str, Any] = {
        "get_device_name": lambda device=None: "cpu",
        "get_device_properties": lambda device=None: types.SimpleNamespace(name="cpu", total_memory=1 << 33),
        "memory_stats": lambda device=None: collections.defaultdict(int),
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "current_device": lambda: 0,
    }
    host.__dict__.update(answers)
    utilities: Any = torch._utils
    utilities._get_available_device_type, utilities._get_device_module = (lambda: "cpu"), (lambda device: host)
    barrier, histc, changed = dist.barrier, torch.histc, dist
    changed.barrier = lambda *args, device_ids=None, **more: barrier(*args, **more)  # type: ignore[assignment]
    if not hasattr(dist, "set_timeout"):  # newer than torch 2.13
        changed.set_timeout = dist.distributed_c10d._set_pg_timeout  # type: ignore[attr-defined]

    def count(x: Tensor, bins: int = 100, **more: Any) -> Tensor:
        return histc(x, bins, **more) if x.is_floating_point() else torch.bincount(x.flatten(), minlength=bins)

    torch.histc = count  # type: ignore[assignment]


use_cpu()
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config.override import derive, override  # noqa: E402
from torchtitan.models.common.attention import FlexAttention  # noqa: E402
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel  # noqa: E402


class Loader(BaseDataLoader):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Any, **more: Any) -> None:
        pass

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        generator = torch.Generator().manual_seed(1)
        while True:
            text = torch.randint(0, 50, (BATCH, LENGTH + 1), generator=generator)
            positions = torch.arange(LENGTH).expand(BATCH, -1).contiguous()
            yield {"input": text[:, :-1].contiguous(), "positions": positions}, text[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Words(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Any, **more: Any) -> None:
        super().__init__()
        self.eos_id = 0

    def encode(self, *args: Any, **more: Any) -> list[int]:
        return []

    def decode(self, *args: Any, **more: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return 50


class Plain(FlexAttention):
    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        pass

    def forward(self, q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, **more: Any) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(q, k, v, is_causal=True, scale=more.get("scale")).transpose(1, 2)


@override(target=FlexAttention.Config, description="causal attention on a CPU")
def plain_attention(config: Any) -> Any:
    return derive(config, Plain.Config)


def main(overrides: list[str]) -> None:
    config = deepseek_v3_debugmodel()
    config.model_spec.model.layers = config.model_spec.model.layers[:LAYERS]
    config.dataloader, config.tokenizer = Loader.Config(), Words.Config()
    config.training.local_batch_size, config.training.seq_len, config.training.steps = BATCH, LENGTH, STEPS
    config.training.mixed_precision_param = "float32"
    config.parallelism.spmd_backend = "partial_dtensor"
    config.activation_checkpoint = None
    config.debug.seed = 0
    config.dump_folder = os.environ["DUMP_FOLDER"]
    config.override.imports += [f"{__name__}.plain_attention", *overrides]
    trainer = config.build()
    losses: list[float] = []
    trainer.metrics_processor.log = lambda step, loss, *args, **more: losses.append(float(loss))
    modules = sorted({type(module).__name__ for part in trainer.model_parts for module in part.modules()})
    trainer.train()
    trainer.close()
    print(json.dumps({"losses": losses, "modules": modules}))
