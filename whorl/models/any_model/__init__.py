"""Any decoder-only model of transformers, in whorl's engine, by transformers' own modelling code.

transformers builds the model on the meta device. A trial there shows what its layers ask of attention (trial.py);
attention then runs over the paged cache (interface.py). Linear layers, norms, embeddings and experts are replaced by
whorl's where computing both shows that they mean the same (meaning.py, layers.py); what is left keeps its code, with
row-invariant forms of torch's functions (row_invariant.py). What the engine cannot do is refused with the reason.
"""

import functools
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from whorl import ops
from whorl.nn import ONE, CacheSpec, PagedKV, Ranks, StateSpec, Step, attend

from . import interface, names, replacing, trial
from .interface import QKV, Caller
from .row_invariant import guard
from .skeleton import RefusedError as RefusedError
from .skeleton import fill_buffers, frozen_rotations, skeleton

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AnyConfig:
    """The values of a config.json that transformers reads."""

    values: Mapping[str, Any]
    vocab_size: int

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> "AnyConfig":
        """Read a config.json. Raises RefusedError, a ValueError, for one that does not run this way."""
        return cls(MappingProxyType(dict(values)), _tried(json.dumps(values, sort_keys=True)))


@functools.lru_cache(maxsize=8)  # the loader reads a config.json several times
def _tried(text: str) -> int:
    """Run the trial of a config.json and return the size of its vocabulary."""
    with torch.device("cpu"):
        hf = skeleton(json.loads(text))
        frozen_rotations(hf)
        trial.run(hf)
    return int(hf.config.vocab_size)


class AnyModel(nn.Module):
    """A model of transformers for the engine (`whorl.nn.Model`).

    config, dtype, ranks, max_length: as of `whorl.models.llama.Llama`.
    """

    config_class = AnyConfig
    ignored: tuple[str, ...] = ()
    tensors = staticmethod(names.converted)

    def __init__(
        self,
        config: AnyConfig,
        *,
        dtype: torch.dtype = torch.float32,
        ranks: Ranks = ONE,
        max_length: int | None = None,
    ) -> None:
        super().__init__()
        self.config, self.dtype, self.vocab_size = config, dtype, config.vocab_size
        with torch.device("cpu"):  # what is computed here is computed on the host; the skeleton is on "meta"
            hf = skeleton(config.values)
            frozen = frozen_rotations(hf)
            requests = trial.run(hf)
            self.max_length = _longest(hf, max_length, is_free=bool(frozen))
            fill_buffers(hf, frozen, self.max_length)
            replaced = replacing.replace_layers(hf, requests, dtype, ranks)
        self.places = {module: i for i, module in enumerate(requests.attentions)}
        self.attentions = replacing.shared_heads(hf, requests, ranks)
        _guard(requests, replaced)
        for name, child in hf.named_children():
            self.add_module(name, child)
        self._body = (hf.base_model,)
        setattr(hf, hf.base_model_prefix, _Hidden())
        self._head = (hf,)  # not a child: its modules are this model's

    def cache_specs(self) -> list[CacheSpec | StateSpec]:
        return [
            PagedKV(num_kv_heads=each.num_kv_heads, head_dim=each.head_dim, dtype=self.dtype, window=each.window)
            for each in self.attentions
        ]

    def attention_flops(self, num_tokens: int) -> float:
        total = 0.0
        for each in self.attentions:
            seen = min(num_tokens, each.window or num_tokens)
            pairs = seen * (seen + 1) / 2 + (num_tokens - seen) * seen
            total += 4 * each.num_heads * each.head_dim * pairs
        return total

    def forward(self, step: Step, caches: Sequence[Any]) -> Tensor:
        # Models take a mask of four dims as it is; another one would make them look at the positions on the host.
        no_mask = torch.zeros(1, 1, 1, 1, device=step.token_ids.device)
        with interface.calling(_Serving(self, step, caches)):
            outputs = self._body[0](
                input_ids=step.token_ids[None],
                position_ids=step.positions[None],
                attention_mask=no_mask,
                use_cache=False,
            )
        return outputs.last_hidden_state[0]  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        return self._head[0](inputs_embeds=hidden[None], use_cache=False).logits[0]  # type: ignore[no-any-return]

    @classmethod
    def tiny(cls, **changes: Any) -> dict[str, Any]:
        """Return a config.json small enough for tests."""
        names = {"architectures": ["OlmoForCausalLM"], "model_type": "olmo"}
        sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        return names | sizes | {"num_attention_heads": 4, "max_position_embeddings": 256, **changes}


class _Serving(Caller):
    """A forward of the engine: attention over the caches of a step."""

    def __init__(self, model: AnyModel, step: Step, caches: Sequence[Any]) -> None:
        self.model, self.parts, self.caches = model, step.parts(), caches
        self.sizes = [len(part.token_ids) for part in self.parts]

    def attend(self, module: nn.Module, qkv: QKV, mask: Any, options: dict[str, Any]) -> Tensor:
        place = self.model.places[module]
        request, cache = self.model.attentions[place], self.caches[place]
        rows = [x[0].transpose(0, 1).split(self.sizes) for x in qkv]
        outputs = []
        for part, queries, keys, values in zip(self.parts, *rows, strict=True):
            ops.write_kv.unchecked(keys, values, cache.k, cache.v, part.slots, cache.k_scale, cache.v_scale)
            numbers = {"scale": request.scale, "window": request.window, "softcap": request.softcap}
            outputs.append(attend(queries, part, cache, **numbers))  # type: ignore[arg-type]
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[None]

    def mask(self, function: Any) -> Any:
        return None

    def experts(self, module: nn.Module, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return interface.experts(module, x, ids, weights)


class _Hidden(nn.Module):
    """Stands for the body in transformers' model while its head is called: returns the hidden states it gets."""

    @property
    def decoder(self) -> nn.Module:
        """The part of a body that some heads call directly."""
        return self

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
        return _Outputs(inputs_embeds)


@dataclass(frozen=True, slots=True)
class _Outputs:
    """The outputs of a body: the hidden states, and None for all others."""

    last_hidden_state: Tensor

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]


def _longest(hf: Any, max_length: int | None, *, is_free: bool) -> int:
    """Return the tokens of the longest sequence. is_free: rotations may be computed for a longer one than stated."""
    stated = getattr(hf.config, "max_position_embeddings", None)
    if not isinstance(stated, int) or stated < 1:
        if max_length is None:
            raise RefusedError("config.json does not say how long sequences may be; give max_model_len")
        return max_length
    if max_length is not None and max_length > stated and not is_free:
        raise ValueError(f"sequences of {max_length} tokens are too long: the model was made for {stated}")
    return max_length or stated


def _guard(requests: trial.Trial, replaced: set[nn.Module]) -> None:
    """Give the modules that are left row-invariant functions, and say what remains in doubt."""
    for module in requests.guards.keys() - replaced:
        guard(module)
    doubts = {
        f"{type(module).__name__} ({', '.join(sorted(names))})"
        for module, names in requests.doubts.items()
        if module not in replaced
    }
    if doubts:
        log.warning(
            "transformers' code adds numbers in an order that may depend on the batch, so that the bits of a token may "
            "too: %s",
            "; ".join(sorted(doubts)),
        )
