"""Towers of vision families beside transformers, and gpt-oss, on a GPU: checks first, then times.

    python bench/trials/families.py              # everything, in at most three minutes, and a table at the end
    python bench/trials/families.py towers       # 16 pictures of 1008 x 1008 (1024 x 1024 for patches of 16) a tower
    python bench/trials/families.py bits         # gpt-oss, part by part: which of them has other bits
    python bench/trials/families.py gpt-oss-20b  # one sequence and 64, with 4096 keys each, and the time by kernel

Prints one JSON document a line. A tower is right if its error against fp64 is at most twice transformers' own. Parts
compile their kernels side by side; while one is timed, the others wait or have ended.
"""

import contextlib
import copy
import functools
import gc
import json
import re
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from whorl import LLM, SamplingParams, nn, ops
from whorl.bench import decode_engine, decode_profile, step_trace
from whorl.bench.decode_engine import DecodeSettings, median_time
from whorl.bench.options import DecodeOptions
from whorl.bench.random_config import read_config
from whorl.engine.settings import EngineSettings
from whorl.engine.weights import random_model
from whorl.models import glm4v_tower, qwen2_vl_tower
from whorl.models.vision_tower import VisionTower
from whorl.nn.weights.dense import ALL_DENSE

DEVICE, COUNT = "cuda", 16
GRID, TRIED = (1, 72, 72), (1, 24, 40)  # patches of a picture of 1008 x 1008 pixels; of one that fp64 computes as well


# ---- towers


def towers() -> list[tuple[str, VisionTower, Any]]:
    """Each tower at its published sizes, and transformers' class of the same config."""
    from transformers.models.glm4v import modeling_glm4v as glm
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as windowed
    from transformers.models.qwen2_vl import modeling_qwen2_vl as plain

    kinds: list[tuple[str, Any, Any, dict[str, Any], Any]] = [
        ("Qwen2-VL", qwen2_vl_tower.Tower, qwen2_vl_tower.TowerConfig, {}, plain.Qwen2VisionTransformerPretrainedModel),
        (
            "Qwen2.5-VL",
            qwen2_vl_tower.WindowedTower,
            qwen2_vl_tower.WindowedTowerConfig,
            {"hidden_size": 1280},
            windowed.Qwen2_5_VisionTransformerPretrainedModel,
        ),
        ("GLM-4V", glm4v_tower.Tower, glm4v_tower.TowerConfig, {}, glm.Glm4vVisionModel),
    ]
    made = []
    for name, tower_class, config_class, values, peer_class in kinds:
        tower = tower_class(config_class.from_hf(values))
        with torch.device(DEVICE):
            nn.create_parameters(tower, ALL_DENSE, torch.bfloat16)
        generator = torch.Generator(DEVICE).manual_seed(0)
        for _, layer in nn.weighted(tower):
            layer.randomize(generator)
        config = peer_class.config_class(**values)
        config._attn_implementation = "sdpa"
        with torch.device(DEVICE):
            peer = peer_class._from_config(config, dtype=torch.bfloat16).eval()
        peer.load_state_dict({name: slot.into for name, slot in nn.destinations(tower).items()})
        made.append((name, tower, peer))
    return made


def patches(tower: VisionTower, grid: tuple[int, int, int]) -> Tensor:
    return torch.randn(grid[1] * grid[2], tower.config.patch_values, device=DEVICE)


def theirs(peer: Any, x: Tensor, grids: list[tuple[int, int, int]]) -> Tensor:
    with torch.inference_mode():
        features: Tensor = peer(x.to(next(peer.parameters()).dtype), torch.tensor(grids, device=DEVICE)).pooler_output
    return features


def time_tower(name: str, tower: VisionTower, peer: Any) -> None:
    x = patches(tower, TRIED)
    exact = theirs(copy.deepcopy(peer).double(), x, [TRIED])
    features = tower.encode(x, TRIED)[0], theirs(peer, x, [TRIED])
    errors = [float((y.double() - exact).norm() / exact.norm()) for y in features]
    inputs = [(patches(tower, GRID), GRID) for _ in range(COUNT)]
    joined = torch.cat([x for x, _ in inputs])
    alone = [tower.encode(*picture) for picture in inputs[:4]]

    def ours() -> None:
        for first in range(0, COUNT, 4):  # as many as the engine runs at once
            tower.encode_all(inputs[first : first + 4])

    seconds = median_time(DEVICE, ours, 5)
    peer_seconds = median_time(DEVICE, lambda: theirs(peer, joined, [GRID] * COUNT), 5)
    row = {
        "tower": name,
        "is_right": errors[0] <= 2 * errors[1] + 1e-6,
        "errors": errors,
        "alone_equals_together": all(map(torch.equal, alone, tower.encode_all(inputs[:4]))),
        "ms": 1e3 * seconds,
        "transformers_ms": 1e3 * peer_seconds,
        "times_faster": peer_seconds / seconds,
        "kernels": profiled(ours),
    }
    print(json.dumps(row), flush=True)


def profiled(function: Callable[[], None]) -> dict[str, tuple[float, float]]:
    """Return the time of each kernel of a call, us, and how often it runs; the slowest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        function()
        torch.cuda.synchronize()
    added, launches = defaultdict[str, float](float), Counter[str]()
    for event in profiler.events():
        name = short_name(event.name)
        added[name] += event.device_time_total
        launches[name] += 1
    return {name: (added[name], launches[name]) for name in sorted(added, key=lambda name: -added[name])}


def short_name(kernel: str) -> str:
    return re.sub(r"^void |<.*|\(.*", "", kernel)


def time_towers() -> None:
    made = towers()
    for _, tower, peer in made:  # compiles
        tower.encode_all([(patches(tower, GRID), GRID)] * 4)
        theirs(peer, patches(tower, TRIED), [TRIED])
    wait_for_turn()
    for name, tower, peer in made:
        time_tower(name, tower, peer)
        gc.collect()
        torch.cuda.empty_cache()


# ---- gpt-oss


def attend(sequences: Tensor, queries: int, keys: int, window: int, *, has_sinks: bool) -> Tensor:
    """Attention of gpt-oss: the last `queries` of `keys` tokens, of two sequences; [2, queries, heads, 64].

    sequences: q, k and v of the tokens. With at most 16 queries they are decoded, with more they are a prompt.
    """
    block, tokens = 16, sequences[:, -keys:]
    q, k, v = tokens[..., :64, :], tokens[..., 64:72, :], tokens[..., 72:80, :]
    pages = -(-keys // block)
    caches = torch.zeros(2, 2, pages * block, 8, 64, device=DEVICE, dtype=torch.bfloat16)
    caches[0, :, :keys], caches[1, :, :keys] = k, v
    caches = caches.view(2, 2 * pages, block, 8, 64)
    tables = torch.arange(2 * pages, device=DEVICE, dtype=torch.int32).view(2, pages)
    starts = torch.arange(3, device=DEVICE, dtype=torch.int32) * queries
    lengths = torch.full((2,), keys, device=DEVICE, dtype=torch.int32)
    sinks = torch.linspace(-2, 4, 64, device=DEVICE) if has_sinks else None
    last = q[:, -queries:].flatten(0, 1).contiguous()
    y = ops.paged_attention(last, *caches, tables, starts, lengths, sinks=sinks, scale=64**-0.5, window=window)
    return y.unflatten(0, (2, queries))


def attention_bits() -> dict[str, bool]:
    """Decoded queries against those of a prompt, and one sequence against two."""
    equal = {}
    for keys in (100, 128, 129, 1000, 5000, 40000):
        tokens = torch.randn(2, keys, 80, 64, device=DEVICE, dtype=torch.bfloat16)
        for window, has_sinks in ((0, True), (128, True), (0, False)):
            prompt = attend(tokens, min(keys, 300), keys, window, has_sinks=has_sinks)
            name = f"attention, {keys} keys, window {window}{', sinks' if has_sinks else ''}"
            for queries in (1, 5):
                decoded = attend(tokens, queries, keys, window, has_sinks=has_sinks)
                equal[f"{name}, {queries} decoded"] = torch.equal(decoded, prompt[:, -queries:])
    return equal


def expert_bits(model: Any) -> dict[str, bool]:
    """Packed experts against their plain values, and each number of tokens against the most."""
    experts = model.decoder.layers[0].mlp.experts
    (up, up_values), (down, down_values) = (
        (stack, stack.format.values(stack)) for stack in (experts.gate_up_proj, experts.down_proj)
    )
    biases = experts.gate_up_bias, experts.down_bias
    most = 4096
    x = torch.randn(most, 2880, device=DEVICE, dtype=torch.bfloat16)
    weights, ids = ops.route(torch.randn(most, 32, device=DEVICE), 4)

    def run(kind: str, tokens: int) -> Tensor:
        stacks: tuple[Tensor | None, ...] = (up_values, None, biases[0], down_values, None, biases[1])
        if kind == "packed":
            stacks = (up.codes, up.scales, biases[0], down.codes, down.scales, biases[1])
        return ops.clipped_experts(x[:tokens], *stacks, weights[:tokens], ids[:tokens], backend="triton")

    equal, whole = {}, {kind: run(kind, most) for kind in ("packed", "plain")}
    for tokens in (1, 5, 16, 17, 64, 65, 128, 129, 512, 513, most):
        some = {kind: run(kind, tokens) for kind in whole}
        equal[f"experts, {tokens} tokens, packed = plain"] = torch.equal(some["packed"], some["plain"])
        for kind, y in whole.items():
            equal[f"experts, {tokens} tokens, {kind}, few = many"] = torch.equal(some[kind], y[:tokens])
    return equal


def layer_bits(model: Any) -> dict[str, bool]:
    """The products with a bias, and the choice of experts: each number of tokens against the most."""
    layer = model.decoder.layers[0]
    router, equal = layer.mlp.router, {}
    x = torch.randn(2048, 2880, device=DEVICE, dtype=torch.bfloat16)
    wide = torch.randn(5120, 2880, device=DEVICE, dtype=torch.bfloat16) * 2880**-0.5
    bias = torch.randn(5120, device=DEVICE, dtype=torch.bfloat16)
    whole, routed, product = router(x), ops.route(router(x), 4), ops.linear(x, wide, bias)
    for tokens in (1, 5, 16, 17, 64, 65, 200):
        logits = router(x[:tokens])
        equal[f"router, {tokens} tokens"] = torch.equal(logits, whole[:tokens])
        chosen = zip(ops.route(logits, 4), routed, strict=True)
        equal[f"choices, {tokens} tokens"] = all(torch.equal(some, all_[:tokens]) for some, all_ in chosen)
        equal[f"linear with a bias, {tokens} tokens"] = torch.equal(
            ops.linear(x[:tokens], wide, bias), product[:tokens]
        )
    return equal


def model_bits(model: Any) -> dict[str, bool]:
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 8192, (n,), generator=draw).tolist() for n in (3, 40, 700, 2100)]
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=1, logprobs=0, ignore_eos=True)
    llm = LLM(model=model, device=DEVICE, num_blocks=2000, max_num_seqs=8)
    batch = llm.generate(prompts, params, progress=False)
    alone = [llm.generate([prompt], params, progress=False)[0] for prompt in prompts]
    scored, equal = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0), {}
    for one, among in zip(alone, batch, strict=True):
        name = f"model, prompt of {len(one.prompt_ids)}"
        decoded = [each.logprob for each in one.logprobs]
        equal[f"{name}, batch"] = decoded == [each.logprob for each in among.logprobs]
        (again,) = llm.generate([one.prompt_ids + one.token_ids], scored, progress=False)
        sent_back = [each.logprob for each in again.prompt_logprobs[len(one.prompt_ids) - 1 :]]
        equal[f"{name}, answer sent back"] = decoded == sent_back
    return equal


def check_bits() -> None:
    """Few layers of gpt-oss-20b, whose experts are real in size: each part by itself, then the engine. Says what
    differs."""
    torch.manual_seed(0)
    config = read_config("gpt-oss-20b") | {"num_hidden_layers": 4, "vocab_size": 8192, "max_position_embeddings": 8192}
    model: Any = random_model(config, device=DEVICE, dtype=torch.bfloat16)
    parts: dict[str, Callable[[], dict[str, bool]]] = {
        "attention": attention_bits,
        "experts": lambda: expert_bits(model),
        "products": lambda: layer_bits(model),
        "model": lambda: model_bits(model),
    }
    for name, part in parts.items():
        equal = part()
        row = {
            "is_right": all(equal.values()),
            "compared": len(equal),
            "differ": [k for k, v in equal.items() if not v],
        }
        print(json.dumps({"gpt-oss bits": name, **row}), flush=True)


# ---- gpt-oss, timed

# tok/s alone and of 64 sequences, with 4096 keys each: the limit by the bytes that a step reads, and what is to be
# reached.
LIMITS = {"gpt-oss-20b": {1: (1128, 560), 64: (14300, 7000)}, "gpt-oss-120b": {1: (834, 450), 64: (4166, 2700)}}
CONTEXT, STEPS, REPEATS, SHOWN = 4096, 48, 3, 12


def time_decode(name: str) -> None:
    options = DecodeOptions(random_config=name, batch="1,64", context=str(CONTEXT), tokens=STEPS, repeats=REPEATS)
    settings = DecodeSettings.resolve(None, options, EngineSettings(device=DEVICE))
    model, _ = decode_engine.load(settings)
    is_first = True
    for _, batch in settings.rows:
        decode_engine.free(DEVICE)
        llm = decode_engine.engine(model, batch, CONTEXT, settings)

        def started(llm: LLM = llm, batch: int = batch) -> list[Any]:
            return decode_engine.start(llm, model.vocab_size, batch, CONTEXT, STEPS)

        decode_engine.time_steps(llm, started(), 8)  # compiles and records
        if is_first:
            wait_for_turn()
        is_first = False
        runs = [decode_engine.time_steps(llm, started(), STEPS) for _ in range(REPEATS)]
        sequences = started()
        kernels = step_trace.kernels(decode_profile._trace(llm))
        decode_engine.end(llm, sequences)
        limit, reach = LIMITS[name][batch]
        speed = batch / statistics.median(runs)
        row = {"decode": name, "batch": batch, "tok_s": speed, "runs": [batch / seconds for seconds in runs]}
        row |= {"limit": limit, "reach": reach, "reached": speed >= reach, "kernels": by_kernel(kernels)}
        print(json.dumps(row), flush=True)
        del llm, sequences, started


def by_kernel(kernels: list[step_trace.Kernel]) -> dict[str, tuple[float, float]]:
    """Return what each kernel adds to a step, us, and how often it runs in it; the slowest first."""
    added, launches = defaultdict[str, float](float), Counter[str]()
    for kernel in kernels:
        name = short_name(kernel.name)
        added[name] += kernel.us / decode_profile._STEPS
        launches[name] += 1
    slowest = sorted(added, key=lambda name: -added[name])
    return {name: (added[name], launches[name] / decode_profile._STEPS) for name in slowest}


# ---- all of them, side by side where nothing is timed

READY, IN_TURN, SECONDS = "ready", "--in-turn", 175
STARTED = time.perf_counter()


def wait_for_turn() -> None:
    """Say that all is compiled, and wait until the parent lets this part be timed."""
    if IN_TURN in sys.argv:
        print(READY, flush=True)
        sys.stdin.readline()


PARTS: dict[str, Callable[[], None]] = {"bits": check_bits, "towers": time_towers}
PARTS |= {name: functools.partial(time_decode, name) for name in LIMITS}


class Part:
    """A part in a process of its own, whose lines are kept."""

    def __init__(self, name: str) -> None:
        self.name, self.lines, self.is_ready = name, list[str](), threading.Event()
        pipe: Any = subprocess.PIPE
        command = [sys.executable, __file__, name, IN_TURN]
        self.process = subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT)
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            if line.strip() == READY:
                print(f"{time.perf_counter() - STARTED:5.1f} s  {self.name} is compiled", flush=True)
                self.is_ready.set()
            else:
                self.lines.append(line)
        self.is_ready.set()

    def finish(self) -> None:
        """Let the part be timed and wait for its end; after three minutes end it."""
        self.is_ready.wait(self._left())
        with contextlib.suppress(BrokenPipeError):
            print(file=self.process.stdin, flush=True)
        self.reader.join(self._left())
        if self.reader.is_alive():
            self.process.kill()
            self.lines.append("killed: no time was left\n")
        code = self.process.wait()
        print(f"{time.perf_counter() - STARTED:5.1f} s  {self.name} ended with {code}", flush=True)
        documents = [line for line in self.lines if line.startswith("{")]
        print("".join(documents if code == 0 else self.lines[-60:]), flush=True)

    def _left(self) -> float:
        return max(1.0, SECONDS - (time.perf_counter() - STARTED))

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines if line.startswith("{")]


def run_all() -> None:
    """Compile side by side, time one after the other, and print a table."""
    parts = [Part(name) for name in ("bits", "gpt-oss-20b", "towers")]
    for part in parts:
        part.finish()
    parts.append(Part("gpt-oss-120b"))
    parts[-1].finish()
    rows = [row for part in parts for row in part.rows]
    print("\ngpt-oss      sequences   tok/s   reach   limit   us a step by kernel (launches)")
    for row in rows:
        if "decode" in row:
            print(f"{row['decode']:12} {row['batch']:9} {row['tok_s']:7.0f} {row['reach']:7} {row['limit']:7}")
            show_kernels(row)
    for row in rows:
        if "tower" in row:
            print(f"{row['tower']:12} {row['ms']:.1f} ms, transformers {row['transformers_ms']:.1f} ms:", end=" ")
            is_right = row["is_right"] and row["alone_equals_together"]
            print(f"{row['times_faster']:.2f} times as fast (reach 1.3); {'right' if is_right else 'WRONG'}")
            show_kernels(row)
        elif "gpt-oss bits" in row:
            print(f"bits of {row['gpt-oss bits']}: {row['compared']} compared, differ: {row['differ'][:12] or 'none'}")


def show_kernels(row: dict[str, Any]) -> None:
    for kernel, (us, launches) in list(row["kernels"].items())[:SHOWN]:
        print(f"{us:54.1f} {kernel} ({launches:.0f})")


if __name__ == "__main__":
    names = [name for name in sys.argv[1:] if name != IN_TURN]
    for name in names:
        PARTS[name]()
    if not names:
        run_all()
