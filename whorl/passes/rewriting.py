"""A graph on its way through the passes, and what is known of it."""

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
    """One graph on its way through the passes."""

    gm: GraphModule
    config: SequenceParallel
    group: str
    report: Report
    inputs: Mapping[str, Layout]
    differing: frozenset[str]
    editor: Editor
    layouts: dict[Node, Layout] = field(default_factory=dict)
    roots: dict[Node, Any] = field(default_factory=dict)  # gathers that stand for a captured collective, and its input
    kinds: dict[Node, Any] = field(default_factory=dict)
    reasons: dict[Node, Any] = field(default_factory=dict)  # why a root stays as it was
    left_alone: list[Collective] = field(default_factory=list)
    placed: dict[Node, Any] = field(default_factory=dict)  # gathers by placement: bytes of a row, and why
    local_roots: set[Node] = field(default_factory=set)

    @property
    def size(self) -> int:
        return self.report.size

    @property
    def graph(self) -> torch.fx.Graph:
        return self.gm.graph

    def infer_layouts(self) -> None:
        self.layouts = layout.infer(self.graph, self.group, self.inputs, self.differing)
