"""DeepSeek-V3.2 against transformers, and the way of weights between the two, in both directions."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("torchtitan")
transformers = pytest.importorskip("transformers")

from whorl.titan.deepseek_v32.args import FLAVOURS, DeepSeekV32Args  # noqa: E402
from whorl.titan.deepseek_v32.hf import (  # noqa: E402
    DeepSeekV32StateDictAdapter,
    export_checkpoint,
    from_hf_config,
    load_pretrained,
    save_pretrained,
    to_hf_config,
)
from whorl.titan.deepseek_v32.model import DeepSeekV32Model  # noqa: E402

S = 40


def make_args(**more: Any) -> DeepSeekV32Args:
    """Tiny, two layers, one of them dense. Many index heads: with few, all products of a pair may be negative, its
    score then is exactly 0, and among equal scores transformers' choice is torch.topk's."""
    args = FLAVOURS["tiny"]
    experts = {"top_k": 2, "num_experts": 8, "use_grouped_mm": False} | more.pop("experts", {})
    moe = dataclasses.replace(args.moe_args, **experts)
    return dataclasses.replace(args, **({"n_layers": 2, "index_n_heads": 24, "moe_args": moe} | more))


def make_model(args: DeepSeekV32Args, seed: int = 0) -> DeepSeekV32Model:
    torch.manual_seed(seed)
    model = DeepSeekV32Model(args)
    model.init_weights()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # initial norms hide a missing weight
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif ".attention." in name:  # nor would it matter which keys are attended to
                parameter.mul_(4)
        for layer in model.layers.values():
            if layer.moe_enabled:
                layer.moe.expert_bias.normal_(std=0.2)
                layer.moe.router.gate.weight.mul_(20)  # or all experts look alike
    return model


def make_peer(model: DeepSeekV32Model, args: DeepSeekV32Args, config: Any = None) -> Any:
    config = transformers.DeepseekV32Config(**(config or to_hf_config(args)))
    config._attn_implementation = "eager"
    peer = transformers.DeepseekV32ForCausalLM(config).eval()
    tensors = DeepSeekV32StateDictAdapter(args, None).to_hf(model.state_dict())
    merged = _merge_experts(tensors, args.moe_args.num_experts)
    missing, unexpected = peer.load_state_dict(merged, strict=False)
    assert not missing
    assert all(name.startswith(f"model.layers.{args.n_layers}.") for name in unexpected), unexpected
    return peer


def _merge_experts(tensors: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    """As transformers keeps them in memory; its loader does this for files."""
    merged = {name: value for name, value in tensors.items() if ".mlp.experts." not in name}
    for first in (name for name in tensors if ".mlp.experts.0.gate_proj" in name):
        each = [first.replace("experts.0.", f"experts.{i}.") for i in range(count)]
        stem = first.split("0.gate_proj")[0]
        gate_up = [torch.cat((tensors[n], tensors[n.replace("gate_proj", "up_proj")])) for n in each]
        merged[stem + "gate_up_proj"] = torch.stack(gate_up)
        merged[stem + "down_proj"] = torch.stack([tensors[n.replace("gate_proj", "down_proj")] for n in each])
    return merged


GROUPS = {"num_expert_groups": 4, "num_limited_groups": 2}
CONFIGURATIONS = {
    "sparse": {"index_topk": 12},
    "dense": {"index_topk": 64},
    "sparse-yarn-groups": {"index_topk": 12, "rope_factor": 40.0, "original_seq_len": 16, "experts": GROUPS},
    "dense-yarn": {"index_topk": 64, "rope_factor": 4.0, "original_seq_len": 16},
    "all-dense-layers": {"index_topk": 12, "n_dense_layers": 2},
    "three-layers-two-shared": {"index_topk": 7, "n_layers": 3, "experts": GROUPS | {"num_shared_experts": 2}},
    "mtp": {"index_topk": 12, "n_mtp_layers": 1},
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_logits_equal_transformers(name: str) -> None:
    args = make_args(**CONFIGURATIONS[name])
    model = make_model(args)
    peer = make_peer(model, args)
    tokens = torch.randint(0, args.vocab_size, (2, S))
    with torch.no_grad():
        ours, theirs = model(tokens), peer(tokens).logits
    assert (ours - theirs).abs().max() < 2e-5 * theirs.abs().max()  # fp32 sums in another order; observed 2e-6


def test_sparse_configurations_are_sparse() -> None:
    """The keys that the indexer leaves out matter: else the test above could not tell."""
    args = make_args(index_topk=12)
    model = make_model(args)
    tokens = torch.randint(0, args.vocab_size, (1, S))
    with torch.no_grad():
        sparse = model(tokens)
        for layer in model.layers.values():
            layer.attention.core.settings = dataclasses.replace(layer.attention.core.settings, topk=64)
        dense = model(tokens)
    assert torch.allclose(sparse[:, :12], dense[:, :12], atol=1e-5)
    assert (sparse[:, 20:] - dense[:, 20:]).abs().max() > 0.05


@pytest.mark.parametrize("mtp", [0, 2])
def test_there_and_back(mtp: int) -> None:
    args = make_args(n_mtp_layers=mtp, experts=GROUPS)
    state = make_model(args).state_dict()
    adapter = DeepSeekV32StateDictAdapter(args, None)
    back = adapter.from_hf(adapter.to_hf(state))
    assert back.keys() == state.keys()
    for name, value in state.items():
        assert torch.equal(back[name], value), name


def test_prediction_layers_may_be_left_aside() -> None:
    args = make_args(n_mtp_layers=1)
    tensors = DeepSeekV32StateDictAdapter(args, None).to_hf(make_model(args).state_dict())
    assert {"enorm.weight", "embed_tokens.weight", "shared_head.head.weight", "mlp.experts.7.up_proj.weight"} <= {
        name.removeprefix("model.layers.2.") for name in tensors
    }
    without = make_args(n_mtp_layers=0)
    loaded = DeepSeekV32StateDictAdapter(without, None).from_hf(tensors)
    assert loaded.keys() == make_model(without).state_dict().keys()


def test_transformers_names_are_ours() -> None:
    """Every tensor of transformers' own model finds its place here."""
    args = make_args(experts=GROUPS)
    peer = transformers.DeepseekV32ForCausalLM(transformers.DeepseekV32Config(**to_hf_config(args)))
    ours = _merge_experts(DeepSeekV32StateDictAdapter(args, None).to_hf(make_model(args).state_dict()), 8)
    assert ours.keys() == peer.state_dict().keys()


# What a job sets, and what a config.json has no place for because it changes no result.
OF_THE_JOB = {
    *("stage", "attention", "indexer_loss_coeff", "mtp_loss_coeff", "global_tokens", "bootstrap_indexer", "moe_impl"),
    *("moe_args.use_grouped_mm", "moe_args.load_balance_coeff", "moe_args._debug_force_load_balance", "_enforced"),
}
# Hugging Face's deepseek_v32 has one value of them.
ONE_VALUE = {"moe_args.score_func", "moe_args.score_before_experts", "moe_args.gate_bias"}


def fields(args: DeepSeekV32Args) -> dict[str, Any]:
    values = {f.name: getattr(args, f.name) for f in dataclasses.fields(args) if f.name != "moe_args"}
    return values | {f"moe_args.{name}": value for name, value in dataclasses.asdict(args.moe_args).items()}


def other_values(args: DeepSeekV32Args) -> DeepSeekV32Args:
    """Every field of the model another than by default."""
    moe = {"num_expert_groups": 4, "num_limited_groups": 2, "route_norm": False}
    more: dict[str, Any] = {"rope_factor": 8.0, "mscale": 0.7, "mscale_all_dim": 0.6, "n_mtp_layers": 1}
    for owner, changes, skipped in (
        (args.moe_args, moe, OF_THE_JOB | ONE_VALUE),
        (args, more, OF_THE_JOB | {"moe_args"}),
    ):
        for field in dataclasses.fields(owner):
            value = getattr(owner, field.name)
            if {field.name, f"moe_args.{field.name}"} & skipped or field.name in changes:
                continue
            changes[field.name] = value + 4 if isinstance(value, int) else value * 2
    return dataclasses.replace(args, **more, moe_args=dataclasses.replace(args.moe_args, **moe))


@pytest.mark.parametrize("through_transformers", [False, True])
def test_every_field_of_a_configuration_comes_back(through_transformers: bool) -> None:
    args = other_values(DeepSeekV32Args())
    before, default = fields(args), fields(DeepSeekV32Args())
    kept = before.keys() - OF_THE_JOB - ONE_VALUE
    assert [name for name in sorted(kept) if before[name] == default[name]] == []
    config = to_hf_config(args)
    if through_transformers:
        config = transformers.DeepseekV32Config(**config).to_dict()
    after = fields(from_hf_config(config))
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}
    assert {name: after[name] for name in ONE_VALUE} == {name: before[name] for name in ONE_VALUE}


@pytest.mark.parametrize(
    ("more", "longest"),
    [
        ({"max_seq_len": 96}, 96),
        ({"max_seq_len": 96, "rope_factor": 40.0}, 163840),  # trained on less than YaRN reaches
        ({"max_seq_len": 200_000, "rope_factor": 40.0}, 200_000),
    ],
)
def test_the_longest_sequence_is_exported(more: dict[str, Any], longest: int) -> None:
    args = make_args(experts=GROUPS, n_mtp_layers=1, **more)
    config = to_hf_config(args)
    assert config["max_position_embeddings"] == longest
    read = transformers.DeepseekV32Config(**config)
    assert read.max_position_embeddings == longest
    for back in (from_hf_config(config), from_hf_config(read.to_dict())):
        assert back.max_seq_len == args.max_seq_len
        assert to_hf_config(back) == config


def test_a_published_configuration_comes_back() -> None:
    """163840 = 40 x 4096, the lengths of the published model."""
    config = to_hf_config(DeepSeekV32Args(rope_factor=40.0, max_seq_len=163840))
    assert config["max_position_embeddings"] == transformers.DeepseekV32Config().max_position_embeddings
    assert to_hf_config(from_hf_config(config)) == config
    assert not any("seq" in key for key in config), "no key that a server might take for its own limit"


@pytest.mark.parametrize(
    "mscales", [{}, {"mscale": 1.0}, {"mscale": 0.7, "mscale_all_dim": 0.0}, {"mscale": 1.0, "mscale_all_dim": 0.5}]
)
def test_yarn_without_its_factors_is_transformers(mscales: dict[str, float]) -> None:
    config = to_hf_config(make_args(rope_factor=4.0, original_seq_len=16, index_topk=64))
    rope = {k: v for k, v in config["rope_parameters"].items() if not k.startswith("mscale")}
    config["rope_parameters"] = rope | mscales
    args = from_hf_config(config)
    args = dataclasses.replace(args, moe_args=dataclasses.replace(args.moe_args, use_grouped_mm=False))
    model = make_model(args)
    peer = make_peer(model, args, config)
    tokens = torch.randint(0, args.vocab_size, (1, S))
    with torch.no_grad():
        theirs = peer(tokens).logits
        assert (model(tokens) - theirs).abs().max() < 2e-5 * theirs.abs().max()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "llama"}, "model_type is 'llama'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'; .* known here with 'sigmoid'"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ({"mlp_layer_types": ["sparse", "dense"]}, "mlp_layer_types is .*1 dense layers"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "rope_type is 'llama3'"),
        ({"rope_scaling": {"type": "linear", "factor": 8.0}}, "type is 'linear'; .*'default' or 'yarn'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 8.0, "attention_factor": 2.0}}, "attention_factor is 2.0"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 8.0, "mscale_all_dim": 1.0}}, "without mscale"),
    ],
)
def test_other_configurations_are_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        from_hf_config(to_hf_config(make_args()) | change)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"experts": {"score_func": "softmax"}},
            "score_func is 'softmax', Hugging Face's deepseek_v32 supports only 'sigmoid'",
        ),
        ({"experts": {"score_before_experts": True}}, "score_before_experts is True"),
        ({"rope_factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.0}, "mscale is 0.7"),
    ],
)
def test_what_transformers_cannot_compute_is_not_exported(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        to_hf_config(make_args(**change))


def train(model: DeepSeekV32Model, steps: int = 5) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        tokens = torch.randint(0, model.model_args.vocab_size, (2, S + 1))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()


def test_trained_checkpoint_loads_in_transformers(tmp_path: Path) -> None:
    """Trained here, saved as TorchTitan does, exported, read by transformers: equal logits. The layer of multi-token
    prediction is left aside there."""
    from torch.distributed import checkpoint

    args = make_args(n_mtp_layers=1, rope_factor=40.0, original_seq_len=16, index_topk=12, experts=GROUPS)
    model = make_model(args)
    train(model)
    checkpoint.save(model.state_dict(), checkpoint_id=str(tmp_path / "step-5"), no_dist=True)
    export_checkpoint(tmp_path / "step-5", args, tmp_path / "hf", torch.float32)
    peer, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert all(name.startswith("model.layers.2.") for name in report["unexpected_keys"])
    tokens = torch.randint(0, args.vocab_size, (1, S))
    with torch.no_grad():
        theirs = peer.eval()(tokens).logits
        assert (model(tokens) - theirs).abs().max() < 2e-5 * theirs.abs().max()
    again = make_model(args, seed=1)
    again.load_state_dict(DeepSeekV32StateDictAdapter(args, None).from_hf(load_pretrained(tmp_path / "hf")))
    with torch.no_grad():
        assert torch.equal(again(tokens), model(tokens))


def test_biases_that_choose_experts_are_exported_as_exact_as_they_are(tmp_path: Path) -> None:
    from torch.distributed import checkpoint

    args = make_args()
    state = make_model(args).state_dict()
    biases = [name for name in state if name.endswith("expert_bias")]
    for name in biases:
        state[name].fill_(1 / 3)
    checkpoint.save(state, checkpoint_id=str(tmp_path / "step-1"), no_dist=True)
    export_checkpoint(tmp_path / "step-1", args, tmp_path / "hf", torch.bfloat16)
    loaded = load_pretrained(tmp_path / "hf")
    exported = [value for name, value in loaded.items() if name.endswith("e_score_correction_bias")]
    assert len(exported) == len(biases) > 0
    assert all(value.eq(1 / 3).all() and value.dtype == torch.float32 for value in exported)
    assert loaded["lm_head.weight"].dtype == torch.bfloat16


def test_large_models_are_written_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from whorl.titan.deepseek_v32 import hf

    monkeypatch.setattr(hf, "SHARD", 100_000)
    args = make_args()
    model = make_model(args)
    save_pretrained({n: v.bfloat16() for n, v in model.state_dict().items()}, args, tmp_path)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 3
    sizes = [file.stat().st_size for file in files]
    assert max(sizes) < 150_000
    assert all(a + b > 100_000 for a, b in itertools.pairwise(sizes)), "no file is begun before the last one is full"
    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert peer.dtype == torch.bfloat16
    assert torch.equal(peer.lm_head.weight, model.output.weight.bfloat16())


def test_what_is_no_checkpoint_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="step-N"):
        export_checkpoint(tmp_path, make_args(), tmp_path / "hf", torch.float32)
    with pytest.raises(ValueError, match=r"no \.safetensors"):
        load_pretrained(tmp_path)


def test_folder_of_transformers_loads_here(tmp_path: Path) -> None:
    args = make_args(index_topk=12, experts=GROUPS)
    torch.manual_seed(0)
    peer = transformers.DeepseekV32ForCausalLM(transformers.DeepseekV32Config(**to_hf_config(args))).eval()
    peer.save_pretrained(tmp_path)
    model = make_model(args)
    model.load_state_dict(DeepSeekV32StateDictAdapter(args, None).from_hf(load_pretrained(tmp_path)))
    tokens = torch.randint(0, args.vocab_size, (1, S))
    with torch.no_grad():
        theirs = peer(tokens).logits
        assert (model(tokens) - theirs).abs().max() < 2e-5 * theirs.abs().max()


def test_dense_checkpoint_needs_asking(tmp_path: Path) -> None:
    args = make_args()
    model = make_model(args)
    whole = DeepSeekV32StateDictAdapter(args, None).to_hf(model.state_dict())
    dense = {n: v for n, v in whole.items() if ".indexer." not in n}
    with pytest.raises(ValueError, match="bootstrap_indexer"):
        DeepSeekV32StateDictAdapter(args, None).from_hf(dense)
    adapter = DeepSeekV32StateDictAdapter(dataclasses.replace(args, bootstrap_indexer=True), None)
    loaded = adapter.from_hf(dense)
    assert loaded.keys() == model.state_dict().keys()
    assert all(torch.equal(v, adapter.from_hf(dense)[n]) for n, v in loaded.items())
    assert loaded["layers.0.attention.indexer.wk.weight"].std() > 0.01
    assert not torch.equal(
        loaded["layers.0.attention.indexer.wk.weight"], loaded["layers.1.attention.indexer.wk.weight"]
    )
    model.load_state_dict(loaded)


@pytest.mark.parametrize("bootstrap", [False, True])
def test_reader_of_a_dense_checkpoint(bootstrap: bool, tmp_path: Path) -> None:
    """TorchTitan's own way: it loads into the tensors of the model, by a reader that the adapter makes."""
    from torch.distributed import checkpoint

    args = make_args(bootstrap_indexer=bootstrap)
    adapter = DeepSeekV32StateDictAdapter(args, None)
    source, model = make_model(args), make_model(args, seed=1)
    kept = {n: v.clone() for n, v in model.state_dict().items()}
    save_pretrained(source.state_dict(), args, tmp_path)
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1, "safetensors makes private files"
    from safetensors.torch import load_file, save_file

    for file in tmp_path.glob("*.safetensors"):
        save_file({n: v for n, v in load_file(file).items() if ".indexer." not in n}, file, metadata={"format": "pt"})
    tensors = adapter.to_hf(model.state_dict())
    if not bootstrap:
        with pytest.raises(ValueError, match="bootstrap_indexer"):
            adapter.get_hf_storage_reader(str(tmp_path))
        return
    checkpoint.load(tensors, storage_reader=adapter.get_hf_storage_reader(str(tmp_path)), no_dist=True)
    loaded = adapter.from_hf(tensors)
    for name, value in loaded.items():
        expected = kept if ".indexer." in name else source.state_dict()
        assert torch.equal(value, expected[name]), name
