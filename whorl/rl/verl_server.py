"""The server of `whorl.rl.verl`: the engine of one replica in an actor of Ray, whose methods verl calls by name."""

import asyncio
import json
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

import ray
from verl.utils import normalize_token_ids
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.device import get_visible_devices_keyword
from verl.workers.config import HFModelConfig
from verl.workers.rollout.replica import RolloutMode, TokenOutput

from whorl.engine.drafting import DraftOptions
from whorl.engine.sampling_params import SamplingParams
from whorl.engine.sequence import FinishReason, Sequence
from whorl.engine.settings import EngineSettings
from whorl.serve.http_server import HttpServer
from whorl.serve.openai import load_app, settings_for

from .sampling import policy_versions, sampled
from .sync import Sync

R = TypeVar("R")
TRANSFERS = ("shm", "ipc", "gloo")
# Fields of verl's rollout and the values with which they ask for nothing. whorl has no others.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "data_parallel_size": (1,),
    "pipeline_model_parallel_size": (1,),
    "expert_parallel_size": (1, None),
    "quantization": (None,),
    "quantization_config_file": (None,),
    "limit_images": (None,),
    "cudagraph_capture_sizes": (None,),
    "scheduling_policy": ("fcfs", None),
}
# verl's sampling parameters that have the same name here, and those with another one.
_SAMPLING = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
        *("logit_bias", "seed", "stop", "stop_token_ids", "min_tokens", "ignore_eos", "max_tokens"),
    }
)
_RENAMED = {"max_new_tokens": "max_tokens"}
_QUEUE = 1 << 20  # verl sends a whole batch at once, and limits it itself
_POLL_SECONDS = 0.01


def engine_settings(config: Any, mode: RolloutMode, replica_rank: int) -> EngineSettings:
    """Return the engine's settings, from verl's fields and `engine_kwargs.whorl`. ValueError names what is unknown."""
    for name, neutral in _NEUTRAL.items():
        if (value := getattr(config, name)) not in neutral:
            raise ValueError(f"verl: rollout.{name} is {value!r}, expected {neutral[0]!r}: whorl has nothing like it")
    if (config.qat or {}).get("enable") or config.mtp.enable_rollout or getattr(config.profiler, "enable", False):
        raise ValueError("verl: rollout.qat, rollout.mtp.enable_rollout and rollout.profiler are not for whorl")
    share, alone = config.gpu_memory_utilization, config.standalone_gpu_memory_utilization
    common = {
        "dtype": config.dtype,
        "tp": config.tensor_model_parallel_size,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "gpu_memory_utilization": alone if mode is RolloutMode.STANDALONE and alone is not None else share,
        "use_prefix_cache": config.enable_prefix_caching,
        "use_graphs": False if config.enforce_eager else None,
        "logprobs_mode": config.logprobs_mode,
        "routed_experts": config.enable_rollout_routing_replay,
        "seed": config.seed + replica_rank,
    }
    own = {name: value for name, value in _own(config).items() if name != "transfer"}
    if unknown := sorted(own.keys() - {field.name for field in fields(EngineSettings)}):
        raise ValueError(f"verl: engine_kwargs.whorl.{unknown[0]} is neither transfer nor a field of EngineSettings")
    return EngineSettings(**common | own)


def sampling_params_of(params: Mapping[str, Any], *, room: int, **defaults: Any) -> SamplingParams:
    """Return verl's parameters of one request as whorl's. ValueError names one that whorl does not have.

    room: tokens behind the prompt, to which longer answers are cut. defaults: where the request says nothing.
    """
    values = {_RENAMED.get(name, name): value for name, value in params.items() if value is not None}
    logprobs = values.pop("logprobs", False)
    for name, neutral in (("n", 1), ("detokenize", False), ("skip_special_tokens", True)):
        if values.pop(name, neutral) != neutral:
            raise ValueError(f"verl: sampling parameter {name} is {params[name]!r}, expected {neutral!r}")
    if unknown := sorted(values.keys() - _SAMPLING):
        raise ValueError(f"verl: sampling parameter {unknown[0]!r} is unknown, expected {', '.join(sorted(_SAMPLING))}")
    values = defaults | values
    values["max_tokens"] = max(1, min(values["max_tokens"], room))
    values["top_k"] = max(0, values.get("top_k", 0))  # verl's -1: all tokens
    for name in ("stop", "stop_token_ids"):
        stops = values.get(name, ())
        values[name] = (stops,) if isinstance(stops, str) else tuple(stops)
    return SamplingParams(**values, logprobs=0 if logprobs else None)


def _own(config: Any) -> dict[str, Any]:
    return dict(config.engine_kwargs.get("whorl") or {})


class Server:
    """The engine of one replica and its HTTP server, in an actor of Ray. verl calls its methods by name."""

    def __init__(self, config: Any, model_config: Any, mode: RolloutMode, replica_rank: int, devices: str) -> None:
        os.environ[get_visible_devices_keyword()] = devices
        self._config = omega_conf_to_dataclass(config)
        self._model = omega_conf_to_dataclass(model_config, dataclass_type=HFModelConfig)
        has_adapter = self._model.lora_rank > 0 or self._model.lora.get("rank", 0) > 0
        if has_adapter and not self._model.lora.get("merge", False):
            raise ValueError("verl: whorl takes whole weights from a trainer: set model.lora.merge to True")
        self._mode, self._replica_rank = mode, replica_rank
        self._gate = asyncio.Event()  # closed: new requests wait, or are rejected
        self._gate.set()
        self._rejects = False
        self._running: set[str] = set()

    async def launch(self) -> str:
        """Load the model and serve it; return the host and port for clients of OpenAI's interface."""
        engine = engine_settings(self._config, self._mode, self._replica_rank)
        path, host = self._model.local_path, ray.util.get_node_ip_address().strip("[]")
        app = load_app(path, engine, DraftOptions(), settings_for(path, host=host, port=0, max_queue=_QUEUE))
        self._llm, self._engine = app.state.service.llm, app.state.service.engine
        self._sync = Sync(self._llm, self._engine, json.dumps({"backend": self._choose_transfer()}))
        self._engine.on_failure = lambda: os._exit(1)  # Ray sees that the actor is dead
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        self._engine.readiness.on_ready = lambda: loop.call_soon_threadsafe(ready.set)
        server = HttpServer(app)
        server.listen()
        self._serving = asyncio.create_task(server.serve(server.listeners))
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait({self._serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if not ready.is_set():
            raise RuntimeError("verl: whorl's server ended before it was ready; its log says why")
        return server.root.removeprefix("http://")

    def _choose_transfer(self) -> str:
        name = _own(self._config).get("transfer", "ipc" if self._llm.runner.device == "cuda" else "shm")
        if name not in TRANSFERS:
            raise ValueError(f"verl: engine_kwargs.whorl.transfer is {name!r}, expected one of {', '.join(TRANSFERS)}")
        return str(name)

    async def _do(self, work: Callable[[], R]) -> R:
        return await self._engine.on_engine(work)

    # ---- sampling

    async def generate(
        self,
        prompt_ids: Any,
        sampling_params: dict[str, Any],
        request_id: str,
        priority: int = 0,
        **media: Any,
    ) -> TokenOutput:
        """Sample one answer. media: verl's pictures, videos, sounds and transfers of a cache, which must be absent."""
        if refused := [name for name, value in media.items() if value]:
            raise ValueError(f"verl: {refused[0]} is not for whorl: its rollout takes text only")
        ids = normalize_token_ids(prompt_ids)
        length = self._config.response_length
        defaults: dict[str, Any] = {
            "max_tokens": min(length, self._config.prompt_length + length - len(ids)),
            "ignore_eos": self._config.ignore_eos,
            "priority": priority,
        }
        if self._config.full_determinism:  # verl gives every sample of a prompt an id of its own
            defaults["seed"] = self._config.seed + zlib.crc32(request_id.encode())
        params = sampling_params_of(sampling_params, room=self._llm.max_model_len - len(ids), **defaults)
        while not self._gate.is_set():
            if self._rejects:
                return TokenOutput(token_ids=[], stop_reason="aborted", extra_fields=self._steps(None))
            await self._gate.wait()
        self._running.add(request_id)  # nothing waits between the gate and the engine's queue
        try:
            return self._output(await sampled(self._engine, ids, params))
        finally:
            self._running.discard(request_id)

    def _output(self, seq: Sequence) -> TokenOutput:
        return TokenOutput(
            token_ids=seq.output_ids,
            log_probs=None if seq.params.logprobs is None else [each.logprob for each in seq.logprobs],
            routed_experts=seq.routed_experts,
            stop_reason="aborted" if seq.finish_reason == FinishReason.ABORT else "completed",
            num_preempted=seq.num_preempted,
            extra_fields=self._steps(seq) | {"num_cached_tokens": seq.num_cached},
        )

    def _steps(self, seq: Sequence | None) -> dict[str, int]:
        """Return verl's names of the versions of the weights; each is the trainer's step."""
        first, last = policy_versions(seq, self._llm.weight_version)
        return {"global_steps": last, "min_global_steps": first, "max_global_steps": last}

    # ---- pauses

    async def abort_all_requests(self, reset_prefix_cache: bool = True, reject_request: bool = False) -> dict[str, Any]:
        """End all requests with what they have. Later ones wait for `resume_generation`, or are rejected."""
        self._gate.clear()
        self._rejects = reject_request
        ids = sorted(self._running)
        await self._do(lambda: self._llm.pause("abort"))
        await self._drain()
        if reset_prefix_cache:
            await self.clear_kv_cache()
        return {"aborted_count": len(ids), "request_ids": ids}

    async def resume_generation(self) -> None:
        await self._do(self._llm.resume)
        self._rejects = False
        self._gate.set()

    async def clear_kv_cache(self) -> None:
        await self._do(self._llm.forget)

    async def _drain(self) -> None:
        while self._running:
            await asyncio.sleep(_POLL_SECONDS)

    # ---- memory

    async def sleep(self) -> None:
        """Give the memory back; in hybrid mode without the weights, which the trainer sends again."""
        if self._config.free_cache_engine and self._mode is not RolloutMode.STANDALONE:
            await self._sleep(2 if self._mode is RolloutMode.HYBRID else 1)

    async def _sleep(self, level: int) -> None:
        await self._drain()
        if not self._llm.control.asleep:
            await self._do(lambda: self._llm.sleep(level))

    async def wake_up(self, tags: list[str] | None = None) -> None:
        if self._mode is not RolloutMode.STANDALONE:
            await self._do(lambda: self._llm.wake(tags))

    async def release_kv_cache(self) -> None:
        """Give back the cache for the time of a sync. Weights and cache sleep together, and weights come anew."""
        if self._config.free_cache_engine and self._mode is not RolloutMode.COLOCATED:
            await self._sleep(2)
            await self._do(lambda: self._llm.wake(["weights"]))

    async def resume_kv_cache(self) -> None:
        if self._config.free_cache_engine and self._mode is not RolloutMode.COLOCATED:
            await self._do(lambda: self._llm.wake(["kv_cache"]))

    # ---- what verl's own adapters call as well

    async def set_global_steps(self, global_steps: int) -> None:
        """Give the weights another version."""

        def rename() -> None:
            self._llm.control.version = str(global_steps)

        await self._do(rename)

    async def start_profile(self, **options: Any) -> None:
        """Do nothing: a profile that is asked for is refused at the start."""

    async def stop_profile(self) -> None:
        """Do nothing."""

    # ---- new weights: `Rollout` calls these

    async def join(self, init_info: dict[str, Any]) -> None:
        await self._sync.begin_transfer(init_info)

    async def transfer(self) -> str:
        return self._sync.backend

    async def begin_update(self) -> None:
        await self._sync.start()

    async def receive(self, update_info: dict[str, Any]) -> None:
        await self._sync.receive(update_info)

    async def finish_update(self, version: str | None) -> str:
        return await self._sync.finish(version)
