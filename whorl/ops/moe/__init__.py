"""Mixture of experts: routing, permuting tokens to their experts and back, grouped and fused expert matmuls."""

from .experts import experts
from .grouped_matmul import grouped_matmul, grouped_matmul_backward
from .permute import permute, permute_backward, unpermute, unpermute_backward
from .route import route, route_backward

__all__ = [
    "experts",
    "grouped_matmul",
    "grouped_matmul_backward",
    "permute",
    "permute_backward",
    "route",
    "route_backward",
    "unpermute",
    "unpermute_backward",
]
