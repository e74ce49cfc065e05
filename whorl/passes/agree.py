"""Compare the ranks before they rewrite: whether they captured the same graph, and which values differ between them.

Ranks exchange messages through the process group's store, with a time limit: when a rank compiles another model, or
none, the other ranks stop with an error instead of hanging in a collective later.
"""

import hashlib
import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import GraphModule, Node

from whorl import collectives

from .layout import Layout

TIMEOUT = timedelta(seconds=300)
SAMPLES = 4096  # how many elements of a tensor are compared one by one; the others count only through their sum


def is_alone(group: str) -> bool:
    """Return whether there is no other rank to compare with: one rank, or torch's "fake" process group."""
    ranks = collectives.process_group(group)
    return ranks.size() == 1 or dist.get_backend(ranks) == "fake"


def exchange(group: str, topic: str, message: Any) -> list[Any]:
    """Send `message` to every rank of the group and return the messages of all ranks, in rank order.

    message: what JSON can hold; raises RuntimeError naming the ranks that sent nothing within `TIMEOUT`.
    """
    if is_alone(group):
        return [message]
    ranks = collectives.process_group(group)
    store = dist.distributed_c10d._get_default_store()
    members = dist.get_process_group_ranks(ranks)
    # The number of this exchange is counted in the store and not in this process, because a process may create several
    # groups one after the other, each with a new store.
    turn = store.add(f"whorl/{group}/{topic}/turns/{members[ranks.rank()]}", 1)
    keys = [f"whorl/{group}/{topic}/{turn}/{member}" for member in members]
    store.set(keys[ranks.rank()], json.dumps(message))
    try:
        store.wait(keys, TIMEOUT)
    except Exception as e:
        missing = [m for m, key in zip(members, keys, strict=True) if not store.check([key])]
        raise RuntimeError(
            f"sequence parallelism: rank {members[ranks.rank()]} waited {TIMEOUT.total_seconds():.0f} s for ranks "
            f"{missing} to publish their {topic}: every rank must compile the same model, at the same time, from equal "
            "caches"
        ) from e
    return [json.loads(store.get(key)) for key in keys]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _describe_value(node: Node) -> str:
    fake = node.meta.get("val")
    return f"{list(fake.shape)} {fake.dtype}" if isinstance(fake, Tensor) else type(fake).__name__


def describe(gm: GraphModule) -> list[tuple[str, str, str]]:
    """Return for each node its name, its structure (operator and operands) and its details (constants and shape).

    Operands in the structure are written as positions in the graph, so that names do not matter.
    """
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    positions = {node: i for i, node in enumerate(gm.graph.nodes)}

    def skeleton(argument: Any) -> Any:
        return f"%{positions[argument]}" if isinstance(argument, Node) else "."

    def constant(argument: Any) -> Any:
        return "%" if isinstance(argument, Node) else repr(argument)

    descriptions = []
    for node in gm.graph.nodes:
        arguments = (node.args, node.kwargs)
        operator = "output" if node.op == "output" else f"{node.op} {node.target if node.op == 'call_function' else ''}"
        structure = f"{operator} {torch.fx.node.map_aggregate(arguments, skeleton)}"
        detail = f"{torch.fx.node.map_aggregate(arguments, constant)} {_describe_value(node)}"
        if node.op == "get_attr":
            with unset_fake_temporarily():  # a constant of the graph is a real tensor even while the graph is captured
                detail += " ".join(map(str, checksum(_attribute(gm, str(node.target)))))
        descriptions.append((node.name, structure, detail))
    return descriptions


def _attribute(gm: GraphModule, path: str) -> Any:
    attribute: Any = gm
    for part in path.split("."):
        attribute = getattr(attribute, part)
    return attribute


def graph_hash(gm: GraphModule) -> str:
    """Return a hash of the graph's structure, without constants and shapes."""
    return _digest("\n".join(structure for _, structure, _ in describe(gm)))


def compare(gm: GraphModule, group: str, topic: str) -> frozenset[str]:
    """Return the names of the nodes whose constants or shapes differ between ranks.

    topic: what is compared, for the error message. Raises RuntimeError when the structure of the graphs differs.
    """
    nodes = describe(gm)
    local = [[_digest(structure), _digest(detail)] for _, structure, detail in nodes]
    ranks = exchange(group, topic, local)
    differing = set()
    for rank, remote in enumerate(ranks):
        for i in range(max(len(remote), len(local))):
            if i >= len(remote) or i >= len(local) or remote[i][0] != local[i][0]:
                where = f"node {i}, {nodes[i][1]}" if i < len(nodes) else f"node {i}"
                hashes = [_digest("".join(n[0] for n in nodes_of_rank)) for nodes_of_rank in ranks]
                raise RuntimeError(
                    f"sequence parallelism: the {topic} is not the same on all ranks: hashes {hashes}; rank {rank} "
                    f"first differs from this one at {where}. Every rank must run the same model code."
                )
            if remote[i][1] != local[i][1]:
                differing.add(nodes[i][0])
    return frozenset(differing)


# ---- tensors


def checksum(x: Any) -> list[Any]:
    """Return what is compared across ranks, and last whether x looks like one repeated value.

    For a tensor: shape, dtype, the sum of its elements' bits as integers, a hash of about SAMPLES of its elements, and
    whether these are all equal. For anything else: its repr and True.
    """
    if not isinstance(x, Tensor):
        return [repr(x), True]
    x = x.detach()
    int_dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(x.element_size(), torch.uint8)
    bits = x.contiguous().view(-1).view(int_dtype) if x.numel() else x.new_zeros(0, dtype=int_dtype)
    samples = bits[:: max(1, bits.numel() // SAMPLES)].cpu()
    is_constant = bool(samples.numel() and (samples == samples[0]).all())  # an empty tensor is equal on all ranks
    return [list(x.shape), str(x.dtype), int(bits.sum(dtype=torch.int64)), _digest(str(samples.tolist())), is_constant]


def is_one_value(x: Any) -> bool:
    """Return whether x is a matrix of one repeated value: an empty cache, or weights before they are loaded.

    That such a tensor is equal on all ranks proves nothing about its later values.
    """
    return isinstance(x, Tensor) and x.dim() > 1 and bool(checksum(x)[-1])


def probe(tensors: Mapping[str, Any], group: str) -> dict[str, Layout]:
    """Compare tensors across ranks; return REPLICATED for each that is equal on all of them, VARYING for the others.

    A matrix of one repeated value (an empty cache, weights before they are loaded) proves nothing, so it is VARYING. A
    vector of one repeated value counts as REPLICATED when it is equal on all ranks, because weights of norms start as
    ones.
    """
    local = {name: checksum(x) for name, x in tensors.items()}
    ranks = exchange(group, "parameters", local)
    layouts = {}
    for name, x in tensors.items():
        is_equal = all(remote.get(name) == local[name] for remote in ranks)
        is_unproven = isinstance(x, Tensor) and x.dim() > 1 and local[name][-1]
        layouts[name] = Layout.REPLICATED if is_equal and not is_unproven else Layout.VARYING
    return layouts
