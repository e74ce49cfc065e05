"""A model under autograd has the numbers of the engine: one definition, one arithmetic."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from kernels import without_cpu_kernels
from one_sequence import PROMPT
from ranks import shared
from schedules import tiny
from test_models import MOE, save
from test_one_arithmetic import MODELS, SAMPLED, decoded, engine
from torch import Tensor

from whorl import nn, ops
from whorl.engine.control import WeightVersions
from whorl.engine.output import Output
from whorl.engine.sequence import SamplingParams
from whorl.engine.weights import load_model
from whorl.models.deepseek import DeepSeek
from whorl.models.gemma3 import Gemma3
from whorl.models.glm4_moe_lite import Glm4MoeLite
from whorl.models.llama import Llama
from whorl.models.qwen3 import Qwen3

SEQUENCES = [PROMPT, PROMPT[:1], PROMPT[3:9], PROMPT[::-1]]


# Those whose class has a gradient; `no_gradient` says why another has none.
TRAINED = [name for name, make in MODELS.items() if not make.args[0].no_gradient]


def sample(model: Any) -> list[Output]:
    return engine(model).generate([PROMPT[:n] for n in (1, 5, 12, 21)], SAMPLED, progress=False)


def trained(model: Any, outputs: list[Output]) -> list[Tensor]:
    """The logprobs of each answer, as a trainer has them: with a gradient, all sequences at once."""
    sequences = [output.prompt_ids + output.token_ids for output in outputs]
    logprobs = nn.trainable(model).logprobs(nn.pack(sequences, "cpu"))
    assert logprobs.requires_grad
    parts = logprobs.split([len(sequence) - 1 for sequence in sequences])
    return [part[len(output.prompt_ids) - 1 :] for part, output in zip(parts, outputs, strict=True)]


@pytest.mark.parametrize("name", TRAINED)
def test_logprobs_are_the_samplers(name: str) -> None:
    model = MODELS[name]()
    outputs = sample(model)
    for output, logprobs in zip(outputs, trained(model, outputs), strict=True):
        assert logprobs.tolist() == decoded(output)


def test_every_family_of_these_is_trained() -> None:
    assert set(TRAINED) == set(MODELS)


@pytest.mark.parametrize(
    ("model_class", "message"),
    [
        (DeepSeek, "logprobs: DeepSeek has no gradient here; train it with `whorl train` and serve the checkpoint"),
        (Glm4MoeLite, "logprobs: GLM-4.7-Flash has no gradient here; take another model to train"),
    ],
)
def test_models_without_a_gradient_say_so(model_class: Any, message: str) -> None:
    model, packed = tiny(model_class), nn.pack(SEQUENCES, "cpu")
    for scores in (model.logprobs, model.scored_logits):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            scores(packed)


def test_another_order_of_k_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without whorl's CPU kernels: with them neither the trainer nor the sampler runs the reference."""
    model = MODELS["qwen3"]()
    reference = ops.linear.reference
    turned = lambda x, weight, bias=None: reference(x.flip(1), weight.flip(1), bias)  # noqa: E731
    with without_cpu_kernels():
        outputs = sample(model)
        monkeypatch.setattr(ops.linear, "reference", turned)
        logprobs = trained(model, outputs)
    assert any(mine.tolist() != decoded(output) for output, mine in zip(outputs, logprobs, strict=True))


def test_after_a_step_too() -> None:
    """What was laid out anew for few rows is not used of weights that have changed since."""
    model = MODELS["qwen3"]()
    before = sample(model)
    optimizer = torch.optim.SGD(nn.trainable(model).parameters(), lr=0.5)
    (-torch.cat(trained(model, before)).mean()).backward()
    optimizer.step()
    after = sample(model.requires_grad_(False))
    assert [decoded(output) for output in after] != [decoded(output) for output in before]
    for output, logprobs in zip(after, trained(model, after), strict=True):
        assert logprobs.tolist() == decoded(output)


def change(model: Any) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.25)


def answers(llm: Any) -> list[list[float]]:
    return [decoded(output) for output in llm.generate([PROMPT[:n] for n in (12, 21)], SAMPLED, progress=False)]


def test_prefixes_of_old_weights_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["qwen3"]()
    llm = engine(model)
    before = answers(llm)
    change(model)
    assert answers(llm) == answers(engine(model)) != before
    monkeypatch.setattr(WeightVersions, "have_changed", lambda self: False)
    change(model)
    assert answers(llm) != answers(engine(model)), "stale keys must show, or this test shows nothing"
    llm.forget()
    assert answers(llm) == answers(engine(model))


def test_running_sequences_are_computed_again() -> None:
    """Tokens that come after weights have changed are wholly of the new ones."""
    model = MODELS["qwen3"]()
    llm = engine(model)
    [seq] = llm.add(PROMPT[:12], SAMPLED)
    for _ in range(4):
        llm.step()
    kept = len(seq.output_ids)
    change(model)
    llm.add(PROMPT[:5], SAMPLED)
    while llm.has_work:
        llm.step()
    scored = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    [again] = engine(model).generate([seq.token_ids], scored, progress=False)
    new, actual = ([each.logprob for each in logprobs] for logprobs in (again.prompt_logprobs[11:], seq.logprobs))
    assert kept > 0
    assert actual[kept:] == new[kept:]
    assert actual[:kept] != new[:kept]


def test_weights_that_lie_elsewhere_are_refused() -> None:
    model = MODELS["qwen3"]()
    llm = engine(model)
    weight = next(model.parameters())
    weight.data = weight.data.clone()
    with pytest.raises(RuntimeError, match="replaced by another tensor"):
        llm.add(PROMPT)


# ---- gradients


def hf_gradients(hf: Any, name: str) -> Tensor:
    """By a checkpoint's name; transformers holds the experts of a layer as one."""
    parameters = dict(hf.named_parameters())
    if name in parameters:
        return parameters[name].grad
    layer, expert, which = re.fullmatch(r"(.*mlp\.experts)\.(\d+)\.(\w+)_proj\.weight", name).groups()
    if which == "down":
        return parameters[f"{layer}.down_proj"].grad[int(expert)]
    return parameters[f"{layer}.gate_up_proj"].grad[int(expert)].chunk(2)[which == "up"]


CHECKPOINTS = {
    "gemma3": Gemma3.tiny(),
    "llama": Llama.tiny(attention_bias=True),
    "qwen3": Qwen3.tiny(tie_word_embeddings=True),
    "qwen3_window": Qwen3.tiny(use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "qwen3_moe": Qwen3.tiny(**MOE, norm_topk_prob=True),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_gradients_are_transformers(name: str, tmp_path: Path) -> None:
    """Sequences packed here, one by one there."""
    hf = save(tmp_path, CHECKPOINTS[name]).train()
    model = nn.trainable(load_model(tmp_path, device="cpu", dtype="float32", progress=False))
    loss = -model.logprobs(nn.pack(SEQUENCES, "cpu")).mean()
    loss.backward()
    losses = []
    for sequence in SEQUENCES:
        logits = hf(torch.tensor([sequence])).logits[0, :-1].float()
        losses.append(
            torch.nn.functional.cross_entropy(logits, torch.tensor(sequence[1:], dtype=torch.long), reduction="none")
        )
    expected = torch.cat(losses).mean()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    for parameter in model.parameters():  # the slots of a checkpoint are views of them: of gradients, now
        parameter.data = parameter.grad
    for source, slot in nn.destinations(model).items():
        gradient = hf_gradients(hf, source)[slot.index]
        torch.testing.assert_close(
            slot.into, gradient, rtol=1e-3, atol=1e-5, msg=lambda m, source=source: f"{source}: {m}"
        )


# ---- where bits are kept, and where they are not


def sharded(name: str) -> list[Tensor]:
    """Plain in bf16; sharded with weights in fp32 that are gathered in bf16."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    packed = nn.pack(SEQUENCES, "cpu")
    plain = nn.trainable(MODELS[name]().float().bfloat16())
    model = nn.trainable(MODELS[name]().float())
    how = {"mesh": init_device_mesh("cpu", (2,)), "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    for layer in model.model.layers:
        fully_shard(layer, **how)
    fully_shard(model, **how)
    register_fsdp_forward_method(model, "logprobs")
    logprobs = model.logprobs(packed)
    logprobs.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    return [plain.logprobs(packed).detach(), logprobs.detach()]


@pytest.mark.parametrize("name", ["qwen3_bfloat16", "qwen3_moe_bfloat16"])
def test_fsdp_keeps_the_bits(name: str) -> None:
    for plain, actual in shared(2).run(sharded, name):
        assert actual.isfinite().all()
        assert torch.equal(actual, plain)


def test_autocast_is_refused() -> None:
    model = nn.trainable(MODELS["qwen3"]())
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="under autocast residuals are fp32"):
        model.logprobs(nn.pack(SEQUENCES, "cpu"))


def test_inductor_is_refused_where_it_leaves_out_roundings() -> None:
    model = nn.trainable(MODELS["qwen3_bfloat16"]())
    packed = nn.pack(SEQUENCES, "cpu")
    with pytest.raises(RuntimeError, match="emulate_precision_casts"):
        torch.compile(model.logprobs, fullgraph=False)(packed)


@pytest.mark.parametrize("name", [pytest.param("qwen3_bfloat16", marks=pytest.mark.slow), "qwen3_moe_bfloat16"])
def test_inductor_with_its_roundings_keeps_the_bits(name: str) -> None:
    model = nn.trainable(MODELS[name]())
    packed = nn.pack(SEQUENCES, "cpu")
    with torch._inductor.config.patch(emulate_precision_casts=True):
        logprobs = torch.compile(model.logprobs)(packed)
        logprobs.sum().backward()
    assert torch.equal(logprobs, model.logprobs(packed))


def test_only_plain_weights_are_trained() -> None:
    model = MODELS["qwen3"]()
    model.lm_head.format = "int4"
    with pytest.raises(ValueError, match=r"lm_head is quantized, expected plain weights"):
        nn.trainable(model)


@pytest.mark.parametrize("sequences", [[], [[1, 2], []]])
def test_empty_sequences_are_refused(sequences: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="at least one sequence and no empty ones"):
        nn.pack(sequences, "cpu")
