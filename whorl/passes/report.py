"""The report of the passes: what was rewritten, what was left alone, and why."""

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
    rows: int | None = None  # rows at capture, if they are not the graph's tokens
    size: int | None = None  # number of ranks, if it is over another group


@dataclass(frozen=True, kw_only=True, slots=True)
class Gather:
    """A gather of the rewritten graph: where the rows of all ranks come together again."""

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
    """What the passes did to one graph; `str(report)` is for people, `report.json()` for programs.

    Bytes are those that one rank sends for `tokens` tokens; a collective with another number of rows counts its rows as
    captured.
    """

    group: str
    size: int
    tokens: int
    min_tokens: int | str = 0
    counts: dict[str, int] = field(default_factory=dict)  # by pass
    collectives: list[Collective] = field(default_factory=list)
    gathers: list[Gather] = field(default_factory=list)
    local_operators: int = 0
    sliced: list[str] = field(default_factory=list)  # full operands of which each rank takes its rows
    gemms: list[str] = field(default_factory=list)  # matmuls that see fewer rows at a time than in the plain graph
    varying: list[str] = field(default_factory=list)  # nodes with constants that differ between ranks
    unproven: list[str] = field(default_factory=list)  # inputs of one repeated value: being equal proves nothing
    not_fused: list[str] = field(default_factory=list)  # collectives that were not fused with a matmul, and why
    is_quantized: bool = False
    is_ordered: bool = True  # sums are in rank order
    predicted_gain: float | None = None  # time of plain communication / time of rewritten
    graph_hash: str = ""

    @property
    def rewrites(self) -> int:
        """The number of captured collectives that were rewritten."""
        return sum(c.rewritten for c in self.collectives)

    @property
    def exactness(self) -> str:
        """How equal the results of the rewritten and the plain graph are, in words."""
        if self.is_quantized:
            return "rounds: activations are gathered in 8 bits"
        if not self.is_ordered:
            return "up to the order of sums, which is left to the backend"
        if self.gemms:
            return (
                "bitwise where a row of a matmul does not depend on the rows beside it "
                f"({len(self.gemms)} matmuls see fewer rows)"
            )
        return "bitwise"

    def bytes_before(self, tokens: int | None = None) -> int:
        """Return the bytes one rank sends in the plain graph; tokens: default those of the capture."""
        return sum(self._sent(c.kind, c, tokens) for c in self.collectives)

    def bytes_after(self, tokens: int | None = None) -> int:
        """Return the bytes one rank sends in the rewritten graph; tokens: default those of the capture."""
        unchanged = sum(self._sent(c.kind, c, tokens) for c in self.collectives if not c.rewritten)
        scattered = [c for c in self.collectives if c.rewritten and c.kind == "all_reduce"]
        rewritten: list[Collective | Gather] = [*scattered, *self.gathers]
        return unchanged + sum(self._sent("reduce_scatter", collective, tokens) for collective in rewritten)

    def _sent(self, kind: str, collective: "Collective | Gather", tokens: int | None) -> int:
        count = self.tokens if tokens is None else tokens
        size = getattr(collective, "size", None) or self.size
        return wire_bytes(kind, collective.row_bytes, count if collective.rows is None else collective.rows, size)

    def as_dict(self) -> dict[str, Any]:
        """Return all fields, with the number of rewrites, the bytes and the exactness."""
        derived = {
            "rewrites": self.rewrites,
            "bytes_before": self.bytes_before(),
            "bytes_after": self.bytes_after(),
            "exactness": self.exactness,
        }
        return asdict(self) | derived

    def json(self) -> str:
        """Return the report as JSON text."""
        return json.dumps(self.as_dict(), indent=2)

    def describe_unproven(self) -> str:
        """Return a sentence on the inputs whose equality on all ranks is not proven."""
        return (
            f"Inputs of one repeated value, which does not prove that ranks have the same: {', '.join(self.unproven)}; "
            "if they are the same, make the first call with real values"
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
                "a cost model (SequenceParallel's `cost`) would count latency as well"
            )
        lines += [f"  {c.kind} {c.shape} {describe_place(c)}: {c.reason}" for c in self.collectives]
        lines += [f"  gather {g.dtype} {g.shape} of {g.value} {describe_place(g)}: {g.reason}" for g in self.gathers]
        if self.sliced:
            lines.append(f"  sliced, equal on all ranks: {', '.join(self.sliced)}")
        if self.varying:
            lines.append(f"  constants that differ between ranks: {', '.join(self.varying)}")
        if self.unproven:
            lines.append(f"  {self.describe_unproven()}")
        lines += [f"  not fused: {reason}" for reason in self.not_fused]
        lines.append("  passes: " + ", ".join(f"{name} {count}" for name, count in self.counts.items()))
        return "\n".join(lines)


def describe_place(collective: Collective | Gather) -> str:
    """Return module and source line of a collective, as a phrase."""
    parts = [collective.module and f"in {collective.module}", collective.source and f"({collective.source})"]
    return " ".join(p for p in parts if p) or "(no source known)"


def module_path(node: Node) -> str:
    """Return the path of the module that a node was traced in, as the model names it."""
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    path = re.sub(r"^L\['\w+'\]\.?", "", path)
    path = re.sub(r"\._modules\['(\w+)'\]", r".\1", path)
    path = re.sub(r"\['?(\w+)'?\]", r".\1", path)
    return path.replace("slf.", "").lstrip(".") or "model"


def source_line(node: Node) -> str:
    """Return "file:line" of the innermost stack frame outside torch."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    outside_torch = [f for f in frames if "/torch/" not in f[0]]
    return f"{outside_torch[-1][0].rsplit('/', 1)[-1]}:{outside_torch[-1][1]}" if outside_torch else ""
