"""Building blocks of models: the tensors of a forward call, the paged cache, and layers that know a rank's shard.

A layer is built for a rank's shard of its weights, and its weights are stored in a format that the checkpoint decides.
Layer and format together state, as `Destination`s, where each tensor of a Hugging Face checkpoint goes: into which view
of which parameter, and which rows and columns of it. The loader needs nothing else.
"""

from .attention import Rope as Rope
from .attention import attend as attend
from .cache import CacheSpec as CacheSpec
from .cache import KVCache as KVCache
from .cache import KVFormat as KVFormat
from .cache import PagedKV as PagedKV
from .cache import States as States
from .cache import StateSpec as StateSpec
from .clipped_experts import ClippedExperts as ClippedExperts
from .experts import Experts as Experts
from .experts import Router as Router
from .experts import StackedExperts as StackedExperts
from .latent_cache import LatentCache as LatentCache
from .latent_cache import LatentKV as LatentKV
from .latent_heads import LatentHeads as LatentHeads
from .linear import Linear as Linear
from .linear import PlainLinear as PlainLinear
from .low_rank import LowRanks as LowRanks
from .low_rank import Target as Target
from .low_rank import Update as Update
from .mixer import Mix as Mix
from .mixer import Mixer as Mixer
from .mixer import Normed as Normed
from .model import Model as Model
from .norm import LayerNorm as LayerNorm
from .norm import RMSNorm as RMSNorm
from .ranks import ONE as ONE
from .ranks import Ranks as Ranks
from .ranks import SharedTokens as SharedTokens
from .ranks import Unit as Unit
from .ranks import all_tokens as all_tokens
from .ranks import own_tokens as own_tokens
from .ranks import sharing as sharing
from .segments import expert_segments as expert_segments
from .segments import segmented_linear as segmented_linear
from .segments import tree_sum as tree_sum
from .step import Inserted as Inserted
from .step import Step as Step
from .trained_update import TrainedUpdates as TrainedUpdates
from .training import Packed as Packed
from .training import Picture as Picture
from .training import check_compiled as check_compiled
from .training import check_training as check_training
from .training import pack as pack
from .training import scores as scores
from .training import tempered as tempered
from .training import trainable as trainable
from .vocabulary import Vocabulary as Vocabulary
from .weight import Destination as Destination
from .weight import Format as Format
from .weight import Formats as Formats
from .weight import Forms as Forms
from .weight import Index as Index
from .weight import Matrix as Matrix
from .weight import Part as Part
from .weight import Plain as Plain
from .weight import Weighted as Weighted
from .weight import create_parameters as create_parameters
from .weight import destinations as destinations
from .weight import weighted as weighted
