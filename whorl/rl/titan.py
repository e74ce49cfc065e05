"""TorchTitan's RL: a generator as an actor of Monarch, with the five endpoints of its `VLLMGenerator`.

TorchTitan's controller names its generator; docs/rl.md has the two lines that name this one. Everything else is
TorchTitan's own: the configuration, the router, the trainer, and torchstore, by which the weights come.
"""

import asyncio
import dataclasses
import math
from operator import attrgetter
from typing import Any

import torch
from monarch.actor import Actor, concurrent_endpoint, current_rank, current_size

from whorl.engine.llm import LLM
from whorl.engine.sampling_params import SamplingParams
from whorl.engine.sequence import Sequence
from whorl.engine.settings import EngineSettings
from whorl.serve.engine_thread import EngineThread
from whorl.serve.metrics import Metrics

from .sampling import policy_versions, sampled

KEY = "model_state_dict"  # of the weights in torchstore, which TorchTitan's trainer puts there
# Fields of VLLMGenerator.Config, and the only value that can be honoured.
_ONLY: dict[str, Any] = {
    "parallelism.data_parallel_degree": 1,
    "parallelism.tensor_parallel_degree": 1,
    "parallelism.expert_parallel_degree": 1,
    "override.imports": [],
    "checkpoint.enable": False,
    # Nothing that old weights computed is ever used again.
    "reset_prefix_cache_on_weight_sync": True,
    "reset_running_requests_on_weight_sync": True,
}
_SAMPLING = frozenset({"temperature", "top_p", "max_tokens", "seed", "stop_token_ids"})
_QUEUE = 1 << 20  # the controller limits its requests itself


def check_config(config: Any) -> None:
    """Raise ValueError for a field of `VLLMGenerator.Config` that asks for what whorl's generator has not."""
    for name, only in _ONLY.items():
        if (value := attrgetter(name)(config)) != only:
            raise ValueError(f"titan: generator.{name} is {value!r}, and whorl's generator takes {only!r} alone")


def sampling_params(sampling: Any, *, room: int) -> SamplingParams:
    """Return TorchTitan's `SamplingConfig` as whorl's. room: tokens behind the prompt; longer answers are cut to it."""
    values = dataclasses.asdict(sampling)
    if unknown := sorted(values.keys() - _SAMPLING):
        raise ValueError(f"titan: sampling.{unknown[0]} is unknown, expected {', '.join(sorted(_SAMPLING))}")
    values["max_tokens"] = max(1, min(values["max_tokens"], room))
    values["stop_token_ids"] = tuple(values["stop_token_ids"] or ())
    return SamplingParams(**values, logprobs=0)


class WhorlGenerator(Actor):
    """In place of `VLLMGenerator`, with its arguments.

    config: a `VLLMGenerator.Config`. model_spec: its adapter gives the weights Hugging Face's names. model_path: a
    folder with the model as Hugging Face has it. compile_config: no effect, since the engine compiles nothing.
    """

    def __init__(
        self,
        config: Any,
        *,
        model_spec: Any,
        model_path: str,
        compile_config: Any,
        max_num_seqs: int,
        output_dir: str,
    ) -> None:
        from torchtitan.observability import structured_logger

        check_config(config)
        if (num := math.prod(current_size().values())) != 1:
            raise ValueError(f"titan: the generator's mesh has {num} processes, expected 1")
        rank, has_log = current_rank().rank, config.debug.enable_structured_logging
        structured_logger.init_structured_logger("rl_generator", output_dir, rank=rank, enable=has_log)
        settings = EngineSettings(
            dtype=config.model_dtype,
            max_model_len=model_spec.model.max_seq_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            gpu_memory_utilization=config.gpu_memory_limit if torch.accelerator.is_available() else None,
            use_graphs=None if config.cudagraph.enable else False,
            seed=config.debug.seed,
        )
        self._config, self._adapter = config, model_spec.state_dict_adapter(model_spec.model, model_path)
        self._llm = LLM(model_path, settings)
        self._engine = EngineThread(self._llm, Metrics(model_path, self._llm.stats), max_queue=_QUEUE)
        self._ready: asyncio.Event | None = None
        self._running: set[str] = set()

    @concurrent_endpoint
    async def start_engine_loop(self) -> None:
        """Begin to take requests. A second call has no effect."""
        if self._ready is None:
            loop, ready = asyncio.get_running_loop(), asyncio.Event()

            def wake() -> None:
                loop.call_soon_threadsafe(ready.set)

            self._ready, self._engine.readiness.on_ready = ready, wake
            self._engine.start()
        await self._ready.wait()

    def _check_started(self) -> None:
        if self._ready is None:
            raise RuntimeError("titan: call start_engine_loop before generate and pull_model_state_dict")

    @concurrent_endpoint
    async def generate(
        self,
        prompt_token_ids: list[int],
        *,
        request_id: str,
        routing_session_id: str,
        sampling_config: Any = None,
        metrics_prefix: str = "generator",
    ) -> Any:
        """Sample one answer; return TorchTitan's `Completion`. routing_session_id: no effect, there is one engine."""
        from torchtitan.experiments.rl.types import Completion

        self._check_started()
        if request_id in self._running:
            raise ValueError(f"titan: request_id {request_id!r} is already in flight")
        room = self._llm.max_model_len - len(prompt_token_ids)
        params = sampling_params(sampling_config or self._config.sampling, room=room)
        self._running.add(request_id)
        try:
            seq = await sampled(self._engine, prompt_token_ids, params)
            num_running = len(self._running)
        finally:
            self._running.discard(request_id)
        first, last = policy_versions(seq, self._llm.weight_version)
        return Completion(
            min_policy_version=first,
            max_policy_version=last,
            request_id=request_id,
            token_ids=seq.output_ids,
            token_logprobs=[each.logprob for each in seq.logprobs],
            finish_reason=str(seq.finish_reason),
            metrics=_metrics(seq, metrics_prefix, num_running),
        )

    @concurrent_endpoint
    async def pull_model_state_dict(self, version: int) -> None:
        """Take the trainer's weights. Requests in progress go on with them, computed again from their tokens."""
        import torchstore

        self._check_started()
        tensors = self._adapter.to_hf(await torchstore.get_state_dict(KEY))
        await self._engine.on_engine(lambda: self._llm.update_weights(tensors.items(), version=str(version)))

    @concurrent_endpoint
    async def sync_log_step(self, step: int, relative_step: int | None = None) -> None:
        """Give the log the controller's step."""
        from torchtitan.observability import structured_logger

        structured_logger.set_step(step, relative_step=relative_step)

    @concurrent_endpoint
    async def close(self) -> None:
        """Stop; requests in progress fail."""
        if self._ready is not None:
            await self._engine.stop()
        self._llm.close()


def _metrics(seq: Sequence, prefix: str, num_running: int) -> list[Any]:
    """Return what TorchTitan's own generator measures of a request, under its names."""
    from torchtitan.experiments.rl.observability import metrics

    times, values = seq.timings, {"num_cached_tokens": float(seq.num_cached)}
    values["inflight_requests_at_completion"] = float(num_running)
    if times.admitted is not None:
        values["queue_time_ms"] = (times.admitted - times.added) * 1000
    if times.time_to_first_token is not None:
        values["time_to_first_token_ms"] = times.time_to_first_token * 1000
    if times.tokens_per_second:
        values["inter_token_latency_ms"] = 1000 / times.tokens_per_second
    kinds = (metrics.Mean, metrics.Max)
    return [metrics.Metric(f"{prefix}/{name}", kind(value)) for name, value in values.items() for kind in kinds]
