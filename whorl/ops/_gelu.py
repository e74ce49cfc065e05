"""Constants of the tanh approximation of GELU: gelu(g) = g * sigmoid(SLOPE * (g + CUBE * g^3)).

The usual form is g / 2 * (1 + tanh(z)) with z = SLOPE / 2 * (g + CUBE * g^3), and 1 + tanh(z) is 2 sigmoid(2 z).
"""

import math

CUBE = 0.044715
SLOPE = 2 * math.sqrt(2 / math.pi)
