"""What a server says of itself to trainers: the part of vLLM's configuration that they read."""

from typing import TYPE_CHECKING, Any

from whorl import __version__

if TYPE_CHECKING:
    from whorl.engine.llm import LLM
    from whorl.serve.settings import ServerSettings


def server_info(llm: "LLM", settings: "ServerSettings", backend: str) -> dict[str, Any]:
    """Return the answer of `/server_info`: vLLM's fields, and SGLang's beside them. backend: how weights come."""
    ranks = llm.settings.num_ranks or 1
    dtype = str(llm.model.dtype)
    model = {
        "model": settings.names[-1],
        "served_model_name": list(settings.names),
        "dtype": dtype,
        "max_model_len": llm.max_model_len,
        "max_logprobs": settings.max_logprobs,
        "logprobs_mode": llm.settings.logprobs_mode,
    }
    config = {
        "model_config": model,
        "parallel_config": {"tensor_parallel_size": ranks, "data_parallel_size": 1, "world_size": ranks},
        "cache_config": {"enable_prefix_caching": llm.settings.use_prefix_cache, "block_size": llm.pool.block_size},
        "weight_transfer_config": {"backend": backend},
        "lora_config": None,
    }
    return {
        "vllm_config": config,
        "whorl_version": __version__,
        "version": __version__,
        "model_path": settings.names[0],
        "tp_size": ranks,
        "weight_version": llm.weight_version,
    }
