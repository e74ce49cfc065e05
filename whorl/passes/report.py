"""What was rewritten, what was left alone, and why."""

import json
import re
from dataclasses import asdict, dataclass, field
from typing import Any

from torch.fx import Node

from whorl.collectives import wire_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """One collective of the graph as it was captured."""

    kind: str  # all_reduce or all_gather
    module: str
    source: str  # file:line
    shape: str
    row_bytes: int
    rewritten: bool
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Gather:
    """A gather of the rewritten graph: where rows come together again."""

    value: str
    module: str
    source: str
    shape: str
    dtype: str
    row_bytes: int
    reason: str
    is_quantized: bool = False


@dataclass(kw_only=True, slots=True)
class Report:
    """Of one graph. Bytes are those one rank sends, with `tokens` tokens."""

    group: str
    size: int
    tokens: int
    min_tokens: int | str = 0
    counts: dict[str, int] = field(default_factory=dict)  # by pass
    collectives: list[Collective] = field(default_factory=list)
    gathers: list[Gather] = field(default_factory=list)
    local_operators: int = 0
    sliced: list[str] = field(default_factory=list)  # full-length operands of which each rank takes its rows
    gemms: list[str] = field(default_factory=list)  # products that see fewer rows than before
    varying: list[str] = field(default_factory=list)  # nodes with constants that differ between ranks
    not_fused: list[str] = field(default_factory=list)  # why collectives and products stay apart
    is_quantized: bool = False
    predicted_gain: float | None = None  # time of plain communication / time of rewritten
    graph_hash: str = ""

    @property
    def rewrites(self) -> int:
        return sum(c.rewritten for c in self.collectives)

    @property
    def exactness(self) -> str:
        if self.is_quantized:
            return "rounds: activations are gathered in 8 bits"
        if self.gemms:
            return (
                f"bitwise where a product's row does not depend on the rows beside it ({len(self.gemms)} run on fewer)"
            )
        return "bitwise"

    def bytes_before(self, tokens: int | None = None) -> int:
        return sum(wire_bytes(c.kind, c.row_bytes, self._at(tokens), self.size) for c in self.collectives)

    def bytes_after(self, tokens: int | None = None) -> int:
        count = self._at(tokens)
        kept = sum(wire_bytes(c.kind, c.row_bytes, count, self.size) for c in self.collectives if not c.rewritten)
        scattered = [c.row_bytes for c in self.collectives if c.rewritten and c.kind == "all_reduce"]
        gathered = [g.row_bytes for g in self.gathers]
        moved = [wire_bytes("reduce_scatter", b, count, self.size) for b in scattered + gathered]
        return kept + sum(moved)

    def _at(self, tokens: int | None) -> int:
        return self.tokens if tokens is None else tokens

    def as_dict(self) -> dict[str, Any]:
        more = {
            "rewrites": self.rewrites,
            "bytes_before": self.bytes_before(),
            "bytes_after": self.bytes_after(),
            "exactness": self.exactness,
        }
        return asdict(self) | more

    def json(self) -> str:
        return json.dumps(self.as_dict(), indent=2)

    def __str__(self) -> str:
        before, after = self.bytes_before(), self.bytes_after()
        lines = [
            f"sequence parallelism over {self.size} ranks, from {self.min_tokens} tokens: "
            f"{self.rewrites} of {len(self.collectives)} collectives rewritten, {len(self.gathers)} gathers, "
            f"{self.local_operators} operators on a rank's rows alone",
            f"bytes sent by a rank for {self.tokens} tokens: {before} before, {after} after"
            + (f" ({after / before:.2f})" if before else ""),
            f"equality: {self.exactness}",
        ]
        if self.predicted_gain is not None:
            lines.append(f"predicted: communication {self.predicted_gain:.2f} times as fast")
        lines += [f"  {c.kind} {c.shape} {_place(c)}: {c.reason}" for c in self.collectives]
        lines += [f"  gather {g.dtype} {g.shape} of {g.value} {_place(g)}: {g.reason}" for g in self.gathers]
        if self.sliced:
            lines.append(f"  sliced, equal on all ranks: {', '.join(self.sliced)}")
        if self.varying:
            lines.append(f"  constants that differ between ranks: {', '.join(self.varying)}")
        lines += [f"  not fused: {reason}" for reason in self.not_fused]
        lines.append("  passes: " + ", ".join(f"{name} {count}" for name, count in self.counts.items()))
        return "\n".join(lines)


def _place(found: Collective | Gather) -> str:
    parts = [found.module and f"in {found.module}", found.source and f"({found.source})"]
    return " ".join(p for p in parts if p) or "(no source known)"


def module_path(node: Node) -> str:
    """The module that a node was traced in, as the model names it."""
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    path = re.sub(r"^L\['\w+'\]\.?", "", path)
    path = re.sub(r"\._modules\['(\w+)'\]", r".\1", path)
    path = re.sub(r"\['?(\w+)'?\]", r".\1", path)
    return path.replace("slf.", "").lstrip(".") or "model"


def source_line(node: Node) -> str:
    """file:line of the innermost frame outside torch."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    ours = [f for f in frames if "/torch/" not in f[0]]
    return f"{ours[-1][0].rsplit('/', 1)[-1]}:{ours[-1][1]}" if ours else ""
