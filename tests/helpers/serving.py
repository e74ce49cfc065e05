"""A server on a real port over the real engine, whose model says what it is told, token by token."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from folders import python_path
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from torch import Tensor

from whorl.engine.llm import LLM
from whorl.engine.settings import EngineSettings
from whorl.engine.tokenizer import Tokenizer
from whorl.nn import KVCache, PagedKV, Step
from whorl.serve import openai
from whorl.serve.connections import listen
from whorl.serve.http_server import HttpServer
from whorl.serve.openai import create_app
from whorl.serve.settings import ServerSettings

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")  # not special, as in Qwen3
TEMPLATE = """{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% if opens_thinking %}<think>
{% endif %}{% endif %}"""
NO_THINKING, THINKING = "<think>\n\n</think>\n\n", "<think>\n"
OPENS = "open "  # how a question begins whose prompt opens a think tag
MODEL = "told"
ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def byte_tokenizer() -> Tokenizer:
    """Every byte a token, and the tags of Qwen3."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in TAGS])
    ends = [backend.token_to_id("<|im_end|>"), backend.token_to_id("<|endoftext|>")]
    return Tokenizer(backend, eos_ids=ends, roles={"eos_token": "<|im_end|>"}, templates={"default": TEMPLATE})


class Told:
    """After a chat prompt it says what `answers` has for the last message; elsewhere the letter after the last one.

    It reads what came before from the cache, so that a wrong block or slot changes what it says.
    """

    config, dtype = None, torch.float32
    max_length = 1024

    def __init__(self, tokenizer: Tokenizer, answers: dict[str, str], *, delay: float = 0.0) -> None:
        self.tokenizer, self.delay = tokenizer, delay
        self.vocab_size = len(tokenizer) + 5  # padding, as real models have
        self.answers = {question: [*tokenizer.encode(text), tokenizer.eos_ids[0]] for question, text in answers.items()}
        self.failure: Exception | None = None
        self.may_step = threading.Event()
        self.may_step.set()
        self.num_free_steps = 0  # taken before it waits for `may_step`

    @contextlib.contextmanager
    def held_after(self, num_steps: int) -> Iterator[None]:
        """Within, it computes so many steps and no more: a longer answer cannot end, however slow the test is."""
        self.num_free_steps = num_steps
        self.may_step.clear()
        try:
            yield
        finally:
            self.num_free_steps = 0
            self.may_step.set()

    def cache_specs(self) -> list[PagedKV]:
        return [PagedKV(num_kv_heads=1, head_dim=1, dtype=self.dtype)]

    def forward(self, step: Step, caches: Sequence[KVCache]) -> Tensor:
        if self.failure is not None:
            raise self.failure
        if self.num_free_steps > 0:
            self.num_free_steps -= 1
        else:
            assert self.may_step.wait(60), "nobody let the model compute"
        time.sleep(self.delay)
        cells = caches[0].k.view(-1)
        is_written = step.slots >= 0
        cells[step.slots[is_written]] = step.token_ids[is_written].float()
        starts, size = step.query_starts.tolist(), caches[0].k.shape[1]
        said = []
        for entry, context in enumerate(step.context_lens.tolist()):
            slots = (step.block_tables[entry].long()[:, None] * size + torch.arange(size)).flatten()
            ids = cells[slots[:context]].long().tolist()
            num_rows = starts[entry + 1] - starts[entry]
            said += [self.next_id(ids[: context - num_rows + 1 + row]) for row in range(num_rows)]
        return torch.tensor(said)[:, None].float()

    def logits(self, hidden: Tensor) -> Tensor:
        out = torch.arange(self.vocab_size).neg().float().repeat(len(hidden), 1) / 100
        out[torch.arange(len(hidden)), hidden[:, 0].long()] = 10.0
        return out

    def next_id(self, ids: list[int]) -> int:
        text = self.tokenizer.decode(ids, skip_special=False)
        head, mark, said = text.rpartition("<|im_start|>assistant\n")
        if not mark:
            letter = ALPHABET[(ALPHABET.find(text[-1:]) + 1) % len(ALPHABET)]
            return self.tokenizer.encode(letter)[0]
        opening = NO_THINKING if said.startswith(NO_THINKING) else ""
        question = head.removesuffix("<|im_end|>\n").rpartition("\n")[2]
        if question.startswith(OPENS):
            opening = THINKING
        # Counted in ids: half a character has no text.
        num_said = len(ids) - len(self.tokenizer.encode(head + mark + opening))
        answer = self.answers.get(question, self.tokenizer.encode(ALPHABET))
        return answer[num_said] if num_said < len(answer) else self.tokenizer.eos_ids[0]


def told(answers: dict[str, str] | None = None, *, delay: float = 0.0, **options: Any) -> LLM:
    tokenizer = byte_tokenizer()
    settings = {"device": "cpu", "max_num_seqs": 32, "block_size": 8, "num_blocks": 512}
    return LLM(model=Told(tokenizer, answers or {}, delay=delay), tokenizer=tokenizer, **(settings | options))  # type: ignore[arg-type]


class Served:
    """A running server: where it is and what is behind it."""

    def __init__(self, llm: LLM, app: Any, server: HttpServer, port: int, api_key: str | None) -> None:
        self.llm, self.app, self.server, self.url = llm, app, server, f"http://127.0.0.1:{port}"
        headers = {"Authorization": f"Bearer {api_key}".encode()} if api_key else {}
        self.http = httpx.Client(base_url=self.url, headers=headers, timeout=30)

    def post(self, path: str, **body: Any) -> Any:
        response = self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def chat(self, text: str, **options: Any) -> Any:
        messages = [{"role": "user", "content": text}]
        return self.post("/v1/chat/completions", messages=messages, **({"temperature": 0} | options))

    def complete(self, prompt: Any, **options: Any) -> Any:
        return self.post("/v1/completions", prompt=prompt, **({"temperature": 0} | options))

    def events(self, path: str, **body: Any) -> list[Any]:
        """The stream's events; the last is the string [DONE]."""
        with self.http.stream("POST", path, json=body | {"stream": True}) as response:
            text = response.read().decode()
            assert response.status_code == 200, text
        assert response.headers["content-type"].startswith("text/event-stream")
        assert text.endswith("\n\n")
        lines = text.removesuffix("\n\n").split("\n\n")
        assert all(line.startswith("data: ") for line in lines)
        bodies = [line.removeprefix("data: ") for line in lines]
        return [body if body == "[DONE]" else json.loads(body) for body in bodies]

    def is_idle(self) -> bool:
        return self.llm.pool.num_used == 0 and not self.llm.has_work


@contextlib.contextmanager
def serving(llm: LLM, **settings: Any) -> Iterator[Served]:
    processor, port = settings.pop("processor", None), settings.pop("port", 0)
    chosen = ServerSettings(**({"names": (MODEL,)} | settings))
    with listening(llm, create_app(llm, chosen, processor), next(iter(chosen.keys), None), port=port) as served:
        yield served


@contextlib.contextmanager
def listening(llm: LLM, app: Any, api_key: str | None = None, *, port: int = 0) -> Iterator[Served]:
    (listener,) = listen("127.0.0.1", port)
    server = HttpServer(app, log_level="error")
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    served = Served(llm, app, server, listener.getsockname()[1], api_key)
    try:
        yield served
    finally:
        served.http.close()
        server.should_exit = True
        thread.join(30)
        listener.close()
        assert not thread.is_alive()


@contextlib.contextmanager
def prepared(model: str | Path, engine: EngineSettings, **options: Any) -> Iterator[Served]:
    """A model's folder, loaded as `whorl serve` loads it."""
    made: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(openai, "_serve", lambda app, *rest: made.append(app) or 0)
        assert openai.build_server(model, engine, port=0, **options)() == 0
    (app,) = made
    llm = app.state.service.engine.llm
    with listening(llm, app) as served:
        wait_until(lambda: answers(served.url))
        yield served


def wait_until(is_so: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


@contextlib.contextmanager
def own_process(
    arguments: str, *, first: str = "", output: Any = None
) -> Iterator[tuple["subprocess.Popen[bytes]", str]]:
    """A server in a process of its own, as `whorl serve` makes it but for the model, and its URL.

    arguments: of `openai.run`, beside its port, as they are written. first: what the process does before.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    imports = "import sys; from serving import told; from whorl.serve.openai import run"
    program = f"{imports}\n{first}\nsys.exit(run('told', port={port}, {arguments}))"
    environment = os.environ | {"PYTHONPATH": python_path()}
    process = subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=output, stderr=output)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: answers(url), seconds=180)
        yield process, url
    finally:
        process.kill()
        process.wait()


def stopped_in_a_stream(
    process: "subprocess.Popen[bytes]", url: str, number: signal.Signals, body: dict[str, Any]
) -> list[str]:
    """The lines of a streamed completion, after the first of which the server gets the signal."""
    with httpx.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}, timeout=30) as response:
        lines = (line for line in response.iter_lines() if line)
        received = [next(lines)]
        process.send_signal(number)
        return received + list(lines)


def in_background(
    served: Served, body: dict[str, Any], path: str = "/v1/completions"
) -> tuple[threading.Thread, list[httpx.Response]]:
    """A completion that a thread asks for, and where its answer will be."""
    responses: list[httpx.Response] = []
    url = f"{served.url}{path}"
    thread = threading.Thread(target=lambda: responses.append(httpx.post(url, json=body, timeout=30)))
    thread.start()
    return thread, responses


def answers(url: str) -> bool:
    """Whether the server there is up."""
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False
