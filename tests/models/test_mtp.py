"""Multi-token prediction as a proposer: against the trainer, against itself without an engine, and in the output."""

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from mock_model import ByteTokenizer, alone, record
from schedules import compare, random_settings, requests, run_at_random
from test_draft_model import Chain, Wandering, misfit
from torch import Tensor

from whorl.engine import graph_sizes, sampler, weights
from whorl.engine import graphs as graphs_module
from whorl.engine.llm import LLM
from whorl.engine.sequence import SamplingParams
from whorl.engine.sequence import Sequence as Seq
from whorl.engine.speculate import Draft
from whorl.engine.speculate.mtp import MTP, _Shifted
from whorl.models.deepseek import DeepSeek
from whorl.nn import Step
from whorl.ops.sample import probabilities

BLOCK = 4
SIZES: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 160, "index_topk": 8, "num_hidden_layers": 2}
SIZES["num_nextn_predict_layers"] = 1


def tiny(**changes: Any) -> Any:
    return weights.random_model(DeepSeek.tiny(**SIZES | changes), device="cpu", dtype=torch.float32)


TARGETS: dict[str, dict[str, Any]] = {"v32": {}, "v3": {"model_type": "deepseek_v3"}}
_MADE: dict[str, tuple[Any, Any]] = {}


def make_pair(**changes: Any) -> tuple[Any, Any]:
    """A target and its layer that often agree: what both say depends on the last token most, and on all others."""
    target = tiny(**changes)
    layer: Any = weights.random_prediction(target)
    with torch.no_grad():
        target.decoder.embed_tokens.weight.mul_(10)
        layer.parts.eh_proj.weight[:, :96].copy_(torch.eye(96))
        layer.parts.eh_proj.weight[:, 96:] *= 0.1
        for names, weight in (*target.named_parameters(), *layer.named_parameters()):
            if "o_proj" in names or "down_proj" in names:
                weight *= 0.2
    return target, layer


def pair(name: str) -> tuple[Any, Any]:
    if name not in _MADE:
        _MADE[name] = make_pair(**TARGETS[name])
    return _MADE[name]


# ---- without an engine


def run_whole(model: Any, token_ids: Sequence[int], states: Tensor | None = None) -> Tensor:
    """Hidden states of a whole sequence in one call."""
    count = len(token_ids)
    caches = [spec.empty(-(-count // BLOCK), BLOCK, "cpu") for spec in model.cache_specs()]
    step = Step(
        token_ids=torch.tensor(token_ids),
        positions=torch.arange(count),
        slots=torch.arange(count),
        block_tables=torch.arange(-(-count // BLOCK), dtype=torch.int32)[None],
        query_starts=torch.tensor([0, count], dtype=torch.int32),
        context_lens=torch.tensor([count], dtype=torch.int32),
        max_position=count,
        states=states,
    )
    with torch.inference_mode():
        return model.forward(step, caches)  # type: ignore[no-any-return]


def guesses(target: Any, layer: Any, token_ids: list[int], k: int) -> list[int]:
    """What the layer drafts behind these tokens, all of it computed anew for every one."""
    states, tokens = run_whole(target, token_ids[:-1]), token_ids[1:]
    guessed: list[int] = []
    while len(guessed) < k:
        hidden = run_whole(layer, tokens, states)
        guessed.append(int(layer.logits(hidden[-1:]).argmax()))
        states, tokens = torch.cat((states, hidden[-1:])), [*tokens, guessed[-1]]
    return guessed


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_layer_computes_what_the_trainer_does(tmp_path: Path) -> None:
    """From a checkpoint as it lies and from an exported one, in fp32 to 2e-6 of the largest logit."""
    pytest.importorskip("torchtitan")
    from test_deepseek_trained import TOKENS, trained, written

    from whorl.titan.deepseek_v32.hf import export_checkpoint

    model = trained(n_mtp_layers=1, index_topk=16)
    further, seen = model.mtp["0"], []
    with torch.no_grad():
        further.block.moe.expert_bias.normal_(std=0.2)
        further.norm.weight.normal_(1, 0.2)
        further.hnorm.weight.normal_(1, 0.2)
        handle = model.norm.register_forward_hook(lambda *arguments: seen.append(arguments[-1]))
        tokens = torch.tensor([TOKENS])
        model(tokens)
        handle.remove()
        h = further(seen[0][:, :-1], model.tok_embeddings(tokens[:, 1:]), model.cos_sin, None)
        expected = model.output(further.norm(h))[0]
    folder = written(model, tmp_path / "run")
    export_checkpoint(folder, model.model_args, tmp_path / "exported", torch.float32)
    for path in (folder, tmp_path / "exported"):
        target = weights.load_model(path, device="cpu", progress=False)
        layer = weights.load_prediction(path, target, progress=False)
        actual = layer.logits(run_whole(layer, TOKENS[1:], run_whole(target, TOKENS[:-1])))
        assert float((actual - expected).abs().max() / expected.abs().max()) < 2e-6
        swapped = layer.logits(run_whole(layer, TOKENS[:-1], run_whole(target, TOKENS[:-1])))
        assert float((swapped - expected).abs().max() / expected.abs().max()) > 0.01


# ---- through the engine: drafts are the layer's, however tokens came


class Checked(MTP):
    """Compares what it drafts with what the layer says when everything is computed anew."""

    num_checked = 0
    target: Any = None

    def propose(self, sequences: Sequence[Seq], k: int) -> list[Draft]:
        drafts = super().propose(sequences, k)
        for seq, draft in zip(sequences, drafts, strict=True):
            if draft.token_ids:
                expected = guesses(self.target, self.draft_head, seq.token_ids, len(draft.token_ids))
                assert draft.token_ids == expected, (seq, draft, expected)
                self.num_checked += len(draft.token_ids)
        return drafts


def checked(name: str, k: int) -> Checked:
    target, layer = pair(name)
    proposer = Checked(layer=layer, k=k)
    proposer.target = target
    return proposer


def run_checked(name: str, seed: int, **changes: Any) -> tuple[Checked, LLM]:
    """Chunks, batches, preemption, aborts, rounds without a draft. Where prefixes are shared, by equal prompts: their
    last blocks are followed by the same tokens."""
    rng = random.Random(seed)
    proposer, block_size, shares = checked(name, rng.choice((1, 2, 4, 5))), rng.choice((1, 2, 4)), rng.random() < 0.4
    settings = random_settings(rng, seqs=3, block_size=block_size).changed(use_prefix_cache=shares, **changes)
    llm = LLM(model=proposer.target, settings=settings, speculate=proposer, draft_length=Wandering(rng))
    prompts = [[rng.randrange(97) for _ in range(rng.randint(1, 19))] for _ in range(2)]
    prompts *= 2
    if not shares:
        prompts = [prompt[: rng.randint(1, len(prompt))] for prompt in prompts]
    added = []
    for prompt in prompts:
        added += llm.add(prompt, SamplingParams(temperature=0, max_tokens=rng.randint(1, 20)))
        for _ in range(rng.randint(0, 4)):
            llm.step()
        if rng.random() < 0.2:
            llm.abort(rng.choice(added))
    while llm.has_work:
        llm.step()
    return proposer, llm


@pytest.mark.parametrize("name", ["v32", "v3"])
@pytest.mark.slow
def test_drafts_are_what_the_layer_says(name: str) -> None:
    seen: Counter[str] = Counter()
    for seed in range(4):
        proposer, llm = run_checked(name, seed)
        seen += Counter(llm.stats()) + Counter(num_checked=proposer.num_checked)
        assert llm.pool.num_used == 0
        assert not proposer._pairs
    assert seen["num_checked"] > 60, seen
    assert seen["num_accepted"] > 10, seen
    assert seen["num_drafted"] - seen["num_accepted"] > 10, seen
    assert seen["num_preemptions"]
    assert seen["num_tokens_hit"]


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_drafts_are_what_the_layer_says_in_many_schedules(name: str) -> None:
    for seed in range(100, 160):
        run_checked(name, seed)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As if the CPU recorded: what is replayed reads the tensors that were there when it was recorded. The rows of each
    replay."""
    replayed: list[int] = []

    def keep(device: str, function: Callable[[], None], *, pool: Any = None) -> Callable[[], None]:
        def replay() -> None:
            replayed.append(1)
            function()

        return replay

    monkeypatch.setattr(graphs_module, "record_graph", keep)
    monkeypatch.setattr(graphs_module, "wants_graphs", lambda device, requested: requested is not False)
    return replayed


@pytest.mark.slow
def test_recorded_drafts_are_the_same(graphs: list[int]) -> None:
    """Both runners replay, padded to the sizes that are recorded, and what one leaves the other has copied."""
    for seed in range(3):
        proposer, llm = run_checked("v32", seed)
        assert llm.runner.graphs.decoding
        assert proposer.drafter.runner.graphs.decoding
        assert proposer.num_checked
    assert len(graphs) > 20


def test_after_a_full_warm_up_nothing_is_recorded(graphs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """And what was warmed up leaves nothing behind: drafts are what the layer says."""
    monkeypatch.setattr(graph_sizes, "KEYS", 16)
    proposer = checked("v3", 2)
    sizes: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": 40, "num_blocks": 32, "block_size": 4}
    llm = LLM(model=proposer.target, device="cpu", warmup="full", speculate=proposer, draft_length="fixed", **sizes)
    runner = proposer.drafter.runner
    recorded = dict(runner.graphs.decoding)
    assert recorded.keys() == {(rows, keys) for rows in (1, 2, 4, 8) for keys in (16, 40)}
    llm.generate([[3, 1, 4], [1, 5, 9, 2, 6, 5, 3]], SamplingParams(temperature=0, max_tokens=24), progress=False)
    assert proposer.num_checked > 20
    assert runner.graphs.decoding == recorded


def forget_a_state(patch: pytest.MonkeyPatch) -> None:
    """A token that was accepted keeps the state that was guessed for it."""
    take = _Shifted.take

    def wrong(self: _Shifted, placed: Any, hidden: Tensor) -> None:
        take(self, placed, hidden.roll(1, 0) if len(hidden) > 1 else hidden)

    patch.setattr(_Shifted, "take", wrong)


def forget_a_token(patch: pytest.MonkeyPatch) -> None:
    """Generated tokens are not computed where no draft was asked for."""
    num_due = _Shifted.num_due

    def wrong(self: _Shifted, block_size: int) -> int:
        count = num_due(self, block_size)
        if count and self.shifted.num_computed >= self.shifted.prompt_len:
            self.shifted.num_computed += count
            self.keep(1)
            return 0
        return count

    patch.setattr(_Shifted, "num_due", wrong)


def keep_guesses(patch: pytest.MonkeyPatch) -> None:
    """What was guessed is taken for the target's."""
    forget = MTP._forget_draft

    def wrong(each: _Shifted) -> None:
        guessed = list(each.shifted.token_ids)
        forget(each)
        each.shifted.token_ids = guessed

    patch.setattr(MTP, "_forget_draft", staticmethod(wrong))


@pytest.mark.parametrize(
    "fault",
    [forget_a_state, pytest.param(forget_a_token, marks=pytest.mark.slow), keep_guesses],
    ids=lambda f: f.__name__,
)
def test_a_cache_out_of_step_shows(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises((AssertionError, IndexError)):  # noqa: PT012
        for seed in range(30):
            run_checked("v32", seed)


# ---- greedy: the target's own output, bit for bit

GREEDY: list[dict[str, Any]] = [{}, {"frequency_penalty": 0.7, "repetition_penalty": 1.2}, {"min_tokens": 3}]


@pytest.mark.parametrize(
    ("name", "seeds"),
    [
        ("v32", range(1)),
        pytest.param("v3", range(2), marks=pytest.mark.slow),
        pytest.param("v32", range(50, 90), marks=pytest.mark.slow),
    ],
)
def test_greedy_output_is_the_targets(name: str, seeds: range) -> None:
    target, layer = pair(name)
    kinds = [{"temperature": 0, **kind} for kind in GREEDY * 2]
    cases = list(requests(random.Random(3), 97, kinds, fewest=6))
    plain = [alone(target, None, *request) for request in cases]
    seen: Counter[str] = Counter()
    for seed in seeds:
        rng = random.Random(seed)
        settings = random_settings(rng, seqs=rng.choice((1, 4, 6)), block_size=rng.choice((1, 2, 5)))
        proposer = MTP(layer=layer, k=rng.randint(1, 6))
        llm = LLM(model=target, settings=settings, speculate=proposer, draft_length="fixed")
        recorded = record(llm)
        for index, seq in run_at_random(rng, llm, cases):
            compare(*plain[index], seq, recorded.get(seq.id, {}))
        assert llm.pool.num_used == 0
        seen += Counter(llm.stats())
    assert seen["num_accepted"] > 10, seen
    assert seen["num_drafted"] - seen["num_accepted"] > 10, seen


# ---- sampled: the target's distribution


class Beside(Chain):
    """A chain that takes hidden states, and is sure that those of its sequences are tokens."""

    state_size = 1

    def forward(self, step: Step, caches: Sequence[Any]) -> Tensor:
        assert step.states is not None
        assert bool((step.states == step.states.round()).all())
        return super().forward(step, caches)


@pytest.mark.slow
def test_sequences_have_the_targets_distribution() -> None:
    target: Any = Chain(1)
    proposer = MTP(layer=Beside(2), k=3)  # type: ignore[arg-type]
    sizes: dict[str, Any] = {"max_num_seqs": 256, "max_model_len": 64, "block_size": 4, "num_blocks": 4096}
    llm = LLM(model=target, device="cpu", speculate=proposer, draft_length="fixed", seed=7, **sizes)
    outputs = llm.generate([[1]] * 1000, SamplingParams(max_tokens=20), progress=False)
    counts = torch.zeros(4, 4)
    for output in outputs:
        for before, after in zip([1, *output.token_ids], output.token_ids, strict=False):
            counts[before, after] += 1
    assert llm.num_accepted > 1000
    assert llm.num_drafted - llm.num_accepted > 1000
    right = probabilities(target.table, **sampler._filters([SamplingParams()] * 4, target.table.device))
    for before in range(4):
        assert misfit(counts[before], right[before]) < 1, (counts, right)


# ---- where it comes from, and what is refused


def test_its_cache_takes_its_part_of_the_memory() -> None:
    target, layer = pair("v32")
    token = sum(spec.token_bytes for spec in (*target.cache_specs(), *layer.cache_specs()))
    proposer = MTP(layer=layer)
    llm = LLM(model=target, device="cpu", memory=10 * 4 * token + 7, block_size=4, speculate=proposer)
    assert llm.pool.num_blocks == 10
    assert proposer.drafter.runner.caches[0].latent.shape[:2] == (10, 4)


def test_in_8_bits() -> None:
    target, layer = pair("v32")
    params = SamplingParams(temperature=0, max_tokens=12)
    how: dict[str, Any] = {"device": "cpu", "num_blocks": 16, "kv_cache_dtype": "fp8"}
    proposer = MTP(layer=layer, k=3)
    plain = LLM(model=target, **how).generate([[5, 4, 3]], params, progress=False)
    llm = LLM(model=target, **how, speculate=proposer, draft_length="fixed")
    assert llm.generate([[5, 4, 3]], params, progress=False)[0].token_ids == plain[0].token_ids
    assert proposer.drafter.runner.caches[0].latent.dtype == torch.uint8


def published(folder: Path) -> dict[str, Tensor]:
    """A checkpoint as DeepSeek publishes them, the embedding and the head a second time in the further layer."""
    from safetensors.torch import load_file, save_file
    from test_deepseek import saved

    config = DeepSeek.tiny(num_nextn_predict_layers=1)
    saved(folder, config)
    tensors = load_file(folder / "model.safetensors")
    more = {name.replace("layers.2.", "layers.3."): x + 0.01 for name, x in tensors.items() if ".layers.2." in name}
    torch.manual_seed(0)
    own = {"eh_proj": torch.randn(32, 64) / 8, **{name: torch.rand(32) + 0.5 for name in ("enorm", "hnorm")}}
    own |= {"shared_head.norm": torch.rand(32) + 0.5, "shared_head.head": tensors["lm_head.weight"].clone()}
    own["embed_tokens"] = tensors["model.embed_tokens.weight"].clone()
    tensors |= more | {f"model.layers.3.{name}.weight": x for name, x in own.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def layer_of(folder: Path) -> Any:
    return weights.load_prediction(folder, weights.load_model(folder, device="cpu", progress=False), progress=False)


def test_published_checkpoints(tmp_path: Path) -> None:
    """In full, and in FP8 blocks, where the product of both halves is not quantised; and through the engine."""
    from safetensors.torch import save_file
    from test_deepseek import to_blocks

    tensors = published(tmp_path)
    kept = ("embed_tokens.weight", "head.weight", "mlp.gate.weight", "weights_proj.weight", "eh_proj.weight")
    coded, values = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and not name.endswith(kept):
            coded[name], coded[f"{name}_scale_inv"], values[name] = to_blocks(tensor, 16)
    (tmp_path / "coded").mkdir()
    save_file(coded, tmp_path / "coded" / "model.safetensors")
    method = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 16]}
    config = DeepSeek.tiny(num_nextn_predict_layers=1) | {"quantization_config": method}
    (tmp_path / "coded" / "config.json").write_text(json.dumps(config))
    save_file(values, tmp_path / "model.safetensors", metadata={"format": "pt"})
    tokens, states = [5, 3, 8, 1], torch.randn(4, 32)
    plain, from_codes = layer_of(tmp_path), layer_of(tmp_path / "coded")
    expected = plain.logits(run_whole(plain, tokens, states))
    assert torch.equal(from_codes.logits(run_whole(from_codes, tokens, states)), expected)
    how: dict[str, Any] = {"tokenizer": ByteTokenizer(), "device": "cpu", "num_blocks": 16}
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    llm = LLM(tmp_path, speculate=MTP(k=2), draft_length="fixed", **how)
    outputs = [each.generate([tokens], params, progress=False)[0].token_ids for each in (llm, LLM(tmp_path, **how))]
    assert outputs[0] == outputs[1]
    assert llm.num_drafted > 5


@pytest.mark.parametrize("scheme", ["w8a8", "fp8"])
def test_a_quantised_model_has_its_layer(tmp_path: Path, scheme: str) -> None:
    """`whorl quantize` rounds what it serves, and the layer stays as it is, but for the makers' FP8: there it is
    rounded as the others are. config.json says so."""
    from whorl.engine.weights.rewrite import quantize_folder

    published(tmp_path / "full")
    quantize_folder(str(tmp_path / "full"), tmp_path / "small", scheme=scheme, progress=False)
    full, small = (dict(layer_of(tmp_path / name).named_parameters()) for name in ("full", "small"))
    assert full.keys() == small.keys()
    is_equal = [torch.equal(ours, small[name]) for name, ours in full.items()]
    assert all(is_equal) == (scheme == "w8a8")
    for name, ours in full.items():
        torch.testing.assert_close(small[name], ours, rtol=0.08, atol=2e-3, msg=name)


def without_layer(folder: Path) -> Path:
    from safetensors.torch import save_file

    left = {name: x for name, x in published(folder).items() if ".layers.3." not in name}
    save_file(left, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_refusals(tmp_path: Path) -> None:
    target, layer = pair("v32")
    made = LLM(model=target, device="cpu", num_blocks=8, speculate=(proposer := MTP(layer=layer)))
    assert made.proposer is proposer
    path = without_layer(tmp_path)
    for message, make in {
        "already drafts for another engine": lambda: LLM(model=target, device="cpu", num_blocks=8, speculate=proposer),
        "pass the path of its checkpoint": lambda: LLM(model=target, device="cpu", num_blocks=8, speculate=MTP()),
        "has no layer of multi-token prediction": lambda: LLM(
            model=tiny(num_nextn_predict_layers=0), device="cpu", num_blocks=8, speculate=MTP()
        ),
        "the files hold no model.layers.3.": lambda: weights.load_prediction(
            path, weights.load_model(path, device="cpu", progress=False), progress=False
        ),
        "k is 0": lambda: MTP(k=0),
    }.items():
        with pytest.raises(ValueError, match=message):
            make()
