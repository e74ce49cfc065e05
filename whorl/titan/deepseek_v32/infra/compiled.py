"""torch.compile, one block at a time: everything but the dispatch of tokens to experts.

A block is compiled in parts, each a whole graph: the attention with what comes before and after it, the feed-forward
layer or, of a mixture of experts, the router and the shared expert. Our operators are single nodes in them. How many
tokens an expert gets is known only when they are there: dispatch, experts and combine are left as they are.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._inductor.custom_graph_pass import CustomGraphPass

from whorl.titan.deepseek_v32.fused import LOSS
from whorl.titan.deepseek_v32.model import DeepSeekV32Model

from .sharding import blocks_of

# torch's own switches for "lower nothing": every operator stays a call of the library, none is decomposed. Graph
# passes, memory planning and the wrapper, which is what takes launch overhead away, stay on.
NO_CODEGEN = {"fallback_by_default": True, "selective_decompose": True}


class KeepInBackward(CustomGraphPass):
    """The indexer's loss, which the attention computes in backward, stays there.

    It needs no gradient from above, so that Inductor would move it to the forward: to be computed once more wherever
    activation checkpointing runs the forward again, and with its results in memory until backward.
    """

    def __call__(self, graph: torch.fx.Graph) -> None:
        mine = {op.node for op in LOSS}
        for node in graph.nodes:
            if node.target in mine:
                node.meta["partitioner_tag"] = "must_be_in_backward"

    def uuid(self) -> str:
        return "whorl.titan.deepseek_v32.infra.compiled.KeepInBackward 2"


def compile_options(backend: Any, *, no_codegen: bool) -> dict[str, Any]:
    """Keywords for torch.compile."""
    if backend == "inductor":
        options = {"joint_custom_pre_pass": KeepInBackward(), **(NO_CODEGEN if no_codegen else {})}
        return {"backend": backend, "options": options}
    if no_codegen:
        raise ValueError(f"whorl.no_codegen is Inductor's; compile.backend is {backend!r}, expected 'inductor'")
    return {"backend": backend}


def compiled_parts(block: Any) -> Iterator[nn.Module]:
    yield from (block.attention_norm, block.attention, block.ffn_norm)
    if not block.moe_enabled:
        yield block.feed_forward
        return
    yield block.moe.router
    if block.moe.shared_experts is not None:
        yield block.moe.shared_experts


def compile_blocks(model: DeepSeekV32Model, backend: Any = "inductor", *, no_codegen: bool = False) -> None:
    """In place, names and classes unchanged: blocks of one kind share what is compiled."""
    options = compile_options(backend, no_codegen=no_codegen)
    for block in blocks_of(model):
        for part in compiled_parts(block):
            part.forward = torch.compile(part.forward, fullgraph=True, dynamic=False, **options)  # type: ignore[method-assign]
