"""TRL: `rollout(url)` is the `rollout_func` of its GRPOTrainer, and `exact_model` a model with the engine's bits.

Nothing of TRL is patched. With any model of transformers the server samples and gets the weights of every step. With
`exact_model` the trainer's log-probabilities also equal the server's, bit for bit, so that the ratio of both is 1.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from whorl import nn
from whorl.engine.weights import load_model

from .client import Client, Transfer

_FILTERS = ("top_p", "top_k", "min_p", "repetition_penalty")
_IGNORED = -100  # the label of a token that is not scored


class Rollout:
    """Samples with a server of whorl: `GRPOTrainer(..., rollout_func=rollout(url))`.

    Attributes num_logprobs, num_mismatches: how many log-probabilities of the server an `exact_model` has computed
    again before its weights changed, and how many of those had other bits; num_syncs: updates of the server's weights.
    """

    def __init__(self, client: Client, *, seed: int = 0) -> None:
        self.client = client
        self.num_logprobs = self.num_mismatches = self.num_syncs = 0
        self._seed, self._step = seed, -1
        self._sampled: dict[tuple[int, ...], list[float]] = {}  # by all tokens, of the present weights

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        """Return prompt and completion ids and log-probabilities, as TRL asks for them; one answer to each prompt."""
        self._check(trainer)
        self._sync(trainer)
        prompt_ids = [list(ids) for ids in trainer._tokenize_prompts(list(prompts))[0]]
        filters = {name: value for name in _FILTERS if (value := getattr(trainer, name, None)) is not None}
        params = {"temperature": trainer.temperature, "max_tokens": trainer.max_completion_length, **filters}
        answers = [answer for (answer,) in self.client.generate(prompt_ids, params, seed=self._next_seed(len(prompts)))]
        expected = (self.client.version,)
        if any(answer.versions != expected for answer in answers):
            raise RuntimeError("rollout: the server's weights changed while it sampled: is there another trainer?")
        for ids, answer in zip(prompt_ids, answers, strict=True):
            self._sampled[*ids, *answer.token_ids] = answer.logprobs
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [answer.token_ids for answer in answers],
            "logprobs": [answer.logprobs for answer in answers],
        }

    def _check(self, trainer: Any) -> None:
        """Raise ValueError if the server would report other log-probabilities than the trainer computes."""
        if self._step >= 0:
            return
        is_plain = trainer.temperature == 1 and not any(
            value not in (None, neutral)
            for name, neutral in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0), ("repetition_penalty", 1.0))
            if (value := getattr(trainer, name, None)) is not None
        )
        config = self.client.get("/server_info?config_format=json")["vllm_config"]["model_config"]
        if not is_plain and config["logprobs_mode"] != "processed_logprobs":
            raise ValueError(
                "rollout: with a temperature or filters the trainer needs log-probabilities of the distribution that "
                "was sampled from: start the server with --logprobs-mode processed_logprobs"
            )

    def _sync(self, trainer: Any) -> None:
        """Send the weights if the trainer has made a step since they were sent."""
        step = trainer.state.global_step
        if step == self._step:
            return
        model = trainer.accelerator.unwrap_model(trainer.model)
        named = getattr(model, "named_weights", None)
        self.client.update_weights(named() if named is not None else model.named_parameters(), version=f"step {step}")
        self.num_syncs += 1
        self._step = step
        self._sampled.clear()
        if named is not None:
            model.temperature = trainer.temperature
            model.observe = functools.partial(self._compare, trainer)

    def _next_seed(self, count: int) -> int:
        first, self._seed = self._seed, self._seed + count
        return first

    def _compare(self, trainer: Any, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Compare what the trainer computes, of the last tokens of a sequence, with what was sampled."""
        sampled = self._sampled.get(tuple(token_ids))
        if sampled is None or trainer.state.global_step != self._step:
            return
        self.num_logprobs += len(sampled)
        self.num_mismatches += sum(a != b for a, b in zip(sampled, logprobs[-len(sampled) :], strict=True))


def rollout(url: str, *, key: str | None = None, transfer: Transfer = "shm", seed: int = 0) -> Rollout:
    """Return the `rollout_func` of TRL's GRPOTrainer for a server that was started with `whorl serve MODEL --rl`.

    Arguments: as for `Client`. Example: `GRPOTrainer(model, rewards, rollout_func=rollout("http://127.0.0.1:8000"))`
    """
    return Rollout(Client(url, key=key, transfer=transfer), seed=seed)


def exact_model(path: Any, config: Any = None, **options: Any) -> Any:
    """Return a model for TRL's trainers that computes the server's numbers, with gradients.

    path: as for `load_model`, or a model of whorl, with `config`, that of transformers. options: of `load_model`; the
    dtype must be the server's. Raises ValueError for quantised weights.
    """
    if config is None:
        from transformers import AutoConfig

        from whorl.engine.weights import resolve

        folder = resolve(path)
        config, path = AutoConfig.from_pretrained(folder), load_model(folder, progress=False, **options)
    return _model_class()(config, nn.trainable(path))


@functools.cache
def _model_class() -> Callable[..., Any]:
    from transformers import GenerationConfig, PreTrainedModel

    class ExactModel(PreTrainedModel):  # type: ignore[misc]
        """A model of whorl as one of transformers.

        TRL puts a head of its own into the forward of the models it gets, and calls the model with `fused_lm_head`;
        such calls are answered here, before that forward.
        """

        _supports_sdpa = _supports_flash_attn = _supports_attention_backend = True
        main_input_name = "input_ids"

        def __init__(self, config: Any, model: Any) -> None:
            super().__init__(config)
            self.whorl = model
            self.generation_config = GenerationConfig.from_model_config(config)
            self.post_init()
            self.temperature = 1.0
            self.observe: Callable[[Sequence[int], Sequence[float]], None] = lambda token_ids, logprobs: None

        def named_weights(self) -> Iterator[tuple[str, Tensor]]:
            """Yield the weights by Hugging Face's names."""
            for name, place in nn.destinations(self.whorl).items():
                yield name, place.into.detach()

        def __call__(self, *arguments: Any, fused_lm_head: bool = False, **options: Any) -> Any:
            return self.score(**options) if fused_lm_head else super().__call__(*arguments, **options)

        def score(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, **options: Any) -> Any:
            """Return the log-probabilities and entropies of the tokens that have labels, [B, T - 1]; 0 elsewhere."""
            is_token = attention_mask.bool()
            rows = [ids[mask].tolist() for ids, mask in zip(input_ids, is_token, strict=True)]
            logits = self.whorl.scored_logits(packed := nn.pack(rows, input_ids.device), temperature=self.temperature)
            values = nn.scores(logits, packed)
            with torch.no_grad():
                logs = torch.log_softmax(logits.float(), -1)
                entropies = -(logs.exp() * logs).nan_to_num(0).sum(-1)
            # The first token of a row has no log-probability.
            is_scored = is_token.clone()
            is_scored[torch.arange(len(rows)), is_token.int().argmax(1)] = False
            is_scored, is_labeled = is_scored[:, 1:], labels[:, 1:] != _IGNORED
            log_probs = values.new_zeros(is_scored.shape).masked_scatter(is_scored, values)
            entropy = entropies.new_zeros(is_scored.shape).masked_scatter(is_scored, entropies)
            for row, part in zip(rows, values.detach().split([len(row) - 1 for row in rows]), strict=True):
                self.observe(row, part.tolist())
            return SimpleNamespace(
                log_probs=log_probs.masked_fill(~is_labeled, 0),
                entropy=entropy.masked_fill(~is_labeled, 0),
                aux_loss=None,
            )

        def forward(self, input_ids: Tensor, **options: Any) -> Any:
            raise NotImplementedError("exact_model: it scores tokens for a trainer; the server generates them")

        def _init_weights(self, module: torch.nn.Module) -> None:
            pass

    return ExactModel
