"""Building blocks of models: the tensors of a forward call, the paged cache, and layers that know a rank's shard.

A layer is built for a rank's shard of its weights, and its weights are stored in a format that the checkpoint decides.
Layer and format together state, as `Destination`s, where each tensor of a Hugging Face checkpoint goes: into which view
of which parameter, and which rows and columns of it. The loader needs nothing else.
"""

from .attention import Rope, attend
from .cache import CacheSpec, KVCache, KVFormat, PagedKV, States, StateSpec
from .experts import Experts, StackedExperts
from .latent_cache import LatentCache, LatentKV
from .latent_heads import LatentHeads
from .linear import Linear, PlainLinear
from .mixer import Mix, Mixer, Normed
from .model import Model
from .norm import LayerNorm, RMSNorm
from .ranks import ONE, Ranks, SharedTokens, Unit, all_tokens, sharing
from .router import Router
from .step import Inserted, Step
from .training import Packed, check_training, pack, trainable
from .vocabulary import Vocabulary
from .weight import (
    Destination,
    Format,
    Formats,
    Index,
    Matrix,
    Part,
    Weighted,
    create_parameters,
    destinations,
    weighted,
)

__all__ = [
    "ONE",
    "CacheSpec",
    "Destination",
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
    "Mix",
    "Mixer",
    "Model",
    "Normed",
    "Packed",
    "PagedKV",
    "Part",
    "PlainLinear",
    "RMSNorm",
    "Ranks",
    "Rope",
    "Router",
    "SharedTokens",
    "StackedExperts",
    "StateSpec",
    "States",
    "Step",
    "Unit",
    "Vocabulary",
    "Weighted",
    "all_tokens",
    "attend",
    "check_training",
    "create_parameters",
    "destinations",
    "pack",
    "sharing",
    "trainable",
    "weighted",
]
