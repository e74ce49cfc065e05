"""The messages of memory that is too small: of torch, vLLM, SGLang and CANN, each with the number to change."""

from typing import Final

from whorl.doctor.memory_numbers import (
    STEP,
    cache_for_one,
    cache_in_tokens,
    no_cache,
    out_of_memory,
    states_of_requests,
    taken_at_start,
    too_many_requests,
)
from whorl.doctor.symptom import Symptom

_NO_ROOM = "vLLM reserves a share of the device; what weights and activations leave of it is the KV cache."
MEMORY_SYMPTOMS: Final = (
    Symptom(
        "kv-cache-too-small",
        r"(?i)max seq len \((\d+)\), \(?([\d.]+) GI?B KV cache is ?needed, which is larger than the available KV cache "
        r"memory \((-?[\d.]+) GI?B\)",
        cause=_NO_ROOM,
        expected="room for one request of the longest length",
        fix="lower --max-model-len",
        is_printed=True,
        with_numbers=cache_for_one,
    ),
    Symptom(
        "kv-cache-too-small",
        r"max seq len \((\d+)\) is larger than the maximum number of tokens that can be stored in KV cache \((\d+)\)",
        cause=_NO_ROOM,
        expected="room for one request of the longest length",
        fix="lower --max-model-len",
        is_printed=True,
        with_numbers=cache_in_tokens,
    ),
    Symptom(
        "kv-cache-too-small",
        r"No available memory for the cache blocks",
        cause=_NO_ROOM,
        expected="a share above the weights",
        fix="raise --gpu-memory-utilization",
        is_printed=True,
        with_numbers=no_cache,
    ),
    Symptom(
        "kv-cache-too-small",
        r"is preempted by (?:PreemptionMode\.)?\w+ mode because there is not enough KV cache space",
        cause="More requests run at once than the KV cache has room for: one is thrown out and computed again. Answers "
        "are right, only late.",
        expected="fewer requests at once, or a larger cache",
        fix=("lower --max-num-seqs", "or raise --gpu-memory-utilization, or lower --max-model-len"),
        severity="warning",
        is_printed=True,
    ),
    Symptom(
        "kv-cache-too-small",
        r"max_num_seqs \((\d+)\) exceeds available Mamba cache blocks \((\d+)\)",
        cause="Layers with a recurrent state keep it for every request that decodes, in a block of the cache each.",
        expected="fewer requests at once, or a larger cache",
        fix="lower --max-num-seqs",
        is_printed=True,
        with_numbers=states_of_requests,
    ),
    Symptom(
        "device-memory-taken",
        r"Free memory on device (?:\S+ )?\(([\d.]+)/([\d.]+) GiB\) on startup is less than desired GPU memory "
        r"utilization \(([\d.]+), ([\d.]+) GiB\)",
        cause="gpu_memory_utilization is a share of the whole device, and the share must be free when vLLM starts.",
        expected="a share that is free",
        fix="lower --gpu-memory-utilization",
        is_printed=True,
        with_numbers=taken_at_start,
    ),
    Symptom(
        "device-memory-taken",
        r"Error in memory profiling\. Initial free memory",
        cause="Free memory grew while vLLM measured its own: another process on the device ended or freed memory.",
        expected="a device whose other processes stand still until vLLM has started",
        fix=("start again when the other processes have ended", "or start them one after the other"),
        is_printed=True,
    ),
    Symptom(
        "device-memory-full",
        r"\b\w+ out of memory occurred when warming up (?:sampler|pooler).{0,80}? with (\d+) dummy requests",
        cause="What is computed at once for --max-num-seqs requests, such as their logits, does not fit beside the KV "
        "cache, which has been allocated before.",
        expected="fewer requests at once, or a smaller cache",
        fix="halve --max-num-seqs",
        is_printed=True,
        with_numbers=too_many_requests,
    ),
    Symptom(
        "device-memory-full",
        r"\b(CUDA|NPU|HIP|XPU)(?: error:)? out of memory(?! occurred)",
        cause="The device has no room for the next tensor.",
        expected="memory for the next tensor",
        fix=STEP,
        is_printed=True,
        with_numbers=out_of_memory,
    ),
    Symptom(
        "device-memory-full",
        r"EL0004\b|Failed to allocate resource\[DeviceMemory\]",
        cause="CANN found no device memory outside torch's pool: HCCL's buffers and operators' workspaces lie there.",
        expected="memory outside the share that the engine takes",
        fix=("lower --gpu-memory-utilization by 0.05", "or a smaller HCCL_BUFFSIZE"),
        is_printed=True,
    ),
    Symptom(
        "device-memory-full",
        r"Cuda failure(?: \d+)? 'out of memory'|CUDA driver error: out of memory|CUBLAS_STATUS_ALLOC_FAILED",
        cause="A library found no device memory outside torch's pool: buffers of collectives, workspaces of matmuls, "
        "and graphs lie there.",
        expected="memory outside the share that the engine takes",
        fix=("lower --gpu-memory-utilization by 0.05", "or end other processes on the device"),
        is_printed=True,
    ),
    Symptom(
        "device-memory-full",
        r"Not enough memory\. Please try to increase --mem-fraction-static",
        cause="SGLang reserves a share of the device for weights and KV cache, and the weights leave no room in it.",
        expected="a share above the weights",
        fix=("raise --mem-fraction-static", "or more ranks: --tp-size"),
        is_printed=True,
    ),
    Symptom(
        "host-memory-full",
        r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory)|\boom[-_]kill|Out of memory: Killed process",
        cause="The host, not the device, has no memory left: weights are read there first, and swap space, caches of "
        "pictures and every rank's process lie there.",
        expected="host memory for what is read and cached there",
        fix=("fewer processes, or less swap space (--swap-space, --cpu-offload-gb)", "or a host with more memory"),
        is_printed=True,
    ),
)
