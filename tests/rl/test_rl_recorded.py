"""What SkyRL, prime-rl and slime send, as their clients write it, answered as they read it."""

import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from lora_files import write_adapter
from safetensors.torch import save_file
from serving import Served
from torch import distributed
from trainer import Sender, changed, engine, free_port, generated, trainable_server, weights

from whorl import nn
from whorl.rl.transfers.group import broadcast


@pytest.fixture
def served() -> Iterator[Served]:
    with trainable_server() as served:
        yield served


def has(served: Served, tensors: dict[str, torch.Tensor]) -> bool:
    places = nn.destinations(served.llm.model)  # type: ignore[arg-type]
    return all(torch.equal(place.into, tensors[name]) for name, place in places.items())


def ask(served: Served, method: str, path: str, **options: Any) -> Any:
    response = served.http.request(method, path, **options)
    assert response.status_code == 200, response.text
    return response.json()


def test_skyrl(served: Served) -> None:
    """remote_inference_client.py: every control call has a JSON body or none, and sleep's level is in it."""
    tensors = changed(weights())
    assert ask(served, "GET", "/get_world_size", json={})["world_size"] == 1
    ask(served, "POST", "/pause", params={"mode": "keep", "clear_cache": "false"})
    sender = Sender(served, packed=True)
    assert sender.send(tensors).status_code == 200  # without a word of its beginning or end
    ask(served, "POST", "/resume")
    assert has(served, tensors)
    ask(served, "POST", "/reset_prefix_cache", json={"reset_running_requests": True})
    ask(served, "POST", "/sleep", json={"level": 1, "tags": ["weights"]})
    assert ask(served, "GET", "/is_sleeping")["is_sleeping"]
    ask(served, "POST", "/wake_up", json={"tags": ["weights"]})
    ask(served, "POST", "/wake_up", json={"tags": ["kv_cache"]})
    assert len(generated(served)["token_ids"]) == 8
    assert ask(served, "POST", "/tokenize", json={"model": "m", "prompt": "ab", "add_special_tokens": True})["tokens"]


def test_a_call_without_all_tensors_is_no_update(served: Served) -> None:
    tensors = changed(weights())
    answer = Sender(served).send({n: t for n, t in tensors.items() if n != "model.norm.weight"})
    assert (answer.status_code, "missing: model.norm.weight" in answer.text) == (400, True)


def test_prime_rl_by_files(served: Served, tmp_path: Any) -> None:
    """client.py: pause, a marker, update_weights with the folder, resume."""
    tensors = changed(weights())
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "STABLE").touch()
    ask(served, "POST", "/pause", params={"mode": "keep", "clear_cache": "false"})
    ask(served, "POST", "/update_weights", json={"weight_dir": tmp_path.as_posix()})
    ask(served, "POST", "/resume")
    assert has(served, tensors)
    body = {
        "model": "told",
        "token_ids": [70, 71, 72],
        "sampling_params": {"max_tokens": 4, "temperature": 1.0, "logprobs": 0, "routed_experts_prompt_start": 0},
        "cache_salt": "step-7",
        "priority": 0,
        "kv_transfer_params": None,
        "features": None,
    }
    headers = {"X-data-parallel-rank": "0", "X-Session-ID": "s"}
    (choice,) = ask(served, "POST", "/inference/v1/generate", json=body, headers=headers)["choices"]
    assert len(choice["token_ids"]) == len(choice["logprobs"]["content"])
    assert ask(served, "GET", "/liveness") == {"status": "ok"}


def test_prime_rl_by_a_group(served: Served) -> None:
    """worker/nccl.py: a count, and of each part the size of a pickled table, the table, a tensor for each dtype."""
    tensors, port, wait = changed(weights()), free_port(), timedelta(seconds=30)
    store = distributed.TCPStore(
        "127.0.0.1", port, 2, is_master=True, timeout=wait, wait_for_workers=False, use_libuv=False
    )
    init = {"host": "127.0.0.1", "port": port, "rank_offset": 0, "inference_world_size": 1, "timeout": 30}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(
            ask, served, "POST", "/init_broadcaster", json=init | {"quantize_in_weight_transfer": False}
        )
        group: Any = distributed.ProcessGroupGloo(distributed.PrefixStore("gloo", store), 0, 2, wait)
        assert answer.result() == {"status": "ok"}
        for _ in range(2):
            update = pool.submit(ask, served, "POST", "/update_weights", json={"weight_dir": None})
            names = list(tensors)
            parts = [names[:5], names[5:]]
            broadcast(group, torch.tensor([len(parts)]))
            for part in parts:
                table = {torch.float32: [(name, tensors[name].shape, tensors[name].numel()) for name in part]}
                data = torch.frombuffer(bytearray(pickle.dumps(table)), dtype=torch.uint8)
                broadcast(group, torch.tensor([len(data)]))
                broadcast(group, data)
                broadcast(group, torch.cat([tensors[name].flatten() for name in part]))
            assert update.result()["status"] == "ok"
            assert has(served, tensors)
            tensors = changed(weights(), 9)


def test_slime(served: Served, tmp_path: Any) -> None:
    """sglang_engine.py with external engines: health, facts, flush, files, version."""
    tensors = changed(weights())
    save_file(tensors, tmp_path / "model.safetensors")
    ask(served, "GET", "/health_generate")
    assert ask(served, "GET", "/get_server_info")["tp_size"] == 1
    ask(served, "POST", "/pause_generation", json={})
    ask(served, "GET", "/flush_cache")
    body = {"model_path": str(tmp_path), "load_format": None, "flush_cache": False, "weight_version": "3"}
    assert ask(served, "POST", "/update_weights_from_disk", json=body)["success"] is True
    ask(served, "POST", "/continue_generation", json={})
    assert ask(served, "GET", "/get_weight_version") == {"weight_version": "3"}
    assert has(served, tensors)
    ask(served, "POST", "/release_memory_occupation", json={})
    ask(served, "POST", "/resume_memory_occupation", json={"tags": ["weights"]})
    ask(served, "POST", "/resume_memory_occupation", json={"tags": ["kv_cache"]})
    assert len(generated(served)["token_ids"]) == 8


def test_a_hostile_table_is_refused(served: Served) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return eval, ("1/0",)

    port, wait = free_port(), timedelta(seconds=30)
    store = distributed.TCPStore(
        "127.0.0.1", port, 2, is_master=True, timeout=wait, wait_for_workers=False, use_libuv=False
    )
    init = {"host": "127.0.0.1", "port": port, "rank_offset": 0, "inference_world_size": 1, "timeout": 30}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, served, "POST", "/init_broadcaster", json=init)
        group: Any = distributed.ProcessGroupGloo(distributed.PrefixStore("gloo", store), 0, 2, wait)
        answer.result()
        update = pool.submit(served.http.post, "/update_weights", json={"weight_dir": None})
        data = torch.frombuffer(bytearray(pickle.dumps(Evil())), dtype=torch.uint8)
        for tensor in (torch.tensor([1]), torch.tensor([len(data)]), data):
            broadcast(group, tensor)
        refused = update.result()
    assert (refused.status_code, "pickle: it names builtins.eval" in refused.text) == (400, True)
    assert len(generated(served)["token_ids"]) == 8  # with the old weights


def test_prime_rl_by_adapters(tmp_path: Any) -> None:
    """client.py: a name and a path, each step the same name."""
    llm = engine(seed=0)
    with trainable_server(llm, runtime_lora=True) as served:
        answers = []
        for step in range(2):
            folder = write_adapter(tmp_path / str(step), llm.model, ("q_proj", "o_proj"), seed=step)
            body = {"lora_name": "policy", "lora_path": str(folder)}
            assert served.http.post("/load_lora_adapter", json=body).status_code == 200
            answers.append(served.complete([70, 71, 72], model="policy", max_tokens=4, ignore_eos=True, logprobs=0))
        first, second = (answer["choices"][0]["logprobs"] for answer in answers)
        assert first["token_logprobs"] != second["token_logprobs"]
