"""The messages of memory that is too small: of torch, vLLM, SGLang and CANN, each with the number to change.

The numbers are those of the message, of the lines around it, and of `served_memory` where config.json is at hand.
"""

import math
import re
from dataclasses import dataclass
from typing import Final

from whorl.doctor.served_memory import GIB, Served, served
from whorl.doctor.symptom import Place, Symptom, printed

UNITS: Final = {"bytes": 2.0**-30, "KiB": 2.0**-20, "MiB": 2.0**-10, "GiB": 1.0, "TiB": 2.0**10}
SIZE: Final = r"(-?[\d.]+) ?(bytes|KiB|MiB|GiB|TiB)"
SAME: Final = 0.05  # relative difference up to which two counts of bytes are of one model
BLOCK: Final = 16  # tokens of a cache block of vLLM's
DEFAULT_SHARE: Final = 0.9  # vLLM's gpu_memory_utilization
MOST_SHARE: Final = 0.97  # of a device's memory: the rest is the driver's, the graphs' and the collectives'
HUGE: Final = 0.1  # of a device's memory: a single tensor of this share is worth a word
FRAGMENTED: Final = 0.5  # GiB, reserved and not allocated, from which on fragmentation is worth a word
SMALLEST_OTHER: Final = 1.0  # GiB of other processes that are worth a word
# The total memory of a device, as torch and vLLM log it, in GiB.
TOTAL: Final = (
    r"total capacity of ([\d.]+) GiB|([\d.]+) GiB total capacity|total_gpu_memory(?:=| \(|\s+)([\d.]+) ?GiB"
    r"|Free memory on device (?:\S+ )?\([\d.]+/([\d.]+) GiB\)"
)
# Where a device ran out of memory: a pattern of the functions on the stack, what they do, what to change.
PHASES: Final = (
    (
        r"^(?:load_model|load_weights|create_weights|initialize_model|from_pretrained)$",
        "while the weights were loaded",
        ("more ranks: --tensor-parallel-size", "or a quantised checkpoint"),
    ),
    (
        r"^_?(?:capture|capture_model|capture_graphs?|capture_cudagraphs|warmup_graph)$",
        "while graphs were captured, after the KV cache had taken its share",
        ("lower --gpu-memory-utilization by 0.03", "or capture fewer sizes (--max-num-seqs), or --enforce-eager"),
    ),
    (
        r"^(?:profile_run|determine_available_memory|determine_num_available_blocks|_?dummy_run)$",
        "while vLLM measured a step of the largest batch",
        ("halve --max-num-batched-tokens", "or lower --max-num-seqs, or fewer pictures a prompt"),
    ),
    (
        r"^(?:initialize_kv_caches?|_?allocate_kv_caches?(?:_tensors)?)$",
        "while the KV cache was allocated",
        ("lower --gpu-memory-utilization: it counts what other processes hold as free",),
    ),
    (
        r"^(?:backward|training_step|train_step|compute_loss|update_actor|update_policy)$",
        "in a training step",
        ("a smaller micro-batch, or activation checkpointing", "or more ranks: whorl train --plan counts them"),
    ),
)
STEP: Final = ("lower --gpu-memory-utilization by 0.05", "or lower --max-num-batched-tokens and --max-num-seqs")


def _size(text: str, *patterns: str) -> float | None:
    """Return the GiB of the first pattern that the text has; a pattern writes a size as {}."""
    for pattern in patterns:
        if match := re.search(pattern.replace("{}", SIZE), text):
            return float(match[1]) * UNITS[match[2]]
    return None


def _total(log: str) -> float | None:
    """Return the GiB of the device, where a line of the log says it."""
    match = re.search(TOTAL, log)
    return next((float(group) for group in match.groups() if group), None) if match else None


def _served(place: Place) -> Served:
    return served(place.launch) if place.launch else Served()


def _share(place: Place) -> float:
    """Return gpu_memory_utilization: the launch's, or that of the log, or vLLM's default."""
    logged = re.search(r"gpu_memory_utilization\W{1,3}\s*(0?\.\d+|1\.0)", place.log)
    stated = place.launch.real("gpu_memory_utilization") if place.launch else None
    return stated or (float(logged[1]) if logged else DEFAULT_SHARE)


def _raised_share(place: Place, missing: float) -> str:
    """Say to which share of the device's memory vLLM must be raised to get so many more GiB."""
    share, total = _share(place), _total(place.log)
    if total is None:
        return f"or raise --gpu-memory-utilization from {share:g} by {missing:.2f} divided by the device's GiB"
    needed = math.ceil((share + missing / total) * 100) / 100
    if needed > MOST_SHARE:
        return f"raising --gpu-memory-utilization is not enough: {needed:.2f} of {total:.2f} GiB would be needed"
    return f"or --gpu-memory-utilization {needed:.2f} in place of {share:g} ({missing:.2f} of {total:.2f} GiB more)"


def cache_for_one(symptom: Symptom, match: re.Match[str], place: Place) -> Symptom:
    length, needed, available = int(match[1]), float(match[2]), float(match[3])
    tokens = int(max(available, 0) / needed * length) // BLOCK * BLOCK if needed else 0
    has_fp8 = place.launch is not None and place.launch.get("kv_cache_dtype") not in (None, "auto")
    halved = "enough" if needed / 2 <= available else "still too much"
    at_hand = _served(place)
    token = at_hand.token()
    is_other = token is not None and abs(needed / length / token - 1) > SAME
    return symptom.saying(
        f"{length} tokens take {needed:.2f} GiB, that is {needed / length * GIB / 1024:.0f} KiB a token, and "
        f"{available:.2f} GiB are left after the weights and a step's activations.",
        at_hand.describe(),
        "The log is of another model, number of ranks or cache dtype." if is_other else None,
        expected=f"at most {tokens} tokens, or {needed - available:.2f} GiB more for the cache",
        fix=(
            *((f"--max-model-len {tokens}",) if tokens else ()),
            _raised_share(place, needed - available),
            *(() if has_fp8 else (f"or --kv-cache-dtype fp8: {needed / 2:.2f} GiB, {halved}",)),
            "or more ranks: --tensor-parallel-size",
        ),
    )


def cache_in_tokens(symptom: Symptom, match: re.Match[str], place: Place) -> Symptom:
    length, tokens = int(match[1]), int(match[2])
    at_hand = _served(place)
    token = at_hand.token()
    more = None if token is None else (length - tokens) * token
    room = f"The cache has room for {tokens} tokens, and one request may have {length}."
    return symptom.saying(
        room,
        at_hand.describe(),
        expected=f"at most {tokens} tokens" + ("" if more is None else f", or {more:.2f} GiB more for the cache"),
        fix=(
            f"--max-model-len {tokens}",
            "or raise --gpu-memory-utilization" if more is None else _raised_share(place, more),
            "or --kv-cache-dtype fp8, which doubles the tokens",
        ),
    )


def no_cache(symptom: Symptom, match: re.Match[str], place: Place) -> Symptom:
    left = _size(place.log, r"Available KV cache memory: {}")
    at_hand, total, share = _served(place), _total(place.log), _share(place)
    weights = at_hand.weights() or _size(place.log, r"Model loading took {}", r"model weights take {}")
    sums = None
    if total is not None and weights is not None:
        sums = f"{share:g} of {total:.2f} GiB are {share * total:.2f} GiB, and the weights take {weights:.2f} of them."
    ranks = at_hand.smallest_tp(0.8 * share * total) if total else None
    return symptom.saying(
        None if left is None else f"{left:.2f} GiB are left.",
        at_hand.describe(),
        sums,
        expected="gpu_memory_utilization x the device's memory above the weights and a step's activations",
        fix=(
            f"raise --gpu-memory-utilization ({share:g} now; at most {MOST_SHARE})",
            "or halve --max-num-batched-tokens and lower --max-num-seqs, which set the activations",
            "or more ranks: --tensor-parallel-size" + ("" if ranks is None else f" {ranks}"),
            "or a quantised checkpoint",
        ),
    )


def taken_at_start(symptom: Symptom, match: re.Match[str], place: Place) -> Symptom:
    free, total, share, desired = (float(number) for number in match.groups())
    largest = math.floor(free / total * 100) / 100
    at_hand = _served(place)
    weights, token = at_hand.weights(), at_hand.token()
    room, is_full = "", weights is not None and weights >= largest * total
    if weights and token:
        tokens = int((largest * total - weights) / token)
        room = f"At {largest:.2f} about {tokens} tokens of cache fit, less activations."
    return symptom.saying(
        f"{share:g} of {total:.2f} GiB are {desired:.2f} GiB, and {free:.2f} GiB are free: other processes hold "
        f"{total - free:.2f} GiB, often an earlier run that has not ended.",
        at_hand.describe(),
        "In what is free not even the weights fit." if is_full else room,
        expected=f"{desired:.2f} GiB free, or a share of at most {largest:.2f}",
        fix=(
            "end the other processes (nvidia-smi, npu-smi info), or choose another device",
            *(() if is_full else (f"or --gpu-memory-utilization {largest:.2f}",)),
        ),
    )


def too_many_requests(symptom: Symptom, match: re.Match[str], place: Place) -> Symptom:
    count = int(match[1])
    fewer = f"--max-num-seqs {max(count // 2, 1)} in place of {count}"
    return symptom.saying(fix=(fewer, "or lower --gpu-memory-utilization by 0.05"))


def states_of_requests(symptom: Symptom, match: re.Match[str], place: Place) -> Symptom:
    count, blocks = int(match[1]), int(match[2])
    return symptom.saying(
        f"{count} requests need {count} blocks, and the cache has {blocks}.",
        expected=f"at most {blocks} requests at once, or a larger cache",
        fix=(*((f"--max-num-seqs {blocks}",) if blocks else ()), "or raise --gpu-memory-utilization"),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Numbers:
    """The GiB in torch's message; old and new wordings, of CUDA and of torch_npu, name the same ones. None: not named.

    tried: the tensor that did not fit; allocated: torch's tensors; loose: reserved by torch and in no tensor.
    """

    tried: float | None
    total: float | None
    free: float | None
    allocated: float | None
    loose: float | None

    @classmethod
    def read(cls, text: str) -> "_Numbers":
        allocated = _size(text, r"{} is allocated by PyTorch", r"{} already allocated")
        loose = _size(text, r"{} is reserved by PyTorch but unallocated")
        reserved = _size(text, r"{} reserved in total by PyTorch")
        return cls(
            tried=_size(text, r"[Tt]ried to allocate {}"),
            total=_size(text, r"total capacity of {}", r"{} total capacity"),
            free=_size(text, r"of which {} is free", r"{} free"),
            allocated=allocated,
            loose=reserved - allocated if loose is None and reserved is not None and allocated is not None else loose,
        )

    @property
    def is_huge(self) -> bool:
        return self.tried is not None and self.total is not None and self.tried > HUGE * self.total

    @property
    def is_fragmented(self) -> bool:
        return self.loose is not None and self.loose > max(self.tried or 0.0, FRAGMENTED)

    def describe(self) -> str:
        parts = [] if self.tried is None else [f"a tensor of {self.tried:.2f} GiB did not fit"]
        if self.free is not None and self.total is not None:
            parts.append(f"{self.free:.2f} of {self.total:.2f} GiB were free")
        if self.allocated is not None:
            parts.append(f"torch's tensors held {self.allocated:.2f} GiB")
        text = "; ".join(parts)
        return f"{text[0].upper()}{text[1:]}." if text else ""

    def describe_waste(self) -> str:
        """Say what is neither free nor in a tensor."""
        parts = []
        if self.is_fragmented:
            parts.append(f"{self.loose:.2f} GiB were reserved and in no tensor: fragments.")
        if self.total is not None and self.free is not None and self.allocated is not None:
            others = self.total - self.free - self.allocated - (self.loose or 0.0)
            if others > SMALLEST_OTHER:
                parts.append(f"{others:.2f} GiB were held outside torch: by other processes, collectives or graphs.")
        return " ".join(parts)


def out_of_memory(symptom: Symptom, match: re.Match[str], place: Place) -> Symptom:
    numbers, at_hand = _Numbers.read(place.text), _served(place)
    when, fix = _phase(place)
    total, weights = numbers.total, at_hand.weights()
    ranks = at_hand.smallest_tp(0.8 * total) if total and (weights or 0) > 0.8 * total else None
    allocator = "PYTORCH_NPU_ALLOC_CONF" if match[1] == "NPU" else "PYTORCH_CUDA_ALLOC_CONF"
    is_short = numbers.tried is not None and numbers.free is not None
    return symptom.saying(
        when,
        numbers.describe(),
        "So large a tensor grows with the tokens of a step, or with their square." if numbers.is_huge else None,
        numbers.describe_waste(),
        at_hand.describe(),
        "The weights alone do not fit." if total and weights and weights > 0.95 * total else None,
        expected=f"{(numbers.tried or 0) - (numbers.free or 0):.2f} GiB more" if is_short else "",
        fix=(
            *((f"export {allocator}=expandable_segments:True",) if numbers.is_fragmented else ()),
            *((f"--tensor-parallel-size {ranks}",) if ranks else ()),
            *(("lower --max-num-batched-tokens and --max-model-len first",) if numbers.is_huge else ()),
            *fix,
        ),
    )


def _phase(place: Place) -> tuple[str | None, tuple[str, ...]]:
    """Return when the device ran out of memory, by the functions on the stack, and what to change then."""
    functions = [frame.function.rpartition(".")[2] for frame in place.failure.frames] if place.failure else []
    for pattern, when, fix in PHASES:
        if any(re.search(pattern, function) for function in functions):
            return f"It ran out {when}.", fix
    return None, STEP


_NO_ROOM = "vLLM reserves a share of the device; what weights and activations leave of it is the KV cache."
MEMORY_SYMPTOMS: Final = (
    printed(
        "kv-cache-too-small",
        r"(?i)max seq len \((\d+)\), \(?([\d.]+) GI?B KV cache is ?needed, which is larger than the available KV cache "
        r"memory \((-?[\d.]+) GI?B\)",
        cause=_NO_ROOM,
        expected="room for one request of the longest length",
        fix="lower --max-model-len",
        with_numbers=cache_for_one,
    ),
    printed(
        "kv-cache-too-small",
        r"max seq len \((\d+)\) is larger than the maximum number of tokens that can be stored in KV cache \((\d+)\)",
        cause=_NO_ROOM,
        expected="room for one request of the longest length",
        fix="lower --max-model-len",
        with_numbers=cache_in_tokens,
    ),
    printed(
        "kv-cache-too-small",
        r"No available memory for the cache blocks",
        cause=_NO_ROOM,
        expected="a share above the weights",
        fix="raise --gpu-memory-utilization",
        with_numbers=no_cache,
    ),
    printed(
        "kv-cache-too-small",
        r"is preempted by (?:PreemptionMode\.)?\w+ mode because there is not enough KV cache space",
        cause="More requests run at once than the KV cache has room for: one is thrown out and computed again. Answers "
        "are right, only late.",
        expected="fewer requests at once, or a larger cache",
        fix=("lower --max-num-seqs", "or raise --gpu-memory-utilization, or lower --max-model-len"),
        severity="warning",
    ),
    printed(
        "kv-cache-too-small",
        r"max_num_seqs \((\d+)\) exceeds available Mamba cache blocks \((\d+)\)",
        cause="Layers with a recurrent state keep it for every request that decodes, in a block of the cache each.",
        expected="fewer requests at once, or a larger cache",
        fix="lower --max-num-seqs",
        with_numbers=states_of_requests,
    ),
    printed(
        "device-memory-taken",
        r"Free memory on device (?:\S+ )?\(([\d.]+)/([\d.]+) GiB\) on startup is less than desired GPU memory "
        r"utilization \(([\d.]+), ([\d.]+) GiB\)",
        cause="gpu_memory_utilization is a share of the whole device, and the share must be free when vLLM starts.",
        expected="a share that is free",
        fix="lower --gpu-memory-utilization",
        with_numbers=taken_at_start,
    ),
    printed(
        "device-memory-taken",
        r"Error in memory profiling\. Initial free memory",
        cause="Free memory grew while vLLM measured its own: another process on the device ended or freed memory.",
        expected="a device whose other processes stand still until vLLM has started",
        fix=("start again when the other processes have ended", "or start them one after the other"),
    ),
    printed(
        "device-memory-full",
        r"\b\w+ out of memory occurred when warming up (?:sampler|pooler).{0,80}? with (\d+) dummy requests",
        cause="What is computed at once for --max-num-seqs requests, such as their logits, does not fit beside the KV "
        "cache, which has been allocated before.",
        expected="fewer requests at once, or a smaller cache",
        fix="halve --max-num-seqs",
        with_numbers=too_many_requests,
    ),
    printed(
        "device-memory-full",
        r"\b(CUDA|NPU|HIP|XPU)(?: error:)? out of memory(?! occurred)",
        cause="The device has no room for the next tensor.",
        expected="memory for the next tensor",
        fix=STEP,
        with_numbers=out_of_memory,
    ),
    printed(
        "device-memory-full",
        r"EL0004\b|Failed to allocate resource\[DeviceMemory\]",
        cause="CANN found no device memory outside torch's pool: HCCL's buffers and operators' workspaces lie there.",
        expected="memory outside the share that the engine takes",
        fix=("lower --gpu-memory-utilization by 0.05", "or a smaller HCCL_BUFFSIZE"),
    ),
    printed(
        "device-memory-full",
        r"Cuda failure(?: \d+)? 'out of memory'|CUDA driver error: out of memory|CUBLAS_STATUS_ALLOC_FAILED",
        cause="A library found no device memory outside torch's pool: buffers of collectives, workspaces of matmuls, "
        "and graphs lie there.",
        expected="memory outside the share that the engine takes",
        fix=("lower --gpu-memory-utilization by 0.05", "or end other processes on the device"),
    ),
    printed(
        "device-memory-full",
        r"Not enough memory\. Please try to increase --mem-fraction-static",
        cause="SGLang reserves a share of the device for weights and KV cache, and the weights leave no room in it.",
        expected="a share above the weights",
        fix=("raise --mem-fraction-static", "or more ranks: --tp-size"),
    ),
    printed(
        "host-memory-full",
        r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory)|\boom[-_]kill|Out of memory: Killed process",
        cause="The host, not the device, has no memory left: weights are read there first, and swap space, caches of "
        "pictures and every rank's process lie there.",
        expected="host memory for what is read and cached there",
        fix=("fewer processes, or less swap space (--swap-space, --cpu-offload-gb)", "or a host with more memory"),
    ),
)
