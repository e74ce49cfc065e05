"""Compile the model block by block, except the dispatch of tokens to experts.

A block is compiled in parts, each as a full graph: the norms and the attention, and the feed-forward network or, in a
mixture of experts, the router and the shared expert. Our operators are single nodes in these graphs. The number of
tokens of an expert is known only at run time, so that dispatch, experts and combine are not compiled.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._inductor.custom_graph_pass import CustomGraphPass

from whorl.titan.deepseek_v32.fused import LOSS
from whorl.titan.deepseek_v32.model import DeepSeekV32Model

from .sharding import transformer_blocks

# Options of whorl.no_codegen, with which Inductor generates no kernels: every operator stays a library call, and none
# is decomposed. Graph passes, memory planning and the wrapper, which removes launch overhead, stay on.
NO_CODEGEN = {"fallback_by_default": True, "selective_decompose": True}


class KeepInBackward(CustomGraphPass):
    """Keeps the indexer loss, which the attention computes in backward, in the backward graph.

    The loss does not depend on the incoming gradient, so that Inductor would move it to the forward. There, activation
    checkpointing would compute it twice, and its results would stay in memory until backward.
    """

    def __call__(self, graph: torch.fx.Graph) -> None:
        loss_nodes = {op.node for op in LOSS}
        for node in graph.nodes:
            if node.target in loss_nodes:
                node.meta["partitioner_tag"] = "must_be_in_backward"

    def uuid(self) -> str:
        return "whorl.titan.deepseek_v32.infra.compiled.KeepInBackward 2"


def compile_options(backend: Any, *, no_codegen: bool) -> dict[str, Any]:
    """Return the keyword arguments for torch.compile; raises ValueError if no_codegen is set for another backend."""
    if backend == "inductor":
        options = {"joint_custom_pre_pass": KeepInBackward(), **(NO_CODEGEN if no_codegen else {})}
        return {"backend": backend, "options": options}
    if no_codegen:
        raise ValueError(f"whorl.no_codegen is set and compile.backend is {backend!r}, expected 'inductor'")
    return {"backend": backend}


def compiled_parts(block: Any) -> Iterator[nn.Module]:
    """Yield the modules of a TransformerBlock that are compiled, each as one graph."""
    yield from (block.attention_norm, block.attention, block.ffn_norm)
    if not block.moe_enabled:
        yield block.feed_forward
        return
    yield block.moe.router
    if block.moe.shared_experts is not None:
        yield block.moe.shared_experts


def compile_blocks(model: DeepSeekV32Model, backend: Any = "inductor", *, no_codegen: bool = False) -> None:
    """Compile the blocks in place; names and classes stay, and blocks of one kind share compiled code."""
    options = compile_options(backend, no_codegen=no_codegen)
    for block in transformer_blocks(model):
        for part in compiled_parts(block):
            part.forward = torch.compile(part.forward, fullgraph=True, dynamic=False, **options)  # type: ignore[method-assign]
