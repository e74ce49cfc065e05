"""Backward of pipeline stages with FSDP2: gradients of one rank, whole or in parts, whenever parameters are freed."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import titan_job
import torch
from ranks import shared
from titan_layouts import TIMEOUT, TOLERANCE, Degrees, Result, batch, build, check, collect, dims, expected_result, job
from torch import nn
from torch.distributed.fsdp import FSDPModule

# Three stages on one rank and two micro-batches. A forward comes between the parts of a backward, another micro-batch's
# part between them too, and parts for the parameters follow on each other.
ORDER = "0F0,1F0,2F0,2I0,0F1,1F1,2F1,1I0,2W0,2I1,1I1,0I0,2W1,1W0,1W1,0W0,0I1,0W1"
WHOLE = "0F0,1F0,2F0,2B0,0F1,1F1,2F1,1B0,2B1,1B1,0B0,0B1"
STAGES = [["tok_embeddings", "layers.0"], ["layers.1"], ["layers.2", "norm", "output"]]
SCHEDULES = ("1F1B", "GPipe", "Interleaved1F1B", "ZBVZeroBubble", "InterleavedZeroBubble", "DualPipeV")
FOUR_LAYERS, SIX_LAYERS = (("n_layers", 4),), (("n_layers", 6),)
CONVERTERS = ("whorl_rms_norm", "whorl_rope", "whorl_permute", "whorl_gmm", "whorl_dsa")
# With parameters that are given back after forward, on four ranks, two of them for a stage.
OTHERS: dict[str, Degrees] = {}
for each in SCHEDULES[3:]:
    base = Degrees(pp=2, schedule=each, reshard="always", model=FOUR_LAYERS)
    OTHERS |= {
        f"{each}, cp": dataclasses.replace(base, cp=2),
        f"{each}, cp x ep": dataclasses.replace(base, cp=2, ep=2),
        f"{each}, ep, every converter": dataclasses.replace(base, ep=2, converters=CONVERTERS),
        f"{each}, warm-up": dataclasses.replace(base, model=SIX_LAYERS, stage="warmup"),
    }
    if each != "DualPipeV":  # which wants four micro-batches at a time
        OTHERS[f"{each}, accumulating"] = dataclasses.replace(base, micro_batches=2)
for each in ("1F1B", "Interleaved1F1B"):
    base = Degrees(pp=2, schedule=each, reshard="always", model=FOUR_LAYERS)
    OTHERS |= {
        f"{each}, cp": dataclasses.replace(base, cp=2),
        f"{each}, accumulating": dataclasses.replace(base, micro_batches=2),
        f"{each}, compiled": dataclasses.replace(base, compiled=True),
        f"{each}, selective checkpointing": dataclasses.replace(base, checkpointing="selective"),
        f"{each}, ep, checkpointing": dataclasses.replace(base, ep=2, checkpointing="full"),
    }


def _gathered(part: nn.Module) -> bool:
    """Whether any of its parameters are; without tensor parallelism what is a whole tensor is no DTensor."""
    return any(not hasattr(p, "placements") for p in part.parameters())


def _unreduced(parts: list[nn.Module]) -> bool:
    """Whether gradients of theirs are there that are not sharded."""
    units = [m for part in parts for m in part.modules() if isinstance(m, FSDPModule)]
    groups = [g for unit in units if (g := unit._get_fsdp_state()._fsdp_param_group) is not None]
    params = [p for group in groups for p in group.fsdp_params if hasattr(p, "_unsharded_param")]
    return any(p.unsharded_accumulated_grad is not None or p._unsharded_param.grad is not None for p in params)


def _on_one(csv: str, layout: Degrees) -> Result:
    """A pipeline whose stages are all on one rank, so that two ranks are enough for FSDP2 over them."""
    from whorl.titan.cpu import install

    install()
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.components.loss import cross_entropy_loss

    from whorl.titan.deepseek_v32.infra.parallelize import parallelize_deepseek_v32
    from whorl.titan.pipeline import build_pipeline

    parallel_dims, config = dims(layout), job(layout)
    meshes = {"pp": init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))["pp"]}
    get_mesh = parallel_dims.get_mesh  # knows of no pipeline of one rank
    parallel_dims.get_mesh = lambda name: meshes[name] if name == "pp" else get_mesh(name)
    tokens, labels = (t.chunk(2)[torch.distributed.get_rank()] for t in batch())
    config.training.local_batch_size, config.parallelism.pipeline_parallel_microbatch_size = len(tokens), 2
    config.parallelism.pipeline_parallel_schedule = "Interleaved1F1B"  # how stages are dealt out
    config.parallelism.pipeline_parallel_schedule_csv = csv
    config.parallelism.module_fqns_per_model_part = STAGES
    model: Any = build(config)
    schedule, parts, _, _ = build_pipeline(
        model,
        parallel_dims,
        config,
        torch.device("cpu"),
        model.model_args,
        parallelize_deepseek_v32,
        cross_entropy_loss,
    )
    whole: list[bool] = []
    for part in parts:
        rest = [p for p in parts if p is not part]
        part.register_forward_pre_hook(
            lambda *_, rest=rest: whole.append(any(map(_gathered, rest)) or _unreduced(parts))
        )
    schedule.step(tokens, target=labels, losses=[], return_outputs=False)
    # Those of the step; before them come the forwards by which stages find out their shapes.
    return {**collect(parts), "whole": whole[-ORDER.count("F") :]}


def _run(tmp_path: Path, order: str, layout: Degrees) -> Result:
    csv = tmp_path / "order.csv"
    csv.write_text(order + "\n")
    return shared(2).run(_on_one, str(csv), layout, timeout=TIMEOUT)[0]


def _worst(got: Result, want: Result) -> tuple[float, str]:
    assert got["gradients"].keys() == want["gradients"].keys()
    assert not [name for name, gradient in got["gradients"].items() if gradient is None]
    return max(
        (float((got["gradients"][name] - gradient).abs().max() / gradient.abs().max()), name)
        for name, gradient in want["gradients"].items()
    )


@pytest.mark.parametrize(("order", "ep"), [(ORDER, 1), (ORDER, 2), (WHOLE, 2)], ids=["parts", "parts, ep", "whole, ep"])
@pytest.mark.parametrize("reshard", ["always", pytest.param("never", marks=pytest.mark.slow)])
def test_backward_with_others_between(reshard: str, order: str, ep: int, tmp_path: Path) -> None:
    got = _run(tmp_path, order, Degrees(reshard=reshard, ep=ep))
    worst, name = _worst(got, expected_result(2))
    assert worst < TOLERANCE, name
    assert any(got["whole"]) == (reshard == "never"), "a stage is gathered, and its gradients are, while it computes"


@pytest.mark.parametrize("reshard", ["always", pytest.param("never", marks=pytest.mark.slow)])
def test_parts_are_added_up_in_fp32(reshard: str, tmp_path: Path) -> None:
    """As whole backwards are, when parameters and so their gradients are bfloat16."""
    layout = Degrees(reshard=reshard, dtype="bfloat16")
    got, want = _run(tmp_path, ORDER, layout), _run(tmp_path, WHOLE, layout)
    worst, name = _worst(got, want)
    assert worst < TOLERANCE, name


@pytest.mark.slow
@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize("reshard", ["always", "never", "default"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_and_policy(schedule: str, reshard: str, ep: int) -> None:
    check(4, Degrees(pp=2, ep=ep, schedule=schedule, reshard=reshard, model=FOUR_LAYERS))


@pytest.fixture(scope="module")
def eight_ranks() -> Iterator[None]:
    yield
    shared(8).stop()


@pytest.mark.slow
@pytest.mark.usefixtures("eight_ranks")
@pytest.mark.parametrize("degrees", [{"tp": 2}, {"tp": 2, "ep": 4}, {"replicate": 2}, {"cp": 2}], ids=str)
def test_products_of_three(degrees: dict[str, Any]) -> None:
    """A pipeline, FSDP2, and others."""
    check(8, Degrees(pp=2, schedule="ZBVZeroBubble", reshard="always", model=FOUR_LAYERS, **degrees))


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_parameters_given_back_and_others(name: str) -> None:
    check(4, OTHERS[name])


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES[3:])
def test_losses_of_training_do_not_depend_on_it(schedule: str, tmp_path: Path) -> None:
    """Through the trainer, several steps."""
    flags = [
        *("--parallelism.pipeline_parallel_degree", "2", "--parallelism.pipeline_parallel_schedule", schedule),
        *("--parallelism.expert_parallel_degree", "2", "--model.flavor", "deeper", "--training.steps", "3"),
        *("--training.local_batch_size", "4"),
    ]
    losses = []
    for reshard in ("always", "never"):
        policy = ("--parallelism.fsdp_reshard_after_forward", reshard)
        told = titan_job.run([*flags, *policy, "--job.dump_folder", str(tmp_path / reshard)], size=4)
        # A V's loss is known on the first stage's ranks, another's on the last one's; the others say -1.
        losses.append([max(float.fromhex(t.losses[step]) for t in told) for step in (1, 2, 3)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][0] != pytest.approx(losses[0][2], rel=1e-3), "it learns"
