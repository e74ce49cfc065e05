"""Prometheus metrics: vLLM's names with the prefix `whorl:`, so that dashboards for vLLM can be reused."""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from whorl.engine.sequence import FinishReason, Sequence

_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_WHOLE = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
# For each histogram: name, help text, and the upper bounds of its buckets in seconds, or in tokens for _TOKENS.
_HISTOGRAMS: tuple[tuple[str, str, tuple[float, ...]], ...] = (
    ("time_to_first_token_seconds", "From arrival to the first token.", _FIRST),
    ("inter_token_latency_seconds", "Between a sequence's tokens.", _BETWEEN),
    ("request_time_per_output_token_seconds", "A finished sequence's mean time for a token.", _BETWEEN),
    ("e2e_request_latency_seconds", "From arrival to the last token.", _WHOLE),
    ("request_queue_time_seconds", "From arrival to the first step with it.", _WHOLE),
    ("request_prefill_time_seconds", "From the first step to the first token.", _WHOLE),
    ("request_decode_time_seconds", "From the first token to the last.", _WHOLE),
    ("request_inference_time_seconds", "From the first step to the last token.", _WHOLE),
    ("request_prompt_tokens", "Prompt tokens of a finished sequence.", _TOKENS),
    ("request_generation_tokens", "Generated tokens of a finished sequence.", _TOKENS),
)
# For each metric: name, help text, kind, and how to compute its value from the engine's `stats()`.
_FROM_STATS: tuple[tuple[str, str, str, Callable[[Mapping[str, int]], float]], ...] = (
    ("num_requests_running", "Sequences that hold blocks.", "gauge", lambda s: s["num_running"]),
    ("num_requests_waiting", "Sequences that wait for blocks.", "gauge", lambda s: s["num_waiting"]),
    ("kv_cache_usage_perc", "Share of the blocks in use; 1 is all.", "gauge", lambda s: _share(s)),
    ("num_preemptions", "Sequences put back to make room.", "counter", lambda s: s["num_preemptions"]),
    ("prefix_cache_queries", "Tokens looked up.", "counter", lambda s: s["num_tokens_queried"]),
    ("prefix_cache_hits", "Tokens found.", "counter", lambda s: s["num_tokens_hit"]),
    ("spec_decode_num_draft_tokens", "Tokens drafted.", "counter", lambda s: s["num_drafted"]),
    ("spec_decode_num_accepted_tokens", "Drafted tokens accepted.", "counter", lambda s: s["num_accepted"]),
)
# Metrics of models that take pictures.
_PICTURE_METRICS: tuple[tuple[str, str, str, Callable[[Mapping[str, int]], float]], ...] = (
    ("mm_cache_queries", "Pictures and videos looked up.", "counter", lambda s: s["num_encoded"] + _hits(s)),
    ("mm_cache_hits", "Pictures and videos that were encoded already.", "counter", lambda s: _hits(s)),
)
# Metrics of models whose layers keep a state for each sequence.
_STATE_METRICS: tuple[tuple[str, str, str, Callable[[Mapping[str, int]], float]], ...] = (
    ("state_memory_bytes", "Memory of states and snapshots.", "gauge", lambda s: s["num_state_bytes"]),
    ("state_snapshots", "Snapshots that prefixes have.", "gauge", lambda s: s["num_snapshots"]),
    ("state_snapshots_saved", "Snapshots that were made.", "counter", lambda s: s["num_states_saved"]),
    ("state_snapshots_loaded", "Snapshots that prompts began with.", "counter", lambda s: s["num_states_loaded"]),
)
# Metrics of engines whose KV cache goes on beyond the device.
_OFFLOAD_METRICS: tuple[tuple[str, str, str, Callable[[Mapping[str, int]], float]], ...] = (
    ("kv_offload_memory_bytes", "Host memory with cached blocks.", "gauge", lambda s: s["num_host_bytes"]),
    ("kv_offload_disk_bytes", "Files with cached blocks.", "gauge", lambda s: s["num_disk_bytes"]),
    ("kv_offload_blocks_spilled", "Blocks copied to the host.", "counter", lambda s: s["num_blocks_spilled"]),
    ("kv_offload_blocks_fetched", "Blocks copied to the device.", "counter", lambda s: s["num_blocks_fetched"]),
    ("kv_offload_files_read", "Files of blocks that were read.", "counter", lambda s: s["num_files_read"]),
    ("kv_offload_files_failed", "Files that could not be used.", "counter", lambda s: s["num_files_failed"]),
)


def _hits(stats: Mapping[str, int]) -> int:
    return stats["num_encoder_hits"]


def _share(stats: Mapping[str, int]) -> float:
    return stats["num_blocks_used"] / stats["num_blocks"]


class Metrics:
    """The metrics of one server. stats: returns the engine's counters; called whenever the metrics are read."""

    def __init__(self, model: str, stats: Callable[[], Mapping[str, int]]) -> None:
        from prometheus_client import CollectorRegistry, Counter, Histogram

        self._registry = CollectorRegistry()
        self._stats, self._model = stats, model
        self._admitted: dict[Sequence, float] = {}  # when the first step with a sequence began
        self._latest: dict[Sequence, float] = {}  # when a sequence got its latest token
        self.num_generated = 0

        def labelled(kind: Any, name: str, text: str, **options: Any) -> Any:
            metric = kind(f"whorl:{name}", text, ["model_name"], registry=self._registry, **options)
            return metric.labels(model)

        self._seconds = {name: labelled(Histogram, name, text, buckets=buckets) for name, text, buckets in _HISTOGRAMS}
        self._prompt_tokens = labelled(Counter, "prompt_tokens", "Prompt tokens of sequences that began.")
        self._tokens = labelled(Counter, "generation_tokens", "Tokens generated.")
        names = ["model_name", "finished_reason"]
        self._finished = Counter("whorl:request_success", "Finished sequences.", names, registry=self._registry)
        for reason in FinishReason:
            self._finished.labels(model, reason.value)
        self._registry.register(self)

    def collect(self) -> Iterator[Any]:
        """Yield the metrics that the engine counts; called by the registry."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        kinds = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}
        stats = self._stats()
        keys = {"num_encoded": _PICTURE_METRICS, "num_state_bytes": _STATE_METRICS, "num_host_bytes": _OFFLOAD_METRICS}
        more = [metric for key, metrics in keys.items() if key in stats for metric in metrics]
        for name, text, kind, value in (*_FROM_STATS, *more):
            family = kinds[kind](f"whorl:{name}", text, labels=["model_name"])
            family.add_metric([self._model], value(stats))
            yield family

    def render(self) -> tuple[bytes, str]:
        """Return the metrics in the text format, and its content type."""
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    # ---- on the engine's thread

    def admitted(self, seq: Sequence, step_start: float) -> None:
        """Record that the step that began at `step_start` is the first one with this sequence."""
        self._admitted[seq] = step_start
        self._prompt_tokens.inc(seq.prompt_len)
        self._observe("request_queue_time_seconds", step_start - seq.timings.added)

    def progressed(self, seq: Sequence, num_tokens: int) -> None:
        """Record that a step added tokens to a sequence."""
        now = time.perf_counter()
        self._tokens.inc(num_tokens)
        self.num_generated += num_tokens
        latest = self._latest.get(seq)
        if latest is None:
            self._observe("time_to_first_token_seconds", now - seq.timings.added)
            self._observe("request_prefill_time_seconds", now - self._admitted.get(seq, now))
        else:
            for _ in range(num_tokens):  # a step that accepts drafts adds several at once
                self._observe("inter_token_latency_seconds", (now - latest) / num_tokens)
        self._latest[seq] = now

    def finished(self, seq: Sequence, reason: FinishReason) -> None:
        """Record the end of a sequence."""
        latest, admitted = self._latest.pop(seq, None), self._admitted.pop(seq, None)
        self._finished.labels(self._model, reason.value).inc()
        if reason in (FinishReason.ABORT, FinishReason.ERROR) or latest is None or admitted is None:
            return
        timings = seq.timings
        decode = latest - (timings.first_token or latest)
        self._observe("e2e_request_latency_seconds", latest - timings.added)
        self._observe("request_decode_time_seconds", decode)
        self._observe("request_inference_time_seconds", latest - admitted)
        self._observe("request_prompt_tokens", seq.prompt_len)
        self._observe("request_generation_tokens", seq.num_outputs)
        if seq.num_outputs > 1:
            self._observe("request_time_per_output_token_seconds", decode / (seq.num_outputs - 1))

    def _observe(self, name: str, value: float) -> None:
        self._seconds[name].observe(max(value, 0.0))
