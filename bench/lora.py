"""`python -m bench.lora`: what adapters cost on a GPU, after a check of their bits and errors.

Checks the operator first: errors against fp64, the bits of a row alone, in a batch and in the tiles of a prompt. Then,
for Qwen3-30B-A3B with updates of q, k, v and o and for Qwen3-8B with all seven, 64 sequences of 4,096 keys decode with
random weights: without adapters, with 64 loaded and none in use, with one for all, and with another for each. Before
that, it checks that a sequence's logits have the same bits beside other adapters, and that the base's are unchanged.
Prints a table of each model as soon as it is measured, then one JSON document. --quick: small sizes, for a machine
without a GPU.
"""

import functools
import json
import statistics
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from whorl import device as devices
from whorl import ops
from whorl.bench.decode_engine import free, prompts, time_steps
from whorl.bench.filled_cache import fill
from whorl.bench.provenance import provenance
from whorl.bench.random_config import read_config
from whorl.engine.llm import LLM
from whorl.engine.load import use_one_stream
from whorl.engine.lora import AdapterFile
from whorl.engine.lora.config import LoraConfig
from whorl.engine.sequence import SamplingParams
from whorl.engine.settings import EngineSettings
from whorl.engine.weights import random_model
from whorl.models.qwen3 import Qwen3
from whorl.timing import measure

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
SHAPES = {"Qwen3-30B-A3B": ATTENTION, "Qwen3-8B": (*ATTENTION, "gate_proj", "up_proj", "down_proj")}
STEPS = 32
# Of the reference's error, by dtype. In fp32 the kernel adds its chunks in order, for equal bits of a row in any batch;
# the library adds them in a tree. Observed on an H200: 3.76 times, 9e-6 of values up to 5.
MOST_ERROR = {torch.bfloat16: 2, torch.float32: 4}
app = typer.Typer(add_completion=False)


# ---- the operator


def check_operator(device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return the largest error against fp64 as a multiple of the reference's, and times; raise if bits differ."""
    inner, sizes, rank, groups = 2048, [4096, 512, 512], 16, 64
    torch.manual_seed(0)
    kind: dict[str, Any] = {"dtype": dtype, "device": device}
    width, rows = sum(sizes), 700
    values: dict[str, Any] = {
        "y": torch.randn(rows, width, **kind),
        "x": torch.randn(rows, inner, **kind),
        "a": torch.randn(groups, 3, rank, inner, **kind) / inner**0.5,
        "b": torch.randn(groups, width, rank, **kind) / rank**0.5,
        "groups": torch.randint(-1, groups, (rows,), dtype=torch.int32, device=device),
        "ranks": torch.full((groups, 3), rank, dtype=torch.int32, device=device),
        "scales": torch.rand(groups, 3, device=device) + 0.5,
    }
    together = ops.low_rank(**values, sizes=sizes)
    for first, count in ((0, 1), (17, 1), (0, 8), (64, 64), (100, 300)):
        part = values | {name: values[name][first : first + count] for name in ("y", "x", "groups")}
        _equal(ops.low_rank(**part, sizes=sizes), together[first : first + count], f"{dtype}: {count} rows")
    order = torch.randperm(rows, device=device)
    moved = values | {name: values[name][order] for name in ("y", "x", "groups")}
    _equal(ops.low_rank(**moved, sizes=sizes), together[order], f"{dtype}: another order")
    none = values["groups"] < 0
    _equal(together[none], values["y"][none], f"{dtype}: rows without an update")
    wide = {name: x.double() if x.is_floating_point() else x for name, x in values.items()}
    exact = ops.low_rank(**wide, sizes=sizes, backend="torch")
    errors = [
        float((result.double() - exact).abs().max())
        for result in (together, ops.low_rank(**values, sizes=sizes, backend="torch"))
    ]
    most = MOST_ERROR[dtype]
    assert errors[0] <= most * errors[1], f"{dtype}: error {errors[0]}, expected at most {most} times {errors[1]}"
    return {"dtype": str(dtype), "error": errors[0], "reference_error": errors[1], "us": _times(values, sizes)}


def _times(values: dict[str, Any], sizes: list[int]) -> dict[str, float]:
    """Return microseconds by number of rows, each with another update, and for a prompt of one."""
    times = {}
    for name, count, spread in (("1", 1, 1), ("64", 64, 64), ("8192 of one", 8192, 1)):
        index = torch.arange(count, device=values["x"].device)
        part = values | {each: values[each][index % 64].contiguous() for each in ("y", "x")}
        part["groups"] = (index % spread).int()
        timing = measure([functools.partial(ops.low_rank, **part, sizes=sizes)], values["x"].device.type)
        times[name] = timing.us
    return times


def _equal(actual: Tensor, expected: Tensor, what: str) -> None:
    assert torch.equal(actual, expected), f"{what}: {int((actual != expected).sum())} numbers have other bits"


# ---- the engine


def adapter(model: Any, kinds: tuple[str, ...], rank: int) -> AdapterFile:
    """Return an adapter with random matrices, in memory."""
    from whorl.nn.low_rank import targets

    generator = torch.Generator().manual_seed(0)
    modules: dict[str, Any] = {}
    for name, target in targets(model).items():
        if name.endswith(kinds) and target.entry is None and not target.is_stack:
            rows, columns = target.shape
            a = torch.randn(rank, columns, generator=generator).to(model.dtype) / columns**0.5
            b = torch.randn(rows, rank, generator=generator).to(model.dtype) * 0.05
            modules[name] = ({"A.weight": a, "B.weight": b},)
    values: dict[str, Any] = {"r": rank, "alpha": float(rank), "rank_pattern": {}, "alpha_pattern": {}}
    values |= {"use_rslora": False, "fan_in_fan_out": False, "lora_bias": False, "target_modules": list(modules)}
    values |= {"exclude_modules": (), "target_parameters": (), "layers": None, "layers_pattern": ()}
    return AdapterFile(LoraConfig(path=Path("random/adapter_config.json"), **values), modules, {})


def engine(model: Any, batch: int, context: int, count: int, device: str) -> LLM:
    length = context + STEPS + 8
    sizes: dict[str, Any] = {"max_num_seqs": batch, "max_model_len": length, "use_prefix_cache": False}
    settings: dict[str, Any] = {"device": device, "max_loras": count, **sizes}
    return LLM(model=model, **settings)


def check_bits(llm: LLM, vocab_size: int) -> None:
    """Raise unless sequences have the same logits alone and beside others, with and without adapters."""
    names: list[str | None] = [None, "a0", "a1", None, "a0"]
    tokens = prompts(len(names), 40, vocab_size)

    def run(chosen: list[int]) -> dict[int, Tensor]:
        logits: dict[int, Tensor] = {}
        sample = llm.runner.run_call

        def recording(call: Any, *rest: Any) -> Any:
            result = sample(call, *rest)
            for row, each in zip(result.logits, result.samples, strict=True):
                seq = each.chunk.sequence
                logits[order[seq.id], seq.num_outputs + seq.num_unread] = row.clone()  # type: ignore[index]
            return result

        llm.runner.run_call = recording  # type: ignore[assignment]
        params = [SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, lora=names[i]) for i in chosen]
        order: dict[int, int] = {}
        for i, each in zip(chosen, params, strict=True):
            order[llm.add(tokens[i], each)[0].id] = i
        while llm.has_work:
            llm.step()
        llm.runner.run_call = sample  # type: ignore[method-assign]
        return logits

    together = run(list(range(len(names))))
    for i in range(len(names)):
        for key, row in run([i]).items():
            _equal(together[key], row, f"sequence {i}, output {key[1]}")  # type: ignore[index]


def decode_ms(llm: LLM, vocab_size: int, batch: int, context: int, names: list[str | None], repeats: int) -> float:
    """Return the median milliseconds of a decode step."""
    times = []
    for _ in range(repeats + 1):
        params = [SamplingParams(temperature=0, max_tokens=STEPS + 4, ignore_eos=True, lora=name) for name in names]
        sequences = [llm.add(p, each)[0] for p, each in zip(prompts(batch, context, vocab_size), params, strict=True)]
        while not all(seq.num_outputs for seq in sequences):
            llm.step()
        times.append(time_steps(llm, sequences, STEPS) * 1e3)
    return statistics.median(times[1:])


def measure_model(name: str, kinds: tuple[str, ...], device: str, *, quick: bool) -> dict[str, Any]:
    count, batch, context, repeats = (3, 4, 64, 1) if quick else (64, 64, 4096, 3)
    config = Qwen3.tiny(vocab_size=512, max_position_embeddings=512) if quick else read_config(name)
    dtype = torch.float32 if quick else torch.bfloat16
    with torch.inference_mode():
        model: Any = random_model(config, device=device, dtype=dtype)
    vocab_size = model.vocab_size
    llm = engine(model, batch, context, count, device)
    file = adapter(model, kinds, 16)
    rows: dict[str, Any] = {}
    plain: list[str | None] = [None] * batch
    fill(llm)
    rows["none loaded"] = decode_ms(llm, vocab_size, batch, context, plain, repeats)
    for i in range(count):
        llm.load_lora(f"a{i}", file)
    rows["64 loaded, none used"] = decode_ms(llm, vocab_size, batch, context, plain, repeats)
    rows["one for all"] = decode_ms(llm, vocab_size, batch, context, ["a0"] * batch, repeats)
    each: list[str | None] = [f"a{i % count}" for i in range(batch)]
    rows["another for each"] = decode_ms(llm, vocab_size, batch, context, each, repeats)
    fresh = engine(model, 8, 256, 4, device)
    for i in range(2):
        fresh.load_lora(f"a{i}", file)
    check_bits(fresh, vocab_size)
    base = rows["none loaded"]
    shares = {name: round(100 * (ms / base - 1), 2) for name, ms in rows.items()}
    nbytes = llm.adapters.low_ranks.nbytes
    del llm, fresh, model
    free(device)
    return {"model": name, "updates": kinds, "ms_per_step": rows, "percent_slower": shares, "adapter_bytes": nbytes}


@app.command(help=__doc__)
def main(
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes, for a machine without a GPU.")] = False,
) -> None:
    device = devices.require(devices.default_device())
    settings: dict[str, Any] = {"device": device}
    use_one_stream(EngineSettings(**settings))
    document: dict[str, Any] = {**provenance(device)}
    if device != "cpu":
        document["operator"] = [check_operator(device, dtype) for dtype in (torch.bfloat16, torch.float32)]
    document["models"] = []
    for name, kinds in SHAPES.items():
        document["models"].append(measured := measure_model(name, kinds, device, quick=quick))
        print(_table(measured), flush=True)
    print(json.dumps(document))
    print(*map(_table, document["models"]), sep="\n")


def _table(measured: dict[str, Any]) -> str:
    """Return the rows of a model, for people."""
    shares = measured["percent_slower"]
    rows = [f"{name:24}{ms:10.3f} ms{shares[name]:9.2f}%" for name, ms in measured["ms_per_step"].items()]
    return "\n".join([f"{measured['model']}, {', '.join(measured['updates'])}", *rows])


if __name__ == "__main__":
    app()
