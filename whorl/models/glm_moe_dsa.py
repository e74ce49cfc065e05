"""GLM-5, 5.1 and 5.2: DeepSeek-V3.2 whose indexer rotates neighbours, and whose layers may share selected keys."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from whorl.models import deepseek
from whorl.models.fields import count
from whorl.models.glm4_moe_lite import dense_layers
from whorl.nn import ONE, LatentCache, Ranks, Step
from whorl.rope_config import RopeConfig

# The defaults of Hugging Face's class, for what files leave out.
_DEFAULTS = {
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 202752,
    "index_n_heads": 32,
}
FULL, SHARED = "full", "shared"  # a layer's own indexer, or the selection of the last layer that has one


@dataclass(frozen=True, kw_only=True)
class GlmMoeDsaConfig(deepseek.DeepSeekConfig):
    """config.json of GLM-5, read as DeepSeek-V3.2's. indexer_types: FULL or SHARED for each layer."""

    indexer_types: tuple[str, ...] = ()

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> "GlmMoeDsaConfig":
        if values.get("indexer_rope_interleave") is False:
            raise ValueError("config.json: indexer_rope_interleave is False, expected True: GLM-5 rotates neighbours")
        read = {**_DEFAULTS, **values, "first_k_dense_replace": dense_layers(values, 3)}
        read |= {"model_type": "deepseek_v32", "indexer_rope_interleave": None}
        config: Any = super().from_hf(read)
        return replace(config, indexer_types=_indexer_types(values, config.num_hidden_layers))  # type: ignore[no-any-return]

    def selects(self, layer: int) -> bool:
        """Return whether this layer has an indexer; a layer of multi-token prediction, after the others, has one."""
        return layer >= len(self.indexer_types) or self.indexer_types[layer] == FULL

    @property
    def low_rank_eps(self) -> float:
        return 1e-6  # as in Hugging Face's class, whatever the file says for the other norms

    @property
    def index_rope(self) -> RopeConfig:
        return RopeConfig.from_hf(self.to_hf() | {"model_type": "glm_moe_dsa"}, layer_type="indexer")


def _indexer_types(values: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """Return the kind of each layer: as listed, by a pattern of F and S, or every so many layers after the first."""
    kinds, pattern = values.get("indexer_types"), values.get("index_topk_pattern")
    if kinds is None and pattern is not None:
        kinds = [{"F": FULL, "S": SHARED}.get(each, each) for each in pattern]
    if kinds is None:
        every = count(values, "index_topk_freq", 1)
        first = count(values, "index_skip_topk_offset", 2, least=0)
        kinds = [SHARED if max(i - first + 1, 0) % every else FULL for i in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or not set(map(str, kinds)) <= {FULL, SHARED}:
        raise ValueError(f"config.json: the kinds of indexers are {kinds}, expected {layers} of {FULL}, {SHARED}")
    if kinds[0] != FULL:
        raise ValueError("config.json: the first layer shares the selection of the one before it, and there is none")
    return tuple(kinds)


class Selection:
    """The keys that the last layer with an indexer selected, in the forward that runs; prompts and decoding sequences
    of a call are steps of their own."""

    def __init__(self) -> None:
        self._kept: list[tuple[Step, Tensor | None]] = []

    def keep(self, step: Step, keys: Tensor | None) -> None:
        self._kept = [*(each for each in self._kept[-1:] if each[0] is not step), (step, keys)]

    def of(self, step: Step) -> Tensor | None:
        return next(keys for kept, keys in self._kept if kept is step)


class Attention(deepseek.Attention):
    """Latent attention over selected keys; a layer without an indexer attends to those of the layer before it."""

    def __init__(self, config: GlmMoeDsaConfig, layer: int, ranks: Ranks) -> None:
        super().__init__(config, layer, ranks)
        self.selection = Selection()

    def selected(self, index: tuple[Tensor, ...], rotary: Tensor, step: Step, cache: LatentCache) -> Tensor | None:
        if self.indexer is not None:
            self.selection.keep(step, super().selected(index, rotary, step, cache))
        return self.selection.of(step)


class Layer(deepseek.Layer):
    """A decoder layer of GLM-5."""

    def attention(self, config: Any, layer: int, ranks: Ranks) -> Attention:
        return Attention(config, layer, ranks)


class GlmMoeDsa(deepseek.DeepSeek):
    """GLM-5 for the engine."""

    config_class = GlmMoeDsaConfig
    layer_class = Layer
    no_gradient = "GLM-5 has no gradient here; take another model to train"

    def __init__(self, config: GlmMoeDsaConfig, *, ranks: Ranks = ONE, **options: Any) -> None:
        super().__init__(config, ranks=ranks, **options)
        self.block_scales = "float"
        selection = Selection()
        for layer in self.decoder.layers:
            layer.mixer.selection = selection  # type: ignore[union-attr]  # one for all layers

    @classmethod
    def tiny(cls, **changes: Any) -> dict[str, Any]:
        """Return a config.json small enough for tests: the third layer and the fourth share a selection."""
        config = super().tiny(n_group=1, topk_group=1, rms_norm_eps=1e-5, num_hidden_layers=4, index_topk_freq=2)
        return config | {"architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", **changes}
