"""Weights and caches that do not fit into memory are refused with the numbers, or weights stay in 16 bits."""

import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from mock_model import ByteTokenizer, MockModel
from safetensors.torch import save_file

from whorl import host_memory, nn
from whorl.engine import memory, weights
from whorl.engine.llm import LLM
from whorl.engine.sequence import SamplingParams
from whorl.engine.speculate.draft_model import DraftModel
from whorl.models.deepseek import DeepSeek
from whorl.models.gemma3 import Gemma3
from whorl.models.llama import Llama
from whorl.models.qwen3 import Qwen3
from whorl.models.qwen3_vl import Qwen3VL
from whorl.nn import Matrix, Ranks
from whorl.nn.weights.dense import DENSE
from whorl.nn.weights.stored import Stored

CONFIGS = {
    "llama": Llama.tiny(attention_bias=True),
    "tied": Llama.tiny(tie_word_embeddings=True),
    "moe": Qwen3.tiny(num_experts=4, norm_topk_prob=True),
    "stacked": Qwen3VL.tiny(num_experts=4),
    "gemma": Gemma3.tiny(),
    "latent": DeepSeek.tiny(),
}


def save(folder: Path, config: dict[str, Any], dtype: torch.dtype = torch.bfloat16, **others: torch.dtype) -> Path:
    """A folder of random weights; others: dtypes by the end of a tensor's name, with _ for dots."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    model = weights.random_model(config, device="cpu", dtype=torch.float32)
    tensors = {name: destination.into.to(dtype) for name, destination in nn.destinations(model).items()}
    for end, other in others.items():
        tensors |= {n: x.to(other) for n, x in tensors.items() if n.replace(".", "_").endswith(end)}
    save_file({name: x.clone() for name, x in tensors.items()}, folder / "model.safetensors")
    return folder


def stored(model: Any) -> list[Matrix]:
    return [m for m in model.modules() if isinstance(m, Matrix) and isinstance(m.format, Stored)]


def limit(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """Let so many bytes be free."""

    def limits() -> Iterator[tuple[int, str]]:
        yield free, "of this test's memory"

    monkeypatch.setattr(host_memory, "limits", limits)
    monkeypatch.setattr(memory, "limits", limits)


# ---- 16 bits where fp32 does not fit


@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.bfloat16) for name in CONFIGS), ("llama", torch.float16)])
def test_weights_of_16_bits_give_the_bits_of_fp32(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    path = save(tmp_path / name, CONFIGS[name], dtype)
    prompts = [[5, 6, 7, 8, 9, 10], [3], [11, 12] * 20]
    texts = []
    for unpack in (True, False):
        llm = LLM(path, tokenizer=ByteTokenizer(), device="cpu", memory=1 << 20, unpack=unpack)
        params = SamplingParams(max_tokens=6, temperature=0, logprobs=3)
        outputs = llm.generate(prompts, params, progress=False)
        texts.append([(output.token_ids, output.logprobs) for output in outputs])
        matrices = stored(llm.model)
        assert bool(matrices) is not unpack
        assert all(matrix.weight.dtype == dtype for matrix in matrices)
    assert texts[0] == texts[1]


def test_memory_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    path = save(tmp_path / "llama", CONFIGS["llama"])
    plain = weights.load_model(path, device="cpu", progress=False)
    assert not stored(plain)
    needed = memory.weight_bytes(plain, unpack=True) + memory.largest_bytes(plain)
    limit(monkeypatch, needed - 1)
    assert stored(weights.load_model(path, device="cpu", progress=False))
    assert "the weights stay in 16 bits, because in float32 they would take" in caplog.text
    limit(monkeypatch, needed + (1 << 15))
    assert not stored(weights.load_model(path, device="cpu", progress=False))
    assert stored(weights.load_model(path, device="cpu", progress=False, reserve=(1 << 15) + 1))
    wide = weights.load_model(path, device="cpu", progress=False, dtype="bfloat16")
    assert not stored(wide)  # asked for: everything is bf16
    assert wide.dtype == torch.bfloat16


def test_a_checkpoint_of_several_dtypes_is_never_rounded(tmp_path: Path) -> None:
    path = save(tmp_path / "llama", CONFIGS["llama"], o_proj_weight=torch.float32, down_proj_weight=torch.float16)
    model = weights.load_model(path, device="cpu", progress=False, unpack=False)
    formats = {n.rpartition(".")[2]: m.format for n, m in model.named_modules() if isinstance(m, Matrix)}
    assert formats["o_proj"] == formats["down_proj"] == DENSE
    assert formats["qkv_proj"] == Stored(torch.bfloat16)
    fp32 = save(tmp_path / "fp32", CONFIGS["stacked"], torch.float32)
    mixed = save(tmp_path / "stacked", CONFIGS["stacked"], experts_gate_up_proj=torch.float32)
    for path in (fp32, mixed):
        assert not stored(weights.load_model(path, device="cpu", progress=False, unpack=False))


# ---- what does not fit


def test_weights_that_do_not_fit_are_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path / "llama", CONFIGS["llama"])
    limit(monkeypatch, 10_000)
    monkeypatch.setattr(weights, "fill", None)
    message = r"llama: .* GB of memory are needed, .* for the weights, .*and 1e-05 GB of this test's memory are free"
    with pytest.raises(memory.OutOfMemory, match=message):
        weights.load_model(path, device="cpu", progress=False)
    with pytest.raises(ValueError, match=r"1e\+06 GB for the cache, and 1e-05 GB"):
        LLM(path, tokenizer=ByteTokenizer(), device="cpu", memory=10**15)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"memory": 1},
            r"cache: a block takes 2048 bytes and its memory is 1; give 2048 bytes or more",
        ),
        (
            {"memory": 10**15},
            r"cache: its memory is 1e\+06 GB, and .* are free; give at most \d+ bytes",
        ),
        (
            {"num_blocks": 10**12},
            r"cache: 1000000000000 blocks of 2048 bytes take 2\.05e\+06 GB, and .* are free",
        ),
    ],
)
def test_caches_that_do_not_fit(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(model=MockModel(), device="cpu", **settings)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"cache of the draft model: {message.removeprefix('cache: ')}"):
        DraftModel(model=MockModel(), device="cpu", **settings)  # type: ignore[arg-type]


def test_the_default_cache_leaves_half_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, 1 << 20)
    llm = LLM(model=MockModel(), device="cpu")  # type: ignore[arg-type]
    assert llm.pool.num_blocks * 2048 == 1 << 19


def test_ranks_share_the_memory_of_a_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reads its shard while the others read theirs, and takes its part of the default cache."""
    path = save(tmp_path / "llama", CONFIGS["llama"])
    with weights.open_checkpoint(path) as checkpoint:
        shard = weights.build(checkpoint.config, device="meta", dtype=torch.float32, tp=Ranks(rank=0, size=2))
    needed = memory.weight_bytes(shard, unpack=False) + memory.largest_bytes(shard)
    limit(monkeypatch, 2 * needed - 1)
    check = functools.partial(memory.check_weights, shard, path, torch.device("cpu"), unpack=False)
    check()
    with pytest.raises(memory.OutOfMemory, match="of memory are needed"):
        check(num_ranks=2)
    assert memory.cache_memory("cpu", 2) == (2 * needed - 1) // 4


# ---- limits


def test_limits_of_control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable: 80 kB\n")
    monkeypatch.setattr(host_memory, "_PROC", proc)
    monkeypatch.setattr(host_memory, "_GROUPS", groups)
    assert host_memory.free_memory() == 80 << 10

    def group(folder: Path, version: int, limit: str, used: int, cached: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        (folder / names[0]).write_text(f"{limit}\n")
        (folder / names[1]).write_text(f"{used}\n")
        key = "inactive_file" if version == 2 else "total_inactive_file"
        (folder / "memory.stat").write_text(f"anon 1\n{key} {cached}\n")

    (proc / "self/cgroup").write_text("0::/outer/inner\n")
    group(groups, 2, "max", 0, 0)
    assert host_memory.free_memory() == 80 << 10
    group(groups / "outer/inner", 2, "max", 5000, 0)
    group(groups / "outer", 2, "9000", 5000, 1000)  # pages of files are given back when memory is needed
    assert host_memory.free_memory() == 5000
    (proc / "self/cgroup").write_text("4:memory:/of/the/host\n0::/\n")  # in a container the root is its own
    group(groups / "memory", 1, "7000", 6000, 2000)
    assert host_memory.free_memory() == 3000


ULIMIT = """
import resource, sys
import torch
from whorl import host_memory, nn
from whorl.cli import app
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + int(sys.argv.pop(1)),) * 2)
assert host_memory.free_memory() <= 1 << 31
app()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux enforces RLIMIT_AS")
def test_a_limit_on_address_space_gives_one_line(tmp_path: Path) -> None:
    sizes = {"vocab_size": 50_000, "hidden_size": 1024, "num_attention_heads": 8, "max_position_embeddings": 256}
    path = save(tmp_path / "llama", Llama.tiny(**sizes))
    command = [sys.executable, "-c", ULIMIT, str(100 << 20), "generate", str(path), "-p", "a", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    lines = done.stderr.splitlines()
    assert (done.returncode, len(lines)) == (2, 1), done.stderr[-2000:]
    assert lines[0].startswith("whorl: ")
    assert "limit (address space, ulimit -v) are free" in lines[0]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux enforces RLIMIT_AS")
@pytest.mark.parametrize("room", [40, 200, 350])
def test_imports_that_do_not_fit_give_one_line(room: int) -> None:
    """Those of torch: its libraries alone take some hundred MB of address space."""
    program = ULIMIT.replace("import torch\nfrom whorl import host_memory, nn\n", "from whorl import host_memory\n")
    program = program.replace("import app", "import run").replace("\napp()", "\nsys.exit(run())")
    command = [sys.executable, "-c", program, str(room << 20), "generate", "-p", "a", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    lines = done.stderr.splitlines()
    assert (done.returncode, len(lines)) == (1, 1), done.stderr[-2000:]
    assert lines[0].startswith("whorl: memory ran out; ")
    assert "limit (address space, ulimit -v) are free: " in lines[0]
