"""Mixture of experts.

`route.py` chooses experts. In training `permute.py` sorts tokens by expert and back, around the products of
`grouped_matmul.py`. `experts.py` does all of this after routing in one operator, whose bits do not depend on the batch,
for inference; its gradient uses the operators of training. `clipped_experts.py` is that of gpt-oss.
"""

from .clipped_experts import clipped_experts as clipped_experts
from .experts import experts as experts
from .grouped_matmul import grouped_matmul as grouped_matmul
from .grouped_matmul import grouped_matmul_backward as grouped_matmul_backward
from .permute import permute as permute
from .permute import permute_backward as permute_backward
from .permute import unpermute as unpermute
from .permute import unpermute_backward as unpermute_backward
from .route import route as route
from .route import route_backward as route_backward
