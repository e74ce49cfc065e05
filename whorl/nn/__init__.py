"""What models are made of: a step's tensors, the paged cache, and layers that know which part of a weight a rank holds.

A layer is built with the rank's share of its weights and says, as `Slot`s, where each tensor of a Hugging Face
checkpoint goes: into which view of which parameter, and which rows and columns of it. The loader needs nothing else.
"""

from .attention import Rope, attend
from .cache import CacheSpec, KVCache, PagedKV
from .experts import Experts
from .linear import Linear
from .model import Model, slots
from .norm import RMSNorm
from .ranks import ONE, Ranks
from .step import Rows, Step
from .vocabulary import Vocabulary
from .weight import Index, Slot

__all__ = [
    "ONE",
    "CacheSpec",
    "Experts",
    "Index",
    "KVCache",
    "Linear",
    "Model",
    "PagedKV",
    "RMSNorm",
    "Ranks",
    "Rope",
    "Rows",
    "Slot",
    "Step",
    "Vocabulary",
    "attend",
    "slots",
]
