"""Weights to a running model and a loop that trains on its own samples, on one GPU: checked bit for bit, and timed.

    python bench/trials/rl_sync.py
    python bench/trials/rl_sync.py --device cpu --layers 2    # the same with small sizes and shared memory

1. NCCL joins a group of one: it refuses two ranks on one GPU.
2. A trainer in a process of its own sends Qwen3-30B-A3B's weights by whorl's client: experts in one tensor, experts one
   by one, and with vLLM's pickled handles. The routes are answered by the transfer and the update of the server.
3. examples/rl_exact.py at Qwen3-0.6B's shape, beside transformers' generate.

Prints a table, and exits with 1 if a weight is not the sender's, a log-probability has other bits, or a time is above
the limits of the project.
"""

import argparse
import base64
import faulthandler
import gc
import json
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:False"  # CUDA IPC shares plain segments
os.environ["NO_PROXY"] = "127.0.0.1"
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor, multiprocessing

from whorl import nn
from whorl.device import synchronize
from whorl.engine.weights import build
from whorl.engine.weights.update import Places, Update
from whorl.models.qwen3 import Qwen3
from whorl.rl.client import Client
from whorl.rl.transfers import announced
from whorl.rl.transfers.memory import IpcTransfer, SharedMemoryTransfer

MOST_TIMES_A_COPY, MOST_SECONDS_ONE_BY_ONE = 1.3, 0.150
HANG = 175  # seconds, after which the stacks of all threads are printed and the run ends
LOOP_ENDS = 105  # no step of the loop begins later
ROUNDS = 4
Tensors = dict[str, Tensor]


def config_30b(layers: int, device: str) -> dict[str, Any]:
    sizes = {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 151936}
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    if device == "cpu":
        sizes = {"hidden_size": 32, "vocab_size": 320}
        experts |= {"moe_intermediate_size": 16}
    head = {} if device == "cpu" else {"head_dim": 128}
    return Qwen3.tiny(num_hidden_layers=layers, intermediate_size=6144, **sizes, **experts) | head


def sent(config: dict[str, Any], device: str, seed: int, *, is_fused: bool) -> Tensors:
    """The tensors by name. Experts that are sent one by one are views of one tensor, as a trainer has them."""
    generator = torch.Generator(device).manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(generator=generator)

    model = build(config, device="meta", dtype=torch.bfloat16)
    places = nn.destinations(model)
    tensors = {name: drawn(*place.shape) for name, place in places.items() if ".experts." not in name}
    count, width, inner = config["num_experts"], config["hidden_size"], config["moe_intermediate_size"]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.mlp.experts"
        gate_up, down = drawn(count, 2 * inner, width), drawn(count, width, inner)
        if is_fused:
            tensors |= {f"{prefix}.gate_up_proj": gate_up, f"{prefix}.down_proj": down}
            continue
        for expert in range(count):
            tensors[f"{prefix}.{expert}.gate_proj.weight"] = gate_up[expert, :inner]
            tensors[f"{prefix}.{expert}.up_proj.weight"] = gate_up[expert, inner:]
            tensors[f"{prefix}.{expert}.down_proj.weight"] = down[expert]
    return tensors


def bits_of(tensor: Tensor) -> list[Any]:
    """Numbers that differ if bits do, or change places."""
    bits = tensor.detach().contiguous().view(torch.int16).flatten()
    sums = [int(bits[first::7].sum(dtype=torch.int64)) for first in range(7)]
    return [*sums, bits[:4].tolist(), bits[-4:].tolist()]


# ---- the trainer, a process of its own


def trainer(url: str, config: dict[str, Any], device: str, seed: int, kind: str, pipe: Any) -> None:
    try:
        pipe.send(trained(url, config, device, seed, kind))
    except BaseException:
        pipe.send({"error": traceback.format_exc()})
    pipe.recv()  # its memory is needed until the receiver is done


def trained(url: str, config: dict[str, Any], device: str, seed: int, kind: str) -> dict[str, Any]:
    tensors = sent(config, device, seed, is_fused=kind == "fused")
    some = list(tensors)[:: max(1, len(tensors) // 60)]
    client = Client(url, transfer="ipc" if device == "cuda" else "shm", timeout=100)
    times = []
    for _ in range(1 if kind.startswith("vllm") else ROUNDS):
        synchronize(device)
        began = time.perf_counter()
        if kind.startswith("vllm"):
            with_handles(client, tensors, is_packed=kind == "vllm packed")
        else:
            client.update_weights(tensors.items())
        times.append(time.perf_counter() - began)
    client.close()
    return {"client": min(times[1:] or times), "tensors": len(tensors), "bits": {n: bits_of(tensors[n]) for n in some}}


def with_handles(client: Client, tensors: Tensors, *, is_packed: bool) -> None:
    """Send as vLLM's trainers do: a pickled handle for each tensor, or one for a buffer that is filled again."""
    from torch.multiprocessing.reductions import reduce_tensor

    client.post("/init_weight_transfer_engine", init_info={})
    client.post("/start_weight_update", partial=False)
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    buffer = torch.empty(1 << 30, dtype=torch.uint8, device="cuda") if is_packed else None
    shared = None if buffer is None else {uuid: reduce_tensor(buffer)[1]}
    for batch in packed_batches(tensors, 1 << 30) if is_packed else [list(tensors.items())]:
        if buffer is not None:
            flat = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for _, tensor in batch])
            buffer[: len(flat)].copy_(flat)
        handles = shared or [{uuid: reduce_tensor(tensor)[1]} for _, tensor in batch]
        torch.cuda.synchronize()
        info = {
            "names": [name for name, _ in batch],
            "dtype_names": ["bfloat16"] * len(batch),
            "shapes": [list(tensor.shape) for _, tensor in batch],
            "ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode(),
        }
        client.post("/update_weights", update_info=info)
    client.post("/finish_weight_update", weight_version=None)


def packed_batches(tensors: Tensors, size: int) -> Iterator[list[tuple[str, Tensor]]]:
    batch: list[tuple[str, Tensor]] = []
    for name, tensor in tensors.items():
        if batch and sum(each.nbytes for _, each in batch) + tensor.nbytes > size:
            yield batch
            batch = []
        batch.append((name, tensor))
    yield batch


# ---- the server's side of it


class Receiver:
    """Answers the routes of an update with the server's own transfer and update. phases: of the last update."""

    def __init__(self, model: Any, device: str) -> None:
        self.device, self.places = device, Places(model)
        self.transfer: Any = None
        self.update: Update | None = None
        self.phases: dict[str, float] = {}
        self.totals: list[float] = []

    def answer(self, path: str, data: bytes) -> dict[str, Any]:
        began = time.perf_counter()
        body = json.loads(data)
        if path == "/init_weight_transfer_engine":
            self.transfer = IpcTransfer(torch.device("cuda", 0)) if self.device == "cuda" else SharedMemoryTransfer()
        elif path == "/start_weight_update":
            self.update, self.phases = Update(self.places), {}
        elif path == "/update_weights":
            self.receive(body["update_info"], began)
        elif path == "/finish_weight_update":
            assert self.update is not None
            self.update.finish()
            self.done("finish", began)
            self.totals.append(sum(self.phases.values()))
        return {"weight_version": "1"}

    def receive(self, info: dict[str, Any], began: float) -> None:
        assert self.update is not None
        tensors = announced(info)
        self.update.check({tensor.name: (tensor.shape, tensor.dtype) for tensor in tensors})
        began = self.done("read and check", began)
        for batch in self.transfer.receive(info):
            began = self.done("map", began)
            self.update.copy(batch)
        self.done("copy", began)

    def done(self, phase: str, began: float) -> float:
        synchronize(self.device)
        now = time.perf_counter()
        self.phases[phase] = self.phases.get(phase, 0.0) + now - began
        return now


def serving(receiver: Receiver) -> HTTPServer:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # the name that the library calls
            data = self.rfile.read(int(self.headers["Content-Length"]))
            try:
                status, answer = 200, receiver.answer(self.path, data)
            except Exception as error:
                traceback.print_exc()
                status, answer = 500, {"error": {"message": f"{type(error).__name__}: {error}"}}
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def timed(work: Callable[[], Any], device: str) -> float:
    synchronize(device)
    began = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - began


def copy_seconds(num_bytes: int, device: str) -> float:
    """How long a copy of so many bytes takes, from one of a GB."""
    size = 1_000_000_000 if device == "cuda" else 1_000_000
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    return min(timed(lambda: target.copy_(source), device) for _ in range(5)) * num_bytes / size


def trial(model: Any, config: dict[str, Any], device: str, kind: str, seed: int) -> dict[str, Any]:
    """Run one trainer against the model."""
    receiver = Receiver(model, device)
    server = serving(receiver)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    url = f"http://127.0.0.1:{server.server_port}"
    process = context.Process(target=trainer, args=(url, config, device, seed, kind, there), daemon=True)
    process.start()
    try:
        if not here.poll(110):
            raise RuntimeError(f"the trainer said nothing for 110 seconds; it is {process.exitcode=}")
        told = here.recv()
        if "error" in told:
            raise RuntimeError(told["error"])
        known = receiver.places.destinations
        wrong = [name for name, bits in told["bits"].items() if bits_of(known[name].into) != bits]
        here.send("done")
        process.join(20)
    finally:
        process.kill()
        server.shutdown()
        server.server_close()
    times = receiver.totals
    return told | {"wrong": wrong, "first": times[0], "best": min(times[1:] or times), "phases": receiver.phases}


def syncs(layers: int, device: str, kinds: dict[str, float], began: float) -> list[tuple[str, str, bool]]:
    """kinds: of trials, with the seconds after which each is left out."""
    config, rows = config_30b(layers, device), []
    model = build(config, device=device, dtype=torch.bfloat16)
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    copy = copy_seconds(num_bytes, device)
    if device == "cuda":
        torch.cuda.empty_cache()
    rows.append(("a copy of its bytes", f"{num_bytes / 1e9:.1f} GB in {1000 * copy:.1f} ms", True))
    limits = {"fused": MOST_TIMES_A_COPY * copy, "one by one": MOST_SECONDS_ONE_BY_ONE}
    for seed, (kind, latest) in enumerate(kinds.items()):
        if time.perf_counter() - began > latest:
            rows.append((f"sync, {kind}", "left out: no time", False))
            continue
        try:
            result = trial(model, config, device, kind, seed)
        except Exception as error:
            traceback.print_exc()
            rows.append((f"sync, {kind}", f"failed: {str(error).strip().splitlines()[-1][:120]}", False))
            continue
        phases = ", ".join(f"{name} {1000 * seconds:.1f}" for name, seconds in result["phases"].items())
        limit = limits.get(kind)
        text = (
            f"{result['tensors']} tensors; server {1000 * result['best']:.1f} ms (first {1000 * result['first']:.1f}; "
            f"{phases}), {result['best'] / copy:.2f} x a copy; client {1000 * result['client']:.1f} ms; "
            f"limit {'none' if limit is None else f'{1000 * limit:.1f} ms'}; other bits in {len(result['wrong'])} of "
            f"{len(result['bits'])} tensors"
        )
        is_quick = limit is None or result["best"] <= limit or device == "cpu"
        rows.append((f"sync, {kind}", text, is_quick and not result["wrong"]))
    return rows


def nccl() -> list[tuple[str, str, bool]]:
    """Join a group of one: the library loads, the id is read, the first all-reduce runs."""
    import ctypes

    from whorl.rl.transfers.nccl import Communicator, _library, _UniqueId

    unique = _UniqueId()
    assert _library().ncclGetUniqueId(ctypes.byref(unique)) == 0
    communicator = Communicator(bytes(unique), 0, 1, torch.device("cuda", 0), 30.0)
    tensor = torch.arange(1000, device="cuda")
    communicator.broadcast(tensor)
    is_same = torch.equal(tensor.cpu(), torch.arange(1000))
    communicator.close()
    return [("nccl, a group of one", "joins and broadcasts" if is_same else "other values", is_same)]


# ---- a loop that trains


def loop(device: str, steps: int, began: float) -> list[tuple[str, str, bool]]:
    """Train by GRPO: every step syncs, samples, compares and trains."""
    import random

    import rl_exact

    sizes: dict[str, Any] = {"vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072}
    sizes |= {"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8}
    head = {"head_dim": 128}
    setup = {"dtype": torch.bfloat16, "prompt": 64, "answer": 128, "prompts": 8, "copies": 8, "learning_rate": 1e-6}
    if device == "cpu":
        sizes, head, setup = {"vocab_size": 97}, {}, {"prompt": 4, "answer": 8}
    config = Qwen3.tiny(**sizes, max_position_embeddings=512, tie_word_embeddings=True) | head
    run = rl_exact.Setup(config=config, device=device, **setup)
    policy, curve, rng = rl_exact.Policy(0, run, is_rounded=False), rl_exact.Curve(), random.Random(0)
    for number in range(steps):
        rl_exact.step(policy, number, rng, 0, curve)
        print(f"step {number}: {curve.step_seconds[-1]:.2f} s, mismatches {curve.mismatches[-1]}", flush=True)
        if time.perf_counter() - began > LOOP_ENDS:
            break
    num_tokens, mismatches = sum(curve.tokens), sum(curve.mismatches)
    warm = slice(1 if len(curve.tokens) > 1 else 0, None)  # the first step compiles

    def mean(values: list[float]) -> float:
        return sum(values[warm]) / len(values[warm])

    step, rollout, sync = (mean(x) for x in (curve.step_seconds, curve.rollout_seconds, curve.sync_seconds))
    theirs = transformers_rollout(config, run, device)
    text = (
        f"{len(curve.tokens)} steps of {run.prompts * run.copies} x {run.answer} tokens: step {step:.3f} s, rollout "
        f"{rollout:.3f} s ({rollout / step:.0%}), sync {1000 * sync:.1f} ms; transformers' generate as rollout "
        f"{theirs:.3f} s ({theirs / rollout:.1f} x), a step with it {step - rollout + theirs:.3f} s; mismatches "
        f"{mismatches} of {num_tokens}"
    )
    return [("rl_exact, Qwen3-0.6B's shape", text, mismatches == 0)]


def transformers_rollout(config: dict[str, Any], run: Any, device: str) -> float:
    """Return the seconds of transformers' generate for one step's samples."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {key: value for key, value in config.items() if key not in ("architectures", "model_type")}
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **values)).to(run.dtype).eval()
    ids = torch.randint(0, 16, (run.prompts * run.copies, run.prompt), device=device)
    sizes = {"max_new_tokens": run.answer, "min_new_tokens": run.answer, "do_sample": True, "pad_token_id": 0}
    with torch.inference_mode():
        return min(
            timed(lambda: model.generate(ids, attention_mask=torch.ones_like(ids), **sizes), device) for _ in "ab"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options = parser.parse_args()
    began = time.perf_counter()
    faulthandler.dump_traceback_later(HANG, exit=True)
    ours, theirs = {"fused": 60.0, "one by one": 90.0}, {"vllm packed": 135.0, "vllm one by one": 145.0}
    parts: list[tuple[str, Callable[[], list[tuple[str, str, bool]]]]] = [
        ("syncs", lambda: syncs(options.layers, options.device, ours, began)),
        ("loop", lambda: loop(options.device, options.steps, began)),
    ]
    if options.device == "cuda":
        print(torch.cuda.get_device_name(), torch.__version__, flush=True)
        parts.insert(0, ("nccl", nccl))
        parts.append(("vllm's handles", lambda: syncs(options.layers, options.device, theirs, began)))
    rows: list[tuple[str, str, bool]] = []
    for name, part in parts:
        try:
            rows += part()
        except Exception as error:
            traceback.print_exc()
            rows.append((name, f"failed: {str(error).strip().splitlines()[-1:]}", False))
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
        print(f"{name}: {time.perf_counter() - began:.0f} s since the start", flush=True)
    print()
    for name, text, is_good in rows:
        print(f"{'good' if is_good else 'MISS'}  {name}: {text}")
    return 0 if all(is_good for _, _, is_good in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
