"""Our operators in a Megatron-core model, against Megatron's own rotation and transformers' Qwen3-VL, on the CPU."""

import itertools
import warnings
from types import SimpleNamespace

import pytest
import torch
from megatron_rank import one_cpu_rank
from torch import nn

from whorl import ops
from whorl.adapters import megatron as adapter
from whorl.device import is_interpreting
from whorl.positions import context_slice

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it misses Apex and Transformer Engine, which need a GPU
    pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install megatron-core==0.16.1")
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer import dot_product_attention
    from megatron.core.transformer.transformer_config import TransformerConfig

SEQ, BATCH, HEADS, GROUPS, HEAD_DIM = 8, 2, 4, 2, 16
CLOSE = {"rtol": 1e-5, "atol": 2e-6}  # fp32, sums in another order; 1e-6 observed

# Megatron's model classes read these from the configuration, which has no fields for them.
YARN = {
    "yarn_rotary_scaling_factor": 4.0,
    "yarn_original_max_position_embeddings": 16,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_mscale": 1.0,
    "yarn_mscale_all_dim": 0.0,
    "yarn_correction_range_round_to_int": True,
}
pytestmark = [
    pytest.mark.filterwarnings("ignore:full scope is deprecated"),
    pytest.mark.filterwarnings("ignore:mkldnn_matmul"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron"),
]


@pytest.fixture(scope="module", autouse=True)
def _rank():
    with one_cpu_rank(parallel_state, dot_product_attention):
        yield


def make_model(kind: str = "mrope", *, sections=(2, 3, 3), head_dim=HEAD_DIM, percent=1.0, **settings) -> GPTModel:
    config = TransformerConfig(
        num_layers=2,
        hidden_size=HEADS * head_dim,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        kv_channels=head_dim,
        ffn_hidden_size=32,
        use_cpu_initialization=True,
        mrope_section=list(sections) if kind == "mrope" else None,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        qk_layernorm=True,
        normalization="RMSNorm",
        **settings,
    )
    if kind == "yarn":
        for name, value in YARN.items():
            setattr(config, name, value)
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=True)
    return GPTModel(config, spec, 64, 64, position_embedding_type=kind, rotary_percent=percent)


def inputs(kind: str, batch: int = BATCH):
    ids = torch.randint(0, 64, (batch, SEQ))
    positions = torch.randint(0, 40, (3, batch, SEQ)) if kind == "mrope" else torch.arange(SEQ).expand(batch, -1)
    mask = torch.triu(torch.ones(SEQ, SEQ, dtype=torch.bool), 1)[None, None]
    return ids, positions, mask


def logits_and_gradients(model, arguments):
    model.zero_grad()
    logits = model(*arguments)
    (logits.float() * torch.linspace(-1, 1, logits.shape[-1])).sum().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


class Recorder(nn.Module):
    """In place of core attention: keeps the rotated q and k, and passes their gradient on."""

    def forward(self, query, key, value, *_, **__):
        self.query, self.key = query, key
        groups = query.shape[-2] // key.shape[-2]
        out = query + key.repeat_interleave(groups, -2) + value.repeat_interleave(groups, -2)
        return out.flatten(-2)


def rotated(model, hidden, rotary_pos_emb, packed=None):
    """q, k and the gradient of hidden at the first attention of the model."""
    attention = model.decoder.layers[0].self_attention
    core, attention.core_attention = attention.core_attention, Recorder()
    try:
        hidden = hidden.clone().requires_grad_()
        out, _ = attention(hidden, None, rotary_pos_emb=rotary_pos_emb, packed_seq_params=packed)
        (out * torch.linspace(-1, 1, out.shape[-1])).sum().backward()
        return attention.core_attention.query.detach(), attention.core_attention.key.detach(), hidden.grad
    finally:
        attention.core_attention = core


def set_context_parallel(model, rank: int, size: int) -> None:
    group = SimpleNamespace(rank=lambda: rank, size=lambda: size)
    for layer in model.decoder.layers:
        layer.self_attention.pg_collection = SimpleNamespace(cp=group)


def packing(lengths, max_length=None) -> PackedSeqParams:
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    longest = max_length or max(lengths)
    return PackedSeqParams("thd", cu_seqlens, cu_seqlens, max_seqlen_q=longest, max_seqlen_kv=longest)


OPERATORS = [{}, {"operator": "mrope", "max_position": 40}]


@pytest.mark.parametrize("options", OPERATORS)
def test_mrope_model_equals_megatron(options):
    model, arguments = make_model(), inputs("mrope")
    expected = logits_and_gradients(model, arguments)
    with adapter.install(model, **options) as installation:
        found = logits_and_gradients(model, arguments)
        assert installation.calls == {options.get("operator", "rope"): 2}
    torch.testing.assert_close(found, expected, **CLOSE)
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
        found = logits_and_gradients(model, arguments)
        assert installation.calls == {"rope": 2}
    torch.testing.assert_close(found, expected, **CLOSE)


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
        found = rotated(model, hidden, model.rotary_pos_emb(positions, sections))
    torch.testing.assert_close(list(found[:2]), expected, **CLOSE)


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
    with adapter.install(model, **options), ops.rope.using("triton"), ops.mrope.using("triton"):
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
    expected = rope_utils._apply_rotary_pos_emb_bshd(q[..., half.argsort()], angles)[..., half]
    with adapter.install(model):
        found, _, _ = rotated(model, hidden, model.rotary_pos_emb(positions, model.mrope_section))
    torch.testing.assert_close(found, expected, **CLOSE)


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
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        torch.testing.assert_close(found, total, rtol=1e-4, atol=1e-5)


def _recomputed(forward):
    def run(hidden_states, rotary_pos_emb=None, **kwargs):
        def body(hidden, carried):
            return forward(hidden_states=hidden, rotary_pos_emb=carried, **kwargs)

        return torch.utils.checkpoint.checkpoint(body, hidden_states, rotary_pos_emb, use_reentrant=True)

    return run


def test_cos_and_sin_are_taken_once_a_step(monkeypatch):
    model, arguments = make_model(), inputs("mrope")
    taken = []
    original = adapter._Branch._cos_sin
    monkeypatch.setattr(adapter._Branch, "_cos_sin", lambda *a: taken.append(1) or original(*a))
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


def generate(model, arguments, context, steps=(5, 1, 2), before_step=lambda _: None):
    """Logits of a prompt and of the tokens after it, a step at a time, the keys in a context."""
    ids, positions, mask = arguments
    found, first = [], 0
    with torch.no_grad():
        for step in steps:
            before_step(context)
            last = first + step
            # An MRoPE model slices what its rotary class gives for the whole sequence, so it is given all positions.
            own = positions if positions.dim() == 3 else positions[:, first:last]
            rows = mask[..., first:last, :last]
            found.append(model(ids[:, first:last], own, rows, inference_context=context, runtime_gather_output=True))
            context.sequence_len_offset = first = last
    return found


def static_context():
    from megatron.core.inference.contexts import StaticInferenceContext

    context = StaticInferenceContext(BATCH, SEQ)
    context.materialize_only_last_token_logits = False
    return context


SERVED = [("rope", {}), ("mrope", {}), ("mrope", OPERATORS[1])]


@pytest.mark.parametrize(("kind", "options"), SERVED)
def test_a_static_inference_context_is_served(kind, options, monkeypatch):
    """Prompt, one token, two tokens: equal to Megatron, which rotates all cached keys again in every step."""
    model, arguments = make_model(kind).eval(), inputs(kind)
    expected = generate(model, arguments, static_context())
    lengths, original = [], adapter._Branch.rotate
    monkeypatch.setattr(adapter._Branch, "rotate", lambda *a: lengths.append(a[2].shape[0]) or original(*a))
    with adapter.install(model, **options) as installation:
        found = generate(model, arguments, static_context())
        assert installation.calls == {options.get("operator", "rope"): 6}
    assert lengths == [5, 5, 1, 1, 2, 2]  # of keys, in two layers
    torch.testing.assert_close(found, expected, **CLOSE)


def test_a_step_may_bring_the_positions_of_its_own_tokens_only():
    """Megatron slices them as if they were of the whole sequence and finds none; ours are right either way."""
    model, (ids, positions, mask) = make_model().eval(), inputs("mrope")
    expected = generate(model, (ids, positions, mask), static_context())
    for options in OPERATORS:
        with adapter.install(model, **options), torch.no_grad():
            context, first = static_context(), 0
            for step, right in zip((5, 1, 2), expected, strict=True):
                last = first + step
                own = (ids[:, first:last], positions[..., first:last], mask[..., first:last, :last])
                found = model(*own, inference_context=context, runtime_gather_output=True)
                torch.testing.assert_close(found, right, **CLOSE)
                context.sequence_len_offset = first = last


def test_a_context_goes_on_as_it_began():
    """The switch counts from the next sequence on: cached keys are all rotated, or none is."""
    model, arguments = make_model("rope").eval(), inputs("rope")
    expected = generate(model, arguments, static_context())
    for at_first in (True, False):
        with adapter.install(model, enabled=at_first) as installation:

            def turn(context, installation=installation, at_first=at_first):
                installation.enabled = at_first if context.sequence_len_offset == 0 else not at_first

            contexts = [static_context(), static_context()]  # two of them take turns
            for context in contexts:
                torch.testing.assert_close(generate(model, arguments, context, before_step=turn), expected, **CLOSE)
            why = {"rope"} if at_first else {"megatron: switched off", "megatron: the cached keys are not rotated"}
            assert set(installation.calls) == why
            contexts[0].reset()
            installation.enabled = True
            installation.calls.clear()
            torch.testing.assert_close(generate(model, arguments, contexts[0]), expected, **CLOSE)
            assert installation.calls == {"rope": 6}


def test_a_context_that_began_before_installation_is_left_to_megatron():
    model, arguments = make_model("rope").eval(), inputs("rope")
    expected = generate(model, arguments, static_context())
    context, installed = static_context(), []

    def install_late(context):
        if context.sequence_len_offset and not installed:
            installed.append(adapter.install(model))

    found = generate(model, arguments, context, before_step=install_late)
    torch.testing.assert_close(found, expected, **CLOSE)
    assert installed[0].calls == {"megatron: the cached keys are not rotated": 4}
    installed[0].uninstall()


class DynamicContext:
    """What the site asks of Megatron's, which needs a GPU: packed tokens and the position of each."""

    use_flashinfer_fused_rope = False

    def __init__(self, positions):
        self.token_to_pos_ids = positions
        self.padded_active_token_count = len(positions)

    def is_static_batching(self):
        return False


@pytest.mark.parametrize("why", [None, "flashinfer rotates", "the query is padded differently"])
def test_a_dynamic_inference_context_is_served(why):
    model = make_model("rope")
    attention = model.decoder.layers[0].self_attention
    query, key = torch.randn(6, 1, HEADS, HEAD_DIM), torch.randn(6, 1, GROUPS, HEAD_DIM)
    angles, positions = model.rotary_pos_emb(SEQ), torch.tensor([3, 4, 0, 1, 2, 7])
    context = DynamicContext(positions)
    context.use_flashinfer_fused_rope = why == "flashinfer rotates"
    context.padded_active_token_count += why == "the query is padded differently"
    handed = []
    attention._adjust_key_value_for_inference = lambda _, q, k, v, rotary, *rest: (
        handed.append((q, k, rotary)) or (q, k, v, rotary, None, None)
    )
    with adapter.install(model) as installation:
        attention._adjust_key_value_for_inference(context, query, key, key, (angles, angles))
        assert installation.calls == ({f"megatron: {why}": 1} if why else {"rope": 1})
    if why is None:
        expected = [rope_utils._apply_rotary_pos_emb_bshd(x, angles[positions]) for x in (query, key)]
        torch.testing.assert_close(list(handed[0][:2]), expected, **CLOSE)
        assert handed[0][2] is None
    else:
        assert handed[0][0] is query


def test_switch_and_uninstall_restore_megatron_exactly():
    model, arguments = make_model(), inputs("mrope")
    expected = model(*arguments)
    owners = [model.rotary_pos_emb, *(layer.self_attention for layer in model.decoder.layers)]
    before = [dict(vars(owner)) for owner in owners]
    installation = adapter.install(model)
    assert not any(dict(vars(owner)) == kept for owner, kept in zip(owners, before, strict=True))
    installation.enabled = False
    torch.testing.assert_close(model(*arguments), expected, rtol=0, atol=0)
    assert {(type(r.owner).__name__, r.name) for r in installation.replaced} == {
        ("MultimodalRotaryEmbedding", "forward"),
        ("SelfAttention", "forward"),
        ("SelfAttention", "_adjust_key_value_for_inference"),
    }
    assert "5 replaced" in str(installation)
    assert "SelfAttention._adjust_key_value_for_inference: q and k through whorl.ops.rope" in str(installation)
    installation.uninstall()
    installation.uninstall()
    assert installation.replaced == ()
    for owner, kept in zip(owners, before, strict=True):
        assert vars(owner).keys() == kept.keys()
        assert all(vars(owner)[name] is value for name, value in kept.items())


class ForeignRotary(nn.Module):
    """A multimodal class of another library: its own merge (here: every channel follows the width)."""

    def __init__(self, like):
        super().__init__()
        self.inv_freq, self.rotary_interleaved, self.seq_len_interpolation_factor = like.inv_freq, False, None

    def forward(self, position_ids, mrope_section, packed_seq_params=None, **_):
        half = position_ids[2].T[..., None, None] * self.inv_freq
        return torch.cat((half, half), -1)


def test_a_foreign_rotary_class_keeps_its_merge():
    model, arguments = make_model(), inputs("mrope")
    model.rotary_pos_emb = ForeignRotary(model.rotary_pos_emb)
    expected = logits_and_gradients(model, arguments)
    with adapter.install(model) as installation:
        assert {entry.name for entry in installation.replaced if entry.owner is model.rotary_pos_emb} == set()
        torch.testing.assert_close(logits_and_gradients(model, arguments), expected, **CLOSE)
        assert installation.calls == {"rope": 2}
    with pytest.raises(ValueError, match="ForeignRotary is not Megatron's; give its layout"):
        adapter.install(model, operator="mrope", max_position=40)


@pytest.mark.parametrize("options", OPERATORS)
def test_shared_and_text_positions_and_interpolation(options):
    """One row of positions for the whole batch; [B, S] text positions; a linear interpolation factor."""
    model, (ids, positions, mask) = make_model(), inputs("mrope")
    model.rotary_pos_emb.seq_len_interpolation_factor = 2.0
    text = torch.arange(SEQ).expand(BATCH, -1)
    expected = [model(ids, p, mask) for p in (positions[:, :1].expand(-1, BATCH, -1), text.expand(3, -1, -1))]
    with adapter.install([model], **options):
        found = [model(ids, p, mask) for p in (positions[:, :1], text)]
    torch.testing.assert_close(found, expected, **CLOSE)


def test_a_failed_installation_leaves_nothing(monkeypatch):
    model = make_model()
    first, second = (layer.self_attention for layer in model.decoder.layers)
    check = adapter._check_attention

    def refuse_second(attention):
        assert "forward" in vars(first) or attention is first  # the first is done when the second is looked at
        if attention is second:
            raise RuntimeError("not this one")
        check(attention)

    monkeypatch.setattr(adapter, "_check_attention", refuse_second)
    with pytest.raises(RuntimeError, match="not this one"):
        adapter.install(model)
    for owner in (model.rotary_pos_emb, first, second):
        assert not {"forward", "_adjust_key_value_for_inference", "__whorl_replaced__"} & vars(owner).keys()


def test_another_megatron_is_refused():
    model = make_model()
    attention = model.decoder.layers[0].self_attention

    class Newer(type(attention)):
        def _adjust_key_value_for_inference(self, query, key):
            return query, key

    attention.__class__ = Newer
    with pytest.raises(RuntimeError, match=r"takes \['query', 'key'\].*this version is not supported"):
        adapter.install(model)


def test_a_second_installation_is_refused_and_changes_nothing():
    model = make_model()
    with adapter.install(model) as installation:
        replaced = installation.replaced
        with pytest.raises(RuntimeError, match=r"already replaced by an installation; uninstall\(\) it first"):
            adapter.install(model)
        assert all(vars(entry.owner)[entry.name] is entry.after for entry in replaced)
    adapter.install(model).uninstall()


def test_mistakes_are_refused_with_the_way_out():
    model = make_model()
    model.position_embedding_type = "rope"
    with pytest.raises(
        ValueError, match=r"takes the 'rope' branch but its rotary embedding is MultimodalRotaryEmbedding"
    ):
        adapter.install(model)
    assert not vars(model.rotary_pos_emb).get("__whorl_replaced__")
    with pytest.raises(ValueError, match="give its rows as max_position"):
        adapter.install(make_model(), operator="mrope")
    with pytest.raises(ValueError, match="expected 'rope' or 'mrope'"):
        adapter.install(make_model(), operator="fused")
    with pytest.raises(ValueError, match="are for MRoPE models; GPTModel uses RotaryEmbedding"):
        adapter.install(make_model("rope"), layout="interleaved")
    with pytest.raises(ValueError, match="no module with a rotary_pos_emb was found"):
        adapter.install(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"mrope_section \[2, 3, 4\] sums to 9, MultimodalRotaryEmbedding has 8"):
        adapter.install(make_model(sections=(2, 3, 4)))
    low = make_model()
    low.rotary_pos_emb.inv_freq = low.rotary_pos_emb.inv_freq.bfloat16()
    with pytest.raises(ValueError, match=r"inv_freq of MultimodalRotaryEmbedding is torch\.bfloat16"):
        adapter.install(low)
    good = make_model()
    with adapter.install(good, operator="mrope", max_position=4):
        with pytest.raises(ValueError, match=r"expected \[3, B, S\]"):
            good.rotary_pos_emb(torch.zeros(4, 1, 2, dtype=torch.long), good.mrope_section)
        with pytest.raises(ValueError, match="outside the table of 4 rows"):
            good(*inputs("mrope"))
