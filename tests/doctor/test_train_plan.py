"""The planner against transformers' parameter counts, torch's FLOP counter and published runs."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from whorl.cli import app
from whorl.plan.command import build_plan
from whorl.plan.hardware import A3, H200, Cluster
from whorl.plan.layout import (
    Parallelism,
    PlanSettings,
    layouts,
    peak_expert_load,
    sharded_parameters,
    stage_weights,
    stages,
)
from whorl.plan.memory import GB, Part, memory_of, peak, uses_masked_attention
from whorl.plan.model_shape import DEEPSEEK_V32, ModelShape, from_hugging_face, read_model
from whorl.plan.options import PlanOptions
from whorl.plan.search import Plan, make_plan
from whorl.plan.speed import time_of

PUBLISHED = Parallelism(pp=2, tp=4, cp=1, dp=16, ep=64, swap=True)
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 128}


def on_meta(config: Any) -> Any:
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


CONFIGS = {
    "deepseek_v32": lambda: transformers.DeepseekV32Config(),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(num_hidden_layers=5),
    "no q_lora": lambda: transformers.DeepseekV3Config(num_hidden_layers=4, q_lora_rank=None, first_k_dense_replace=1),
    "llama": lambda: transformers.LlamaConfig(**TINY, num_hidden_layers=3, num_key_value_heads=2),
    "tied": lambda: transformers.LlamaConfig(**TINY, num_hidden_layers=3, tie_word_embeddings=True, head_dim=32),
    "qwen2": lambda: transformers.Qwen2Config(**TINY, num_hidden_layers=3, num_key_value_heads=2),
    "qwen3": lambda: transformers.Qwen3Config(**TINY, num_hidden_layers=3, num_key_value_heads=2, head_dim=24),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **TINY, num_hidden_layers=5, num_experts=8, moe_intermediate_size=48, decoder_sparse_step=2, mlp_only_layers=[3]
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_counted_as_transformers_has_them(name: str) -> None:
    config = CONFIGS[name]()
    shape = from_hugging_face(config.to_dict(), name)
    assert shape.parameters == sum(p.numel() for p in on_meta(config).parameters())


def test_the_built_in_model_is_the_configuration() -> None:
    config = transformers.DeepseekV32Config().to_dict()
    assert from_hugging_face(config, DEEPSEEK_V32.name) == DEEPSEEK_V32
    assert DEEPSEEK_V32.parameters == 671_877_929_216


def test_parameters_by_how_they_are_shared() -> None:
    model = on_meta(transformers.DeepseekV32Config(num_hidden_layers=4))
    for index in (0, 3):
        kinds = {"split": 0, "replicated": 0, "experts": 0}
        for name, p in model.model.layers[index].named_parameters():
            is_replicated = any(word in name for word in ("norm", "indexer", "q_a_proj", "kv_a_proj", "mlp.gate."))
            is_expert = "mlp.experts" in name
            kinds["experts" if is_expert else "replicated" if is_replicated else "split"] += p.numel()
        assert dataclasses.asdict(DEEPSEEK_V32.layer(index)) == kinds


def test_work_of_weights_is_what_torch_counts() -> None:
    config = transformers.LlamaConfig(**TINY, num_hidden_layers=3, num_key_value_heads=4, attn_implementation="eager")
    shape, tokens = from_hugging_face(config.to_dict(), "llama"), 64
    model = on_meta(config)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.zeros(1, tokens, dtype=torch.long, device="meta")).logits.sum().backward()
    # The counter saw one forward of three passes' two, and attention to all keys and not only to those before.
    attention = 3 * 2 * shape.heads * tokens * 2 * shape.head_dim * shape.layers
    weights = sum(6 * shape.layer(i).split for i in range(shape.layers)) + shape.head_work()
    angles = shape.head_dim  # positions times frequencies are a product, too, before transformers 5.22
    assert counter.get_total_flops() in (tokens * (weights + attention + angles), tokens * (weights + attention))
    planned = sum(shape.layer_work(i, tokens).split for i in range(shape.layers))
    ours = sum(8 * shape.layer(i).split + shape.attention_work(tokens).split for i in range(shape.layers))
    assert planned == ours


def test_work_of_sparse_attention() -> None:
    """TFLOP of a layer and a sequence, worked out by hand for 128 heads of 576 and 512, 2048 keys, 64 x 128 indexer."""
    for seq, forward, backward, target, scores, gradient in (
        (4096, 1.75, 4.43, 0.93, 0.137, 0.31),
        (32768, 18.11, 45.8, 9.59, 8.80, 3.20),
    ):
        work = DEEPSEEK_V32.attention_work(seq)
        assert work.split * seq / 1e12 == pytest.approx(2 * forward + backward + target, rel=0.005)
        assert work.replicated * seq / 1e12 == pytest.approx(2 * scores + gradient, rel=0.01)


def test_the_efficiency_is_that_of_the_published_trims() -> None:
    for layers, speed, efficiency in ((8, 400, 0.066), (4, 568, 0.051)):
        trim = dataclasses.replace(DEEPSEEK_V32, layers=layers, experts=8, dense=frozenset({0}))
        assert speed * trim.token_work(4096) / A3.flops == pytest.approx(efficiency, rel=0.01)
    assert A3.efficiency == 0.066


# ---- layouts


def plan_of(cards: int, memory: float = 64, **settings: Any) -> Plan:
    cluster = Cluster(hardware=A3, cards=cards, dies=2, memory=memory)
    return make_plan(DEEPSEEK_V32, cluster, PlanSettings(seq=32768, batch=cluster.ranks, **settings))


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of(64)


def test_the_published_layout_fits_and_leads(plan: Plan) -> None:
    row = next(row for row in plan.rows if row.layout == PUBLISHED)
    assert row.fits
    assert row.memory.parameters == pytest.approx(row.memory.gradients)
    assert row.memory.optimizer == 0
    without = [row.layout for row in plan.feasible if row.layout.cp == 1]
    assert without.index(PUBLISHED) < 3
    assert 29 / 3 < row.tokens_per_card < 29 * 3


def test_the_optimizer_must_be_swapped_on_64_cards(plan: Plan) -> None:
    assert plan.feasible
    assert all(row.layout.swap for row in plan.feasible)


def test_32_cards_are_too_few_for_weights_and_gradients() -> None:
    plan = plan_of(32)
    assert plan.feasible == []
    assert plan.problem is not None
    assert "5368 GB without the indexers" in plan.problem
    assert "32 cards have 4096 GB" in plan.problem


def test_what_else_can_be_too_much_is_named() -> None:
    plan = plan_of(64, memory=44)
    assert plan.problem is not None
    assert "the smallest layout" in plan.problem
    assert "of a rank's 44, most of it parameters" in plan.problem


def test_every_layout_is_whole(plan: Plan) -> None:
    seen = set()
    for row in plan.rows:
        layout = row.layout
        assert layout.pp * layout.tp * layout.cp * layout.dp == 128
        assert layout.stage % layout.ep == 0
        assert layout not in seen
        seen.add(layout)
        assert row.fits == (row.memory.total <= 64)
    speeds = [row.tokens_per_card for row in plan.feasible]
    assert speeds == sorted(speeds, reverse=True)


def test_tokens_are_those_of_a_card_with_all_its_dies(plan: Plan) -> None:
    row, tokens = plan.feasible[0], plan.settings.batch * plan.settings.seq
    assert row.tokens_per_card * 64 * row.time.total == pytest.approx(tokens)


@pytest.mark.slow
def test_what_takes_all_of_the_memory_fits() -> None:
    needed = plan_of(64).feasible[0]
    for memory, fits in ((needed.memory.total, True), (needed.memory.total * (1 - 1e-9), False)):
        rows = plan_of(64, memory).rows
        assert [row.fits for row in rows if row.layout == needed.layout] == [fits]


def test_context_parallel_ranks_take_two_pieces_of_a_sequence_each() -> None:
    """One from its beginning and one from its end, so that every rank has as many keys to see."""
    shape = from_hugging_face({"model_type": "llama", **TINY, "num_hidden_layers": 3, "num_key_value_heads": 4}, "tiny")
    for seq, widest in ((12, 2), (16, 4)):
        degrees = {layout.cp for layout in layouts(shape, 4, PlanSettings(seq=seq, batch=4)) if layout.tp == 1}
        assert max(degrees) == widest


@pytest.mark.parametrize("layout", [PUBLISHED, Parallelism(pp=4, tp=2, cp=4, dp=4, ep=8, swap=False)])
def test_all_ranks_together_hold_the_model_once(layout: Parallelism) -> None:
    total = sum(
        sharded_parameters(stage_weights(DEEPSEEK_V32, layers), layout) * layout.stage
        for layers in stages(DEEPSEEK_V32, layout.pp)
    )
    repeated = sum(DEEPSEEK_V32.layer(i).replicated for i in range(61)) * (layout.tp - 1)
    assert total == pytest.approx(DEEPSEEK_V32.parameters - DEEPSEEK_V32.hidden + repeated)


def test_stages_share_all_layers() -> None:
    for pp in (1, 2, 4, 16, 32):
        assert [i for layers in stages(DEEPSEEK_V32, pp) for i in layers] == list(range(61))


def test_each_kind_of_parallelism_costs_and_saves_what_it_should() -> None:
    settings = PlanSettings(seq=32768, batch=256)  # several microbatches in every layout
    cluster = Cluster(hardware=H200, cards=128, memory=141)

    def both(**changes: Any) -> tuple[Any, Any]:
        layout = dataclasses.replace(Parallelism(pp=1, tp=1, cp=1, dp=128, ep=1, swap=False), **changes)
        return memory_of(DEEPSEEK_V32, layout, settings), time_of(DEEPSEEK_V32, layout, cluster, settings)

    memory, time = both()
    assert (time.tensor, time.expert, time.context, time.pipeline) == (0, 0, 0, 0)
    tp_memory, tp_time = both(tp=4, dp=32)
    assert tp_memory.activations < memory.activations / 2
    assert tp_time.tensor > 0
    assert both(tp=16, dp=8)[1].tensor > 5 * tp_time.tensor * 15 / 12, "beyond the eight of a node it is the network"
    cp_memory, cp_time = both(cp=8, dp=16)
    assert cp_memory.activations == pytest.approx(memory.activations / 8)
    assert cp_time.context > 0
    ep_memory, ep_time = both(ep=8)
    assert ep_memory.buffers < memory.buffers / 3
    assert ep_time.expert > 0
    assert ep_time.fsdp < time.fsdp
    assert both(pp=4, dp=32)[1].pipeline > 0
    swapped = both(swap=True)
    assert swapped[0].optimizer == 0
    assert swapped[0].total < memory.total
    assert swapped[1].optimizer > time.optimizer


@pytest.mark.parametrize(
    "layout", [Parallelism(pp=1, tp=4, cp=8, dp=4, ep=64, swap=False), dataclasses.replace(PUBLISHED, pp=1)]
)
def test_all_ranks_together_do_the_work_once(layout: Parallelism) -> None:
    settings = PlanSettings(seq=32768, batch=layout.dp, imbalance=0)
    cluster = Cluster(hardware=A3, cards=64, dies=2, memory=64)
    done = time_of(DEEPSEEK_V32, layout, cluster, settings).compute * A3.flops * A3.efficiency * layout.tp * layout.cp
    repeated = sum(DEEPSEEK_V32.layer_work(i, 32768).replicated for i in range(61)) * (layout.tp - 1)
    assert done == pytest.approx(32768 * (DEEPSEEK_V32.token_work(32768) + repeated))


def test_load_of_the_fullest_rank() -> None:
    """The formula is an upper estimate of what independent loads give."""
    torch.manual_seed(0)
    settings = PlanSettings(seq=4096, batch=128)
    for ep in (8, 64):
        layout = Parallelism(pp=1, tp=1, cp=1, dp=128, ep=ep, swap=False)
        loads = 1 + settings.imbalance * torch.randn(2000, ep, 256 // ep)
        drawn = loads.mean(2).amax(1).mean().item() - 1
        assert drawn < peak_expert_load(DEEPSEEK_V32, layout, settings) - 1 < 1.5 * drawn


def test_dense_models_have_no_expert_parallelism() -> None:
    shape = from_hugging_face(transformers.LlamaConfig(num_key_value_heads=8).to_dict(), "llama")
    candidates = list(layouts(shape, 16, PlanSettings(seq=4096, batch=16)))
    assert {layout.ep for layout in candidates} == {1}
    assert max(layout.tp for layout in candidates) == 8, "a rank has a whole key head"


# ---- memory, as it was measured

MEASURED = Path(__file__).parents[2] / "bench" / "results" / "training_h200.json"
ALONE = Parallelism(pp=1, tp=1, cp=1, dp=1, ep=1, swap=False)
GIB = 2**30


def trim(layers: int) -> ModelShape:
    return dataclasses.replace(DEEPSEEK_V32, layers=layers, experts=8, chosen=2, dense=frozenset({0}))


def measured_rows() -> list[Any]:
    documents = json.loads(MEASURED.read_text()).values()
    rows = [row for document in documents for row in document.get("rows", [])]
    return [row for row in rows if row["row"] != "transformers"]


def name_of(row: Any) -> str:
    return "-".join([str(row["layers"]), str(row["seq"]), row["row"], *({"checkpoint"} & set(row["switches"]))])


@pytest.mark.parametrize("row", measured_rows(), ids=name_of)
def test_memory_is_near_the_allocators_peak(row: Any) -> None:
    """One H200 with 139 GiB; weights, gradients and moments bf16, 512 tokens of the cross entropy at once.

    A tenth is what the planner promises; half of that shows when a part of backward is forgotten. Compiled blocks keep
    more than is counted, up to 1.7 GiB.
    """
    has = set(row["switches"]).__contains__
    settings = PlanSettings(
        seq=row["seq"],
        batch=1,
        weight=2,
        gradient=2,
        moment=1 + 4 / 256 if has("swap8") else 2,
        checkpoint=has("checkpoint"),
        fused=has("dsa"),
        chunk=512,
        ring=row.get("ring", 3),
    )
    predicted = memory_of(trim(row["layers"]), dataclasses.replace(ALONE, swap=has("swap") or has("swap8")), settings)
    if row.get("out_of_memory"):
        assert predicted.allocated * GB > 139 * GIB
    else:
        assert predicted.allocated * GB == pytest.approx(row["allocated_bytes"], rel=0.06 if has("compile") else 0.05)


def test_what_was_measured_is_varied() -> None:
    rows = [row for row in measured_rows() if "allocated_bytes" in row]
    assert {row["layers"] for row in rows} == {4, 8}
    assert {row["seq"] for row in rows} == {4096, 8192, 16384, 32768}
    switches = [set(row["switches"]) for row in rows]
    for name in ("dsa", "checkpoint", "swap", "compile"):
        assert any(name in switched for switched in switches)
        assert any(name not in switched for switched in switches)


def test_peak_follows_backward() -> None:
    first, last = Part(saved=10, working=1, gradients=100), Part(saved=20, working=50, gradients=5)
    assert peak([first, last]).total == 10 + 1 + 105  # the last one's 20 are free, its gradient stays
    assert peak([last]).total == 20 + 50 + 5
    memory = peak([first, last], accumulates=True)
    assert (memory.activations, memory.gradients) == (10 + 20 + 50, 105)


def test_sizes_are_what_is_asked_for() -> None:
    wide = memory_of(trim(4), ALONE, PlanSettings(seq=4096, batch=2))
    narrow = memory_of(trim(4), ALONE, PlanSettings(seq=4096, batch=2, weight=2, gradient=2, moment=2))
    for name in ("parameters", "gradients", "optimizer"):
        assert getattr(wide, name) == pytest.approx(2 * getattr(narrow, name))
    assert wide.buffers == pytest.approx(wide.parameters / 2), "autocast's copy of the weights"
    assert narrow.buffers == 0, "one rank has nothing to gather"
    assert memory_of(trim(4), dataclasses.replace(ALONE, dp=2), PlanSettings(seq=4096, batch=2)).buffers > 0


def test_cross_entropy_at_once() -> None:
    def whole(chunk: int) -> float:
        settings = PlanSettings(seq=8192, batch=1, weight=2, gradient=2, moment=2, checkpoint=True, chunk=chunk)
        return memory_of(dataclasses.replace(trim(1), heads=8), ALONE, settings).activations * GB

    wide = 8192 * DEEPSEEK_V32.vocab * 4 * 2
    assert whole(0) == pytest.approx(whole(8192))
    assert whole(8192) - whole(4096) == pytest.approx(wide / 2)


def test_attention_is_chosen_as_the_operators_do() -> None:
    from whorl.ops import choose_attention

    for topk in (64, 2048, 4096):
        for keys in (16, 64, 212, 213, 2048, 4096, 6800, 6801, 13600, 13601, 32768):
            assert uses_masked_attention(keys, topk) == (choose_attention(keys, topk, "cpu") == "masked")


@pytest.mark.slow
def test_a_device_without_a_masking_kernel_keeps_absorbed_queries_of_short_sequences_too() -> None:
    """As whorl.ops.choose_attention does on Ascend, whose plan is then that of the absorbed path at every length."""
    options = [PlanOptions(hardware=name, seq=4096, dies=2) for name in ("a3", "h200")]
    plans = [build_plan("deepseek-v3.2", 64, each) for each in options]
    assert [plan.settings.masked for plan in plans] == [False, True]
    size = {"weight": 2, "gradient": 2, "moment": 2}
    own = [PlanSettings(seq=4096, batch=1, checkpoint=False, masked=masked, **size) for masked in (False, True)]
    absorbed, masked = (memory_of(trim(8), ALONE, settings).activations for settings in own)
    assert absorbed > masked, "absorbed queries and what each head gathered are kept besides"


# ---- the command


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["train", *arguments])


ASKED = ("--plan", "deepseek-v3.2", "--dies", "2", "--memory", "64", "--seq", "32768")


def test_the_command_prints_the_table() -> None:
    done = run(*ASKED, "--cards", "64", "--top", "3")
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert "128 ranks, 8192 GB" in lines[1]
    assert sum(line.startswith("PP") for line in lines) == 6
    assert "PP2 TP4 CP1 DP16 EP64 swap at 29 tokens/s per card; predicted" in done.output
    assert "assumed:" in lines
    assert "25% of its mean" in done.output


@pytest.mark.slow
def test_the_command_as_json() -> None:
    done = run(*ASKED, "--cards", "32", "--json")
    assert done.exit_code == 1
    answer = json.loads(done.output)
    assert answer["feasible"] == 0
    assert "5368 GB" in answer["problem"]
    answer = json.loads(run(*ASKED, "--cards", "64", "--json", "--host", "25").output)
    assert answer["published"]["tokens_per_second_per_card"] == 29
    row = next(row for row in answer["rows"] if row["layout"] == dataclasses.asdict(PUBLISHED))
    parts = {k: v for k, v in row["memory_gb"].items() if k != "total"}
    assert set(parts) == {"parameters", "gradients", "optimizer", "activations", "buffers", "reserve"}
    assert sum(parts.values()) == pytest.approx(row["memory_gb"]["total"])
    assert answer["cluster"]["hardware"]["host"] == 25e9
    assert len(answer["assumptions"]) >= 5


def test_the_command_for_one_card(tmp_path: Path) -> None:
    """8 layers at 32k tokens with checkpointing, measured at 71.6 GiB; without it they ran out of memory."""
    config = transformers.DeepseekV32Config(
        num_hidden_layers=8, n_routed_experts=8, num_experts_per_tok=2, first_k_dense_replace=1
    ).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = (
        "--plan",
        str(tmp_path),
        "--hardware",
        "h200",
        "--cards",
        "1",
        "--seq",
        "32768",
        "--states",
        "bfloat16",
    )
    answer = json.loads(run(*arguments, "--json").output)
    row = next(row for row in answer["rows"] if not row["layout"]["swap"])
    assert (row["memory_gb"]["total"] - row["memory_gb"]["reserve"]) * GB / GIB == pytest.approx(71.6, rel=0.1)
    without = json.loads(run(*arguments, "--no-checkpointing", "--json").output)
    assert without["feasible"] == 0
    assert "no activation checkpointing" in "".join(without["assumptions"])


def test_a_config_file_is_a_model(tmp_path: Path) -> None:
    config = transformers.Qwen3MoeConfig(num_hidden_layers=8).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = run("--plan", str(tmp_path), "--cards", "8", "--hardware", "h200", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["parameters"] == read_model(str(tmp_path)).parameters
    assert "published" in json.loads(done.output)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give exactly one of RECIPE"),
        (("--plan", "deepseek-v3.2"), "give --cards N"),
        (("--plan", "nothing", "--cards", "8"), "no model nothing"),
        (("--plan", "deepseek-v3.2", "--cards", "8", "--hardware", "abacus"), "expected one of a3, h200"),
        (("--plan", "deepseek-v3.2", "--cards", "8", "--efficiency", "2"), "over 0 and at most 1"),
        (("--plan", "deepseek-v3.2", "--cards", "8", "--states", "int8"), "expected one of float32, bfloat16"),
        (("--plan", "deepseek-v3.2", "--cards", "8", "--link", "0"), "link is 0 GB/s"),
        (("--plan", "deepseek-v3.2", "--cards", "8", "--memory", "-1"), "memory is -1.0 GB, expected"),
        (("--plan", "deepseek-v3.2", "--cards", "127", "--dies", "1", "--batch", "1"), "no layout divides"),
    ],
)
def test_bad_usage(arguments: tuple[str, ...], message: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert message in done.output


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "model_type is 'mamba'"),
        ({"kv_lora_rank": None}, "kv_lora_rank is missing"),
        ({"attention_bias": True}, "attention_bias is set"),
    ],
)
def test_configurations_that_are_not_understood(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_hugging_face(transformers.DeepseekV32Config().to_dict() | change, "it")


def test_a_shape_is_a_value() -> None:
    assert isinstance(hash(DEEPSEEK_V32), int)
    with pytest.raises(dataclasses.FrozenInstanceError):
        DEEPSEEK_V32.layers = 3  # type: ignore[misc]
    assert isinstance(DEEPSEEK_V32, ModelShape)
