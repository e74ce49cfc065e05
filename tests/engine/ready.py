"""What an engine on Hopper would still compile or try after its warm-up, found without a GPU.

Run as a program without TRITON_INTERPRET. The engine runs on the CPU as if that were a Hopper GPU: launches of kernels
are recorded instead of run, by the keys under which Triton stores compiled kernels, and so are trials of library
products. All results are zeros. Prints JSON: how many kernels and trials the warm-up had, and those that a mixed load
needed besides. Takes a JSON object as its argument: model, settings (changes of the engine's), and without (the tasks
of the warm-up whose descriptions begin with it are left out).
"""

import contextvars
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from whorl import device as devices
from whorl.engine import graphs, inputs, warmup
from whorl.engine.batch import Batch
from whorl.engine.llm import LLM
from whorl.engine.sequence import SamplingParams
from whorl.engine.weights import random_model
from whorl.models.llama import Llama
from whorl.models.qwen3 import Qwen3
from whorl.ops import OPS, _hopper, _overlap_triton, linear_library, rms_norm_triton
from whorl.ops._trial_store import TrialStore

BACKEND = make_backend(GPUTarget("cuda", 90, 32))
CONFIG: dict[str, Any] = {
    "hidden_size": 512,
    "head_dim": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
}
MODELS: dict[str, dict[str, Any]] = {
    "experts": Qwen3.tiny(num_experts=8, moe_intermediate_size=64),
    "dense": Llama.tiny(),
}
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "block_size": 16,
    "max_num_seqs": 40,
    "max_prompt_tokens": 700,
    "max_num_batched_tokens": 720,
    "max_model_len": 500,
    "num_blocks": 40 * 32,
    "use_prefix_cache": True,
    "run_ahead": True,
    "seed": 1,
}


class Recorder:
    """The keys of all launches and trials, and how to name them."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, str], str] = {}
        self._binders: dict[JITFunction, Callable[..., Any]] = {}

    def launch(self, kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        if kernel not in self._binders:
            self._binders[kernel] = create_function_from_signature(kernel.signature, kernel.params, BACKEND)
        _, kinds, options = self._binders[kernel](*args, **kwargs)
        names = dict(zip(kernel.arg_names, kinds, strict=True)) | options
        self.seen.setdefault((kernel.__name__, str(names)), f"{kernel.__name__} {names}")

    def trial(self, store: TrialStore, key: str, device: str, trial: Callable[[], bool]) -> bool:
        self.seen.setdefault((store.name, key), f"trial {store.name} {key}")
        return False  # our own kernels then run all sizes, which is the harder case


def pretend(recorder: Recorder) -> None:
    """Make this process take the CPU for a Hopper GPU that computes nothing."""
    JITFunction.run = lambda kernel, *args, **kwargs: recorder.launch(kernel, *args, **kwargs)  # type: ignore[method-assign]
    TrialStore.outcome = lambda store, *args: recorder.trial(store, *args)  # type: ignore[method-assign]
    devices.BACKENDS["triton"] = devices.Backend("cpu", lambda: None)
    for op in OPS.values():
        op._is_plain_on_host = False
    _overlap_triton.overlaps_kernels = lambda device: True
    _hopper.compute_capability = lambda device: _hopper.HOPPER
    rms_norm_triton.multiprocessors = lambda device: 132
    linear_library.accelerator = lambda device: _Names
    graphs.record_graph = _record
    graphs.wants_graphs = lambda device, requested: True
    inputs.start_copy = _copy
    torch.empty, torch.empty_like = torch.zeros, torch.zeros_like  # as indices, all results must be valid
    torch.Tensor.new_empty = torch.Tensor.new_zeros  # type: ignore[method-assign]


class _Names:
    @staticmethod
    def get_device_name(device: Any) -> str:
        return "Hopper"


def _record(device: str, function: Callable[[], None], *, pool: Any = None) -> Callable[[], None]:
    function()
    context = contextvars.copy_context()  # a graph keeps the kernels that were chosen while it was recorded
    return lambda: context.run(function)


def _copy(source: torch.Tensor, to: torch.Tensor) -> None:
    from whorl.engine.kernels_triton import copy

    if 0 < source.nbytes <= inputs.MOST_COPIED:
        copy(source.view(torch.uint8), to.view(torch.uint8))
    to.copy_(source)


class Shape(NamedTuple):
    """What a step is made of."""

    decoding: int
    prompts: int
    tokens: int  # of the prompts


def load(llm: LLM) -> Iterator[None]:
    """Run requests of all lengths that come and go; yield after each step."""
    rng = random.Random(5)
    longest = llm.max_model_len - 60
    for number in range(400):
        if number in (100, 200, 300):  # many prompts at once: long ones, the same with a cached prefix, and short ones
            while llm.has_work:
                llm.step()
                yield
            for token in range(36):
                prompt = [token] * 19 if number == 300 else [7] * (longest - 3) + [token] * 3
                llm.add(prompt, SamplingParams(max_tokens=4))
        if number % 3 and rng.random() < 0.7:
            length = rng.choice((1, 2, rng.randint(1, 20), rng.randint(1, longest), rng.randint(longest // 2, longest)))
            prompt = [rng.randrange(llm.vocab_size) for _ in range(length)]
            if rng.random() < 0.3:
                prompt = [7] * (length - 1) + prompt[:1]  # a prefix that is cached by then
            params = SamplingParams(
                max_tokens=rng.randint(1, 50),
                temperature=rng.choice((0.0, 0.8)),
                logprobs=rng.choice((None, None, 3)),
                prompt_logprobs=rng.choice((None,) * 6 + (2,)),
                repetition_penalty=rng.choice((1.0, 1.0, 1.2)),
                ignore_eos=True,
            )
            for _ in range(rng.choice((1, 1, 1, 5, 30))):
                llm.add(prompt[: rng.randint(1, length)], params)
        llm.step()
        yield
    while llm.has_work:
        llm.step()
        yield


def watch(llm: LLM) -> list[Shape]:
    """Return a list that gets what each step is made of."""
    shapes, run = [Shape(0, 0, 0)], llm.runner.run

    def watched(batch: Batch, *args: Any) -> Any:
        prompts = [chunk for chunk in batch.chunks if not chunk.is_decode]
        shapes.append(Shape(len(batch.chunks) - len(prompts), len(prompts), sum(chunk.length for chunk in prompts)))
        return run(batch, *args)

    llm.runner.run = watched  # type: ignore[method-assign]
    return shapes


def main() -> None:
    options = json.loads(sys.argv[1]) if sys.argv[1:] else {}
    config = MODELS[options.get("model", "experts")] | CONFIG
    model = random_model(config, device="cpu", dtype=torch.bfloat16)
    recorder = Recorder()
    pretend(recorder)
    llm = LLM(model=model, **(SETTINGS | options.get("settings", {})), warm=False)
    work = warmup.WarmUp(llm, "full")
    tasks, left_out = work.tasks, options.get("without")
    if left_out:
        work.tasks = lambda: (task for task in tasks() if not task.description.startswith(left_out))  # type: ignore[method-assign]
    num_tasks = sum(1 for _ in work.run())
    warmed = len(recorder.seen)
    late: list[str] = []
    shapes = watch(llm)
    for step, _ in enumerate(load(llm)):
        new = list(recorder.seen.values())[warmed + len(late) :]
        late += [f"step {step} ({shapes[-1]}): {name}" for name in new]
    names = Counter(name for name, _ in list(recorder.seen)[:warmed])
    document: dict[str, Any] = {"tasks": num_tasks, "warmed": warmed, "by_kernel": names, "late": late}
    document |= {
        f"most_{name}": max(values) for name, values in zip(Shape._fields, zip(*shapes, strict=True), strict=True)
    }
    json.dump(document, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
