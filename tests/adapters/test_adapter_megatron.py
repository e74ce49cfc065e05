"""Our operators in a Megatron-core model, against Megatron's own rotation and transformers' Qwen3-VL, on the CPU."""

import pytest
import torch
from megatron_models import (
    BATCH,
    CLOSE,
    HEAD_DIM,
    HEADS,
    MARKS,
    OPERATORS,
    SEQ,
    assert_equals,
    inputs,
    logits_and_gradients,
    make_model,
    megatron_rotation,
    one_rank,
    packing,
    rotated,
    set_context_parallel,
)

from whorl import ops
from whorl.adapters import megatron as adapter
from whorl.device import is_interpreting
from whorl.positions import context_slice

pytestmark = MARKS


@pytest.fixture(scope="module", autouse=True)
def _rank():
    with one_rank():
        yield


@pytest.mark.parametrize("options", OPERATORS)
def test_mrope_model_equals_megatron(options):
    model, arguments = make_model(), inputs("mrope")
    expected = logits_and_gradients(model, arguments)
    with adapter.install(model, **options) as installation:
        actual = logits_and_gradients(model, arguments)
        assert installation.calls == {options.get("operator", "rope"): 2}
    assert_equals(actual, expected)
    assert not torch.equal(expected[0], model(arguments[0], arguments[1].roll(1, 0), arguments[2]))


@pytest.mark.parametrize(
    ("kind", "percent", "interleaved"),
    [("rope", 1.0, False), ("rope", 0.5, False), ("rope", 1.0, True), ("rope", 0.5, True), ("yarn", 1.0, False)],
)
def test_plain_model_equals_megatron(kind, percent, interleaved):
    model = make_model(kind, percent=percent, rotary_interleaved=interleaved)
    arguments = inputs("rope")
    expected = logits_and_gradients(model, arguments)
    with adapter.install(model) as installation:
        actual = logits_and_gradients(model, arguments)
        assert installation.calls == {"rope": 2}
    assert_equals(actual, expected)


def test_bfloat16_is_at_most_as_far_from_fp32_as_megatron():
    model, (_, positions, _) = make_model(), inputs("mrope")
    freqs = model.rotary_pos_emb(positions, model.mrope_section)
    hidden = torch.randn(SEQ, BATCH, HEADS * HEAD_DIM).bfloat16()
    exact = rotated(model, hidden.float(), freqs)
    half = make_model()
    half.load_state_dict(model.state_dict())
    half.bfloat16()
    theirs = rotated(half, hidden, freqs)
    with adapter.install(half):
        ours = rotated(half, hidden, freqs)
    for mine, other, truth in zip(ours, theirs, exact, strict=True):
        assert mine.dtype == torch.bfloat16
        assert (mine.float() - truth).abs().max() <= 2 * (other.float() - truth).abs().max()
        assert (mine.float() - truth).norm() <= 1.01 * (other.float() - truth).norm()


@pytest.mark.parametrize("options", OPERATORS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_packed_mrope_equals_megatron_on_every_rank(options, size):
    """Megatron's apply function maps whole packed angles exactly; its rotary class, asked for one rank, does not."""
    model, lengths = make_model(), [8, 16, 8]
    total = sum(lengths)
    positions = torch.randint(0, 40, (3, 1, total))
    freqs = model.rotary_pos_emb(positions, model.mrope_section)
    hidden, packed = torch.randn(total, 1, HEADS * HEAD_DIM), packing(lengths)
    for rank in range(size):
        set_context_parallel(model, rank, size)
        local = context_slice(hidden, rank, size, dim=0, cu_seqlens=packed.cu_seqlens_q)
        expected = rotated(model, local, freqs, packed)
        with adapter.install(model, **options) as installation:
            carried = model.rotary_pos_emb(positions, model.mrope_section, cp_group=None)
            torch.testing.assert_close(rotated(model, local, carried, packed), expected, **CLOSE)
            installation.enabled = False
            torch.testing.assert_close(rotated(model, local, carried, packed), expected, **CLOSE)
            assert installation.calls == {options.get("operator", "rope"): 1, "megatron: switched off": 1}


@pytest.mark.parametrize("size", [1, 2])
def test_packed_plain_rope_equals_megatron_on_every_rank(size):
    model, lengths = make_model("rope"), [4, 12, 8]
    hidden, packed = torch.randn(sum(lengths), 1, HEADS * HEAD_DIM), packing(lengths)
    freqs = model.rotary_pos_emb(12, packed_seq=True)
    for rank in range(size):
        set_context_parallel(model, rank, size)
        local = context_slice(hidden, rank, size, dim=0, cu_seqlens=packed.cu_seqlens_q)
        expected = rotated(model, local, freqs, packed)
        with adapter.install(model):
            torch.testing.assert_close(rotated(model, local, freqs, packed), expected, **CLOSE)


def test_packed_plain_rope_restarts_when_the_table_is_as_long_as_the_pack():
    """Megatron takes such a table for per-token angles, and the second sequence goes on where the first ended."""
    model, lengths = make_model("rope"), [8, 8]
    hidden = torch.randn(16, 1, HEADS * HEAD_DIM)
    truth = rotated(model, hidden, model.rotary_pos_emb(8, packed_seq=True), packing(lengths))
    freqs, packed = model.rotary_pos_emb(16, packed_seq=True), packing(lengths, max_length=16)
    assert not torch.allclose(rotated(model, hidden, freqs, packed)[0], truth[0], atol=1e-2)
    with adapter.install(model):
        torch.testing.assert_close(rotated(model, hidden, freqs, packed), truth, **CLOSE)


@pytest.mark.parametrize("options", OPERATORS)
@pytest.mark.parametrize("enabled", [True, False])
def test_padded_mrope_of_every_context_rank(options, enabled):
    model, (_, positions, _) = make_model(), inputs("mrope")
    hidden = torch.randn(SEQ, BATCH, HEADS * HEAD_DIM)
    whole = rotated(model, hidden, model.rotary_pos_emb(positions, model.mrope_section))
    size = 2
    with adapter.install(model, enabled=enabled, **options):
        carried = model.rotary_pos_emb(positions, model.mrope_section)
        for rank in range(size):
            set_context_parallel(model, rank, size)
            chunks = [part.chunk(2 * size, 0) for part in (hidden, *whole)]
            local, *expected = [torch.cat((part[rank], part[2 * size - 1 - rank])) for part in chunks]
            torch.testing.assert_close(list(rotated(model, local, carried)), expected, **CLOSE)


def test_positions_of_other_tokens_are_refused():
    model, (_, positions, _) = make_model(), inputs("mrope")
    with adapter.install(model):
        carried = model.rotary_pos_emb(positions, model.mrope_section)
        with pytest.raises(ValueError, match="positions of 8 tokens for 6 tokens on rank 0 of 1"):
            rotated(model, torch.randn(6, BATCH, HEADS * HEAD_DIM), carried)
    plain = make_model("rope")
    with adapter.install(plain), pytest.raises(ValueError, match="9 rotary positions, expected 6"):
        rotated(plain, torch.randn(6, BATCH, HEADS * HEAD_DIM), plain.rotary_pos_emb(9))


@pytest.mark.parametrize(
    "options", [{"layout": "interleaved"}, {"layout": "interleaved", "operator": "mrope", "max_position": 40}]
)
@pytest.mark.parametrize("enabled", [True, False])
def test_interleaved_equals_transformers_qwen3_vl(options, enabled):
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding, apply_rotary_pos_emb

    sections, head_dim = [24, 20, 20], 128
    rope_parameters = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": sections,
        "mrope_interleaved": True,
    }
    config = Qwen3VLTextConfig(
        hidden_size=HEADS * head_dim, num_attention_heads=HEADS, head_dim=head_dim, rope_parameters=rope_parameters
    )
    positions = torch.randint(0, 40, (3, BATCH, SEQ))
    model = make_model(sections=sections, head_dim=head_dim)
    hidden = torch.randn(SEQ, BATCH, HEADS * head_dim)
    cos, sin = Qwen3VLTextRotaryEmbedding(config)(hidden, positions)
    zero = torch.zeros(SEQ, BATCH, 1, head_dim)
    q, k, _ = (x.permute(1, 2, 0, 3) if x.dim() == 4 else x for x in rotated(model, hidden, zero))  # unrotated, BHSD
    expected = [x.permute(2, 0, 1, 3) for x in apply_rotary_pos_emb(q, k, cos, sin)]
    with adapter.install(model, enabled=enabled, **options):
        actual = rotated(model, hidden, model.rotary_pos_emb(positions, sections))
    torch.testing.assert_close(list(actual[:2]), expected, **CLOSE)


@pytest.mark.skipif(not is_interpreting(), reason="Triton runs on the CPU only in its interpreter")
@pytest.mark.parametrize("kind", ["rope", "mrope"])
@pytest.mark.parametrize("is_packed", [False, True])
def test_the_triton_backend_takes_what_the_site_passes(kind, is_packed):
    pytest.importorskip("triton")
    model = make_model(kind)
    batch = 1 if is_packed else BATCH
    packed = packing([3, 5]) if is_packed else None
    positions = torch.randint(0, 40, (3, batch, SEQ))
    hidden = torch.randn(SEQ, batch, HEADS * HEAD_DIM)
    freqs = model.rotary_pos_emb(positions, model.mrope_section) if kind == "mrope" else model.rotary_pos_emb(SEQ)
    if is_packed and kind == "rope":
        freqs = model.rotary_pos_emb(5, packed_seq=True)
    expected = rotated(model, hidden, freqs, packed)
    options = OPERATORS[1] if kind == "mrope" else {}
    with adapter.install(model, **options), ops.rope.using("triton"):
        carried = model.rotary_pos_emb(positions, model.mrope_section) if kind == "mrope" else freqs
        torch.testing.assert_close(rotated(model, hidden, carried, packed), expected, **CLOSE)


def test_pairs_style_mrope_works_where_megatron_raises():
    """rotary_interleaved=True: the same as half style on channels put in pairs order."""
    model = make_model(rotary_interleaved=True)
    positions = torch.randint(0, 40, (3, BATCH, SEQ))
    with pytest.raises(RuntimeError, match="view"):
        model.rotary_pos_emb(positions, model.mrope_section)
    hidden = torch.randn(SEQ, BATCH, HEADS * HEAD_DIM)
    q, _, _ = rotated(model, hidden, torch.zeros(SEQ, BATCH, 1, HEAD_DIM))
    half = torch.arange(HEAD_DIM).reshape(2, -1).T.flatten()  # where pairs order takes its channels from
    angles = make_model().rotary_pos_emb(positions, model.mrope_section)
    expected = megatron_rotation(q[..., half.argsort()], angles)[..., half]
    with adapter.install(model):
        actual, _, _ = rotated(model, hidden, model.rotary_pos_emb(positions, model.mrope_section))
    torch.testing.assert_close(actual, expected, **CLOSE)


def test_gradients_survive_recomputation_and_mixed_microbatches():
    """Two microbatches forward before either runs backward, each layer recomputed with detached inputs."""
    model = make_model()
    batches = [inputs("mrope"), inputs("mrope")]
    expected = [logits_and_gradients(model, arguments)[1] for arguments in batches]
    total = {name: expected[0][name] + expected[1][name] for name in expected[0]}
    for layer in model.decoder.layers:
        layer.forward = _recomputed(layer.forward)
    for options in OPERATORS:
        model.zero_grad()
        with adapter.install(model, **options):
            losses = [(o * torch.linspace(-1, 1, o.shape[-1])).sum() for o in (model(*a) for a in batches)]
            for loss in losses:
                loss.backward()
        actual = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        torch.testing.assert_close(actual, total, rtol=1e-4, atol=1e-5)


def _recomputed(forward):
    def run(hidden_states, rotary_pos_emb=None, **kwargs):
        def body(hidden, carried):
            return forward(hidden_states=hidden, rotary_pos_emb=carried, **kwargs)

        return torch.utils.checkpoint.checkpoint(body, hidden_states, rotary_pos_emb, use_reentrant=True)

    return run


def test_cos_and_sin_are_taken_once_a_step(monkeypatch):
    model, arguments = make_model(), inputs("mrope")
    taken = []
    original = adapter._RotaryEmbedding._cos_sin
    monkeypatch.setattr(adapter._RotaryEmbedding, "_cos_sin", lambda *a: taken.append(1) or original(*a))
    with adapter.install(model):
        first = model(*arguments)
        assert len(taken) == 1
        again = model(arguments[0], arguments[1].roll(1, 0), arguments[2])
        assert len(taken) == 2
        assert not torch.equal(first, again)
        carried = model.rotary_pos_emb(arguments[1], model.mrope_section)
        hidden = torch.randn(SEQ, BATCH, HEADS * HEAD_DIM)
        before = rotated(model, hidden, carried)[0]
        carried.mul_(2)  # written in place: what was kept must not be used
        assert not torch.equal(rotated(model, hidden, carried)[0], before)
