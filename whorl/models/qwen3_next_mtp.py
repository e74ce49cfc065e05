"""The multi-token prediction layer of Qwen3-Next and Qwen3.5, as a draft model beside the model it belongs to.

As DeepSeek's (`deepseek_mtp.py`): for token t it takes the model's hidden state of that token, after the final norm,
and the embedding of token t + 1. The layer has attention, whatever the model's layers have; embedding and head are the
model's.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module, ModuleList

from whorl.models.qwen3_next_config import FULL
from whorl.nn import ONE, CacheSpec, Mixer, PlainLinear, Ranks, StateSpec, Step

if TYPE_CHECKING:
    from whorl.models.qwen3_next import Qwen3Next


class PredictionParts(Module):
    """The modules of the layer, by their names in checkpoints. fc is never quantised."""

    def __init__(self, target: "Qwen3Next", ranks: Ranks) -> None:
        super().__init__()
        config: Any = target.config
        layer_class = target.layer_class
        size = config.hidden_size
        # A layer like those of the model with attention; where layers have experts, it has them, too.
        alone = replace(config, kinds=(FULL,), windows=(None,), experts=_in_layer_0(config.experts))
        self.fc = PlainLinear(2 * size, size)
        self.layers = ModuleList([layer_class(alone, 0, ranks)])
        self.norm, self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = (layer_class.norm(config) for _ in range(3))


def _in_layer_0(experts: Any) -> Any:
    return None if experts is None else replace(experts, layers=(0,))


class Prediction(Module):
    """The first multi-token prediction layer of a model. Published models have one; further ones are not used.

    target: the model whose embedding, head and rotary table it shares. ranks: the target's.
    """

    only = "mtp."  # prefix of the checkpoint's tensors that it loads

    def __init__(self, target: "Qwen3Next", ranks: Ranks = ONE) -> None:
        super().__init__()
        self._target = (target,)  # in a tuple, so that the target's weights do not become this module's
        self.config, self.dtype, self.vocab_size = target.config, target.dtype, target.vocab_size
        self.max_length, self.state_size = target.max_length, target.config.hidden_size
        self.mtp = PredictionParts(target, ranks)
        self.ignored: tuple[str, ...] = (*target.ignored, "mtp.embed_tokens.weight", "mtp.shared_head.head.weight")

    @property
    def mixer(self) -> Mixer:
        return self.mtp.layers[0].mixer  # type: ignore[return-value]

    def cache_specs(self) -> list[CacheSpec | StateSpec]:
        return [self.mixer.cache_spec(self.dtype)]

    def attention_flops(self, num_tokens: int) -> float:
        return self.mixer.flops(num_tokens)

    def forward(self, step: Step, caches: Sequence[Any]) -> Tensor:
        assert step.states is not None, "the prediction layer needs the hidden states of its target"
        (target,), parts = self._target, self.mtp
        rotary = target.rope.rows(step)

        def mix(mixer: Mixer, *projected: Tensor) -> Tensor:
            return mixer.mix(*projected, rotary, step, caches[0])

        embedded = parts.pre_fc_norm_embedding(target.embed(step.token_ids), None)[0]
        hidden = parts.pre_fc_norm_hidden(step.states, None)[0]
        x, residual = parts.layers[0](parts.fc(torch.cat((embedded, hidden), -1)), None, mix)
        return parts.norm(x, residual)[0]  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        return self._target[0].logits(hidden)
