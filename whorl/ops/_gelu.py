"""Constants of the tanh approximation of GELU, shared by the operator and its kernel."""

import math

CUBE = 0.044715
SLOPE = 2 * math.sqrt(2 / math.pi)  # 1 + tanh(z) is 2 sigmoid(2 z)
