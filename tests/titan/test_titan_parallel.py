"""Layouts of gloo ranks against one rank: losses, gradients, routing; and what travels between them, and when."""

import dataclasses
from typing import Any

import pytest
import torch
from ranks import shared
from titan_layouts import (
    BATCH,
    LENGTH,
    TIMEOUT,
    TOLERANCE,
    Degrees,
    Result,
    batch,
    build,
    cases,
    check,
    collect,
    collectives,
    dims,
    expected_result,
    job,
    result_of,
)
from torch import Tensor

CONVERTERS = ("whorl_rms_norm", "whorl_rope", "whorl_permute", "whorl_gmm", "whorl_dsa")
ALONE = {"fsdp": Degrees(), "tp": Degrees(tp=2), "ep": Degrees(ep=2), "pp": Degrees(pp=2), "cp": Degrees(cp=2)}
TWO_RANKS = {
    "fsdp, accumulating": Degrees(micro_batches=2),
    "tp, warm-up": Degrees(tp=2, stage="warmup"),
    "tp x ep": Degrees(tp=2, ep=2),
    "tp x ep, every converter": Degrees(tp=2, ep=2, converters=CONVERTERS),
    "ep, selective checkpointing": Degrees(ep=2, checkpointing="selective"),
    "pp, selective checkpointing": Degrees(pp=2, checkpointing="selective"),
    "pp, interleaved": Degrees(pp=2, schedule="Interleaved1F1B", model=(("n_layers", 4),)),
    "pp, DualPipeV": Degrees(pp=2, schedule="DualPipeV", model=(("n_layers", 4),)),
}
SPLIT = TWO_RANKS["pp, DualPipeV"]
MORE_ON_TWO_RANKS = {
    "fsdp, predicting further": Degrees(model=(("n_mtp_layers", 1),)),
    "fsdp, every converter, selective checkpointing": Degrees(converters=CONVERTERS, checkpointing="selective"),
    "fsdp, warm-up": Degrees(stage="warmup"),
    "tp, whole logits, checkpointing": Degrees(tp=2, loss_parallel=False, checkpointing="full"),
    "tp, selective checkpointing": Degrees(tp=2, checkpointing="selective"),
    "tp x ep, warm-up": Degrees(tp=2, ep=2, stage="warmup"),
    "ep, predicting further": Degrees(ep=2, model=(("n_mtp_layers", 1),)),
    "pp, warm-up": Degrees(pp=2, stage="warmup"),
    "pp, checkpointing": Degrees(pp=2, checkpointing="full"),
    "pp, zero bubble": Degrees(pp=2, schedule="ZBVZeroBubble", model=(("n_layers", 4),)),
    "pp, zero bubble, every converter": Degrees(
        pp=2, schedule="ZBVZeroBubble", model=(("n_layers", 4),), converters=CONVERTERS
    ),
    "pp, zero bubble, warm-up": Degrees(pp=2, schedule="ZBVZeroBubble", model=(("n_layers", 6),), stage="warmup"),
    "pp, zero bubble, interleaved": Degrees(pp=2, schedule="InterleavedZeroBubble", model=(("n_layers", 4),)),
    "cp, warm-up": Degrees(cp=2, stage="warmup"),
}
FOUR_RANKS = {
    "fsdp": Degrees(),
    "hsdp": Degrees(replicate=2),
    "fsdp x tp": Degrees(tp=2),
    "fsdp x ep": Degrees(ep=2),
    "ep": Degrees(ep=4),
    "hsdp x ep": Degrees(ep=2, replicate=2),
    "fsdp x tp x ep": Degrees(tp=2, ep=4),
    "fsdp x tp x ep, over data": Degrees(tp=2, ep=2),
    "fsdp x tp x ep x etp": Degrees(tp=2, ep=2, etp=2),
    "pp x fsdp": Degrees(pp=2),
    "pp x tp": Degrees(pp=2, tp=2),
    "pp x tp x ep": Degrees(pp=2, tp=2, ep=2),
    "pp x ep": Degrees(pp=2, ep=2),
    "pp x fsdp, DualPipeV": Degrees(pp=2, schedule="DualPipeV", model=(("n_layers", 4),)),
    "pp x ep, interleaved": Degrees(pp=2, ep=2, schedule="Interleaved1F1B", model=(("n_layers", 4),)),
    "pp x cp": Degrees(pp=2, cp=2),
}
SLOW = (*cases(2, MORE_ON_TWO_RANKS, pytest.mark.slow), *cases(4, FOUR_RANKS, pytest.mark.slow))


@pytest.mark.parametrize(("ranks", "layout"), [*cases(2, ALONE | TWO_RANKS), *SLOW])
def test_as_one_rank(ranks: int, layout: Degrees) -> None:
    check(ranks, layout)


@pytest.mark.parametrize("name", ["fsdp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ep", "cp"))])
def test_in_bfloat16(name: str) -> None:
    """Parameters are rounded for use and stay what they are; gradients are summed in fp32."""
    got, want = result_of(2, dataclasses.replace(ALONE[name], dtype="bfloat16")), expected_result(2)
    assert all(gradient.dtype == torch.float32 for gradient in got["gradients"].values())
    torch.testing.assert_close(got["loss"], want["loss"], rtol=0.01, atol=0)
    torch.testing.assert_close(got["norm"], want["norm"], rtol=0.1, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp", "tp", "cp", "tp x ep"])
def test_compiled(name: str) -> None:
    check(2, dataclasses.replace((ALONE | TWO_RANKS)[name], compiled=True))


@pytest.mark.parametrize(("name", "micro_batches"), [("fsdp", 2), ("pp", BATCH)])
def test_bits_are_those_of_micro_batches(name: str, micro_batches: int) -> None:
    """Where one rank can add up in the same order."""
    got, want = result_of(2, ALONE[name]), expected_result(2, micro_batches)
    differ = [n for n, gradient in want["gradients"].items() if not torch.equal(gradient, got["gradients"][n])]
    assert not differ


# ---- through TorchTitan's trainer


class _Loader:
    """One batch, with labels to ignore."""

    def __iter__(self) -> Any:
        tokens, labels = batch()
        yield {"input": tokens}, labels.masked_fill(torch.arange(LENGTH) % 5 == 0, -100)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def _train(trainer_name: str, folder: str) -> Result:
    """One step of a pipeline by a trainer; its gradients."""
    import os

    from whorl.titan.cpu import install

    install()
    import torchtitan.train
    from torchtitan.protocols import train_spec

    from whorl.titan.register import register
    from whorl.titan.trainer import WhorlTrainer

    os.environ["LOCAL_RANK"] = str(torch.distributed.get_rank())
    register()
    config = job(Degrees(pp=2))
    model = build(config)
    spec = train_spec.get_train_spec("deepseek_v32")
    if "deepseek_v32_test" not in train_spec._extra_train_specs:
        own = dataclasses.replace(
            spec,
            model_args={"test": model.model_args},
            build_dataloader_fn=lambda **_: _Loader(),
            build_tokenizer_fn=None,
        )
        train_spec.register_train_spec("deepseek_v32_test", own)
    config.model.name, config.model.flavor = "deepseek_v32_test", "test"
    config.job.dump_folder = folder
    config.training.local_batch_size, config.training.max_norm, config.optimizer.lr = BATCH, 1e9, 0.0
    trainer = {"titan": torchtitan.train.Trainer, "whorl": WhorlTrainer}[trainer_name](config)
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for part in trainer.model_parts:
            for name, parameter in part.named_parameters():
                parameter.copy_(weights[name])
    trainer.train_step(trainer.batch_generator(trainer.dataloader))
    answer = collect(trainer.model_parts)
    trainer.close()
    return answer


def _masked_alone() -> Result:
    from torchtitan.components.loss import cross_entropy_loss

    model = build(job(Degrees()))
    ((inputs, labels),) = list(_Loader())
    num_labels = int((labels != -100).sum())
    (cross_entropy_loss(model(inputs["input"]), labels) / num_labels).backward()
    return {**collect([model]), "labels": num_labels}


@pytest.mark.parametrize("trainer", ["titan", "whorl"])
def test_pipeline_gradients_through_the_trainer(trainer: str, tmp_path: Any) -> None:
    """TorchTitan's trainer knows all labels of the step; ours counts those that are not ignored."""
    want = shared(2).run(_masked_alone, timeout=TIMEOUT)[0]
    answers = shared(2).run(_train, trainer, str(tmp_path), timeout=TIMEOUT)
    got = {name: gradient for a in answers for name, gradient in a["gradients"].items()}
    factor = 1 if trainer == "whorl" else want["labels"] / (BATCH * LENGTH)
    assert got.keys() == want["gradients"].keys()
    for name, gradient in want["gradients"].items():
        scale = 1 if ".indexer." in name else factor  # whose loss does not know labels
        worst = float((got[name] - gradient * scale).abs().max() / gradient.abs().max())
        assert worst < TOLERANCE, name


# ---- what travels


def _matmuls() -> dict[str, Any]:
    """Collectives of products on DTensors."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh, answers = init_device_mesh("cpu", (2,)), {}

    def product(x_at: Any, w_at: Any, grad_at: Any) -> dict[str, Any]:
        x, w = torch.randn(3, 4, 8), torch.randn(6, 8)
        dx, dw = (distribute_tensor(t, mesh, [at]).requires_grad_() for t, at in ((x, x_at), (w, w_at)))
        counts = {}

        def forward() -> None:
            counts["y"] = torch.nn.functional.linear(dx, dw)

        forward_counts = collectives(forward)
        y: Any = counts["y"]
        grad = distribute_tensor(torch.ones(3, 4, 6), mesh, [grad_at])
        backward_counts = collectives(lambda: y.backward(grad))
        px, pw = x.requires_grad_(), w.requires_grad_()
        torch.nn.functional.linear(px, pw).backward(torch.ones(3, 4, 6))
        for got, want in ((dx.grad, px.grad), (dw.grad, pw.grad)):
            torch.testing.assert_close(got.full_tensor(), want)
        return {"forward": forward_counts, "backward": backward_counts, "y": str(y.placements)}

    assert isinstance(distribute_tensor(torch.ones(2), mesh, [Replicate()]), DTensor)
    answers["replicated"] = product(Replicate(), Replicate(), Replicate())
    answers["head"] = product(Replicate(), Shard(0), Shard(2))
    return answers


@pytest.mark.parametrize("name", ["replicated", "head"])
def test_products_that_need_no_communication(name: str) -> None:
    """q_lora's, which no rank shares out, and the head's: dY by words, W by words (dimension 1 of its transpose)."""
    answer = shared(2).run(_matmuls, timeout=TIMEOUT)[0][name]
    assert answer["forward"] == {}
    assert answer["backward"] == {}


def _block(layer: int, ep: int) -> dict[str, Any]:
    """Collectives of one tensor-parallel block's attention and feed-forward layer, batch above 1."""
    from whorl.titan.cpu import install

    install()
    from whorl.titan.deepseek_v32.infra.parallelize import parallelize_deepseek_v32

    layout = Degrees(tp=2, ep=ep)
    config = job(layout)
    model = parallelize_deepseek_v32(build(config), dims(layout), config)
    block = model.layers[str(layer)]
    x = torch.randn(3, LENGTH // 2, 32, requires_grad=True)
    parts = {
        "attention": lambda: block.attention(block.attention_norm(x), model.cos_sin),
        "feed_forward": lambda: (block.moe if block.moe_enabled else block.feed_forward)(block.ffn_norm(x)),
    }
    answers: dict[str, Any] = {}
    for name, part in parts.items():
        kept: list[Tensor] = []
        answers[name, "forward"] = collectives(lambda part=part, kept=kept: kept.append(part()))
        answers[name, "backward"] = collectives(lambda kept=kept: kept[0].sum().backward())
    return answers


GATHER, SCATTER = {"all_gather_into_tensor": 1}, {"reduce_scatter_tensor": 1}
TARGET = {"all_reduce": 1}  # heads added up, for the indexer's loss
COUNTS = {"all_reduce": 1}  # of tokens per expert
# A dense layer; experts that are cut; whole experts, where routing (sizes, there, back) is on own tokens.
FEED_FORWARD = {
    (0, 1): (GATHER | SCATTER, GATHER | SCATTER),
    (1, 1): (GATHER | SCATTER, GATHER | {"all_reduce": 4}),
    (1, 2): (GATHER | SCATTER | COUNTS | {"all_to_all_single": 3}, GATHER | SCATTER | {"all_to_all_single": 2}),
}


@pytest.mark.parametrize(("layer", "ep"), FEED_FORWARD)
def test_collectives_of_a_block(layer: int, ep: int) -> None:
    """In the attention's low-rank products, and in their backward, none: one gather and one scatter for them all."""
    counts = shared(2).run(_block, layer, ep, timeout=TIMEOUT)[0]
    assert counts["attention", "forward"] == GATHER | SCATTER | TARGET
    assert counts["attention", "backward"] == GATHER | SCATTER
    forward, backward = FEED_FORWARD[layer, ep]
    assert counts["feed_forward", "forward"] == forward
    assert counts["feed_forward", "backward"] == backward


# ---- when parameters travel


def _trace(explicit: bool) -> list[tuple[str, float]]:
    """Names and times of what FSDP2 reports to the profiler in one step, after one to warm up."""
    from whorl.titan.cpu import install

    install()
    from torch.distributed.fsdp import FSDPModule
    from torch.profiler import ProfilerActivity, profile

    from whorl.titan.deepseek_v32.infra.parallelize import parallelize_deepseek_v32

    config = job(Degrees())
    model = parallelize_deepseek_v32(build(config), dims(Degrees()), config)
    if not explicit:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_modules_to_forward_prefetch([])
                module.set_modules_to_backward_prefetch([])
    tokens, _ = batch()
    for _ in range(2):
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            model(tokens[:2]).sum().backward()
    return [(e.name, e.time_range.start) for e in profiler.events() if e.name.startswith("FSDP::")]


def _is_ahead(events: list[tuple[str, float]], end: str, block: int, other: int) -> bool:
    """Whether the all-gather of `other` begins before the work of `block` does end."""
    ends = next(time for name, time in events if name == f"FSDP::{end} (layers.{block})")
    starts = [time for name, time in events if name == f"FSDP::all_gather (layers.{other})"]
    return (starts[0] if end == "post_forward" else starts[-1]) < ends


def test_the_embedding_is_not_gathered_for_backward() -> None:
    names = [name for name, _ in shared(2).run(_trace, True, timeout=TIMEOUT)[0]]
    assert names.count("FSDP::all_gather (tok_embeddings)") == 1
    assert names.count("FSDP::all_gather (layers.0)") == 2


def test_parameters_are_asked_for_ahead() -> None:
    events = shared(2).run(_trace, True, timeout=TIMEOUT)[0]
    for block in (0, 1):
        assert _is_ahead(events, "post_forward", block, block + 1), events
    for block in (2, 1):
        assert _is_ahead(events, "post_backward_accumulate", block, block - 1), events


def test_without_being_told_to_forward_asks_late() -> None:
    events = shared(2).run(_trace, False, timeout=TIMEOUT)[0]
    assert not any(_is_ahead(events, "post_forward", block, block + 1) for block in (0, 1))


# ---- what does not fit


def _refused(layout: Degrees, length: int) -> str:
    from whorl.titan.cpu import install

    install()
    from titan_layouts import _pipelined, _plain, _update

    config = job(layout)
    config.training.seq_len, config.training.local_batch_size = length, BATCH
    model = build(config, **dict(layout.model))
    try:
        step = (_pipelined if layout.pp > 1 else _plain)(model, dims(layout), config)
        _update(step.parts, dims(layout), config)
    except ValueError as error:
        return str(error)
    return "taken"


@pytest.mark.parametrize(
    ("layout", "length", "words"),
    [
        (Degrees(cp=2), 30, "training.seq_len is 30, expected a multiple of 4"),
        (
            Degrees(tp=2, model=(("n_heads", 3),)),
            LENGTH,
            "tensor_parallel_degree is 2, expected a divisor of the 3 heads",
        ),
        (Degrees(replicate=2), LENGTH, "data_parallel_replicate_degree is 2 without FSDP"),
        (Degrees(cp=2, balancer="ptrr"), LENGTH, "expected 'headtail'"),
        (dataclasses.replace(SPLIT, checkpointing="full"), LENGTH, "activation_checkpoint.mode is 'full'"),
        (dataclasses.replace(SPLIT, compiled=True), LENGTH, "DualPipeV, splits backward"),
        (dataclasses.replace(SPLIT, stage="warmup"), LENGTH, "a pipeline stage (norm, output"),
    ],
)
def test_what_does_not_fit_is_refused(layout: Degrees, length: int, words: str) -> None:
    assert words in shared(2).run(_refused, layout, length, timeout=TIMEOUT)[0]
