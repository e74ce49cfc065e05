"""The products of experts on Hopper, of many tokens and of one or two, have the bits of the other kernels."""

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu
# Experts, choices, channels and width: of real models, and with weights that fill no tile.
SIZES = [(128, 8, 2048, 768), (5, 2, 192, 64), (8, 2, 320, 192), (40, 3, 576, 448), (1, 1, 64, 128)]
EVEN, ALL_TO_ONE, FIRST_HALF = "even", "all to one", "first half"


def routed(tokens: int, experts: int, choices: int, how: str) -> torch.Tensor:
    """[T, K]; of these kernels an expert may be chosen twice by a token."""
    ids = torch.randint(experts, (tokens, choices), device="cuda", dtype=torch.int32)
    if how == ALL_TO_ONE:
        return torch.full_like(ids, experts - 1)
    return ids if how == EVEN else ids // 2


def both(tokens: int, size: tuple[int, int, int, int], dtype: torch.dtype, how: str = EVEN) -> list[torch.Tensor]:
    """What the kernel for Hopper wrote to hidden and to parts, then what the plain kernels wrote."""
    from whorl.ops.moe import experts_many_rows_hopper_triton as hopper
    from whorl.ops.moe import experts_many_tokens_triton as plain

    experts, choices, channels, width = size
    shapes: dict[str, Any] = {"x": (tokens, channels), "up": (experts, 2 * width, channels)}
    shapes["down"] = (experts, channels, width)
    drawn = {name: torch.randn(*shape, device="cuda") for name, shape in shapes.items()}
    x, up, down = (t.mul(1 if name == "x" else t.shape[-1] ** -0.5).to(dtype) for name, t in drawn.items())
    assert hopper.fits(x, up, down)
    order, counts = plain.sort_pairs(routed(tokens, experts, choices, how), experts)
    results = []
    for is_plain in (False, True):
        pairs = tokens * choices
        hidden, parts = (torch.full((pairs, n), torch.nan, device="cuda", dtype=dtype) for n in (width, channels))
        if is_plain:
            plans = plain.tile_plan(pairs / experts, x.element_size())
            plain.run_gate_up(x, up, order, counts, hidden, choices, plans[0])
            plain.run_down(hidden, down, order, counts, parts, plans[1])
        else:
            hopper.run_gate_up(x, up, order, counts, hidden, choices)
            hopper.run_down(hidden, down, order, counts, parts)
        results += [hidden, parts]
    return results


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_bits(size: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for tokens in (1, 63, 64, 65, 127, 129, 1000, 3001):
        for how in (EVEN, ALL_TO_ONE, FIRST_HALF):
            hidden, parts, plain_hidden, plain_parts = both(tokens, size, dtype, how)
            assert torch.equal(hidden, plain_hidden), (tokens, how)
            assert torch.equal(parts, plain_parts), (tokens, how)


def test_repeated_calls_agree() -> None:
    """Programs run in any order, and the copies of one tile must not overwrite another."""
    torch.manual_seed(1)
    for _ in range(20):
        results = both(4000, SIZES[0], torch.bfloat16)
        assert torch.equal(results[0], results[2])
        assert torch.equal(results[1], results[3])


@pytest.mark.parametrize("change", ["channels", "width", "dtype", "strides"])
def test_what_does_not_fit(change: str) -> None:
    from whorl.ops.moe import experts_many_rows_hopper_triton as hopper

    channels, width = 128 + 8 * (change == "channels"), 64 + 8 * (change == "width")
    dtype = torch.float32 if change == "dtype" else torch.bfloat16
    x, up, down = (
        torch.zeros(*shape, device="cuda", dtype=dtype)
        for shape in ((9, channels), (4, 2 * width, channels), (4, channels, width))
    )
    if change == "strides":
        up = up.mT.contiguous().mT
    assert not hopper.fits(x, up, down)


def test_it_can_fail() -> None:
    """The halves of the channels in the other order: another order of additions, other bits."""
    from whorl import ops

    torch.manual_seed(2)
    values = ops.OPS["experts"].make(
        tokens=(600,), hidden=2048, width=768, experts=8, k=2, dtype=torch.bfloat16, device="cuda"
    )
    turned = dict(values)
    for name in ("x", "gate_up"):
        turned[name] = torch.cat((values[name][..., 1024:], values[name][..., :1024]), -1)
    assert not torch.equal(ops.experts(**values, backend="triton"), ops.experts(**turned, backend="triton"))


# ---- one or two tokens: the second product and the sum of the choices

FEW_SIZES = [(128, 2048, 768), (8, 40, 256), (11, 328, 512)]  # experts, channels and width


def few_values(tokens: int, size: tuple[int, int, int], dtype: torch.dtype) -> dict[str, Any]:
    from whorl import ops

    experts, hidden, width = size
    sizes = {"hidden": hidden, "width": width, "experts": experts, "k": 8}
    return ops.OPS["experts"].make(tokens=(tokens,), **sizes, dtype=dtype, device="cuda")  # type: ignore[no-any-return]


def without_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    from whorl.ops.moe import experts_triton

    monkeypatch.setattr(experts_triton, "few_tokens_on_hopper", lambda down, ids: None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", FEW_SIZES, ids=str)
def test_bits_of_few_tokens(size: tuple[int, int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from whorl import ops
    from whorl.ops.moe import experts_few_tokens_hopper_triton as few

    torch.manual_seed(3)
    drawn = [few_values(tokens, size, dtype) for tokens in (1, 2, 1, 2)]
    assert all(few.fits(values["down"], values["ids"]) for values in drawn)
    results = [ops.experts(**values, backend="triton") for values in drawn]
    without_hopper(monkeypatch)
    for values, y in zip(drawn, results, strict=True):
        assert torch.equal(y, ops.experts(**values, backend="triton"))


@pytest.mark.parametrize("tokens", [1, 2])
def test_layers_that_run_ahead(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a recorded step kernels start early, and must not read ids that are not written yet."""
    from whorl import ops
    from whorl.device import ahead

    torch.manual_seed(4)
    layers = [few_values(tokens, FEW_SIZES[0], torch.bfloat16) for _ in range(6)]
    gates = [torch.randn(128, 2048, device="cuda", dtype=torch.bfloat16) / 16 for _ in layers]
    x = layers[0]["x"].clone()

    def step() -> torch.Tensor:
        y = x
        for layer, gate in zip(layers, gates, strict=True):
            weights, ids = ops.route(ops.linear(y, gate, backend="triton"), 8, backend="triton")
            y = ops.experts(y, layer["gate_up"], layer["down"], weights, ids, backend="triton") * 4
        return y

    with torch.inference_mode(), ahead():
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            recorded = step()
    without_hopper(monkeypatch)
    for _ in range(30):
        x.normal_()
        graph.replay()
        with torch.inference_mode():
            assert torch.equal(recorded, step())


@pytest.mark.parametrize("change", ["tokens", "choices", "width", "channels", "dtype", "strides"])
def test_what_does_not_fit_few_tokens(change: str) -> None:
    from whorl.ops.moe import experts_few_tokens_hopper_triton as few

    width, channels = {"width": 1024}.get(change, 256), 64 + 4 * (change == "channels")
    dtype = torch.float32 if change == "dtype" else torch.bfloat16
    down = torch.zeros(9, channels, width, device="cuda", dtype=dtype)
    if change == "strides":
        down = down.mT.contiguous().mT
    ids = torch.zeros(3 if change == "tokens" else 2, 7 if change == "choices" else 8, dtype=torch.int32)
    assert not few.fits(down, ids)
