"""Train a tiny DeepSeek-V3.2 for one step on several ranks; return loss, gradients and counts of the whole model.

TorchTitan is imported inside the functions, because without it these checks are skipped.
"""

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from whorl.device import HOST

BATCH, LENGTH = 8, 32  # sequences of the global batch, tokens of a sequence
# What a step has computed: "loss", "norm", "gradients" by parameter; "counts" (tokens per expert), "kl" (indexer loss)
# and "biases" (of the experts) by layer. A parameter without a gradient has None.
Result = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Degrees:
    """The degrees and options of a training step; the ranks that the degrees leave are data parallel by FSDP."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    replicate: int = 1
    schedule: str = "1F1B"
    reshard: str = "default"  # parallelism.fsdp_reshard_after_forward
    balancer: str | None = "headtail"
    checkpointing: str = "none"
    loss_parallel: bool = True
    compiled: bool = False
    stage: str = "sparse"
    core: str = "small"  # "small" operators, or the path of the fused attention: "masked" or "absorbed"
    converters: tuple[str, ...] = ()
    dtype: str = "float32"  # training.mixed_precision_param
    micro_batches: int = 1  # gradient accumulation; a pipeline divides each of them again
    model: tuple[tuple[str, Any], ...] = ()  # model arguments that replace the defaults


def job(degrees: Degrees) -> Any:
    """Return TorchTitan's job config with these degrees."""
    from torchtitan.config import JobConfig

    from whorl.titan.config import Whorl
    from whorl.titan.job_options import DEGREES

    config: Any = JobConfig()
    config.training.seq_len = LENGTH
    config.training.global_batch_size = BATCH
    config.training.mixed_precision_param = degrees.dtype
    config.activation_checkpoint.mode = degrees.checkpointing
    config.activation_checkpoint.selective_ac_option = "op"
    parallelism = config.parallelism
    parallelism.disable_loss_parallel = not degrees.loss_parallel
    for name in ("tp", "cp", "pp", "ep", "etp"):
        setattr(parallelism, DEGREES[name], getattr(degrees, name))
    parallelism.data_parallel_replicate_degree = degrees.replicate
    parallelism.context_parallel_load_balancer = degrees.balancer
    parallelism.pipeline_parallel_schedule = degrees.schedule
    parallelism.pipeline_parallel_expert_parallel_overlap = False  # needs streams
    parallelism.fsdp_reshard_after_forward = degrees.reshard
    config.compile.enable, config.compile.backend = degrees.compiled, "aot_eager"
    config.whorl = Whorl(stage=degrees.stage)  # type: ignore[arg-type]
    return config


def build(config: Any, **model_args: Any) -> Any:
    """Build the model of a job with fixed random weights. model_args: arguments that replace the defaults here."""
    from whorl.titan.deepseek_v32.args import FLAVOURS, experts
    from whorl.titan.deepseek_v32.model import DeepSeekV32Model

    moe_args = experts(num_experts=8, top_k=2, num_expert_groups=4, num_limited_groups=2)
    small = {"dim": 32, "inter_dim": 48, "moe_inter_dim": 16, "n_layers": 3, "index_topk": 8, "vocab_size": 64}
    args = dataclasses.replace(FLAVOURS["tiny"], moe_args=moe_args, **{**small, **model_args})
    args.update_from_config(config)
    torch.manual_seed(3)
    model = DeepSeekV32Model(args)
    model.init_weights()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif "indexer" in name or "router" in name:
                parameter.mul_(10)  # so that the selection does not depend on the last bit
    return model


def batch() -> tuple[Tensor, Tensor]:
    """Return the tokens and the labels of the global batch, the same on every rank."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 64, (BATCH, LENGTH + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def full_tensor(x: Any) -> Tensor:
    """Return the whole tensor of a DTensor, gathered from all ranks; a tensor is only detached."""
    tensor: Tensor = x.detach().full_tensor() if hasattr(x, "full_tensor") else x.detach()
    return tensor


def collect(parts: list[Any]) -> Result:
    """Return full gradients by name, and by layer the tokens per expert and the indexer loss of this rank."""
    from whorl.titan.deepseek_v32.core import pop_log

    result: Result = {"gradients": {}, "counts": {}, "kl": {}}
    for part in parts:
        for name, parameter in part.named_parameters():
            name = name.replace("_checkpoint_wrapped_module.", "")
            result["gradients"][name] = None if parameter.grad is None else full_tensor(parameter.grad).clone()
        for layer, block in part.layers.items():
            result["kl"][layer] = pop_log(block.attention.core.kl)
            if block.moe_enabled:
                result["counts"][layer] = block.moe.tokens_per_expert.clone()
    return result


def install_cpu_shims(device: str) -> None:
    """Patch TorchTitan for a CPU when the device is one: TorchTitan assumes an accelerator."""
    if device == HOST:
        from whorl.titan.cpu import install

        install()


def one_rank(micro_batches: int = 1, stage: str = "sparse", *, device: str = HOST, **model_args: Any) -> Result:
    """Return the result of a step on one rank, which those of several ranks are compared with.

    micro_batches: the batch is divided into as many parts, whose gradients are added in order.
    """
    from torchtitan.components.loss import cross_entropy_loss

    model = build(job(Degrees(stage=stage)), **model_args).to(device)
    loss = torch.zeros((), device=device)
    for tokens, labels in zip(*(t.to(device).chunk(micro_batches) for t in batch()), strict=True):
        part_loss = cross_entropy_loss(model(tokens), labels) / (BATCH * LENGTH)
        part_loss.backward()
        loss += part_loss.detach()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    return {"loss": loss, "norm": norm, **collect([model])}


def dims(degrees: Degrees) -> Any:
    """Return TorchTitan's ParallelDims of these degrees."""
    from whorl.titan.job_options import parallel_dims

    return parallel_dims(job(degrees), dist.get_world_size())


def run(degrees: Degrees, device: str = HOST) -> Result:
    """Run a training step; every rank calls this and returns what it knows of the result.

    Loss, counts and indexer loss are summed over data- and context-parallel ranks, as TorchTitan does.
    """
    install_cpu_shims(device)
    torch._dynamo.reset()  # other degrees bring other shapes
    from torchtitan.distributed import utils
    from torchtitan.distributed.context_parallel import prepare_context_parallel_input

    parallel_dims, config = dims(degrees), job(degrees)
    data = parallel_dims.dp_replicate * parallel_dims.dp_shard
    rank = parallel_dims.get_mesh("batch").get_local_rank() if data > 1 else 0
    tokens, labels = (t.to(device).chunk(data)[rank] for t in batch())
    micro_batches = degrees.micro_batches
    config.training.local_batch_size = tokens.shape[0] // micro_batches
    model = build(config, **dict(degrees.model)).to(device)
    if degrees.core != "small":
        fuse(model, degrees.core)
    if degrees.converters:
        from whorl.titan.converters.table import CONVERTERS

        for name in degrees.converters:
            CONVERTERS[name](config, parallel_dims).convert(model)
    step = _pipelined(model, parallel_dims, config) if degrees.pp > 1 else _plain(model, parallel_dims, config)
    loss = torch.zeros((), device=device)
    context = utils.get_train_context(degrees.tp > 1 and degrees.loss_parallel)
    for micro_batch in zip(*(t.chunk(micro_batches) for t in (tokens, labels)), strict=True):
        extra_inputs: dict[str, Any] = {}
        inputs, targets = micro_batch
        if degrees.cp > 1:
            mesh, torch_device = parallel_dims.get_mesh("cp"), torch.device(device)
            local_shards = prepare_context_parallel_input(
                inputs, targets, extra_inputs, mesh, torch_device, degrees.balancer
            )
            inputs, targets, extra_inputs = local_shards
        with context():
            loss += step(inputs, targets, extra_inputs)
    result = collect(step.parts)
    mesh = parallel_dims.get_optional_mesh("loss")
    if mesh is not None:
        for value in (loss, *result["counts"].values(), *result["kl"].values()):
            dist.all_reduce(value, group=mesh.get_group())
    return {"loss": loss, **result, **_update(step.parts, parallel_dims, config)}


def _update(parts: list[Any], parallel_dims: Any, config: Any) -> Result:
    """Return TorchTitan's gradient norm, and the biases of the experts after an optimizer step."""
    from torchtitan.distributed import utils

    from whorl.titan.optimizer import build_optimizers

    parameters = [p for part in parts for p in part.parameters()]
    pp_mesh = parallel_dims.get_optional_mesh("pp")
    norm = utils.clip_grad_norm_(parameters, 1e9, pp_mesh=pp_mesh, ep_enabled=parallel_dims.ep_enabled)
    build_optimizers(parts, config.optimizer, parallel_dims).step()
    blocks = {layer: block for part in parts for layer, block in part.layers.items() if block.moe_enabled}
    return {"norm": full_tensor(norm), "biases": {layer: block.moe.expert_bias for layer, block in blocks.items()}}


def fuse(model: Any, path: str) -> None:
    """Replace the attention core of every layer by the fused one."""
    from whorl.titan.deepseek_v32.fused import FusedDSA

    for block in model.layers.values():
        settings = dataclasses.replace(block.attention.core.settings, path=path)
        block.attention.core = FusedDSA(settings)


def _plain(model: Any, parallel_dims: Any, config: Any) -> Any:
    """Return a function (tokens, labels, other inputs) -> loss that runs forward and backward.

    Its attribute `parts` has the parallelized model.
    """
    from torchtitan.components.loss import cross_entropy_loss

    from whorl.titan.deepseek_v32.infra.parallelize import parallelize_deepseek_v32

    model = parallelize_deepseek_v32(model, parallel_dims, config)

    def step(inputs: Tensor, labels: Tensor, more: dict[str, Any]) -> Tensor:
        loss = cross_entropy_loss(model(inputs, **more), labels) / (BATCH * LENGTH)
        loss.backward()
        return full_tensor(loss)

    step.parts = [model]  # type: ignore[attr-defined]
    return step


def _pipelined(model: Any, parallel_dims: Any, config: Any) -> Any:
    """Return the same as `_plain` for a pipeline; `parts` has the stages of this rank.

    On a rank without the last stage the loss is 0.
    """
    from torchtitan.components.loss import cross_entropy_loss

    from whorl.titan.deepseek_v32.infra.parallelize import parallelize_deepseek_v32
    from whorl.titan.pipeline import build_pipeline

    schedule, parts, is_first, is_last = build_pipeline(
        model,
        parallel_dims,
        config,
        next(model.parameters()).device,
        model.model_args,
        parallelize_deepseek_v32,
        cross_entropy_loss,
    )

    def step(inputs: Tensor, labels: Tensor, more: dict[str, Any]) -> Tensor:
        losses: list[Tensor] | None = [] if is_last else None
        schedule.step(
            *((inputs,) if is_first else ()),
            **more,
            target=labels if is_last else None,
            losses=losses,
            return_outputs=False,
        )
        return (
            full_tensor(torch.stack(losses).sum()) / (BATCH * LENGTH)
            if losses
            else inputs.new_zeros((), dtype=torch.float32)
        )

    step.parts = parts  # type: ignore[attr-defined]
    return step


def merge_ranks(results: list[Result], degrees: Degrees) -> Result:
    """Merge the results of all ranks into that of the whole model; each pipeline stage has a part of it."""
    if degrees.pp == 1:
        return results[0]
    # The ranks of the last stage, one in pp, all have the loss; the others have 0.
    loss = sum(result["loss"] for result in results) * degrees.pp / len(results)
    merged: Result = {"loss": loss, "norm": results[0]["norm"]}
    for kind in ("gradients", "counts", "kl", "biases"):
        merged[kind] = {name: value for result in results for name, value in result[kind].items()}
    return merged
