"""Gated delta layers: Qwen3.5, Qwen3-Next and what follows them.

`conv.py` is the causal depthwise convolution, `gates.py` the decay and the strength of an update, `l2_norm.py` the norm
of query and key heads, `rule.py` the recurrence over packed sequences, and `norm.py` the norm of the result with its
gate. Serving has the same convolution and recurrence over the states of running sequences: `conv_lanes.py` and
`lanes.py`; `layout.py` says what a layer stores for one. `arithmetic.py` is the arithmetic that all forms share.

The recurrence is computed in chunks of 64 tokens at absolute positions. Within a chunk a row is a function of the state
at the chunk's start and of the rows before it, so a finished row leaves behind all that later rows need: its key, its
delta and its decay. A prompt computes whole chunks, decoding computes the new rows from the stored ones, in the same
order of additions, and the bits are equal.
"""

from .conv import causal_conv as causal_conv
from .conv_lanes import causal_conv_lanes as causal_conv_lanes
from .gates import delta_gates as delta_gates
from .l2_norm import l2_norm as l2_norm
from .lanes import gated_delta_lanes as gated_delta_lanes
from .layout import CHUNK as CHUNK
from .layout import delta_tensors as delta_tensors
from .norm import gated_rms_norm as gated_rms_norm
from .rule import gated_delta as gated_delta
from .rule_backward import gated_delta_backward as gated_delta_backward
from .step import gated_delta_step as gated_delta_step
