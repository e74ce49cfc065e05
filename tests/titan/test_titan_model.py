"""DeepSeek-V3.2 in training: loss curves, the losses the model brings, its sizes."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("torchtitan")

from tiny_deepseek import make_model, tiny
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.models.moe.moe import TokenChoiceTopKRouter, TokenReorderer

from whorl.titan.deepseek_v32.args import FLAVOURS
from whorl.titan.deepseek_v32.core import AttentionSettings, Core, pop_log
from whorl.titan.deepseek_v32.loss import build_loss, chunked_cross_entropy
from whorl.titan.deepseek_v32.model import DeepSeekV32Model
from whorl.titan.deepseek_v32.moe import Reorderer, Router

# ---- the model


def kl_of(model: DeepSeekV32Model) -> float:
    return sum(pop_log(m.kl).item() for m in model.modules() if isinstance(m, Core))


def test_loss_curves_agree_with_and_without_the_converter() -> None:
    """20 steps of AdamW on one text: what is trained on is the same, to the rounding of fp32."""
    text = torch.randint(0, 512, (1, 49), generator=torch.Generator().manual_seed(3))
    curves: dict[str, list[tuple[float, float]]] = {}
    for path in ("small", "masked", "absorbed"):
        model = make_model(tiny(n_layers=2), path)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        curves[path] = []
        for _ in range(20):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            curves[path].append((loss.item(), kl_of(model)))
    first, last = curves["small"][0], curves["small"][-1]
    assert last[0] < 0.5 * first[0]
    for path in ("masked", "absorbed"):
        for (a, kl_a), (b, kl_b) in zip(curves["small"], curves[path], strict=True):
            assert abs(a - b) < 2e-3 * a  # observed 1e-4: a choice among nearly equal keys may fall otherwise
            assert abs(kl_a - kl_b) < 2e-2 * kl_a


def test_micro_batches_add_up() -> None:
    """The mean is over the tokens of the whole step, however it is cut."""
    args = tiny(global_tokens=4 * 32, index_topk=8)
    tokens = torch.randint(0, 512, (4, 32))
    results = []
    for parts in ([tokens], tokens.split(1)):
        model = make_model(args, "masked")
        for part in parts:
            logits = model(part)
            (torch.nn.functional.cross_entropy(logits.flatten(0, 1), part.flatten(), reduction="sum") / 128).backward()
        results.append(({n: p.grad for n, p in model.named_parameters()}, kl_of(model)))
    assert math.isclose(results[0][1], results[1][1], rel_tol=1e-4)
    for name, grad in results[0][0].items():
        other = results[1][0][name]
        assert (grad - other).norm() <= 1e-3 * grad.norm() + 1e-9, name


def test_positions_are_what_order_is() -> None:
    """Tokens in another order, with their positions: the same logits in that order."""
    model = make_model(tiny(index_n_heads=24))  # with few heads many scores are 0, and ties go by order
    tokens, order = torch.randint(0, 512, (2, 40)), torch.randperm(40)
    with torch.no_grad():
        straight = model(tokens)
        for positions in (order[None], order.expand(2, -1)):
            assert torch.allclose(model(tokens[:, order], positions=positions), straight[:, order], atol=1e-4)
        assert not torch.allclose(model(tokens[:, order]), straight[:, order], atol=0.1)


def test_built_on_meta() -> None:
    """As TorchTitan builds it."""
    with torch.device("meta"):
        model = DeepSeekV32Model(tiny(n_mtp_layers=1))
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    model.init_weights(buffer_device=torch.device("cpu"))
    torch.manual_seed(0)
    other = DeepSeekV32Model(tiny(n_mtp_layers=1))
    torch.manual_seed(0)
    other.init_weights()
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))
    assert torch.equal(model.cos_sin, other.cos_sin)
    tokens = torch.randint(0, 512, (1, 32))
    logits = model(tokens)
    assert torch.equal(logits, other(tokens))
    logits.sum().backward()
    assert kl_of(model) > 0


@pytest.mark.filterwarnings("ignore")  # this machine's bf16 products are slow, and say so
def test_autocast_of_a_wide_model() -> None:
    """Without FSDP, TorchTitan computes in bf16 by autocast; LayerNorm then stays wide."""
    model = make_model(tiny(n_layers=2), "masked")
    tokens = torch.randint(0, 512, (1, 24))
    with torch.no_grad():
        wide = model(tokens)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens)
    logits.float().sum().backward()
    assert logits.dtype == torch.bfloat16
    assert (logits - wide).norm() < 0.1 * wide.norm()
    assert all(p.grad is not None and p.grad.isfinite().all() for n, p in model.named_parameters() if ".moe." not in n)


def test_wrong_calls_are_refused() -> None:
    model = make_model(tiny())
    with pytest.raises(ValueError, match="attention_masks"):
        model(torch.zeros(1, 8, dtype=torch.long), attention_masks=object())
    with pytest.raises(ValueError, match=r"65 tokens, expected at most 64"):
        model(torch.zeros(1, 65, dtype=torch.long))
    with pytest.raises(ValueError, match=r"rotary table is torch\.bfloat16"):
        model.bfloat16()(torch.zeros(1, 8, dtype=torch.long))


@pytest.mark.parametrize("groups", [None, 4])
@pytest.mark.parametrize("balanced", [False, True])
def test_router_is_torchtitans(groups: int | None, balanced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the count of tokens, which there is torch.histc: that takes no integers on a CPU."""
    settings = ("sigmoid", True, 2.5, False, balanced)
    real = torch.histc
    monkeypatch.setattr(torch, "histc", lambda x, **k: real(x.float(), **k).long())
    ours, theirs = (cls(16, 8, groups, groups and 2, 3, *settings) for cls in (Router, TokenChoiceTopKRouter))
    ours.load_state_dict(theirs.state_dict())
    x, bias = torch.randn(50, 16), torch.randn(8) / 4
    actual, expected = ours(x, bias), theirs(x, bias)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    sorted_ours, sorted_theirs = (cls(8, 3)(*actual[:2]) for cls in (Reorderer, TokenReorderer))
    assert all(torch.equal(a, b) for a, b in zip(sorted_ours, sorted_theirs, strict=True))


# ---- losses


@pytest.mark.parametrize("chunk", [1, 5, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunked_cross_entropy(chunk: int, dtype: torch.dtype) -> None:
    """TorchTitan's own, value and gradient: fp32 to rounding, bf16 to the last bit or one beside it."""
    from torchtitan.components.loss import cross_entropy_loss

    torch.manual_seed(0)
    logits = (4 * torch.randn(2, 9, 100)).to(dtype)
    labels = torch.randint(0, 100, (2, 9))
    labels[0, :3] = IGNORE_INDEX
    a, b = (logits.clone().requires_grad_() for _ in range(2))
    expected = cross_entropy_loss(a, labels)
    (expected / 7).backward()
    x = b * 1  # its memory is overwritten
    actual = chunked_cross_entropy(x, labels, chunk=chunk)
    (actual / 7).backward()
    assert torch.allclose(actual, expected, rtol=1e-6)
    assert torch.allclose(a.grad, b.grad, rtol=1e-5 if dtype == torch.float32 else 2**-7, atol=1e-9)
    assert not b.grad[0, :3].any()


def test_overwritten_logits_are_not_used_again() -> None:
    x = torch.randn(1, 4, 10, requires_grad=True)
    logits = x * 1
    square = (logits**2).sum()
    loss = chunked_cross_entropy(logits, torch.zeros(1, 4, dtype=torch.long), chunk=2) + square
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_build_loss() -> None:
    from types import SimpleNamespace as Job

    from whorl.titan.config import Whorl

    compiling = Job(enable=False, components=[])
    logits, labels = torch.randn(1, 4, 10, requires_grad=True), torch.zeros(1, 4, dtype=torch.long)
    losses = [
        build_loss(Job(whorl=Whorl(loss_chunk=chunk), compile=compiling), parallel_dims=None)(logits, labels)
        for chunk in (0, 3)
    ]
    assert torch.allclose(*losses)
    with pytest.raises(ValueError, match=r"loss_chunk is -1"):
        build_loss(Job(whorl=Whorl(loss_chunk=-1), compile=compiling))


def test_multi_token_prediction() -> None:
    """Two layers: what is attached is the mean over both of the loss of the tokens after next."""
    model = make_model(tiny(n_mtp_layers=2, mtp_loss_coeff=0.3))
    tokens = torch.randint(0, 512, (2, 20))
    logits = model(tokens)
    with torch.no_grad():
        assert torch.equal(logits, model(tokens))
        h = model.tok_embeddings(tokens)
        for layer in model.layers.values():
            h = layer(h, model.cos_sin)
        h, expected = model.norm(h), 0.0
        for depth, layer in enumerate(model.mtp.values(), 1):
            # The last tokens have no next one; what stands in their place reaches none before them.
            embedded = model.tok_embeddings(torch.cat((tokens[:, depth:], tokens[:, :depth] * 0), 1))
            h = layer(h, embedded, model.cos_sin, None)
            further = model.output(layer.norm(h))[:, : 20 - depth - 1]
            expected += torch.nn.functional.cross_entropy(
                further.flatten(0, 1), tokens[:, depth + 1 :].flatten(), reduction="sum"
            ).item()
    (logits.sum() * 0).backward()
    assert pop_log(model.mtp_loss).item() == pytest.approx(expected * 0.3 / 2 / 40, rel=1e-5)
    unused = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    # Of the last layer's experts some may see no token.
    assert all(".experts." in n for n in unused), unused


def test_prediction_layer_joins_token_and_state_in_this_order() -> None:
    """As checkpoints have it: `enorm` and the first half of `eh_proj` are for the token, `hnorm` and the rest for h."""
    model = make_model(tiny(n_mtp_layers=1))
    layer, (h, token, other) = model.mtp["0"], torch.randn(3, 1, 8, 64)

    def changes(parameter: Tensor, part: slice, **changed: Tensor) -> bool:
        kept = parameter.detach().clone()
        with torch.no_grad():
            parameter[..., part] = 0
            results = [layer(x["h"], x["token"], model.cos_sin, None) for x in ({"h": h, "token": token}, changed)]
            parameter.copy_(kept)
        return not torch.equal(*results)

    weight, everything = layer.eh_proj.weight, slice(None)
    for parameter, part in ((layer.enorm.weight, everything), (weight, slice(0, 64))):
        assert not changes(parameter, part, h=h, token=other)
        assert changes(parameter, part, h=other, token=token)
    for parameter, part in ((layer.hnorm.weight, everything), (weight, slice(64, 128))):
        assert changes(parameter, part, h=h, token=other)
        assert not changes(parameter, part, h=other, token=token)


# ---- sizes


def test_parameters_of_the_flavours() -> None:
    with torch.device("meta"):
        count = {n: sum(p.numel() for p in DeepSeekV32Model(FLAVOURS[n]).parameters()) for n in ("4l", "8l")}
    assert {n: round(c / 1e9, 3) for n, c in count.items()} == {"4l": 4.243, "8l": 6.633}
    assert set(FLAVOURS) == {"tiny", "debug", "4l", "8l", "4l_top8", "8l_top8", "671b"}


@pytest.mark.slow
def test_parameters_of_the_whole_model() -> None:
    with torch.device("meta"):
        model = DeepSeekV32Model(FLAVOURS["671b"])
    total, _ = FLAVOURS["671b"].get_nparams_and_flops(model, 4096)
    assert round(total / 1e9, 1) == 671.9


def test_flops() -> None:
    """Counted by hand for 4 layers at 4096 tokens: 6 for each weight that is used, chosen pairs thrice.

    4 for the indexer's weights, whose input gets no gradient; what the indexer learns from is attention once more, and
    is not counted again.
    """
    args = FLAVOURS["4l"]
    with torch.device("meta"):
        _, flops = args.get_nparams_and_flops(DeepSeekV32Model(args), 4096)
    attention, indexer, dense, expert, head = 187.11e6, 13.96e6, 396.4e6, 44.04e6, 926.7e6
    weights = 6 * (4 * attention + dense + 3 * 3 * expert + head) + 4 * 4 * indexer
    keys = 1536.5  # of 2048 at most, causal
    pairs = 6 * 128 * keys * 320 + 2 * 64 * 128 * 2048.5 + 4 * 64 * 128 * keys
    assert flops == pytest.approx(weights + 4 * pairs, rel=1e-4)


def test_softmax_scale() -> None:
    assert FLAVOURS["4l"].softmax_scale == pytest.approx(192**-0.5)
    assert FLAVOURS["671b"].softmax_scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)


def make_job(**parallelism: int) -> Any:
    from torchtitan.config import JobConfig

    job = JobConfig()
    job.training.seq_len, job.training.local_batch_size = 32, 2
    for name, value in parallelism.items():
        setattr(job.parallelism, name, value)
    return job


def test_update_from_config(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from whorl.titan.config import Whorl

    monkeypatch.setenv("WORLD_SIZE", "16")
    args = tiny()
    job = make_job(tensor_parallel_degree=2, context_parallel_degree=2)
    args.update_from_config(job)
    assert (args.max_seq_len, args.global_tokens) == (32, 2 * 4 * 32)
    job.training.global_batch_size = 64
    more = {name: getattr(job, name) for name in ("training", "parallelism", "debug")}
    ours = Whorl(stage="warmup", indexer_loss_coeff=0.25, attention="absorbed", bootstrap_indexer=True)
    args.update_from_config(SimpleNamespace(**more, whorl=ours))
    assert args.global_tokens == 64 * 32
    assert AttentionSettings.from_args(args) == dataclasses.replace(
        AttentionSettings.from_args(tiny()), stage="warmup", coefficient=0.25, path="absorbed", global_tokens=64 * 32
    )
    assert args.bootstrap_indexer


@pytest.mark.parametrize("kind", ["pipeline", "context", "tensor"])
def test_multi_token_prediction_says_what_it_cannot(kind: str) -> None:
    with pytest.raises(ValueError, match=f"{kind}_parallel_degree is 2"):
        tiny(n_mtp_layers=1).update_from_config(make_job(**{f"{kind}_parallel_degree": 2}))
