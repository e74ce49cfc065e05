"""Megatron on a machine without CUDA, as the one rank of a group."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist


@contextlib.contextmanager
def one_cpu_rank(parallel_state: Any, dot_product_attention: Any) -> Iterator[None]:
    """Its rotary classes ask for the current device, its dropout for CUDA's generator: both are given the CPU's.

    The modules are handed in, as it may not be installed.
    """
    patch = pytest.MonkeyPatch()
    patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    tracker = SimpleNamespace(fork=contextlib.nullcontext)
    patch.setattr(dot_product_attention.tensor_parallel, "get_cuda_rng_tracker", lambda: tracker)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    patch.undo()
