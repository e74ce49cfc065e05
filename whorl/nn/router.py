"""The router of a mixture of experts that is balanced by a bias."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from whorl import ops

from .weight import Destination, Formats, Weighted


class Router(Weighted):
    """The linear layer that scores E experts, and the bias that is added to scores only for choosing among them.

    Weight [E, C] and bias [E] are fp32 whatever the model's dtype: rounded scores would choose other experts.
    """

    weight: Tensor
    bias: Tensor

    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__()
        self.width, self.num_experts = width, num_experts

    def create_parameters(self, name: str, formats: Formats, dtype: torch.dtype) -> None:
        for key, shape in (("weight", (self.num_experts, self.width)), ("bias", (self.num_experts,))):
            self.register_parameter(key, nn.Parameter(torch.empty(shape), requires_grad=False))

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits [T, E] fp32 of x [T, C], without the bias; `ops.route` makes scores of them."""
        return ops.linear.unchecked(x.float(), self.weight)  # type: ignore[no-any-return]

    def destinations(self, name: str) -> Iterator[tuple[str, Destination]]:
        experts, width = slice(0, self.num_experts), slice(0, self.width)
        yield (
            f"{name}.weight",
            Destination(into=self.weight, shape=(self.num_experts, self.width), index=(experts, width)),
        )
        yield (
            f"{name}.e_score_correction_bias",
            Destination(into=self.bias, shape=(self.num_experts,), index=(experts,)),
        )

    def randomize(self, generator: torch.Generator) -> None:
        self.weight.normal_(std=self.width**-0.5, generator=generator)
        self.bias.zero_()

    def prompt_flops(self, num_tokens: int) -> float:
        return 2 * self.width * self.num_experts * num_tokens
