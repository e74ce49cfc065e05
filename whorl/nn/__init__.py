"""What models are made of: a step's tensors, the paged cache, and layers that know which part of a weight a rank holds.

A layer is built with the rank's share of its weights, and they are held in a format that the checkpoint decides. Both
say, as `Slot`s, where each tensor of a Hugging Face checkpoint goes: into which view of which parameter, and which rows
and columns of it. The loader needs nothing else.
"""

from .attention import Rope, attend
from .cache import CacheSpec, KVCache, KVFormat, PagedKV
from .experts import Experts, StackedExperts
from .latent_cache import LatentCache, LatentKV
from .latent_heads import LatentHeads
from .linear import Linear, PlainLinear
from .model import Model, recordable
from .norm import LayerNorm, RMSNorm
from .ranks import ONE, Ranks, Unit
from .router import Router
from .step import Inserted, Step
from .training import Packed, check_training, pack, trainable
from .vocabulary import Vocabulary
from .weight import Format, Formats, Index, Matrix, Part, Slot, Weighted, hold, slots, weighted

__all__ = [
    "ONE",
    "CacheSpec",
    "Experts",
    "Format",
    "Formats",
    "Index",
    "Inserted",
    "KVCache",
    "KVFormat",
    "LatentCache",
    "LatentHeads",
    "LatentKV",
    "LayerNorm",
    "Linear",
    "Matrix",
    "Model",
    "Packed",
    "PagedKV",
    "Part",
    "PlainLinear",
    "RMSNorm",
    "Ranks",
    "Rope",
    "Router",
    "Slot",
    "StackedExperts",
    "Step",
    "Unit",
    "Vocabulary",
    "Weighted",
    "attend",
    "check_training",
    "hold",
    "pack",
    "recordable",
    "slots",
    "trainable",
    "weighted",
]
