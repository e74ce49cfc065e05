"""What ranks tell each other before they rewrite: that they hold the same graph, and which values differ.

They speak through the process group's store, with a time limit: a rank that compiles something else, or nothing,
makes the others stop with an error instead of hanging in a collective later.
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
SAMPLES = 4096  # elements of a tensor that are compared one by one; the rest enters by its sum


def is_alone(group: str) -> bool:
    """Whether there is nobody to speak with: one rank, or torch's pretended process group."""
    ranks = collectives.process_group(group)
    return ranks.size() == 1 or dist.get_backend(ranks) == "fake"


def exchange(group: str, topic: str, message: Any) -> list[Any]:
    """Every rank's message, in rank order."""
    if is_alone(group):
        return [message]
    ranks = collectives.process_group(group)
    store = dist.distributed_c10d._get_default_store()
    members = dist.get_process_group_ranks(ranks)
    # Counted in the store: it begins with the group, a process may outlive several.
    turn = store.add(f"whorl/{group}/{topic}/turns/{members[ranks.rank()]}", 1)
    keys = [f"whorl/{group}/{topic}/{turn}/{member}" for member in members]
    store.set(keys[ranks.rank()], json.dumps(message))
    try:
        store.wait(keys, TIMEOUT)
    except Exception as e:
        missing = [m for m, key in zip(members, keys, strict=True) if not store.check([key])]
        raise RuntimeError(
            f"sequence parallelism: rank {members[ranks.rank()]} waited {TIMEOUT.total_seconds():.0f} s for ranks "
            f"{missing} to say {topic}: every rank must compile the same model, at the same time, from equal caches"
        ) from e
    return [json.loads(store.get(key)) for key in keys]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _shape(node: Node) -> str:
    found = node.meta.get("val")
    return f"{list(found.shape)} {found.dtype}" if isinstance(found, Tensor) else type(found).__name__


def describe(gm: GraphModule) -> list[tuple[str, str, str]]:
    """For each node its name, what it is and reads, and its constants and shape."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    places = {node: i for i, node in enumerate(gm.graph.nodes)}

    def skeleton(argument: Any) -> Any:
        return f"%{places[argument]}" if isinstance(argument, Node) else "."

    def constant(argument: Any) -> Any:
        return "%" if isinstance(argument, Node) else repr(argument)

    found = []
    for node in gm.graph.nodes:
        both = (node.args, node.kwargs)
        what = "output" if node.op == "output" else f"{node.op} {node.target if node.op == 'call_function' else ''}"
        structure = f"{what} {torch.fx.node.map_aggregate(both, skeleton)}"
        detail = f"{torch.fx.node.map_aggregate(both, constant)} {_shape(node)}"
        if node.op == "get_attr":
            with unset_fake_temporarily():  # a constant of the graph is a real tensor, also while it is captured
                detail += " ".join(map(str, checksum(_attribute(gm, str(node.target)))))
        found.append((node.name, structure, detail))
    return found


def _attribute(gm: GraphModule, path: str) -> Any:
    found: Any = gm
    for part in path.split("."):
        found = getattr(found, part)
    return found


def graph_hash(gm: GraphModule) -> str:
    return _digest("\n".join(structure for _, structure, _ in describe(gm)))


def compare(gm: GraphModule, group: str, topic: str) -> frozenset[str]:
    """Names of nodes whose constants or shapes differ between ranks; graphs of different structure are an error."""
    nodes = describe(gm)
    mine = [[_digest(structure), _digest(detail)] for _, structure, detail in nodes]
    everyone = exchange(group, topic, mine)
    differing = set()
    for rank, theirs in enumerate(everyone):
        for i in range(max(len(theirs), len(mine))):
            if i >= len(theirs) or i >= len(mine) or theirs[i][0] != mine[i][0]:
                where = f"node {i}, {nodes[i][1]}" if i < len(nodes) else f"node {i}"
                hashes = [_digest("".join(n[0] for n in each)) for each in everyone]
                raise RuntimeError(
                    f"sequence parallelism: the {topic} is not the same on all ranks: hashes {hashes}; rank {rank} "
                    f"first differs from this one at {where}. Every rank must run the same model code."
                )
            if theirs[i][1] != mine[i][1]:
                differing.add(nodes[i][0])
    return frozenset(differing)


# ---- tensors


def checksum(x: Any) -> list[Any]:
    """Shape, dtype, the sum of all bits and a hash of some elements; the last says whether all of those are equal."""
    if not isinstance(x, Tensor):
        return [repr(x), True]
    x = x.detach()
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(x.element_size(), torch.uint8)
    bits = x.contiguous().view(-1).view(kind) if x.numel() else x.new_zeros(0, dtype=kind)
    some = bits[:: max(1, bits.numel() // SAMPLES)].cpu()
    is_constant = bool(some.numel() and (some == some[0]).all())  # what is empty is equal everywhere
    return [list(x.shape), str(x.dtype), int(bits.sum(dtype=torch.int64)), _digest(str(some.tolist())), is_constant]


def is_one_value(x: Any) -> bool:
    """Whether a matrix (an empty cache, weights before they are loaded) proves nothing by being equal everywhere."""
    return isinstance(x, Tensor) and x.dim() > 1 and bool(checksum(x)[-1])


def probe(tensors: Mapping[str, Any], group: str) -> dict[str, Layout]:
    """REPLICATED for tensors equal on all ranks, else VARYING.

    A matrix of one repeated value (an empty cache, weights before they are loaded) proves nothing: it is VARYING. A
    vector of one value is taken at its word, since norms start as ones.
    """
    mine = {name: checksum(x) for name, x in tensors.items()}
    everyone = exchange(group, "parameters", mine)
    found = {}
    for name, x in tensors.items():
        is_equal = all(theirs.get(name) == mine[name] for theirs in everyone)
        says_nothing = isinstance(x, Tensor) and x.dim() > 1 and mine[name][-1]
        found[name] = Layout.REPLICATED if is_equal and not says_nothing else Layout.VARYING
    return found
