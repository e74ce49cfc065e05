"""Run the passes inside torch.compile's own Inductor, for users who do not call `whorl.passes.compile`."""

import hashlib
from pathlib import Path
from typing import Any

from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph

from whorl import collectives

from .capture import rounding, schemas_key
from .config import SequenceParallel
from .cost import least_tokens
from .inputs import Input, input_layouts, name_inputs
from .pipeline import order_sums_in_place, rewrite, tokens_of
from .report import Report
from .rows import same

_SOURCES = tuple(sorted(str(p) for p in Path(__file__).parent.glob("*.py")))


class SequenceParallelPass(CustomGraphPass):
    """The pass for Inductor's `post_grad_custom_pre_pass`.

    Inductor compiles one graph per capture. It is rewritten when the captured number of tokens, or the hint of a
    symbolic one, reaches `min_tokens`. That must be a number: "auto" needs the choice at run time that
    `whorl.passes.compile` makes.
    """

    def __init__(self, config: SequenceParallel) -> None:
        if config.min_tokens == "auto":
            raise ValueError("inductor_options: min_tokens 'auto' needs whorl.passes.compile; give a number of tokens")
        self.config = config
        self.reports: list[Report] = []
        self.inputs: list[Input] = []
        self.left_as_is = ""  # why the last graph was not rewritten; empty when it was

    @property
    def report(self) -> Report:
        """The report of the graph rewritten last; raises RuntimeError if none was."""
        if not self.reports:
            raise RuntimeError(self.left_as_is or "the pass has not run yet: call the compiled model first")
        return self.reports[-1]

    def record(self, graph: Graph) -> None:
        """Record the layouts of the inputs before AOTAutograd, while inputs still have their names and values."""
        gm: Any = graph.owning_module
        self.inputs = input_layouts(gm, self.config)

    def __call__(self, graph: Graph) -> None:
        gm: Any = graph.owning_module
        tokens = tokens_of(gm, collectives.group_name(self.config.group))
        count = tokens if isinstance(tokens, int) else tokens.node.hint
        size = collectives.group_size(collectives.group_name(self.config.group))
        self.left_as_is = ""
        if count < int(self.config.min_tokens):
            self.left_as_is = f"nothing was rewritten: {count} tokens, and min_tokens is {self.config.min_tokens}"
        elif not self.config.pad and not same(tokens % size, 0):
            self.left_as_is = (
                f"nothing was rewritten: {tokens} tokens may not divide evenly over {size} ranks, and pad is off"
            )
        if self.left_as_is:
            order_sums_in_place(gm, self.config)
            return
        report: Report = rewrite(gm, self.config, inputs=name_inputs(gm, self.inputs), in_place=True).meta["report"]
        report.min_tokens = least_tokens(self.config, report)
        self.reports.append(report)

    def uuid(self) -> Any:
        """Return a hash of everything that a rewritten graph depends on.

        The rank is not part of it, because no graph holds the rank.
        """
        group = collectives.group_name(self.config.group)
        world = (group, collectives.group_size(group))
        inputs = [(name, layout.value) for name, layout, *_ in self.inputs]
        text = f"{_key(self.config)} {world} {inputs} {schemas_key()}"
        return get_hash_for_files(_SOURCES, extra=hashlib.sha256(text.encode()).hexdigest())


def _key(config: SequenceParallel) -> str:
    """Return the options that a rewritten graph depends on; the group and the inputs are hashed by the caller."""
    fields = (config.min_tokens, config.quantize, config.pad, config.ordered, config.sharded, config.fuse, config.skip)
    return repr(fields)


class _Recorder(CustomGraphPass):
    """The pass for Inductor's `pre_grad_custom_pass`: it records the inputs and changes nothing."""

    def __init__(self, owner: SequenceParallelPass) -> None:
        self.owner = owner

    def __call__(self, graph: Graph) -> None:
        self.owner.record(graph)

    def uuid(self) -> Any:
        return self.owner.uuid()


def inductor_options(config: SequenceParallel) -> dict[str, Any]:
    """Return the options that run the passes inside Inductor; see `whorl.passes.inductor_options`.

    The pass itself, with its reports, is under "post_grad_custom_pre_pass".
    """
    sequence_parallel = SequenceParallelPass(config)
    passes = {"pre_grad_custom_pass": _Recorder(sequence_parallel), "post_grad_custom_pre_pass": sequence_parallel}
    return passes | rounding(config)
