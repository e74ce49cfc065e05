"""What a rank of a large layout keeps, by TorchTitan's fake backend: one process, collectives that do nothing."""

import dataclasses
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def num_bytes(tensors: Iterable[Any]) -> int:
    local = [x.to_local() if isinstance(x, DTensor) else x for x in tensors if isinstance(x, Tensor)]
    return sum(x.numel() * x.element_size() for x in local)


def of_a_step(flags: list[str], tell: Callable[..., None]) -> dict[str, Any]:
    """After a step of TorchTitan's trainer; the first flag is the number of ranks.

    With expert parallelism only the update is made: a fake all-to-all tells a rank nothing of how many tokens come.
    """
    from titan_job import build

    os.environ["NGPU"], *flags = flags
    trainer = build([*flags, "--comm.mode", "fake_backend", "--checkpoint.no_enable"], tell, plain=True)
    trainer.step = 1
    parameters = [p for part in trainer.model_parts for p in part.parameters()]
    if trainer.parallel_dims.ep_enabled:
        for p in parameters:
            p.grad = torch.zeros_like(p)
        for optimizer in trainer.optimizers:
            optimizer.step()
    else:
        trainer.train_step(trainer.batch_generator(trainer.dataloader))
    return {
        "args": dataclasses.asdict(trainer.model_args),
        "parameters": num_bytes(parameters),
        "gradients": num_bytes(p.grad for p in parameters),
        "optimizer": num_bytes(x for o in trainer.optimizers for s in o.state.values() for x in s.values() if x.dim()),
    }


def of_a_rank(flags: list[str], tell: Callable[..., None]) -> dict[str, Any]:
    """On the meta device, so that any model does; the first flags are the rank and the number of ranks."""
    from titan_job import FLAGS
    from torchtitan.config import ConfigManager
    from torchtitan.protocols.train_spec import get_train_spec

    from whorl.titan.job_options import parallel_dims

    rank, size, *flags = flags
    config = ConfigManager().parse_args([*FLAGS, *flags])
    dist.init_process_group("fake", rank=int(rank), world_size=int(size))
    dims = parallel_dims(config, int(size))
    spec = get_train_spec(config.model.name)
    args = spec.model_args[config.model.flavor]
    args.update_from_config(config)
    with torch.device("meta"):
        model = spec.model_cls(args)
    if dims.pp_enabled:
        loss = spec.build_loss_fn(config, parallel_dims=dims)
        device = torch.device("cpu")
        _, parts, _, _ = spec.pipelining_fn(model, dims, config, device, args, spec.parallelize_fn, loss)
    else:
        parts = [spec.parallelize_fn(model, dims, config)]
    return {"args": dataclasses.asdict(args), "parameters": num_bytes(x for part in parts for x in part.parameters())}
