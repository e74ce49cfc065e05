"""Mixture of experts.

`route.py` chooses experts. In training `permute.py` sorts tokens by expert and back, around the products of
`grouped_matmul.py`. `experts.py` does all of this after routing in one operator, whose bits do not depend on the batch,
for inference; its gradient uses the operators of training.
"""

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
