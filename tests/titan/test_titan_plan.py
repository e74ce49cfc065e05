"""What the planner predicts of weights, gradients and moments, against TorchTitan with fake collectives."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import titan_bytes
import titan_job

from whorl.plan.layout import Parallelism, PlanSettings, layouts, stages
from whorl.plan.memory import GB, memory_of, stage_memory
from whorl.plan.model_shape import DEEPSEEK_V32, ModelShape, from_hugging_face

# The planner leaves out the norm before the head; nothing else differs.
NORM = 1e-4


def shape(args: dict[str, Any]) -> ModelShape:
    from torchtitan.models.moe import MoEArgs

    from whorl.titan.deepseek_v32.args import DeepSeekV32Args

    model = DeepSeekV32Args(**args | {"moe_args": MoEArgs(**args["moe_args"])})
    return from_hugging_face(model.config.to_hf(), "")


def flags(folder: Path, flavour: str, layout: Parallelism, seq: int, batch: int) -> list[str]:
    return [
        *("--job.dump_folder", str(folder), "--model.flavor", flavour, "--training.seq_len", str(seq)),
        *("--training.local_batch_size", str(batch // layout.dp)),
        *("--parallelism.pipeline_parallel_degree", str(layout.pp)),
        *("--parallelism.tensor_parallel_degree", str(layout.tp)),
        *("--parallelism.context_parallel_degree", str(layout.cp)),
        *("--parallelism.expert_parallel_degree", str(layout.ep)),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "cp", "dp", "ep"), [(2, 1, 4, 4), (1, 1, 8, 8), (4, 1, 4, 1), (2, 2, 2, 1)])
def test_a_step_of_a_middle_sized_model(tp: int, cp: int, dp: int, ep: int, tmp_path: Path) -> None:
    layout = Parallelism(pp=1, tp=tp, cp=cp, dp=dp, ep=ep, swap=False)
    ranks = str(layout.pp * layout.stage)
    # Several sequences for a rank: with one, the peak may come before all gradients are there.
    job = [ranks, *flags(tmp_path, "debug", layout, seq=64, batch=16)]
    measured = titan_job.run(job, function=titan_bytes.of_a_step)[0].answer
    predicted = memory_of(shape(measured["args"]), layout, PlanSettings(seq=64, batch=16))
    for name in ("parameters", "gradients", "optimizer"):
        assert getattr(predicted, name) * GB == pytest.approx(measured[name], rel=NORM), name


@pytest.mark.slow
@pytest.mark.parametrize(("pp", "tp", "ep"), [(2, 4, 64), (1, 8, 32), (4, 4, 64)])
def test_weights_of_the_whole_model(pp: int, tp: int, ep: int, tmp_path: Path) -> None:
    """Of every pipeline stage."""
    layout = Parallelism(pp=pp, tp=tp, cp=1, dp=16, ep=ep, swap=True)
    batch = 8 * layout.dp
    job = flags(tmp_path, "671b", layout, seq=32768, batch=batch)
    ranks = layout.pp * layout.stage
    firsts = [str(stage * layout.stage) for stage in range(layout.pp)]
    answers = [titan_job.run([r, str(ranks), *job], function=titan_bytes.of_a_rank)[0].answer for r in firsts]
    model, settings = shape(answers[0]["args"]), PlanSettings(seq=32768, batch=batch)
    measured = [answer["parameters"] for answer in answers]
    predicted = [stage_memory(model, layout, settings, stage).parameters * GB for stage in range(layout.pp)]
    assert predicted == pytest.approx(measured, rel=NORM)


@pytest.mark.parametrize("layers", [8, 27, 61])
def test_stages_are_torchtitans(layers: int) -> None:
    pipeline = pytest.importorskip("torchtitan.distributed.pipeline_parallel")
    model = dataclasses.replace(DEEPSEEK_V32, layers=layers)
    for pp in (1, 2, 4, 5, 8, 16, 32):
        cut = stages(model, pp)
        if not all(cut):
            continue  # no plan has a stage without layers
        parts = pipeline.generate_llm_fqn_per_model_part(pp, layers)
        theirs = [[int(name.split(".")[1]) for name in part if name.startswith("layers.")] for part in parts]
        assert [list(mine) for mine in cut] == theirs


def _taken_by_torch(stages: int, microbatches: int) -> bool:
    from torch.distributed.pipelining import Schedule1F1B

    stage: Any = SimpleNamespace(num_stages=stages, is_first=True, is_last=False, has_backward=False, group=None)
    stage.group_rank, stage.group_size = 0, stages
    try:
        Schedule1F1B(stage, microbatches, scale_grads=False)
    except ValueError as error:
        return "Number of microbatches" not in str(error)  # for another reason: taken, and so not equal
    return True


@pytest.mark.parametrize("batch", [4, 8, 32])
def test_microbatches_are_enough_for_torchs_schedule(batch: int) -> None:
    ranks = 32
    of_many = {(a.pp, a.dp) for a in layouts(DEEPSEEK_V32, ranks, PlanSettings(seq=4096, batch=ranks * ranks))}
    whole = {(pp, dp) for pp, dp in of_many if batch % dp == 0}
    taken = {(pp, dp) for pp, dp in whole if pp == 1 or _taken_by_torch(pp, batch // dp)}
    assert {(a.pp, a.dp) for a in layouts(DEEPSEEK_V32, ranks, PlanSettings(seq=4096, batch=batch))} == taken
    assert (taken < whole) == (batch < ranks)
