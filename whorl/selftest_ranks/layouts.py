"""A tiny DeepSeek-V3.2 on some layout of ranks: its loss, gradients and counts as if it were one model.

TorchTitan is imported inside the functions: without it these checks are left out.
"""

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from whorl.device import HOST

BATCH, LENGTH = 8, 32
Result = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Degrees:
    """Degrees as TorchTitan names them; what is left over is sharded data parallelism."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    replicate: int = 1
    schedule: str = "1F1B"
    reshard: str = "default"  # FSDP2's parameters after a forward
    balancer: str | None = "headtail"
    checkpointing: str = "none"
    loss_parallel: bool = True
    compiled: bool = False
    stage: str = "sparse"
    core: str = "small"  # or a path of the fused one
    converters: tuple[str, ...] = ()
    dtype: str = "float32"  # of FSDP2's parameters in use
    micro_batches: int = 1  # gradient accumulation; a pipeline cuts each into its own
    model: tuple[tuple[str, Any], ...] = ()


def job(layout: Degrees) -> Any:
    from torchtitan.config import JobConfig

    from whorl.titan.config import Whorl
    from whorl.titan.job_options import DEGREES

    config: Any = JobConfig()
    config.training.seq_len = LENGTH
    config.training.global_batch_size = BATCH
    config.training.mixed_precision_param = layout.dtype
    config.activation_checkpoint.mode = layout.checkpointing
    config.activation_checkpoint.selective_ac_option = "op"
    parallelism = config.parallelism
    parallelism.disable_loss_parallel = not layout.loss_parallel
    for name in ("tp", "cp", "pp", "ep", "etp"):
        setattr(parallelism, DEGREES[name], getattr(layout, name))
    parallelism.data_parallel_replicate_degree = layout.replicate
    parallelism.context_parallel_load_balancer = layout.balancer
    parallelism.pipeline_parallel_schedule = layout.schedule
    parallelism.pipeline_parallel_expert_parallel_overlap = False  # needs streams
    parallelism.fsdp_reshard_after_forward = layout.reshard
    config.compile.enable, config.compile.backend = layout.compiled, "aot_eager"
    config.whorl = Whorl(stage=layout.stage)  # type: ignore[arg-type]
    return config


def build(config: Any, **more: Any) -> Any:
    """The same weights whatever the layout."""
    from whorl.titan.deepseek_v32.args import FLAVOURS, experts
    from whorl.titan.deepseek_v32.model import DeepSeekV32Model

    chosen = experts(num_experts=8, top_k=2, num_expert_groups=4, num_limited_groups=2)
    small = {"dim": 32, "inter_dim": 48, "moe_inter_dim": 16, "n_layers": 3, "index_topk": 8, "vocab_size": 64}
    args = dataclasses.replace(FLAVOURS["tiny"], moe_args=chosen, **{**small, **more})
    args.update_from_config(config)
    torch.manual_seed(3)
    model = DeepSeekV32Model(args)
    model.init_weights()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif "indexer" in name or "router" in name:
                parameter.mul_(10)  # so that choices do not hang on the last bit
    return model


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 64, (BATCH, LENGTH + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def whole(x: Any) -> Tensor:
    found: Tensor = x.detach().full_tensor() if hasattr(x, "full_tensor") else x.detach()
    return found


def collect(parts: list[Any]) -> Result:
    """Gradients by name, whole; tokens per expert and KL as this rank has them, by layer."""
    from whorl.titan.deepseek_v32.core import pop_log

    found: Result = {"gradients": {}, "counts": {}, "kl": {}}
    for part in parts:
        for name, parameter in part.named_parameters():
            name = name.replace("_checkpoint_wrapped_module.", "")
            found["gradients"][name] = None if parameter.grad is None else whole(parameter.grad).clone()
        for layer, block in part.layers.items():
            found["kl"][layer] = pop_log(block.attention.core.kl)
            if block.moe_enabled:
                found["counts"][layer] = block.moe.tokens_per_expert.clone()
    return found


def prepare(device: str) -> None:
    """TorchTitan reckons with an accelerator; on a CPU it needs help."""
    if device == HOST:
        from whorl.titan.cpu import install

        install()


def one_rank(micro_batches: int = 1, stage: str = "sparse", *, device: str = HOST, **more: Any) -> Result:
    """What every layout is compared with; micro-batches are added up in order."""
    from torchtitan.components.loss import cross_entropy_loss

    model = build(job(Degrees(stage=stage)), **more).to(device)
    loss = torch.zeros((), device=device)
    for tokens, labels in zip(*(t.to(device).chunk(micro_batches) for t in batch()), strict=True):
        part = cross_entropy_loss(model(tokens), labels) / (BATCH * LENGTH)
        part.backward()
        loss += part.detach()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    return {"loss": loss, "norm": norm, **collect([model])}


def dims(layout: Degrees) -> Any:
    from whorl.titan.job_options import parallel_dims

    return parallel_dims(job(layout), dist.get_world_size())


def run(layout: Degrees, device: str = HOST) -> Result:
    """On every rank; loss and counts are summed as TorchTitan sums them."""
    prepare(device)
    torch._dynamo.reset()  # another layout, other shapes
    from torchtitan.distributed import utils
    from torchtitan.distributed.context_parallel import prepare_context_parallel_input

    parallel_dims, config = dims(layout), job(layout)
    data = parallel_dims.dp_replicate * parallel_dims.dp_shard
    rank = parallel_dims.get_mesh("batch").get_local_rank() if data > 1 else 0
    tokens, labels = (t.to(device).chunk(data)[rank] for t in batch())
    micro_batches = layout.micro_batches
    config.training.local_batch_size = tokens.shape[0] // micro_batches
    model = build(config, **dict(layout.model)).to(device)
    if layout.core != "small":
        fuse(model, layout.core)
    if layout.converters:
        from whorl.titan.converters.table import CONVERTERS

        for name in layout.converters:
            CONVERTERS[name](config, parallel_dims).convert(model)
    step = _pipelined(model, parallel_dims, config) if layout.pp > 1 else _plain(model, parallel_dims, config)
    loss = torch.zeros((), device=device)
    context = utils.get_train_context(layout.tp > 1 and layout.loss_parallel)
    for own in zip(*(t.chunk(micro_batches) for t in (tokens, labels)), strict=True):
        more: dict[str, Any] = {}
        inputs, targets = own
        if layout.cp > 1:
            mesh, place = parallel_dims.get_mesh("cp"), torch.device(device)
            cut = prepare_context_parallel_input(inputs, targets, more, mesh, place, layout.balancer)
            inputs, targets, more = cut
        with context():
            loss += step(inputs, targets, more)
    found = collect(step.parts)
    mesh = parallel_dims.get_optional_mesh("loss")
    if mesh is not None:
        for value in (loss, *found["counts"].values(), *found["kl"].values()):
            dist.all_reduce(value, group=mesh.get_group())
    return {"loss": loss, **found, **_update(step.parts, parallel_dims, config)}


def _update(parts: list[Any], parallel_dims: Any, config: Any) -> Result:
    """TorchTitan's gradient norm, and the experts' biases after an optimizer's step."""
    from torchtitan.distributed import utils

    from whorl.titan.optimizer import build_optimizers

    parameters = [p for part in parts for p in part.parameters()]
    pp_mesh = parallel_dims.get_optional_mesh("pp")
    norm = utils.clip_grad_norm_(parameters, 1e9, pp_mesh=pp_mesh, ep_enabled=parallel_dims.ep_enabled)
    build_optimizers(parts, config.optimizer, parallel_dims).step()
    blocks = {layer: block for part in parts for layer, block in part.layers.items() if block.moe_enabled}
    return {"norm": whole(norm), "biases": {layer: block.moe.expert_bias for layer, block in blocks.items()}}


def fuse(model: Any, path: str) -> None:
    from whorl.titan.deepseek_v32.fused import FusedDSA

    for block in model.layers.values():
        settings = dataclasses.replace(block.attention.core.settings, path=path)
        block.attention.core = FusedDSA(settings)


def _plain(model: Any, parallel_dims: Any, config: Any) -> Any:
    from torchtitan.components.loss import cross_entropy_loss

    from whorl.titan.deepseek_v32.infra.parallelize import parallelize_deepseek_v32

    model = parallelize_deepseek_v32(model, parallel_dims, config)

    def step(inputs: Tensor, labels: Tensor, more: dict[str, Any]) -> Tensor:
        loss = cross_entropy_loss(model(inputs, **more), labels) / (BATCH * LENGTH)
        loss.backward()
        return whole(loss)

    step.parts = [model]  # type: ignore[attr-defined]
    return step


def _pipelined(model: Any, parallel_dims: Any, config: Any) -> Any:
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
            whole(torch.stack(losses).sum()) / (BATCH * LENGTH) if losses else inputs.new_zeros((), dtype=torch.float32)
        )

    step.parts = parts  # type: ignore[attr-defined]
    return step


def together(answers: list[Result], layout: Degrees) -> Result:
    """What all ranks' answers say of the one model."""
    if layout.pp == 1:
        return answers[0]
    loss = sum(a["loss"] for a in answers) * layout.pp / len(answers)
    whole: Result = {"loss": loss, "norm": answers[0]["norm"]}
    for kind in ("gradients", "counts", "kl", "biases"):
        whole[kind] = {name: value for a in answers for name, value in a[kind].items()}
    return whole
