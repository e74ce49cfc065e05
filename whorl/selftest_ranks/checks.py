"""What several ranks must agree on. A check raises, or says in a few words what it compared.

Numbers come from generators seeded by rank, so every rank can compute what the others hold and no check trusts the
collective that it tests.
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


class Skipped(Exception):
    """This machine cannot run the check; the message says why."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """run(device, ranks). starts_ranks: it runs in one process, which starts the ranks itself, as the engine does."""

    run: Callable[[str, int], str]
    starts_ranks: bool = False


def data(rank: int, *shape: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.randn(shape, generator=generator).to(device, dtype)


def same(got: Tensor, want: Tensor, what: str) -> None:
    if not torch.equal(got, want):
        wrong = int((got != want).sum())
        raise AssertionError(f"{what}: {wrong} of {want.numel()} elements are not what the ranks sent")


def close(got: Tensor, want: Tensor, what: str, bound: float) -> None:
    worst = float((got.float() - want.float()).abs().max() / want.float().abs().max().clamp_min(1e-30))
    if not worst <= bound:
        raise AssertionError(f"{what}: off by {worst:.1e} of the largest element, at most {bound:.0e} is right")


# ---- collectives


def plain_collectives(device: str, ranks: int) -> str:
    me = dist.get_rank()
    everyone = [data(rank, ranks * 3, 5, device=device) for rank in range(ranks)]
    mine = everyone[me]
    sum_of_all = torch.stack(everyone).sum(0)
    reduced = mine.clone()
    dist.all_reduce(reduced)
    close(reduced, sum_of_all, "all_reduce", 1e-6)
    gathered = torch.empty(ranks, *mine.shape, device=device)
    dist.all_gather(list(gathered.unbind()), mine)
    same(gathered, torch.stack(everyone), "all_gather")
    scattered = torch.empty(3, 5, device=device)
    dist.reduce_scatter_tensor(scattered, mine.clone())
    close(scattered, sum_of_all.view(ranks, 3, 5)[me], "reduce_scatter", 1e-6)
    exchanged = torch.empty_like(mine)
    dist.all_to_all_single(exchanged, mine)
    same(exchanged, torch.cat([x.view(ranks, 3, 5)[me] for x in everyone]), "all_to_all")
    for source in range(ranks):
        sent = mine.clone()
        dist.broadcast(sent, source)
        same(sent, everyone[source], f"broadcast from rank {source}")
    _pass_round(everyone, me, ranks)
    return "all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send and receive"


def _pass_round(everyone: list[Tensor], me: int, ranks: int) -> None:
    received = torch.empty_like(everyone[me])
    pairs = [dist.P2POp(dist.isend, everyone[me], (me + 1) % ranks), dist.P2POp(dist.irecv, received, (me - 1) % ranks)]
    for work in dist.batch_isend_irecv(pairs):
        work.wait()
    same(received, everyone[(me - 1) % ranks], "send and receive")


def ordered_sums(device: str, ranks: int) -> str:
    """In rank order, so that a row's bits are its own; an odd number of rows leaves the last rank fewer."""
    group, me = collectives.group_name(None), dist.get_rank()
    for dtype in (torch.float32, torch.bfloat16):
        everyone = [data(rank, 2 * ranks + 1, 16, device=device, dtype=dtype) for rank in range(ranks)]
        total = everyone[0].float()
        for other in everyone[1:]:
            total = total + other.float()
        want = total.to(dtype)
        same(collectives.ordered_all_reduce(everyone[me], group), want, f"ordered_all_reduce {dtype}")
        alone = collectives.ordered_all_reduce(everyone[me][:1].contiguous(), group)
        same(alone, want[:1], f"ordered_all_reduce of one row, {dtype}")
        rows = collectives.rows_per_rank(want.shape[0], ranks)
        mine = want[me * rows : (me + 1) * rows]
        found = collectives.ordered_reduce_scatter(everyone[me], group)
        same(found[: len(mine)], mine, f"ordered_reduce_scatter {dtype}")
        same(collectives.all_gather(found, want.shape[0], group), want, f"all_gather {dtype}")
    return "bit for bit the sum in rank order, fp32 and bf16, one row and many"


def quantized_gather(device: str, ranks: int) -> str:
    group, me, tokens = collectives.group_name(None), dist.get_rank(), 2 * ranks
    whole = data(0, tokens, 64, device=device)
    for format, bound in (("int8", 1e-2), ("fp8", 8e-2)):
        found = collectives.all_gather_quantized(whole[2 * me : 2 * me + 2].contiguous(), tokens, group, format)
        close(found, whole, f"gather in {format}", bound)
    return "int8 and fp8"


def symmetric_memory(device: str, ranks: int) -> str:
    from whorl.passes.fused import has_symmetric_memory

    if device != BACKENDS["triton"].home:
        raise Skipped("symmetric memory belongs to CUDA")
    if not has_symmetric_memory(collectives.group_name(None)):
        raise AssertionError(
            "the cards cannot map each other's memory: products and collectives overlap in chunks only"
        )
    return "every rank maps every other's memory"


# ---- passes


class Block(torch.nn.Module):
    """Norm, two products, a sum over ranks: what every layer of a tensor-parallel model has."""

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


def _rewritten(device: str, ranks: int, *, fuse: bool) -> tuple[Any, Tensor, Tensor]:
    """(the compiled block, its answer, the plain block's)."""
    from whorl.passes import SequenceParallel, compile

    block = torch.nn.Sequential(Block(device), Block(device)).requires_grad_(False)
    x = data(0, 4 * ranks - 1, 64, device=device, dtype=torch.bfloat16)
    plain = compile(block, SequenceParallel(min_tokens=1 << 40, sharded=("up", "down")), backend="eager")
    asked = SequenceParallel(min_tokens=1, fuse=fuse, sharded=("up", "down"))
    passes = compile(block, asked, backend="eager")
    with torch.no_grad():
        want, got = plain(x), passes(x)
    if passes.last_run != "rewritten":
        raise AssertionError(f"the passes left the graph alone: {passes.report}")
    return passes, got, want


def sequence_parallel(device: str, ranks: int) -> str:
    _, got, want = _rewritten(device, ranks, fuse=False)
    same(got, want, "the rewritten graph against the plain one")
    return "reduce-scatter and all-gather for all-reduce, bit for bit, a token count that the ranks do not divide"


def fused_products(device: str, ranks: int) -> str:
    _, got, want = _rewritten(device, ranks, fuse=True)
    same(got, want, "products overlapped with collectives against the plain graph")
    from whorl.passes.overlapped import matmul_reduce_scatter

    me, group = dist.get_rank(), collectives.group_name(None)
    everyone = [data(rank, 64 * ranks, 256, device=device, dtype=torch.bfloat16) for rank in range(ranks)]
    weight = data(99, 256, 256, device=device, dtype=torch.bfloat16)
    total = torch.stack([x.float() @ weight.float() for x in everyone]).sum(0)
    found = matmul_reduce_scatter(everyone[me], weight, group, False)
    close(found, total.view(ranks, 64, 256)[me], "matmul_reduce_scatter by the platform", 2e-2)
    return "overlapped in chunks bit for bit; the platform's own fused product within bf16"


# ---- engine


def _checkpoint(folder: Path, config: dict[str, Any]) -> Path:
    """A tiny random model as every rank loads it."""
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models

    from whorl import nn
    from whorl.engine.weights import random_model

    (folder / "config.json").write_text(json.dumps(config))
    model: Any = random_model(config, device="cpu", dtype=torch.float32)
    save_file({name: slot.into.clone() for name, slot in nn.slots(model).items()}, folder / "model.safetensors")
    words = {f"w{i}": i for i in range(config["vocab_size"])}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return folder


def _engine(device: str, ranks: int, **options: Any) -> str:
    from whorl.engine.llm import LLM
    from whorl.engine.sequence import SamplingParams
    from whorl.models.llama import Llama
    from whorl.models.qwen3 import Qwen3

    wide: dict[str, Any] = {"hidden_size": 32 * ranks, "intermediate_size": 32 * ranks}
    wide |= {"num_attention_heads": 2 * ranks, "num_key_value_heads": ranks}
    configs = {
        "Llama": Llama.tiny(**wide, head_dim=16),
        "Qwen3-MoE": Qwen3.tiny(**wide, num_experts=8, norm_topk_prob=True),
    }
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=1)
    prompts: Any = [[3, 5, 8], [1, 2] * 9, [9] * 5]
    for name, config in configs.items():
        with tempfile.TemporaryDirectory() as folder:
            path = _checkpoint(Path(folder), config)
            found = []
            for size, more in ((1, {}), (ranks, options)):
                llm = LLM(path, device=device, dtype=torch.float32, tp=size, max_model_len=64, num_blocks=64, **more)
                try:
                    found.append(llm.generate(prompts, params))
                finally:
                    llm.close()
        for alone, together in zip(*found, strict=True):
            _compare_outputs(name, alone, together)
    return f"{' and '.join(configs)}: tokens and log probabilities of one rank"


def _compare_outputs(name: str, alone: Any, together: Any) -> None:
    if alone.token_ids != together.token_ids:
        raise AssertionError(f"{name}: tokens {together.token_ids}, alone {alone.token_ids}")
    pairs = zip(alone.logprobs, together.logprobs, strict=True)
    worst = max(abs(a.logprob - b.logprob) for a, b in pairs)
    if not worst < 1e-3:
        raise AssertionError(f"{name}: log probabilities are off by {worst:.1e}, at most 1e-3 is right")


def tensor_parallel(device: str, ranks: int) -> str:
    return _engine(device, ranks)


def engine_sequence_parallel(device: str, ranks: int) -> str:
    return _engine(device, ranks, sp="on")


# ---- training


def _trains(**degrees: Any) -> Callable[[str, int], str]:
    """A check of one layout of a training step; ranks that are left over share the data."""

    def run(device: str, ranks: int) -> str:
        if not is_installed("torchtitan"):
            raise Skipped("TorchTitan is not installed: pip install 'whorl[train]'")
        from . import compare, layouts

        if ranks % 2 or layouts.BATCH % ranks:
            raise Skipped(f"the test's batch of {layouts.BATCH} is shared by 2, 4 or 8 ranks, not by {ranks}")
        layout = layouts.Degrees(**degrees)
        mine = _on_host(layouts.run(layout, device))
        answers: list[Any] = [None] * ranks
        dist.all_gather_object(answers, mine)
        want = _on_host(layouts.one_rank(stage=layout.stage, device=device, **dict(layout.model)))
        tolerance = compare.TOLERANCE if device == HOST else 20 * compare.TOLERANCE  # products by other kernels
        compare.compare(layouts.together(answers, layout), want, layout, tolerance)
        return "loss, every gradient, routing and the indexer's loss of one rank"

    return run


def _on_host(found: Any) -> Any:
    if isinstance(found, dict):
        return {name: _on_host(value) for name, value in found.items()}
    return found.cpu() if isinstance(found, Tensor) else found


CHECKS: dict[str, Check] = {
    "collectives": Check(run=plain_collectives),
    "ordered sums": Check(run=ordered_sums),
    "quantised gather": Check(run=quantized_gather),
    "symmetric memory": Check(run=symmetric_memory),
    "sequence parallelism": Check(run=sequence_parallel),
    "fused products": Check(run=fused_products),
    "engine, tensor parallel": Check(run=tensor_parallel, starts_ranks=True),
    "engine, sequence parallel": Check(run=engine_sequence_parallel, starts_ranks=True),
    "train, FSDP": Check(run=_trains()),
    "train, FSDP, parameters freed": Check(run=_trains(reshard="always")),
    "train, tensor parallel": Check(run=_trains(tp=2)),
    "train, expert parallel": Check(run=_trains(ep=2)),
    "train, context parallel": Check(run=_trains(cp=2)),
    "train, pipeline": Check(run=_trains(pp=2)),
    "train, pipeline, DualPipeV": Check(run=_trains(pp=2, schedule="DualPipeV", model=(("n_layers", 4),))),
}
