"""Which experts every token was sent to, for trainers that replay them.

The ids are written beside the keys and values, by slot, so that a cached prefix has those of the call that computed it.
"""

import re
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whorl.nn import Experts

from .sequence import Sequence

_LAYER = re.compile(r"\blayers\.(\d+)\.")


class Routes:
    """The experts of every cached token and layer, [slots, L, K]; 0 in layers without experts.

    Raises ValueError for a model without experts. Attribute slots: of the tokens of the call that is computed now.
    """

    def __init__(self, model: Any, num_slots: int, device: str) -> None:
        named = model.named_modules() if isinstance(model, torch.nn.Module) else ()
        layers = [(int(match[1]), m) for name, m in named if isinstance(m, Experts) and (match := _LAYER.search(name))]
        if not layers:
            raise ValueError(f"routed_experts: {type(model).__name__} has no experts; leave the setting out")
        shape = num_slots + 1, model.config.num_hidden_layers, max(experts.per_token for _, experts in layers)
        is_small = max(experts.num_experts for _, experts in layers) <= 256
        # The last row takes what padding writes, whose slot is -1.
        self.values = torch.zeros(shape, dtype=torch.uint8 if is_small else torch.int16, device=device)
        self.slots: Tensor | None = None
        for layer, experts in layers:
            experts.register_forward_pre_hook(self._noting(layer))

    def _noting(self, layer: int) -> Any:
        def note(module: torch.nn.Module, arguments: tuple[Tensor, Tensor, Tensor]) -> None:
            if self.slots is not None:  # None: a call outside of the runner's
                ids = arguments[2]
                self.values[self.slots, layer, : ids.shape[1]] = ids.to(self.values.dtype)

        return note

    def store(self, seq: Sequence, block_size: int) -> None:
        """Store the experts [T - 1, L, K] of a sequence that ends, while it has its blocks. The last token was sent to
        none."""
        if seq.block_table:
            at = np.arange(min(seq.num_computed, len(seq.token_ids) - 1))
            slots = np.asarray(seq.block_table, dtype=np.int64)[at // block_size] * block_size + at % block_size
            seq.routed_experts = self.values[torch.from_numpy(slots).to(self.values.device)].cpu().numpy()
