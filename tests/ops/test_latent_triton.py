"""Triton kernels of latent attention in pages: codes to the bit, and bits that do not depend on who computes what."""

import contextlib
from typing import Any

import pytest
import torch
from one_sequence import Runner
from test_deepseek import V3, coded, tiny
from torch import Tensor

from whorl import ops
from whorl.ops.indexer import bounds
from whorl.ops.latent import codes

pytest.importorskip("triton", reason="Triton has no wheel for this platform")
from whorl.ops.latent import attention_triton, indexer_triton, scores_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPS = (ops.head_linear, ops.latent_write, ops.index_write, ops.paged_indexer, ops.latent_attention)


def made(op: Any, **case: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    values: dict[str, Any] = op.make(**{"dtype": torch.bfloat16, "device": DEVICE} | case)
    return values


def attend(values: dict[str, Any]) -> Tensor:
    out: Tensor = ops.latent_attention(**values, backend="triton")
    return out


# ---- what is written


EXTREMES = (0.0, 1e-9, 448.0, 2.0**-20, 3e4)  # of rows: nothing, less than the least scale, and exact powers of two


def rows(width: int) -> Tensor:
    torch.manual_seed(0)
    x = torch.randn(9, width)
    for i, value in enumerate(EXTREMES):
        x[i] *= value
    x[5] = 448.0
    return x.bfloat16().to(DEVICE)


def test_latents_are_those_of_the_norm_and_the_rotation_and_codes_those_of_the_reference() -> None:
    """Three ways to the same bits: two kernels, one kernel, and what the reference rounds of that."""
    kv, weight = rows(576), (torch.rand(512, device=DEVICE) + 0.5).bfloat16()
    angles = torch.rand(9, 64, device=DEVICE) * 2 - 1
    slots = torch.tensor([3, 9, 0, -1, 17, 8, 1, 10, 11], device=DEVICE)
    plain = torch.zeros(3, 6, 576, dtype=torch.bfloat16, device=DEVICE)
    coded_pages = torch.zeros(3, 6, 656, dtype=torch.uint8, device=DEVICE)
    for cache in (plain, coded_pages):
        ops.latent_write(kv, weight, angles, cache, slots, backend="triton")
    kept = slots >= 0
    latent = ops.rms_norm(kv[:, :512], weight, backend="triton")
    turned, _ = ops.rope(kv[:, None, 512:], None, angles, style="pairs", backend="triton")
    assert torch.equal(plain.flatten(0, 1)[slots[kept]], torch.cat((latent, turned[:, 0]), 1)[kept])
    expected = codes.pack_latents(latent, turned[:, 0])[kept]
    assert torch.equal(coded_pages.flatten(0, 1)[slots[kept]], expected)
    assert plain.flatten(0, 1).count_nonzero(1).count_nonzero() == 7  # one has no slot, one is zero


def test_keys_of_the_indexer_are_coded_as_the_reference_does() -> None:
    k, weight = rows(128), torch.rand(128, device=DEVICE) + 0.5
    arguments = k, weight, torch.randn(128, device=DEVICE), torch.rand(9, 64, device=DEVICE) * 2 - 1
    slots = torch.tensor([3, 9, 0, -1, 17, 8, 1, 10, 11], device=DEVICE)
    plain = torch.zeros(3, 6, 128, dtype=torch.bfloat16, device=DEVICE)
    actual, expected = (torch.zeros(3, 6, 132, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    for cache in (plain, actual):
        ops.index_write(*arguments, cache, slots, backend="triton")
    codes.store_index(plain.flatten(0, 1)[slots.clamp_min(0)], expected, slots)
    assert torch.equal(actual, expected)
    assert int(actual.count_nonzero()) > 8 * 100


def test_queries_are_rounded_as_the_reference_does() -> None:
    q = rows(128).view(3, 3, 128)
    weights = torch.randn(3, 3, device=DEVICE)
    actual, expected = indexer_triton._round(q, weights), codes.round_queries(q, weights)
    assert torch.equal(actual[0].float(), expected[0])
    assert torch.equal(actual[1], expected[1])


# ---- attention


@pytest.mark.slow
def test_the_number_of_programs_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists that are walked, and lists whose cuts are shared by 2 and by as many as there are; drafts, an empty list
    and a row that belongs to nobody among them. Cuts at other places would show."""
    case = {"queries": (3, 1), "contexts": (300, 270), "topk": 260, "heads": 5, "dim": 40, "value_dim": 24}
    values = made(ops.latent_attention, **case)
    values["indices"][1] = -1
    values["q"] = torch.cat((values["q"], values["q"][:1]))
    values["indices"] = torch.cat((values["indices"], values["indices"][:1]))
    outputs = []
    for programs in (1, 2, 9):
        monkeypatch.setattr(attention_triton, "_plan", lambda *_, n=programs: ({"BLOCK_H": 16}, n))
        outputs.append(attend(values))
    assert all(torch.equal(outputs[0], each) for each in outputs)
    assert outputs[0][1].count_nonzero() == outputs[0][4].count_nonzero() == 0
    assert outputs[0][[0, 2, 3]].count_nonzero() > 3 * 5 * 20
    monkeypatch.setattr(attention_triton, "cut_of", lambda _: 64)
    assert not torch.equal(outputs[0], attend(values))


def test_a_token_alone_has_the_bits_that_it_has_among_others() -> None:
    """And a list of every key those of no list."""
    case = {"queries": (6,), "contexts": (280,), "heads": 3, "dim": 40, "value_dim": 32}
    values = made(ops.latent_attention, **case)
    whole = attend(values)
    every = torch.full((6, 280), -1, dtype=torch.int32, device=DEVICE)
    for i in range(6):
        every[i, : 275 + i] = torch.arange(275 + i)
    assert torch.equal(attend(values | {"indices": every}), whole)
    starts = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
    assert torch.equal(attend(values | {"q": values["q"][5:], "query_starts": starts}), whole[5:])


def test_codes_are_widened_to_what_they_stand_for() -> None:
    """A cache of codes gives the bits of a bf16 cache that holds their values."""
    case = {"queries": (2, 1), "contexts": (200, 9), "topk": 150, "heads": 3, "dim": 300, "value_dim": 260}
    values = made(ops.latent_attention, **case, coded=True)
    pages = values["cache"]
    plain = codes.unpack_latents(pages.flatten(0, 1), 260).view(*pages.shape[:2], 300)
    assert torch.equal(plain.bfloat16().float(), plain)
    assert torch.equal(attend(values), attend(values | {"cache": plain.bfloat16()}))


# ---- the choice


@pytest.mark.slow
@pytest.mark.parametrize("coded_keys", [False, True])
def test_a_choice_does_not_depend_on_what_is_scored_beside_it(
    coded_keys: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, a few tokens at a time, and each token alone; a row that belongs to nobody chooses nothing."""
    case = {"queries": (3, 0, 5, 1), "contexts": (70, 5, 40, 33), "heads": 8, "dim": 32, "topk": 20}
    values = made(ops.paged_indexer, **case, coded=coded_keys)
    values["q"] = torch.cat((torch.randn_like(values["q"]), values["q"][:1]))
    values["weights"] = torch.cat((values["weights"], values["weights"][:1]))
    indices = ops.paged_indexer(**values, backend="triton")
    assert indices[-1].tolist() == [-1] * 20
    width = values["block_tables"].shape[1] * values["cache"].shape[1]
    monkeypatch.setattr(indexer_triton, "chunks", lambda count, size: bounds.chunks(count, size, 4 * width))
    assert torch.equal(ops.paged_indexer(**values, backend="triton"), indices)
    monkeypatch.setattr(scores_triton, "DRAFTED", 0)  # the kernel of prompts instead of that of decoding
    assert torch.equal(ops.paged_indexer(**values, backend="triton"), indices)
    monkeypatch.undo()
    row = 0
    for b, (count, context) in enumerate(zip(case["queries"], case["contexts"], strict=True)):
        for i in range(count):
            alone = values | {name: values[name][row : row + 1] for name in ("q", "weights")}
            alone |= {"block_tables": values["block_tables"][b : b + 1]}
            alone |= {"query_starts": torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)}
            alone |= {"context_lens": torch.tensor([context - count + i + 1], dtype=torch.int32, device=DEVICE)}
            if i == count - 1:
                assert torch.equal(ops.paged_indexer(**alone, backend="triton")[0], indices[row])
            row += 1


def test_equal_scores_go_to_the_earliest_and_planted_keys_are_found() -> None:
    length, block, topk = 700, 16, 8
    count = -(-length // block)
    table = torch.randperm(count, generator=torch.Generator().manual_seed(0)).int()[None].to(DEVICE)
    starts, lengths = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([0, 2], [length]))
    q, weight = torch.ones(2, 4, 16, device=DEVICE), torch.full((2, 4), 0.25, device=DEVICE)
    index = torch.zeros(count, block, 16, device=DEVICE)
    arguments = (q, weight, index, table, starts, lengths, topk)
    assert ops.paged_indexer(*arguments, backend="triton").tolist() == [list(range(topk))] * 2
    for place in (640, length - 1):
        index[int(table[0, place // block]), place % block] = 1.0
    indices = ops.paged_indexer(*arguments, backend="triton").tolist()
    assert indices == [[*range(topk - 1), 640], [*range(topk - 2), 640, length - 1]]


# ---- the model


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        pytest.param(coded, {"num_hidden_layers": 1}, id="sparse-codes", marks=pytest.mark.slow),
        pytest.param(tiny, {"num_hidden_layers": 2}, id="sparse-numbers", marks=pytest.mark.slow),
        pytest.param(coded, V3, id="v3-codes", marks=pytest.mark.slow),
        pytest.param(tiny, V3, id="v3-numbers", marks=pytest.mark.slow),
    ],
)
def test_decoded_equals_prefilled(make: Any, changes: dict[str, Any]) -> None:
    """With these kernels in a whole model: a prompt, and the same tokens one, two and three at a time."""
    model = make(**changes)
    tokens = [(7 * i * i + 3) % 97 for i in range(16)]
    with contextlib.ExitStack() as stack:
        for op in OPS:
            stack.enter_context(op.using("triton"))
        whole = Runner(model).run(tokens)
        runner = Runner(model)
        parts = [runner.run(tokens[a:b]) for a, b in ((0, 10), (10, 11), (11, 14), (14, 16))]
    assert torch.equal(torch.cat(parts), whole)
    assert not torch.equal(Runner(model).run(tokens), whole), "the references ran"
