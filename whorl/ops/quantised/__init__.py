"""Linear layers and experts whose weights are stored in fewer bits than they are multiplied in."""

from .int8_experts import int8_experts
from .int8_linear import int8_linear
from .packed_experts import packed_experts
from .packed_linear import packed_linear

__all__ = ["int8_experts", "int8_linear", "packed_experts", "packed_linear"]
