"""DeepSeek-V3.2 where index scores are exactly equal: the one thing in which transformers' logits may differ."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("torchtitan")
pytest.importorskip("transformers")

from test_titan_hf import make_args, make_model, make_peer

CLOSE = 2e-5  # of the largest logit, as in test_titan_hf; observed 3e-7


@dataclass
class Choice:
    """Of one layer: scores and chosen keys [B, S, T], ours and transformers', of the same inputs."""

    ours: Tensor
    theirs: Tensor
    our_keys: Tensor
    their_keys: Tensor


def run_peer(peer: Any, tokens: Tensor, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Logits; of each layer the scores that transformers' indexer takes the highest of, and which it takes."""
    selected = []
    topk = torch.Tensor.topk

    def noted(scores: Tensor, *args: Any, **more: Any) -> Any:
        taken = topk(scores, *args, **more)
        if scores.shape == (len(tokens), tokens.shape[1], tokens.shape[1]):  # the router has others
            selected.append((scores, taken.indices))
        return taken

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(torch.Tensor, "topk", noted)
        return peer(tokens).logits, selected


def force(model: Any, taken: list[tuple[Tensor, Tensor]]) -> list[Choice]:
    """Let every layer attend to the keys that transformers' took; what it would have taken is noted as it runs."""
    choices: list[Choice] = []
    for layer, (scores, indices) in zip(model.layers.values(), taken, strict=True):
        own = layer.attention.core._choose

        def choose(ours: Tensor, seen: Tensor, own: Any = own, scores: Any = scores, indices: Any = indices) -> Tensor:
            their_keys = torch.zeros_like(seen.expand_as(ours)).scatter(-1, indices, True) & seen
            choices.append(Choice(ours, scores, own(ours, seen), their_keys))
            return their_keys

        layer.attention.core._choose = choose
    return choices


@pytest.mark.parametrize(
    ("seed", "length", "more"),
    [
        (0, 40, {"index_topk": 12}),
        (1, 64, {"index_topk": 12}),
        (9, 64, {"index_topk": 16, "rope_factor": 40.0, "original_seq_len": 16, "n_layers": 3}),
    ],
)
def test_logits_differ_by_exact_ties_alone(
    seed: int, length: int, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With four heads a product in sixteen is negative in all of them, and the score exactly 0: so are others'."""
    args = make_args(index_n_heads=4, **more)
    model = make_model(args, seed)
    tokens = torch.randint(0, args.vocab_size, (2, length))
    theirs, taken = run_peer(make_peer(model, args), tokens, monkeypatch)
    with torch.no_grad():
        free = model(tokens)
        choices = force(model, taken)
        forced = model(tokens)
    bound = CLOSE * theirs.abs().max()
    assert (free - theirs).abs().max() > 100 * bound, "nothing to explain"
    assert (forced - theirs).abs().max() < bound, "the same keys, the same logits, at every position"
    queries = 0
    for choice in choices:
        other = choice.our_keys ^ choice.their_keys
        for b, s in other.any(-1).nonzero().tolist():
            queries += 1
            for scores, keys in ((choice.ours, choice.our_keys), (choice.theirs, choice.their_keys)):
                differing = scores[b, s][other[b, s]]
                assert (differing == scores[b, s][keys[b, s]].min()).all(), "equal to the bit to the last one taken"
                assert (differing == 0).all()
            lost, got = (k[b, s].nonzero().max() for k in (choice.their_keys & other, choice.our_keys & other))
            assert got < lost, "of equal scores we take the earliest keys"
    assert queries > 0
    first = min(
        int(((c.our_keys ^ c.their_keys).any(-1).any(0)).nonzero().min())
        for c in choices
        if c.our_keys.ne(c.their_keys).any()
    )
    assert (free - theirs)[:, :first].abs().max() < bound, "nothing differs before the first tie"
