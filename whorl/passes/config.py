"""The options of sequence parallelism."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from .cost import CostModel

QUANTIZE = (None, "int8", "fp8")


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceParallel:
    """Options of sequence parallelism over one process group.

    group: torch.distributed's process group, its name, or None for all processes.
    min_tokens: with fewer tokens the plain graph runs; "auto" takes the threshold from `cost`, or from a cost model
        measured on this machine.
    quantize: gather activations as int8 or fp8 with one fp32 scale per token where that moves fewer bytes. This rounds.
        A model that quantises its activations itself needs None: its quantised tensors are gathered as they are.
    pad: pad token counts that are not a multiple of the number of ranks inside the graph; False: such counts take the
        plain graph. `rewrite` makes only the rewritten graph: where the number of tokens is a symbol, its caller must
        run the plain graph for such counts.
    ordered: sum over ranks in rank order, in the plain graph too, so that both graphs give the same bits. False leaves
        the order to the backend's own collectives.
    sharded: names of parameters and inputs (a dot-separated part of a name, or an fnmatch pattern) that differ between
        ranks where nothing else shows it. DTensor parameters and differences that `probe` sees need no mention.
    probe: compare a checksum of every parameter and input across ranks once, at compile time; those that differ are
        varying. False: everything that is not a DTensor and not in `sharded` is taken to be equal on all ranks.
    fuse: run collectives and the matmuls beside them as one operator, part by part. A matmul then sees fewer rows at a
        time, which may change the last bits of aten's mm; whorl's linear keeps its bits.
    skip: names of passes to leave out.
    cost: a `cost.CostModel` for min_tokens="auto" and for the gain that the report predicts.

    Raises ValueError for a value that is not among these. Example: SequenceParallel(min_tokens=1000, quantize="int8")
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
        for name in ("skip", "sharded"):  # a string would be read as a sequence of letters
            if isinstance(getattr(self, name), str):
                value = getattr(self, name)
                raise ValueError(f"SequenceParallel: {name} is {value!r}, expected several names: ({value!r},)")
        if isinstance(self.group, int):  # torch.distributed.new_group returns a number to ranks outside the group
            raise ValueError("SequenceParallel: this rank is not in the group; call compile only on ranks of the group")
        if self.quantize not in QUANTIZE:
            raise ValueError(f"SequenceParallel: quantize is {self.quantize!r}, expected one of None, 'int8', 'fp8'")
        is_count = isinstance(self.min_tokens, int) and not isinstance(self.min_tokens, bool) and self.min_tokens >= 0
        if self.min_tokens != "auto" and not is_count:
            raise ValueError(f"SequenceParallel: min_tokens is {self.min_tokens!r}, expected 'auto' or a count >= 0")
