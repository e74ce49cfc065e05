"""Linear layers and experts with quantised weights.

The `packed_*` operators unpack weights of 4 or 8 bits to the dtype of the activations before they multiply; the
`int8_*` operators quantise the activations too and multiply in int8. `layout.py` describes how weights are stored.
"""

from .int8_experts import int8_experts as int8_experts
from .int8_linear import int8_linear as int8_linear
from .packed_experts import packed_experts as packed_experts
from .packed_linear import packed_linear as packed_linear
