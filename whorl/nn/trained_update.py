"""Training low-rank updates of a frozen model: the numbers are those that the engine computes with them."""

import contextlib
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from whorl import ops

from .low_rank import Target, Update, targets
from .weight import Matrix, Routing


class TrainedUpdates(nn.Module):
    """Low-rank updates of some projections of a model, as PEFT begins them: A random, B zero.

    model: its parameters are frozen. names: ends of the names of linear layers, and of the stacks of experts, such as
    "q_proj" or "experts.gate_up_proj". The updates are in the model's dtype unless `dtype` says otherwise, and are
    rounded to it where they multiply. Raises ValueError if a name fits nothing, or the model is sharded over ranks.

        updates = nn.TrainedUpdates(model, ["q_proj", "v_proj"], rank=8, alpha=16)
        optimizer = torch.optim.AdamW(updates.parameters(), lr=1e-3)
        with updates.attached():
            loss = -model.logprobs(nn.pack(sequences, "cpu")).mean()
    """

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        *,
        rank: int = 16,
        alpha: float = 16,
        dtype: torch.dtype | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.rank, self.alpha = rank, alpha
        every = {name: target for name, target in targets(model).items() if target.entry is None}
        self.targets = {name: target for name, target in every.items() if name.endswith(tuple(names))}
        self.names = tuple(names)
        if missing := [end for end in names if not any(name.endswith(end) for name in every)]:
            raise ValueError(f"TrainedUpdates: no layer of the model has a name that ends with {', '.join(missing)}")
        model.requires_grad_(False)
        self.a, self.b = nn.ParameterList(), nn.ParameterList()
        for target in self.targets.values():
            _check_whole(target)
            weight = next(target.matrix.parameters())
            stack = target.matrix.lead if target.is_stack else ()
            rows, columns = target.shape
            a = torch.empty(*stack, rank, columns).uniform_(-1, 1, generator=generator) / math.sqrt(columns)
            kind = {"device": weight.device, "dtype": dtype or target.matrix.dtype}
            self.a.append(nn.Parameter(a.to(**kind)))  # type: ignore[call-overload]
            self.b.append(nn.Parameter(torch.zeros(*stack, rows, rank, **kind)))  # type: ignore[call-overload]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def updates(self) -> dict[str, Update]:
        """Return the updates by their names in checkpoints."""
        pairs = zip(self.targets, self.a, self.b, strict=True)
        return {name: Update(a=a, b=b, scale=self.scale) for name, a, b in pairs}

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Let the model compute with the updates in this context."""
        by_matrix: dict[Matrix, _Added] = {}
        for (name, update), target in zip(self.updates().items(), self.targets.values(), strict=True):
            by_matrix.setdefault(target.matrix, _Added(target.matrix)).add(self.targets[name], update)
        for matrix, added in by_matrix.items():
            matrix.adapter = added
        try:
            yield
        finally:
            for matrix in by_matrix:
                matrix.adapter = None


def _check_whole(target: Target) -> None:
    parts = target.parts[: len(target.rows)]
    num_rows = sum(part.rows.stop - part.rows.start for part in parts)
    for part in parts:
        if num_rows != target.shape[0] or part.columns != slice(0, target.shape[1]):
            raise ValueError(f"TrainedUpdates: {target.key} is sharded over ranks, expected a model on one rank")


class _Added:
    """What is added to the products of one matrix: an update of each of its parts, where it has one."""

    def __init__(self, matrix: Matrix) -> None:
        self.parts = matrix.entry_parts
        self.updates: list[Update | None] = [None] * len(self.parts)

    def add(self, target: Target, update: Update) -> None:
        for part, rows in zip(target.parts, target.rows, strict=False):
            index = next(i for i, known in enumerate(self.parts) if known.first == part.first)
            self.updates[index] = Update(a=update.a, b=update.b[..., rows, :][..., part.rows, :], scale=update.scale)

    def __call__(self, y: Tensor, x: Tensor, routing: Routing | None = None) -> Tensor:
        """As `Adapter`, with a gradient, and rounded where `ops.low_rank` rounds."""
        columns = y.split([part.rows.stop - part.rows.start for part in self.parts], -1)
        outputs = [
            part if update is None else part + _product(x, update, routing) * update.scale
            for part, update in zip(columns, self.updates, strict=True)
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)


def _product(x: Tensor, update: Update, routing: Routing | None) -> Tensor:
    a, b = update.a.to(x.dtype), update.b.to(x.dtype).contiguous()
    if routing is None:
        return ops.linear(ops.linear(x, a), b)  # type: ignore[no-any-return]
    return ops.grouped_matmul(ops.grouped_matmul(x, a, routing.counts), b, routing.counts)  # type: ignore[no-any-return]
