"""A trainer's side of a server with --rl: its routes as methods, and the sender of new weights.

It needs torch and the standard library only.
"""

import json
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .senders import Sender, Transfer, announcement, make_sender

_CONCURRENT = 64


class ServerError(RuntimeError):
    """The server refused or cannot be reached. status: of HTTP; 0: it cannot be reached."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Completion:
    """A sampled answer. logprobs: of each token; versions: of the weights that sampled it, in their order."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    versions: tuple[str, ...]


class Client:
    """The routes of one server.

    url: such as http://127.0.0.1:8000. key: its API key, if it has one. transfer: how weights are sent: "shm", shared
    memory of one machine, "ipc", the memory of one GPU, or "gloo"; the server must have been started with the same
    backend.
    """

    def __init__(self, url: str, *, key: str | None = None, transfer: Transfer = "shm", timeout: float = 600) -> None:
        self.url, self.timeout = url.rstrip("/"), timeout
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._transfer = transfer
        self._sender: Sender | None = None

    def get(self, path: str) -> Any:
        """Return the answer of a route. Raises ServerError."""
        return self._ask(urllib.request.Request(self.url + path, headers=self._headers))

    def post(self, path: str, **body: Any) -> Any:
        """Send a JSON body to a route and return its answer. Raises ServerError."""
        data = json.dumps(body).encode()
        return self._ask(urllib.request.Request(self.url + path, data=data, headers=self._headers, method="POST"))

    def _ask(self, request: urllib.request.Request) -> Any:
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            raise ServerError(error.code, f"{request.full_url}: {_message(error)}") from None
        except (urllib.error.URLError, OSError) as error:
            raise ServerError(0, f"{request.full_url}: the server cannot be reached: {error}") from None

    # ---- weights

    @property
    def version(self) -> str:
        """The version of the server's weights."""
        return str(self.get("/weight_info")["weight_version"])

    def update_weights(
        self, tensors: Iterable[tuple[str, Tensor]], *, version: str | None = None, partial: bool = False
    ) -> str:
        """Send new weights, by Hugging Face's names; return their version. See `LLM.update_weights`."""
        if self._sender is None:
            self._sender = self._join()
        self.post("/start_weight_update", partial=partial)
        for batch in _batches(tensors, self._sender.most_bytes):
            self._send(self._sender, batch)
        return str(self.post("/finish_weight_update", weight_version=version)["weight_version"])

    def _join(self) -> Sender:
        sender = make_sender(self._transfer, self.timeout)
        with ThreadPoolExecutor(1) as pool:  # the server answers when both have met
            answer = pool.submit(self.post, "/init_weight_transfer_engine", init_info=sender.init_info)
            try:
                sender.join()
            finally:
                answer.result()
        return sender

    def _send(self, sender: Sender, batch: Sequence[tuple[str, Tensor]]) -> None:
        info = announcement(batch) | sender.prepare(batch)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(self.post, "/update_weights", update_info=info)
            try:
                sender.send()
            except RuntimeError:  # the server has closed the group: its answer says why
                answer.result()
                raise
            answer.result()

    def close(self) -> None:
        """Give back what sending needs."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    # ---- sampling

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Mapping[str, Any], *, n: int = 1, seed: int | None = None
    ) -> list[list[Completion]]:
        """Sample n answers to each prompt of token ids. params: fields of `sampling_params` of /inference/v1/generate.

        seed: makes all answers reproducible; prompt i uses seed + i.
        """

        def ask(index: int) -> list[Completion]:
            seeded = {} if seed is None else {"seed": seed + index}
            sampling = {"logprobs": 0, **params, "n": n, **seeded}
            answer = self.post("/inference/v1/generate", token_ids=list(prompts[index]), sampling_params=sampling)
            return [_completion(choice) for choice in answer["choices"]]

        with ThreadPoolExecutor(max(1, min(_CONCURRENT, len(prompts)))) as pool:
            return list(pool.map(ask, range(len(prompts))))


def _message(error: urllib.error.HTTPError) -> str:
    text = error.read().decode(errors="replace")
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:500]


def _completion(choice: Mapping[str, Any]) -> Completion:
    return Completion(
        token_ids=choice["token_ids"],
        logprobs=[entry["logprob"] for entry in choice["logprobs"]["content"]],
        finish_reason=choice["finish_reason"],
        versions=tuple(span["version"] for span in choice["weight_versions"]),
    )


def _batches(tensors: Iterable[tuple[str, Tensor]], most_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield tensors in groups of at most so many bytes, or of one."""
    batch: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        if batch and size + tensor.nbytes > most_bytes:
            yield batch
            batch, size = [], 0
        batch.append((name, tensor.detach()))
        size += tensor.nbytes
    if batch:
        yield batch
