"""What trainers do around a model: padding, packing, checkpointing, compiling, sharding; and what is refused."""

import re
from typing import Any

import pytest
import torch
from exact_models import FAMILIES, prompts, stock
from ranks import shared
from torch import Tensor
from transformers_models import build

from whorl import exact

SEQUENCES = prompts(0)


def expected(hf: Any) -> list[Tensor]:
    """The logits of each sequence alone."""
    return [hf(input_ids=torch.tensor([ids])).logits[0] for ids in SEQUENCES]


# ---- batches


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_padding_on_either_side(family: str, side: str) -> None:
    hf = stock(family)
    exact.install(hf)
    longest = max(map(len, SEQUENCES))
    ids, mask = torch.zeros(len(SEQUENCES), longest, dtype=torch.long), torch.zeros(len(SEQUENCES), longest)
    places = [slice(0, len(s)) if side == "right" else slice(longest - len(s), longest) for s in SEQUENCES]
    for row, (sequence, place) in enumerate(zip(SEQUENCES, places, strict=True)):
        ids[row, place], mask[row, place] = torch.tensor(sequence), 1
    positions = (mask.cumsum(1) - 1).clamp_min(0).long()
    outputs = hf(input_ids=ids, attention_mask=mask, output_hidden_states=True)
    again = hf(input_ids=ids, attention_mask=mask, position_ids=positions)
    embedded = hf(inputs_embeds=hf.get_input_embeddings()(ids), attention_mask=mask)
    for row, (alone, place) in enumerate(zip(expected(hf), places, strict=True)):
        for each in (outputs, again, embedded):
            assert torch.equal(each.logits[row, place], alone)
    assert all(each.shape[:2] == ids.shape for each in outputs.hidden_states)
    outputs.logits.sum().backward()
    assert all(each.grad.isfinite().all() for each in hf.parameters())


def packed() -> tuple[Tensor, Tensor, Tensor]:
    """All sequences in one row: tokens, positions, cu_seqlens."""
    positions = torch.cat([torch.arange(len(s)) for s in SEQUENCES])
    starts = torch.tensor([0, *map(len, SEQUENCES)]).cumsum(0).int()
    return torch.tensor([[token for ids in SEQUENCES for token in ids]]), positions[None], starts


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows(family: str) -> None:
    hf = stock(family)
    exact.install(hf)
    ids, positions, starts = packed()
    alone = torch.cat(expected(hf))
    assert torch.equal(hf(input_ids=ids, position_ids=positions).logits[0], alone)
    by_starts = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 21, "max_length_k": 21}
    assert torch.equal(hf(input_ids=ids, **by_starts).logits[0], alone)
    assert torch.equal(hf(input_ids=ids, position_ids=positions, **by_starts).logits[0], alone)
    assert not torch.equal(hf(input_ids=ids).logits[0], alone), "one sequence is another thing than four"


def test_the_balance_of_experts_is_still_learned() -> None:
    hf = stock("qwen3_moe")
    exact.install(hf)
    ids = packed()[0]
    hf(input_ids=ids, labels=ids, output_router_logits=True).loss.backward()
    assert hf.model.layers[0].mlp.gate.weight.grad.any()
    with pytest.raises(ValueError, match="output_router_logits needs a batch without padding"):
        hf(input_ids=ids, attention_mask=torch.ones_like(ids), output_router_logits=True)


# ---- checkpointing and compiling


def step(hf: Any) -> tuple[Tensor, list[Tensor]]:
    """Log-probabilities and gradients."""
    values = torch.cat(exact.sequence_logprobs(hf, SEQUENCES))
    hf.zero_grad()
    values.mean().backward()
    return values.detach(), [each.grad.clone() for each in hf.parameters()]


@pytest.mark.parametrize("how", ["transformers", "torch", "torch first"])
@pytest.mark.parametrize("family", FAMILIES)
def test_checkpointing_changes_no_bit(family: str, how: str) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    hf, plain = stock(family), stock(family)
    exact.install(plain)
    is_layer = lambda module: type(module).__name__.endswith("DecoderLayer")  # noqa: E731
    if how == "torch first":
        apply_activation_checkpointing(hf, check_fn=is_layer)
    exact.install(hf)
    if how == "transformers":
        hf.gradient_checkpointing_enable({"use_reentrant": False})
    elif how == "torch":
        apply_activation_checkpointing(hf, check_fn=is_layer)
    (values, gradients), (own, others) = step(plain), step(hf)
    assert torch.equal(values, own)
    assert all(torch.equal(a, b) for a, b in zip(gradients, others, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("what", ["layers", "model"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_compiled_with_its_roundings(family: str, what: str) -> None:
    hf = stock(family, torch.bfloat16)
    exact.install(hf)
    values, _ = step(hf)
    with torch._inductor.config.patch(emulate_precision_casts=True):
        for part in hf.model.layers if what == "layers" else [hf]:
            part.compile()
        own, gradients = step(hf)
    assert torch.equal(own, values)
    assert all(each.isfinite().all() for each in gradients)


def test_compiled_without_its_roundings_is_refused() -> None:
    hf = stock("llama", torch.bfloat16)
    exact.install(hf)
    hf.model.layers[0].compile()
    with pytest.raises(RuntimeError, match="emulate_precision_casts"):
        step(hf)


def test_autocast_is_refused() -> None:
    hf = stock("llama")
    exact.install(hf)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="under autocast"):
        step(hf)


# ---- FSDP2


def sharded(family: str, *, is_installed_first: bool) -> list[Tensor]:
    """Plain in bf16; sharded with weights in fp32 that are gathered in bf16; after a step of the optimizer, too."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    plain, hf = stock(family, torch.bfloat16), stock(family, torch.bfloat16).float()
    exact.install(plain)
    if is_installed_first:
        exact.install(hf)
    how: dict[str, Any] = {"mesh": init_device_mesh("cpu", (2,))}
    how["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in hf.model.layers:
        fully_shard(layer, **how)
    fully_shard(hf, **how)
    if not is_installed_first:
        exact.install(hf)
    hf.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(hf.parameters(), lr=1e-2)
    outcome = []
    for _ in range(2):
        values = torch.cat(exact.sequence_logprobs(hf, SEQUENCES))
        optimizer.zero_grad()
        values.mean().backward()
        outcome += [torch.cat(exact.sequence_logprobs(plain, SEQUENCES)).detach(), values.detach()]
        optimizer.step()
        with torch.no_grad():
            for mine, each in zip(plain.parameters(), hf.parameters(), strict=True):
                mine.copy_(each.full_tensor())
    return outcome


@pytest.mark.parametrize("is_installed_first", [True, False], ids=["installed first", "sharded first"])
@pytest.mark.parametrize("family", FAMILIES)
def test_fsdp_keeps_the_bits(family: str, is_installed_first: bool) -> None:
    for answer in shared(2).run(_sharded, family, is_installed_first):
        first, own, second, after = answer
        assert torch.equal(own, first)
        assert torch.equal(after, second)
        assert not torch.equal(after, own), "the optimizer has changed the weights"


def _sharded(family: str, is_installed_first: bool) -> list[Tensor]:
    return sharded(family, is_installed_first=is_installed_first)


# ---- what is refused


def test_other_families_are_refused() -> None:
    with pytest.raises(ValueError, match="Qwen3VLForConditionalGeneration is not known, expected one of Llama"):
        exact.install(build("qwen3_vl"))


def _with_adapter(hf: Any) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    inject_adapter_in_model(LoraConfig(target_modules=["q_proj"]), hf)


def _with_other_forward(hf: Any) -> None:
    hf.model.norm.__class__ = type("FusedNorm", (type(hf.model.norm),), {"forward": lambda self, x: x})


def _with_max_norm(hf: Any) -> None:
    hf.model.embed_tokens.max_norm = 1.0


def _with_dropout(hf: Any) -> None:
    hf.config.attention_dropout = 0.1


def _with_gelu(hf: Any) -> None:
    hf.config.hidden_act = "gelu"


UNKNOWN = {
    "an adapter": (_with_adapter, "self_attn.q_proj is a Linear, which is not known"),
    "another forward": (_with_other_forward, "model.norm is a FusedNorm, which is not known"),
    "max_norm": (_with_max_norm, "model.embed_tokens has max_norm"),
    "dropout": (_with_dropout, "attention_dropout is 0.1"),
    "another activation": (_with_gelu, "hidden_act is 'gelu'"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_is_refused_and_nothing_changed(name: str) -> None:
    change, message = UNKNOWN[name]
    hf = stock("llama")
    change(hf)
    with pytest.raises(ValueError, match=re.escape(message)):
        exact.install(hf)
    assert not any("forward" in vars(module) for module in hf.modules())


def test_two_installations_are_refused() -> None:
    hf = stock("llama")
    exact.install(hf)
    with pytest.raises(RuntimeError, match="already has its own forward"):
        exact.install(hf)


def test_a_long_sequence_is_refused() -> None:
    hf = stock("llama", max_position_embeddings=32)
    exact.install(hf)
    with pytest.raises(ValueError, match="position 39 is past the 32 tokens"):
        hf(input_ids=torch.ones(1, 40, dtype=torch.long))


IDS = torch.tensor([[1, 2, 3, 4]])
CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "attention weights": ({"output_attentions": True}, "output_attentions"),
    "positions from 1": ({"position_ids": torch.arange(1, 5)[None]}, "token 0 has position 1, expected 0"),
    "a sequence over two rows": (
        {"input_ids": torch.tensor([[1, 2], [3, 4]]), "position_ids": torch.arange(4).view(2, 2)},
        "token 2 has position 2, expected 0",
    ),
    "a gap": ({"position_ids": torch.tensor([[0, 1, 3, 4]])}, "token 2 has position 3, expected 2"),
    "a hole": ({"attention_mask": torch.tensor([[1, 0, 1, 1]])}, "has 0 between the tokens of a row"),
    "only padding": ({"attention_mask": torch.zeros(1, 4)}, "has no token"),
    "a mask of four dims": ({"attention_mask": torch.ones(1, 1, 4, 4)}, "attention_mask is [1, 1, 4, 4]"),
    "starts that end early": ({"cu_seq_lens_q": torch.tensor([0, 3])}, "cu_seqlens run from 0 to 3, expected 0 to 4"),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_the_engine_does_not_make(name: str) -> None:
    call, message = CALLS[name]
    hf = stock("llama")
    exact.install(hf)
    with pytest.raises(ValueError, match=re.escape(message)):
        hf(**{"input_ids": IDS, **call})


def test_a_cache_is_refused() -> None:
    from transformers import DynamicCache

    hf = stock("llama").eval()
    exact.install(hf)
    with pytest.raises(ValueError, match="got a cache"):
        hf(input_ids=IDS, past_key_values=DynamicCache(config=hf.config))
    with pytest.raises(ValueError, match="got a cache"):
        hf.generate(IDS, max_new_tokens=2)
