"""Layers of whorl with the interface of the modules that they replace in a model of transformers."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whorl.nn import Destination, Formats, Linear, Plain, Ranks, RMSNorm, StackedExperts, Vocabulary, Weighted


class OwnLinear(Linear):
    """`Linear` for activations of any number of dims. Where it is sharded, its input or its output may be whole.

    gathers: the ranks' rows of the output are put together. splits: the input is whole, and a rank takes its columns.
    """

    def __init__(self, *arguments: Any, gathers: bool = False, splits: bool = False, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.gathers, self.columns = gathers, self.parts[0].columns if splits else None

    @property
    def is_cut(self) -> bool:
        """Whether the modules beside it see a rank's share of the channels."""
        return self.ranks.size > 1 and not self.gathers and self.columns is None

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        rows = rows if self.columns is None else rows[:, self.columns].contiguous()
        y = super().forward(rows)
        y = self.ranks.gather(y) if self.gathers else y
        return y.view(*x.shape[:-1], -1)


class TransposedLinear(OwnLinear):
    """A linear layer whose checkpoint has the weight transposed, [inputs, outputs]."""

    def destinations(self, name: str) -> Iterator[tuple[str, Destination]]:
        for source, destination in super().destinations(name):
            if source.endswith(".bias"):
                yield source, destination
            elif destination.dtype is None and len(destination.shape) == 2:
                shape, index = destination.shape[::-1], destination.index[::-1]
                yield source, Destination(into=destination.into.t(), shape=shape, index=index)
            else:
                raise ValueError(f"{name}: a weight that is stored transposed cannot be quantised ({self.format})")


class OwnHead(Vocabulary):
    """The output head, called like a linear layer."""

    def forward(self, hidden: Tensor) -> Tensor:
        return self.logits(hidden.reshape(-1, hidden.shape[-1])).view(*hidden.shape[:-1], -1)


class OwnEmbedding(Vocabulary):
    """The embedding, multiplied by a factor that is rounded to the embeddings' dtype first."""

    factor = 1.0

    def forward(self, token_ids: Tensor) -> Tensor:
        rows = super().forward(token_ids.flatten()).view(*token_ids.shape, -1)
        if self.factor == 1:
            return rows
        return rows * float(torch.tensor(self.factor, device="cpu").to(rows.dtype))


class TiedHead(nn.Module):
    """The output head of a model whose embedding has its weight."""

    def __init__(self, embedding: OwnEmbedding) -> None:
        super().__init__()
        self._embedding = (embedding,)  # not a child: it is one already

    def forward(self, hidden: Tensor) -> Tensor:
        logits = self._embedding[0].logits(hidden.reshape(-1, hidden.shape[-1]))
        return logits.view(*hidden.shape[:-1], -1)


class OwnRMSNorm(RMSNorm):
    """`RMSNorm` of one tensor."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, None)[0]


class OwnLayerNorm(Plain):
    """LayerNorm over the last dim in fp32, rounded once; with a weight of one number per channel, or per head and
    channel, and perhaps a bias. Its sums are those of one token. plus_one: it is multiplied by 1 + weight."""

    def __init__(self, eps: float, *, plus_one: bool = False, **shapes: tuple[int, ...]) -> None:
        super().__init__(**shapes)
        self.eps, self.plus_one = eps, plus_one

    def forward(self, x: Tensor) -> Tensor:
        y = F.layer_norm(x.float(), x.shape[-1:], None, None, self.eps) * (self.weight.float() + self.plus_one)
        return (y + self.bias.float() if "bias" in self.shapes else y).to(x.dtype)

    def randomize(self, generator: torch.Generator) -> None:
        self.weight.fill_(1 - self.plus_one)
        if "bias" in self.shapes:
            self.bias.fill_(0)


class OwnExperts(StackedExperts):
    """Experts that are called with each token's choices before their weights."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return super().forward(hidden_states, top_k_weights, top_k_index)


class Held(Weighted):
    """Mixed into the class of a module of transformers that keeps its own code: its tensors are loaded as they are.

    Its child modules are layers of their own.
    """

    has_layers = True
    kept: Mapping[str, torch.dtype | None]  # its parameters and buffers, and the dtype of those that keep theirs

    def create_parameters(self, name: str, formats: Formats, dtype: torch.dtype) -> None:
        for key, own in self.kept.items():
            tensor = getattr(self, key)
            into = torch.empty(tensor.shape, dtype=own or dtype)
            if key in self._buffers:
                self._buffers[key] = into
            else:
                self.register_parameter(key, nn.Parameter(into, requires_grad=False))

    def destinations(self, name: str) -> Iterator[tuple[str, Destination]]:
        for key in self.kept:
            into = getattr(self, key)
            shape = tuple(into.shape)
            yield f"{name}.{key}", Destination(into=into, shape=shape, index=tuple(slice(0, n) for n in shape))

    def randomize(self, generator: torch.Generator) -> None:
        for key in self.kept:
            tensor = getattr(self, key)
            if tensor.dim() > 1:
                tensor.normal_(std=tensor.shape[-1] ** -0.5, generator=generator)
            else:
                tensor.fill_(key == "weight")

    def step_bytes(self, batch: int) -> float:
        return sum(getattr(self, key).nbytes for key in self.kept)

    @property
    def num_values(self) -> int:
        return sum(getattr(self, key).numel() for key in self.kept)


def hold(module: Any, kept: Mapping[str, torch.dtype | None]) -> None:
    """Make a module of transformers a layer that the loader fills. kept: as `Held` says."""
    kind = type(module)
    module.__class__ = type(kind.__name__, (Held, kind), {"__module__": kind.__module__})
    module.kept = kept


def shares(ranks: Ranks, style: str | None) -> dict[str, Any]:
    """Return the options of `OwnLinear` for a style of transformers' tensor-parallel plan."""
    if ranks.size == 1 or style is None:
        return {}
    side = "column" if style.startswith("colwise") else "row"
    ends = {"gathers": style.endswith("_gather_output"), "splits": style.endswith("_split_input")}
    return {"shard": side, "ranks": ranks, **ends}
