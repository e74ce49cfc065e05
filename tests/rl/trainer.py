"""A trainer's side in tests: a tiny model with a tokenizer, a server with --rl, and the wire over gloo."""

import contextlib
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
from serving import Served, byte_tokenizer, serving
from torch import Tensor, distributed

from whorl import nn
from whorl.engine.llm import LLM
from whorl.engine.weights import random_model
from whorl.models.qwen3 import Qwen3
from whorl.rl.routes import add_routes
from whorl.rl.transfers.group import broadcast

Tensors = dict[str, Tensor]
CONFIG = Qwen3.tiny(vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2)


def model(**changes: Any) -> Any:
    return random_model({**CONFIG, **changes}, device="cpu", dtype=torch.float32)


def engine(**changes: Any) -> LLM:
    settings = {"device": "cpu", "num_blocks": 256, "block_size": 8, "max_num_seqs": 32, "seed": 0}
    return LLM(model=model(), tokenizer=byte_tokenizer(), **{**settings, **changes})  # type: ignore[arg-type]


@contextlib.contextmanager
def trainable_server(llm: LLM | None = None, **settings: Any) -> Iterator[Served]:
    options = {"rl": True, "more_routes": (add_routes,)} | settings
    with serving(llm or engine(), **options) as served:
        yield served


def weights(of: Any = None) -> Tensors:
    return {n: place.into.detach().clone() for n, place in nn.destinations(of or model()).items()}


def changed(tensors: Tensors, seed: int = 1) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {n: t + 0.1 * torch.randn(t.shape, generator=generator) for n, t in tensors.items()}


def info_of(tensors: Tensors) -> dict[str, Any]:
    return {
        "names": list(tensors),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Sender:
    """Rank 0 of a group of two over gloo."""

    def __init__(self, served: Served, *, packed: bool = False, packed_bytes: int = 1 << 30) -> None:
        self.served, self.packed, self.packed_bytes = served, packed, packed_bytes
        port = free_port()
        wait = timedelta(seconds=30)
        self.store = distributed.TCPStore(
            "127.0.0.1", port, 2, is_master=True, timeout=wait, wait_for_workers=False, use_libuv=False
        )
        init = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
        init |= {"packed": packed, "packed_buffer_size_bytes": packed_bytes}
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(served.http.post, "/init_weight_transfer_engine", json={"init_info": init})
            self.group: Any = distributed.ProcessGroupGloo(distributed.PrefixStore("gloo", self.store), 0, 2, wait)
            assert answer.result().status_code == 200, answer.result().text

    def post(self, path: str, **body: Any) -> Any:
        return self.served.http.post(path, json=body)

    def send(self, tensors: Tensors, announced: Tensors | None = None) -> Any:
        """Announce tensors, and broadcast them meanwhile; return the server's answer."""
        info = info_of(tensors if announced is None else announced)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(self.post, "/update_weights", update_info=info)
            for buffer in self.buffers(tensors):
                broadcast(self.group, buffer)
            return answer.result()

    def buffers(self, tensors: Tensors) -> Iterator[Tensor]:
        if not self.packed:
            yield from (tensor.contiguous() for tensor in tensors.values())
            return
        rows: list[Tensor] = []
        for tensor in tensors.values():
            rows.append(tensor.contiguous().view(-1).view(torch.uint8))
            if sum(row.numel() for row in rows) > self.packed_bytes:
                yield torch.cat(rows)
                rows = []
        if rows:
            yield torch.cat(rows)

    def update(self, tensors: Tensors, version: str | None = None) -> Any:
        assert self.post("/start_weight_update").status_code == 200
        answer = self.send(tensors)
        assert answer.status_code == 200, answer.text
        return self.served.post("/finish_weight_update", weight_version=version)


def generated(served: Served, prompt: Sequence[int] = tuple(range(5, 30)), **options: Any) -> Any:
    params = {"max_tokens": 8, "temperature": 0, "logprobs": 0, "ignore_eos": True} | options
    return served.post("/inference/v1/generate", token_ids=list(prompt), sampling_params=params)["choices"][0]
