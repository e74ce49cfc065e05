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

    kind: str  # all_reduce, all_gather, reduce_scatter or all_to_all
    module: str
    source: str  # file:line
    shape: str
    row_bytes: int
    rewritten: bool
    reason: str
    rows: int | None = None  # when captured, where they are not the graph's tokens
    size: int | None = None  # ranks, where it is over another group


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
    rows: int | None = None


@dataclass(kw_only=True, slots=True)
class Report:
    """Of one graph. Bytes are those one rank sends, with `tokens` tokens; what has other rows has them as captured."""

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
    unproven: list[str] = field(default_factory=list)  # inputs of one repeated value: they say nothing about ranks
    not_fused: list[str] = field(default_factory=list)  # why collectives and products stay apart
    is_quantized: bool = False
    is_ordered: bool = True  # sums are in rank order
    predicted_gain: float | None = None  # time of plain communication / time of rewritten
    graph_hash: str = ""

    @property
    def rewrites(self) -> int:
        return sum(c.rewritten for c in self.collectives)

    @property
    def exactness(self) -> str:
        if self.is_quantized:
            return "rounds: activations are gathered in 8 bits"
        if not self.is_ordered:
            return "up to the order of sums, which is left to the backend"
        if self.gemms:
            return (
                f"bitwise where a product's row does not depend on the rows beside it ({len(self.gemms)} run on fewer)"
            )
        return "bitwise"

    def bytes_before(self, tokens: int | None = None) -> int:
        return sum(self._sent(c.kind, c, tokens) for c in self.collectives)

    def bytes_after(self, tokens: int | None = None) -> int:
        kept = sum(self._sent(c.kind, c, tokens) for c in self.collectives if not c.rewritten)
        scattered = [c for c in self.collectives if c.rewritten and c.kind == "all_reduce"]
        moved: list[Collective | Gather] = [*scattered, *self.gathers]
        return kept + sum(self._sent("reduce_scatter", found, tokens) for found in moved)

    def _sent(self, kind: str, found: "Collective | Gather", tokens: int | None) -> int:
        count = self.tokens if tokens is None else tokens
        size = getattr(found, "size", None) or self.size
        return wire_bytes(kind, found.row_bytes, count if found.rows is None else found.rows, size)

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

    def what_is_unproven(self) -> str:
        return (
            f"Inputs of one repeated value, which does not prove that ranks have the same: {', '.join(self.unproven)}; "
            "if they do, make the first call with real values"
        )

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
        elif after and self.rewrites:
            lines.append(
                f"predicted by bytes alone: communication {before / after:.2f} times as fast; "
                "a cost model (SequenceParallel's `cost`) knows latency, too"
            )
        lines += [f"  {c.kind} {c.shape} {place(c)}: {c.reason}" for c in self.collectives]
        lines += [f"  gather {g.dtype} {g.shape} of {g.value} {place(g)}: {g.reason}" for g in self.gathers]
        if self.sliced:
            lines.append(f"  sliced, equal on all ranks: {', '.join(self.sliced)}")
        if self.varying:
            lines.append(f"  constants that differ between ranks: {', '.join(self.varying)}")
        if self.unproven:
            lines.append(f"  {self.what_is_unproven()}")
        lines += [f"  not fused: {reason}" for reason in self.not_fused]
        lines.append("  passes: " + ", ".join(f"{name} {count}" for name, count in self.counts.items()))
        return "\n".join(lines)


def place(found: Collective | Gather) -> str:
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
