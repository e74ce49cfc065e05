"""Megatron's inference contexts, switching and refusals of the adapter, on the CPU."""

import pytest
import torch
from megatron_models import (
    BATCH,
    CLOSE,
    GROUPS,
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
)
from torch import nn

from whorl.adapters import megatron as adapter

pytestmark = MARKS


@pytest.fixture(scope="module", autouse=True)
def _rank():
    with one_rank():
        yield


def generate(model, arguments, context, steps=(5, 1, 2), before_step=lambda _: None):
    """Logits of a prompt and of the tokens after it, a step at a time, the keys in a context."""
    ids, positions, mask = arguments
    outputs, first = [], 0
    with torch.no_grad():
        for step in steps:
            before_step(context)
            last = first + step
            # An MRoPE model slices what its rotary class gives for the whole sequence, so it is given all positions.
            own = positions if positions.dim() == 3 else positions[:, first:last]
            rows = mask[..., first:last, :last]
            outputs.append(model(ids[:, first:last], own, rows, inference_context=context, runtime_gather_output=True))
            context.sequence_len_offset = first = last
    return outputs


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
    lengths, original = [], adapter._RotaryEmbedding.rotate
    monkeypatch.setattr(adapter._RotaryEmbedding, "rotate", lambda *a: lengths.append(a[2].shape[0]) or original(*a))
    with adapter.install(model, **options) as installation:
        actual = generate(model, arguments, static_context())
        assert installation.calls == {options.get("operator", "rope"): 6}
    assert lengths == [5, 5, 1, 1, 2, 2]  # of keys, in two layers
    torch.testing.assert_close(actual, expected, **CLOSE)


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
                actual = model(*own, inference_context=context, runtime_gather_output=True)
                torch.testing.assert_close(actual, right, **CLOSE)
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

    actual = generate(model, arguments, context, before_step=install_late)
    torch.testing.assert_close(actual, expected, **CLOSE)
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
        expected = [megatron_rotation(x, angles[positions]) for x in (query, key)]
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
        assert_equals(logits_and_gradients(model, arguments), expected)
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
        actual = [model(ids, p, mask) for p in (positions[:, :1], text)]
    torch.testing.assert_close(actual, expected, **CLOSE)


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
