"""A stock model of TorchTitan, trained with whorl.exact, has the bits of the engine that samples for it."""

import dataclasses
import re
from typing import Any

import pytest
import torch
from exact_models import DTYPES, prompts, sampled, scores
from ranks import shared
from test_one_arithmetic import engine

from whorl import exact, nn
from whorl.engine.weights import random_model
from whorl.exact.titan import MODELS, hf_config

pytest.importorskip("torchtitan", minversion="0.2.2")

SIZES = {"dim": 96, "n_layers": 2, "n_heads": 6, "n_kv_heads": 3, "vocab_size": 97, "max_seq_len": 256}
NAMES = ("llama3", "qwen3")


def stock(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A model of TorchTitan with random weights, in training mode."""
    torch.manual_seed(0)
    if name == "llama3":
        from torchtitan.models.llama3.model.args import TransformerModelArgs
        from torchtitan.models.llama3.model.model import Transformer

        model: Any = Transformer(TransformerModelArgs(**SIZES, multiple_of=16, **changes))
    else:
        from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
        from torchtitan.models.qwen3.model.model import Qwen3Model

        model = Qwen3Model(Qwen3ModelArgs(**SIZES, head_dim=16, hidden_dim=160, **changes))
    with torch.no_grad():
        model.init_weights(torch.device("cpu"))
        for key, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if "norm" in key else parameter.shape[-1] ** -0.5))
            if "norm" in key:
                parameter.add_(1)
    return cast(model, dtype).train()


def cast(model: Any, dtype: torch.dtype) -> Any:
    """Change the dtype of parameters alone: TorchTitan's table of rotations is complex."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def adapter(model: Any) -> Any:
    """TorchTitan's own, from its names and its order of rotated channels to Hugging Face's."""
    if type(model).__name__ == "Qwen3Model":
        from torchtitan.models.qwen3.model.state_dict_adapter import Qwen3StateDictAdapter

        return Qwen3StateDictAdapter(model.model_args, None)
    from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter

    return Llama3StateDictAdapter(model.model_args, None)


def architecture(model: Any) -> str:
    return MODELS[type(model).__module__, type(model).__name__][0]


def give(llm: Any, model: Any, version: str) -> None:
    state = {name: each.detach() for name, each in model.state_dict().items()}
    llm.update_weights(adapter(model).to_hf(state).items(), version=version)


def serving(model: Any) -> Any:
    values = hf_config(model, architecture(model))
    return engine(random_model(values, device="cpu", dtype=next(model.parameters()).dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_five_steps_have_no_mismatch(name: str, dtype: str) -> None:
    model = stock(name, DTYPES[dtype])
    llm = serving(model)
    installation = exact.install(model)
    assert "attention.forward" in str(installation)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(5):
        give(llm, model, f"step {step}")
        outputs = sampled(llm, seed=step)
        trainer = scores(model, outputs, f"step {step}")
        assert exact.certify(exact.Scores.of(outputs), trainer, recomputed=trainer).num_tokens == 32
        optimizer.zero_grad()
        (-torch.cat(trainer.logprobs).mean()).backward()
        optimizer.step()


@pytest.mark.parametrize("name", NAMES)
def test_a_stock_model_computes_the_same_with_other_bits(name: str) -> None:
    """Which also shows that the order of channels is right, by TorchTitan's own adapter and rotation."""
    model = stock(name)
    ids = torch.tensor([prompts(0)[3]])
    before = model(ids)
    with exact.install(model):
        after = model(ids)
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)
    assert not torch.equal(after, before)
    assert torch.equal(model(ids), before)


@pytest.mark.parametrize("name", NAMES)
def test_packed_rows(name: str) -> None:
    from torchtitan.models.attention import VarlenMetadata

    model = stock(name)
    exact.install(model)
    packed = nn.pack(prompts(0), "cpu")
    alone = torch.cat([model(torch.tensor([ids]))[0] for ids in prompts(0)])
    masks = VarlenMetadata(packed.starts, packed.starts, packed.max_position, packed.max_position)
    assert torch.equal(model(packed.token_ids[None], positions=packed.positions[None])[0], alone)
    assert torch.equal(model(packed.token_ids[None], attention_masks=masks)[0], alone)
    with pytest.raises(ValueError, match="attention_masks is a Tensor, expected None or VarlenMetadata"):
        model(packed.token_ids[None], attention_masks=torch.ones(1))


def _sharded(name: str) -> list[torch.Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    plain, model = stock(name, torch.bfloat16), cast(stock(name, torch.bfloat16), torch.float32)
    exact.install(plain)
    how = {"mesh": init_device_mesh("cpu", (2,)), "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    for layer in model.layers.values():
        fully_shard(layer, **how)
    fully_shard(model, **how)
    exact.install(model)
    values = torch.cat(exact.sequence_logprobs(model, prompts(0)))
    values.mean().backward()
    assert all(each.grad is not None for each in model.parameters())
    return [values.detach(), torch.cat(exact.sequence_logprobs(plain, prompts(0))).detach()]


@pytest.mark.parametrize("name", NAMES)
def test_fsdp_keeps_the_bits(name: str) -> None:
    for actual, expected in shared(2).run(_sharded, name):
        assert torch.equal(actual, expected)


def test_segments() -> None:
    model = stock("qwen3")
    installation = exact.install(model, tp_segments=8)
    assert str(installation).count("8 segments of K") == 2
    values = torch.cat(exact.sequence_logprobs(model, prompts(0)))
    installation.uninstall()
    exact.install(model)
    other = torch.cat(exact.sequence_logprobs(model, prompts(0)))
    torch.testing.assert_close(values, other, rtol=1e-4, atol=1e-5)
    assert not torch.equal(values, other)


# ---- what is refused


def test_experts_are_refused() -> None:
    from torchtitan.models.moe import MoEArgs

    model = stock("qwen3", moe_enabled=True, moe_inter_dim=32, moe_args=MoEArgs(num_experts=4, top_k=2))
    with pytest.raises(ValueError, match="TorchTitan's experts are not known"):
        exact.install(model)


def test_other_modules_are_refused() -> None:
    model = stock("llama3")
    model.norm = torch.nn.LayerNorm(96)
    with pytest.raises(ValueError, match=re.escape("norm is a LayerNorm, which is not known")):
        exact.install(model)
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_stage_of_a_pipeline_is_refused() -> None:
    model = stock("llama3")
    exact.install(model)
    model.tok_embeddings = None
    with pytest.raises(ValueError, match="pipeline parallelism is not possible"):
        model(torch.ones(1, 4, 96))


def test_sizes_are_the_models() -> None:
    values = hf_config(model := stock("llama3"), architecture(model))
    assert values["intermediate_size"] == model.layers["0"].feed_forward.w2.in_features
    assert (
        values["rope_parameters"]["factor"]
        == dataclasses.asdict(model.model_args)["rope_scaling_args"]["scaling_factor"]
    )
