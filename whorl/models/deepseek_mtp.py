"""The multi-token prediction layer of DeepSeek and GLM, as a draft model beside the model it belongs to.

For token t it takes the model's hidden state of that token, after the final norm, and the embedding of token t + 1; its
own hidden state predicts token t + 2. Embedding and head are the model's. For further draft tokens its own hidden state
takes the place of the model's, which is possible because both go through the same head.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, ModuleDict

from whorl.models import llama
from whorl.models.deepseek_v32 import PREDICTION_TIED
from whorl.nn import ONE, CacheSpec, Mixer, PlainLinear, Ranks, RMSNorm, StateSpec, Step


class SharedHead(Module):
    """The norm before the head; the head itself is the model's."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.norm = RMSNorm(size, eps)


class PredictionParts(Module):
    """The modules of the layer, by their names in checkpoints: those of a decoder layer and its own.

    eh_proj is never quantised.
    """

    def __init__(self, layer: llama.Layer, size: int, eps: float) -> None:
        super().__init__()
        for name, module in layer.named_children():
            self.add_module(name, module)
        self.block = (layer,)  # in a tuple, so that its modules are registered only once, above
        self.enorm, self.hnorm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.eh_proj = PlainLinear(2 * size, size)
        self.shared_head = SharedHead(size, eps)


class Decoder(Module):
    """The container that gives the layer its number in checkpoints."""

    def __init__(self, number: int, parts: PredictionParts) -> None:
        super().__init__()
        self.layers = ModuleDict({str(number): parts})


class Prediction(Module):
    """The first multi-token prediction layer of a model. Published models have one; further ones are not used.

    target: the model whose embedding, head and rotary table it shares. ranks: the target's.
    """

    def __init__(self, target: llama.Llama, ranks: Ranks = ONE) -> None:
        super().__init__()
        config: Any = target.config
        number, size, eps = config.num_hidden_layers, config.hidden_size, config.rms_norm_eps
        self._target = (target,)  # in a tuple, so that the target's weights do not become this module's
        self.config, self.dtype, self.vocab_size = config, target.dtype, target.vocab_size
        self.max_length, self.state_size = target.max_length, size
        self.model = Decoder(number, PredictionParts(target.layer_class(config, number, ranks), size, eps))
        self.only = f"model.layers.{number}."  # prefix of the checkpoint's tensors that it loads
        self.ignored = (*target.ignored, *(f"{number}.{name}" for name in PREDICTION_TIED))

    @property
    def parts(self) -> PredictionParts:
        (parts,) = self.model.layers.values()
        assert isinstance(parts, PredictionParts)
        return parts

    def cache_specs(self) -> list[CacheSpec | StateSpec]:
        return [self.parts.block[0].mixer.cache_spec(self.dtype)]

    def attention_flops(self, num_tokens: int) -> float:
        return self.parts.block[0].mixer.flops(num_tokens)

    def forward(self, step: Step, caches: Sequence[Any]) -> Tensor:
        assert step.states is not None, "the prediction layer needs the hidden states of its target"
        (target,), parts = self._target, self.parts
        rotary = target.rope.rows(step)
        (layer,) = parts.block

        def mix(mixer: Mixer, *projected: Tensor) -> Tensor:
            return mixer.mix(*projected, rotary, step, caches[0])

        embedded = target.decoder.embed_tokens(step.token_ids)
        normed = parts.enorm(embedded, None)[0], parts.hnorm(step.states, None)[0]
        x, residual = layer(parts.eh_proj(torch.cat(normed, -1)), None, mix)
        return parts.shared_head.norm(x, residual)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        return self._target[0].logits(hidden)
