"""The state that the passes share: one graph and what is known of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from . import layout
from .config import SequenceParallel
from .editor import Editor
from .layout import Layout
from .report import Collective, Report


@dataclass(slots=True)
class Rewrite:
    """One graph on its way through the passes, and what the passes so far have learned.

    inputs: layouts of placeholders by name; differing: names of nodes whose constants or shapes differ between ranks.
    """

    gm: GraphModule
    config: SequenceParallel
    group: str
    report: Report
    inputs: Mapping[str, Layout]
    differing: frozenset[str]
    editor: Editor
    layouts: dict[Node, Layout] = field(default_factory=dict)
    roots: dict[Node, Any] = field(default_factory=dict)  # gathers that replace a captured collective, and their shards
    kinds: dict[Node, Any] = field(default_factory=dict)  # of each root: all_reduce or all_gather
    reasons: dict[Node, Any] = field(default_factory=dict)  # why a root stays as it was
    left_alone: list[Collective] = field(default_factory=list)
    placed: dict[Node, Any] = field(default_factory=dict)  # gathers that `place` made: bytes per row, and why there
    local_roots: set[Node] = field(default_factory=set)  # roots whose rows stay on their rank

    @property
    def size(self) -> int:
        """The number of ranks of the group."""
        return self.report.size

    @property
    def graph(self) -> torch.fx.Graph:
        return self.gm.graph

    def infer_layouts(self) -> None:
        """Set `layouts` anew, after the graph has changed."""
        self.layouts = layout.infer(self.graph, self.group, self.inputs, self.differing)
