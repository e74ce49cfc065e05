"""What the passes are asked to do."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from .cost import CostModel

QUANTIZE = (None, "int8", "fp8")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRange:
    """Token counts from `start` to `end`, both included; `end` None: and all above."""

    start: int
    end: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceParallel:
    """Sequence parallelism over one process group.

    group: torch.distributed's process group, its name, or None for all processes.
    min_tokens: below so many tokens the graph stays as it is; "auto" asks `cost`, or the cost model of this machine.
    quantize: gather activations as int8 or fp8 with one fp32 scale a token where that moves fewer bytes. It rounds;
        a model that quantises by itself needs None: its own quantised tensors are gathered, and nothing is rounded.
    pad: token counts that the ranks do not divide are padded inside the graph; False: they take the plain graph.
        `rewrite` alone has one graph: with a symbolic number of tokens its caller chooses.
    ordered: sum over ranks in rank order, in the plain graph too, so that both give the same bits. False leaves the
        sums to the backend's own collectives.
    sharded: names of parameters and inputs (a dot-separated part of them, or fnmatch patterns) that differ between
        ranks though nothing in them says so. DTensor parameters and what `probe` finds need no mention.
    probe: compare a checksum of every parameter and input across ranks once, at compile time; those that differ are
        varying. False: what is not DTensor and not in `sharded` is taken to be equal on all ranks.
    fuse: run collectives and the matrix products beside them as one operator, piece by piece. A product then sees fewer
        rows at a time, which may change the last bits of aten's; whorl's linear keeps its own.
    skip: names of passes to leave out.
    """

    group: Any = None
    min_tokens: int | Literal["auto"] = "auto"
    quantize: Literal["int8", "fp8"] | None = None
    pad: bool = True
    ordered: bool = True
    sharded: tuple[str, ...] = ()
    probe: bool = True
    fuse: bool = False
    skip: tuple[str, ...] = ()
    cost: "CostModel | None" = None

    def __post_init__(self) -> None:
        for name in ("skip", "sharded"):  # a string is a sequence, too: of letters
            if isinstance(getattr(self, name), str):
                given = getattr(self, name)
                raise ValueError(f"SequenceParallel: {name} is {given!r}, expected several names: ({given!r},)")
        if isinstance(self.group, int):  # what torch.distributed.new_group gives to ranks outside of it
            raise ValueError("SequenceParallel: this rank is not in the group; only its ranks compile with it")
        if self.quantize not in QUANTIZE:
            raise ValueError(f"SequenceParallel: quantize is {self.quantize!r}, expected one of None, 'int8', 'fp8'")
        is_count = isinstance(self.min_tokens, int) and not isinstance(self.min_tokens, bool) and self.min_tokens >= 0
        if self.min_tokens != "auto" and not is_count:
            raise ValueError(f"SequenceParallel: min_tokens is {self.min_tokens!r}, expected 'auto' or a count >= 0")
