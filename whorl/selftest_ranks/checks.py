"""The checks of `whorl selftest --ranks`, listed in CHECKS. A check returns a text about what it compared, or raises.

Numbers come from generators seeded by rank: a rank computes the data of all, and no check relies on what it tests.
"""

import dataclasses
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from whorl import collectives
from whorl.device import BACKENDS, HOST, is_installed
from whorl.extras import how_to_install


class Skipped(Exception):
    """This machine cannot run the check; the message says why."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """A check, called as run(device, ranks). starts_ranks: it runs in one process that starts the ranks itself."""

    run: Callable[[str, int], str]
    starts_ranks: bool = False


def data(rank: int, *shape: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the random numbers that belong to `rank`, the same on whichever rank this is called."""
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.randn(shape, generator=generator).to(device, dtype)


def same(actual: Tensor, expected: Tensor, label: str) -> None:
    """Raise AssertionError unless the tensors are equal."""
    if not torch.equal(actual, expected):
        differing = int((actual != expected).sum())
        raise AssertionError(f"{label}: {differing} of {expected.numel()} elements differ from the expected ones")


def close(actual: Tensor, expected: Tensor, label: str, bound: float) -> None:
    """Raise AssertionError unless every error is at most `bound` of the largest expected element; NaN fails."""
    error = float((actual.float() - expected.float()).abs().max() / expected.float().abs().max().clamp_min(1e-30))
    if not error <= bound:
        raise AssertionError(f"{label}: off by {error:.1e} of the largest element, expected at most {bound:.0e}")


# ---- collectives


def plain_collectives(device: str, ranks: int) -> str:
    me = dist.get_rank()
    inputs = [data(rank, ranks * 3, 5, device=device) for rank in range(ranks)]
    local_input = inputs[me]
    total = torch.stack(inputs).sum(0)
    reduced = local_input.clone()
    dist.all_reduce(reduced)
    close(reduced, total, "all_reduce", 1e-6)
    gathered = torch.empty(ranks, *local_input.shape, device=device)
    dist.all_gather(list(gathered.unbind()), local_input)
    same(gathered, torch.stack(inputs), "all_gather")
    scattered = torch.empty(3, 5, device=device)
    dist.reduce_scatter_tensor(scattered, local_input.clone())
    close(scattered, total.view(ranks, 3, 5)[me], "reduce_scatter", 1e-6)
    exchanged = torch.empty_like(local_input)
    dist.all_to_all_single(exchanged, local_input)
    same(exchanged, torch.cat([x.view(ranks, 3, 5)[me] for x in inputs]), "all_to_all")
    for source in range(ranks):
        buffer = local_input.clone()
        dist.broadcast(buffer, source)
        same(buffer, inputs[source], f"broadcast from rank {source}")
    _check_send_receive(inputs, me, ranks)
    return "all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send and receive"


def _check_send_receive(inputs: list[Tensor], me: int, ranks: int) -> None:
    received = torch.empty_like(inputs[me])
    send = dist.P2POp(dist.isend, inputs[me], (me + 1) % ranks)
    receive = dist.P2POp(dist.irecv, received, (me - 1) % ranks)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
    same(received, inputs[(me - 1) % ranks], "send and receive")


def ordered_sums(device: str, ranks: int) -> str:
    """Check that sums are added in rank order, bit for bit; an odd token count leaves the last rank fewer tokens."""
    group, me = collectives.group_name(None), dist.get_rank()
    for dtype in (torch.float32, torch.bfloat16):
        inputs = [data(rank, 2 * ranks + 1, 16, device=device, dtype=dtype) for rank in range(ranks)]
        total = inputs[0].float()
        for x in inputs[1:]:
            total = total + x.float()
        expected = total.to(dtype)
        same(collectives.ordered_all_reduce(inputs[me], group), expected, f"ordered_all_reduce {dtype}")
        one_token = collectives.ordered_all_reduce(inputs[me][:1].contiguous(), group)
        same(one_token, expected[:1], f"ordered_all_reduce of one token, {dtype}")
        tokens = collectives.rows_per_rank(expected.shape[0], ranks)
        local_sum = expected[me * tokens : (me + 1) * tokens]
        scattered = collectives.ordered_reduce_scatter(inputs[me], group)
        same(scattered[: len(local_sum)], local_sum, f"ordered_reduce_scatter {dtype}")
        same(collectives.all_gather(scattered, expected.shape[0], group), expected, f"all_gather {dtype}")
    return "bits are equal to the sum in rank order, fp32 and bf16, one token and many"


def quantized_gather(device: str, ranks: int) -> str:
    group, me, tokens = collectives.group_name(None), dist.get_rank(), 2 * ranks
    expected = data(0, tokens, 64, device=device)
    for format, bound in (("int8", 1e-2), ("fp8", 8e-2)):
        gathered = collectives.all_gather_quantized(expected[2 * me : 2 * me + 2].contiguous(), tokens, group, format)
        close(gathered, expected, f"gather in {format}", bound)
    return "int8 and fp8"


def symmetric_memory(device: str, ranks: int) -> str:
    from whorl.passes.fused import has_symmetric_memory

    if device != BACKENDS["triton"].home:
        raise Skipped("symmetric memory needs CUDA")
    if not has_symmetric_memory(collectives.group_name(None)):
        raise AssertionError("the cards cannot map each other's memory: matmuls overlap collectives only in chunks")
    return "every rank maps the memory of every other rank"


# ---- passes


class Block(torch.nn.Module):
    """A norm, two linear layers and an all-reduce: the structure of a layer of a tensor-parallel model."""

    def __init__(self, device: str, width: int = 64) -> None:
        super().__init__()
        me = dist.get_rank()
        self.norm = torch.nn.Parameter(torch.ones(width, device=device, dtype=torch.bfloat16))
        self.up = torch.nn.Parameter(data(me, width, width, device=device, dtype=torch.bfloat16) / 8)
        self.down = torch.nn.Parameter(data(me + 50, width, width, device=device, dtype=torch.bfloat16) / 8)

    def forward(self, x: Tensor) -> Tensor:
        from whorl.ops import linear, rms_norm

        y = linear(torch.nn.functional.silu(linear(rms_norm(x, self.norm), self.up)), self.down)
        y = torch.ops._c10d_functional.all_reduce(y, "sum", collectives.group_name(None))
        return x + torch.ops._c10d_functional.wait_tensor(y)


def _run_rewritten(device: str, ranks: int, *, fuse: bool) -> tuple[Tensor, Tensor]:
    """Return the output of two blocks rewritten by the passes, and the output of the same blocks unchanged."""
    from whorl.passes import SequenceParallel, compile

    block = torch.nn.Sequential(Block(device), Block(device)).requires_grad_(False)
    x = data(0, 4 * ranks - 1, 64, device=device, dtype=torch.bfloat16)
    unchanged = compile(block, SequenceParallel(min_tokens=1 << 40, sharded=("up", "down")), backend="eager")
    rewritten = compile(block, SequenceParallel(min_tokens=1, fuse=fuse, sharded=("up", "down")), backend="eager")
    with torch.no_grad():
        expected, actual = unchanged(x), rewritten(x)
    if rewritten.last_run != "rewritten":
        raise AssertionError(f"the passes did not rewrite the graph: {rewritten.report}")
    return actual, expected


def sequence_parallel(device: str, ranks: int) -> str:
    actual, expected = _run_rewritten(device, ranks, fuse=False)
    same(actual, expected, "the rewritten graph against the unchanged one")
    return "reduce-scatter and all-gather for all-reduce: bits are equal, for a token count the ranks do not divide"


def fused_products(device: str, ranks: int) -> str:
    """Compare matmuls that overlap with collectives with the unchanged graph and with a product in fp32."""
    actual, expected = _run_rewritten(device, ranks, fuse=True)
    same(actual, expected, "matmuls overlapped with collectives against the unchanged graph")
    from whorl.passes.fused import matmul_reduce_scatter

    me, group = dist.get_rank(), collectives.group_name(None)
    inputs = [data(rank, 64 * ranks, 256, device=device, dtype=torch.bfloat16) for rank in range(ranks)]
    weight = data(99, 256, 256, device=device, dtype=torch.bfloat16)
    total = torch.stack([x.float() @ weight.float() for x in inputs]).sum(0)
    fused = matmul_reduce_scatter(inputs[me], weight, group, False)
    close(fused, total.view(ranks, 64, 256)[me], "matmul_reduce_scatter of the platform", 2e-2)
    return "overlapped in chunks: bits are equal; the platform's fused product is within bf16"


# ---- engine


def _checkpoint(folder: Path, config: dict[str, Any]) -> Path:
    """Write a tiny random model with a tokenizer into a folder and return the folder."""
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models

    from whorl import nn
    from whorl.engine.weights import random_model

    (folder / "config.json").write_text(json.dumps(config))
    model: Any = random_model(config, device="cpu", dtype=torch.float32)
    save_file({name: slot.tensor() for name, slot in nn.destinations(model).items()}, folder / "model.safetensors")
    words = {f"w{i}": i for i in range(config["vocab_size"])}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return folder


def _check_engine(device: str, ranks: int, *, is_moe: bool = False, **options: Any) -> str:
    """Compare the tokens and the log probabilities of the engine on several ranks with those on one rank.

    is_moe: only of a model with experts.
    """
    from whorl.engine.llm import LLM
    from whorl.engine.sequence import SamplingParams
    from whorl.models.llama import Llama
    from whorl.models.qwen3 import Qwen3

    sizes: dict[str, Any] = {"hidden_size": 32 * ranks, "intermediate_size": 32 * ranks}
    sizes |= {"num_attention_heads": 2 * ranks, "num_key_value_heads": ranks}
    configs = {
        "Llama": Llama.tiny(**sizes, head_dim=16),
        "Qwen3-MoE": Qwen3.tiny(**sizes, num_experts=4 * ranks, norm_topk_prob=True),
    }
    if is_moe:
        del configs["Llama"]
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=1)
    prompts: Any = [[3, 5, 8], [1, 2] * 9, [9] * 5]
    for name, config in configs.items():
        with tempfile.TemporaryDirectory() as folder:
            path = _checkpoint(Path(folder), config)
            outputs = []
            for extra in ({}, {"tp": ranks, **options}):
                llm = LLM(path, device=device, dtype=torch.float32, max_model_len=64, num_blocks=64, **extra)
                try:
                    outputs.append(llm.generate(prompts, params))
                finally:
                    llm.close()
        for alone, together in zip(*outputs, strict=True):
            _compare_outputs(name, alone, together)
    return f"{' and '.join(configs)}: tokens and log probabilities match those of one rank"


def _compare_outputs(name: str, alone: Any, together: Any) -> None:
    if alone.token_ids != together.token_ids:
        raise AssertionError(f"{name}: tokens are {together.token_ids}, expected {alone.token_ids} as on one rank")
    pairs = zip(alone.logprobs, together.logprobs, strict=True)
    worst = max(abs(a.logprob - b.logprob) for a, b in pairs)
    if not worst < 1e-3:
        raise AssertionError(f"{name}: log probabilities are off by {worst:.1e}, expected at most 1e-3")


def tensor_parallel(device: str, ranks: int) -> str:
    return _check_engine(device, ranks)


def engine_sequence_parallel(device: str, ranks: int) -> str:
    return _check_engine(device, ranks, sp="on")


def engine_expert_parallel(device: str, ranks: int) -> str:
    _check_engine(device, ranks, is_moe=True, ep=ranks)
    return _check_engine(device, ranks, is_moe=True, ep=ranks, tp=1)


# ---- training


def _training_check(**degrees: Any) -> Callable[[str, int], str]:
    """Return a check of a training step with the given degrees; the remaining ranks are data parallel."""

    def run(device: str, ranks: int) -> str:
        if not is_installed("torchtitan"):
            raise Skipped(f"TorchTitan is not installed: {how_to_install('train')}")
        from . import compare, layouts

        if ranks % 2 or layouts.BATCH % ranks:
            raise Skipped(f"ranks is {ranks}, expected 2, 4 or 8, which divide the batch of {layouts.BATCH}")
        layout = layouts.Degrees(**degrees)
        local_result = _on_host(layouts.run(layout, device))
        results: list[Any] = [None] * ranks
        dist.all_gather_object(results, local_result)
        expected = _on_host(layouts.one_rank(stage=layout.stage, device=device, **dict(layout.model)))
        tolerance = compare.TOLERANCE if device == HOST else 20 * compare.TOLERANCE  # other kernels multiply there
        compare.compare(layouts.merge_ranks(results, layout), expected, layout, tolerance)
        return "loss, every gradient, routing and indexer loss match those of one rank"

    return run


def _on_host(result: Any) -> Any:
    if isinstance(result, dict):
        return {name: _on_host(value) for name, value in result.items()}
    return result.cpu() if isinstance(result, Tensor) else result


CHECKS: dict[str, Check] = {
    "collectives": Check(run=plain_collectives),
    "ordered sums": Check(run=ordered_sums),
    "quantised gather": Check(run=quantized_gather),
    "symmetric memory": Check(run=symmetric_memory),
    "sequence parallelism": Check(run=sequence_parallel),
    "fused products": Check(run=fused_products),
    "engine, tensor parallel": Check(run=tensor_parallel, starts_ranks=True),
    "engine, sequence parallel": Check(run=engine_sequence_parallel, starts_ranks=True),
    "engine, expert parallel": Check(run=engine_expert_parallel, starts_ranks=True),
    "train, FSDP": Check(run=_training_check()),
    "train, FSDP, parameters freed": Check(run=_training_check(reshard="always")),
    "train, tensor parallel": Check(run=_training_check(tp=2)),
    "train, expert parallel": Check(run=_training_check(ep=2)),
    "train, context parallel": Check(run=_training_check(cp=2)),
    "train, pipeline": Check(run=_training_check(pp=2)),
    "train, pipeline, DualPipeV": Check(run=_training_check(pp=2, schedule="DualPipeV", model=(("n_layers", 4),))),
}
