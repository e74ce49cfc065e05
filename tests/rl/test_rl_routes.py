"""The routes of trainers: updates over gloo, pauses, sleep, versions in answers, and what is refused."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file
from serving import Served, byte_tokenizer, serving, wait_until
from trainer import Sender, changed, engine, free_port, generated, info_of, model, trainable_server, weights

from whorl import nn
from whorl.engine.llm import LLM
from whorl.engine.sequence import SamplingParams
from whorl.rl.transfers.group import broadcast


@pytest.fixture
def served() -> Iterator[Served]:
    with trainable_server() as served:
        yield served


def fresh(tensors: dict[str, torch.Tensor]) -> list[Any]:
    """What an engine says that has had these weights from the start."""
    other = model()
    with torch.no_grad():
        for name, place in nn.destinations(other).items():
            place.into.copy_(tensors[name])
    llm = LLM(model=other, tokenizer=byte_tokenizer(), device="cpu", num_blocks=64, block_size=8)  # type: ignore[arg-type]
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=0)
    (output,) = llm.generate([list(range(5, 30))], params, progress=False)
    return [output.token_ids, [each.logprob for each in output.logprobs]]


def said(served: Served) -> list[Any]:
    choice = generated(served)
    return [choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]]]


@pytest.mark.parametrize(("packed", "size"), [(False, 0), (True, 1 << 30), (True, 20_000)])
def test_an_update_over_a_group(served: Served, packed: bool, size: int) -> None:
    before, tensors = said(served), changed(weights())
    sender = Sender(served, packed=packed, packed_bytes=size or 1 << 30)
    answer = sender.update(tensors, "step 1")
    assert answer == {"message": "Weight update finished", "weight_version": "step 1"}
    assert said(served) == fresh(tensors) != before
    assert generated(served)["weight_versions"] == [{"version": "step 1", "start": 0, "end": 8}]
    assert served.http.get("/weight_info").json() == {"weight_version": "step 1"}
    assert sender.update(weights())["weight_version"] == "2"
    assert said(served) == before


def test_a_folder_by_prime_rls_and_by_slimes_route(served: Served, tmp_path: Any) -> None:
    before, tensors = said(served), changed(weights())
    save_file(tensors, tmp_path / "model.safetensors")
    answer = served.post("/update_weights", weight_dir=str(tmp_path))
    assert answer["status"] == "ok"
    assert said(served) == fresh(tensors)
    save_file(weights(), tmp_path / "model.safetensors")
    body = {"model_path": str(tmp_path), "weight_version": "7", "flush_cache": True}
    assert served.post("/update_weights_from_disk", **body)["success"] is True
    assert said(served) == before
    assert served.http.get("/server_info").json()["weight_version"] == "7"
    missing = served.http.post("/update_weights", json={"weight_dir": str(tmp_path / "no")})
    assert (missing.status_code, "no *.safetensors" in missing.text) == (400, True)
    assert said(served) == before


def test_shared_memory() -> None:
    from multiprocessing.shared_memory import SharedMemory

    tensors = changed(weights())
    with trainable_server(weight_transfer_config='{"backend": "shm"}') as served:
        flat = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors.values()])
        memory = SharedMemory(create=True, size=flat.numel())
        try:
            memory.buf[: flat.numel()] = flat.numpy().tobytes()
            served.post("/init_weight_transfer_engine", init_info={})
            served.post("/start_weight_update")
            served.post("/update_weights", update_info={**info_of(tensors), "shm": memory.name})
            served.post("/finish_weight_update")
            assert said(served) == fresh(tensors)
            for name, message in (("../x", "expected the name"), ("not-there", "cannot be read")):
                served.post("/init_weight_transfer_engine", init_info={})
                served.post("/start_weight_update")
                refused = served.http.post("/update_weights", json={"update_info": {**info_of(tensors), "shm": name}})
                assert (refused.status_code, message in refused.text) == (400, True)
                assert said(served) == fresh(tensors)
        finally:
            memory.close()
            memory.unlink()


def test_the_routes_exist_with_rl_only_and_need_the_key() -> None:
    with serving(engine()) as served:
        assert served.http.post("/pause", json={}).status_code == 404
        assert "weight_version" not in served.complete("abc", max_tokens=2)
    with trainable_server(api_key="secret") as served:
        assert served.http.post("/pause").status_code == 200
        for method, path in (("POST", "/resume"), ("GET", "/server_info"), ("POST", "/update_weights")):
            refused = httpx.request(method, served.url + path)
            assert refused.status_code == 401
    with pytest.raises(ValueError, match="rl needs the routes of trainers"), serving(engine(), rl=True):
        pass


def test_backends_that_cannot_work_are_refused_at_the_start() -> None:
    for config, message in (
        ('{"backend": "nccl"}', "weights come by nccl, which needs a GPU"),
        ('{"backend": "pigeon"}', "expected a backend of nccl, gloo, ipc, shm"),
        ("no json", "expected a backend"),
    ):
        with pytest.raises(ValueError, match=message), trainable_server(weight_transfer_config=config):
            pass


def test_what_trl_reads_of_the_server(served: Served) -> None:
    info = served.http.get("/server_info", params={"config_format": "json"}).json()["vllm_config"]
    assert info["model_config"]["dtype"] == "torch.float32"
    assert info["model_config"]["logprobs_mode"] == "raw_logprobs"
    assert info["model_config"]["max_model_len"] == served.llm.max_model_len
    assert (info["weight_transfer_config"], info["lora_config"]) == ({"backend": "gloo"}, None)
    assert served.http.get("/get_world_size").json() == {"world_size": 1}


# ---- faults


def test_a_sender_that_dies_leaves_no_mixture(served: Served) -> None:
    before, tensors = said(served), changed(weights())
    sender = Sender(served)
    sender.post("/start_weight_update")
    first = dict(list(tensors.items())[:3])
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(sender.post, "/update_weights", update_info=info_of(tensors))
        for tensor in first.values():
            broadcast(sender.group, tensor.contiguous())
        sender.group = None  # the process is gone
        assert answer.result().status_code == 409
    refused = served.http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 2})
    assert refused.status_code == 409
    assert "repair them by a whole update" in refused.text
    assert served.http.post("/resume").status_code == 409
    sender = Sender(served)
    sender.update(weights())
    assert said(served) == before


def test_a_sender_that_dies_before_the_first_tensor_leaves_the_old_weights(served: Served) -> None:
    before = said(served)
    sender = Sender(served)
    sender.post("/start_weight_update")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(sender.post, "/update_weights", update_info=info_of(weights()))
        sender.group = None
        assert answer.result().status_code == 409
    assert said(served) == before


WRONG = {
    "shape": (lambda t: t | {"model.norm.weight": torch.ones(63)}, "of another shape: model.norm.weight"),
    "unknown": (lambda t: t | {"model.norm.weights": torch.ones(64)}, "not part of the model: model.norm.weights"),
}


@pytest.mark.parametrize("name", WRONG)
def test_tensors_that_do_not_fit_are_refused_before_they_come(served: Served, name: str) -> None:
    before, tensors = said(served), changed(weights())
    change, message = WRONG[name]
    sender = Sender(served)
    sender.post("/start_weight_update")
    answer = sender.post("/update_weights", update_info=info_of(change(tensors)))
    assert (answer.status_code, message in answer.text) == (400, True)
    assert sender.post("/finish_weight_update").status_code == 409
    assert said(served) == before


def test_a_missing_tensor_is_refused_at_the_end(served: Served) -> None:
    tensors = changed(weights())
    sender = Sender(served)
    sender.post("/start_weight_update")
    assert sender.send({n: t for n, t in tensors.items() if n != "model.norm.weight"}).status_code == 200
    answer = sender.post("/finish_weight_update")
    assert (answer.status_code, "missing: model.norm.weight" in answer.text) == (400, True)
    assert served.http.post("/v1/completions", json={"prompt": "abc"}).status_code == 409
    sender.update(tensors)
    assert said(served) == fresh(tensors)


def test_two_syncs_at_once(served: Served) -> None:
    tensors = changed(weights())
    sender = Sender(served)
    assert sender.post("/start_weight_update").status_code == 200
    assert sender.post("/start_weight_update").status_code == 409
    with ThreadPoolExecutor(2) as pool:
        answer = pool.submit(sender.post, "/update_weights", update_info=info_of(tensors))
        wait_until(lambda: served.app.state.sync._is_busy)
        second = sender.post("/update_weights", update_info=info_of(tensors))
        assert (second.status_code, "another sync" in second.text) == (409, True)
        for tensor in tensors.values():
            broadcast(sender.group, tensor.contiguous())
        assert answer.result().status_code == 200
    served.post("/finish_weight_update")
    assert said(served) == fresh(tensors)


def test_a_trainer_that_falls_silent(served: Served) -> None:
    before = said(served)
    served.app.state.sync._seconds = 0.2
    assert served.http.post("/start_weight_update").status_code == 200
    assert said(served) == before  # it waits until the update is given up
    assert served.llm.control.update is None


def test_no_bad_group_hangs(served: Served) -> None:
    served.app.state.sync._seconds = 1.0
    good = {"master_address": "127.0.0.1", "master_port": free_port(), "rank_offset": 1, "world_size": 2}
    for change, status, message in (
        ({}, 409, "no trainer answers at 127.0.0.1"),
        ({"world_size": 1}, 400, "makes this rank 1 of world_size 1"),
        ({"master_port": "x"}, 400, "master_port is 'x'"),
        ({"master_address": None}, 400, "master_address is None"),
    ):
        answer = served.http.post("/init_weight_transfer_engine", json={"init_info": good | change})
        assert (answer.status_code, message in answer.text) == (status, True), answer.text
    assert served.http.post("/update_weights", json={"update_info": {}}).status_code == 409


# ---- pauses, sleep, requests that span


def in_background(served: Served, results: list[Any], **options: Any) -> threading.Thread:
    def ask() -> None:
        params = {"max_tokens": 200, "temperature": 1.0, "seed": 1, "ignore_eos": True, "logprobs": 0}
        body = {"token_ids": list(range(5, 30)), "sampling_params": params} | options
        results.append(httpx.post(f"{served.url}/inference/v1/generate", json=body, timeout=60).json())

    thread = threading.Thread(target=ask)
    thread.start()
    wait_until(lambda: any(seq.num_outputs > 2 for seq in served.llm.scheduler.running))
    return thread


@pytest.mark.parametrize("on_update", ["continue", "restart", "abort"])
def test_a_request_that_spans_an_update(served: Served, on_update: str) -> None:
    results: list[Any] = []
    sender, tensors = Sender(served), changed(weights())
    thread = in_background(served, results, on_update=on_update)
    served.post("/pause?mode=keep")
    sender.update(tensors, "new")
    served.post("/resume")
    thread.join()
    (choice,) = results[0]["choices"]
    spans = choice["weight_versions"]
    assert [span["version"] for span in spans] == {"continue": ["0", "new"], "restart": ["new"], "abort": ["0"]}[
        on_update
    ]
    assert choice["finish_reason"] == ("abort" if on_update == "abort" else "length")
    assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == spans[-1]["end"]
    assert (spans[0]["start"], results[0]["weight_version"]) == (0, spans[-1]["version"])


def test_pause_keep_freezes_and_wait_finishes(served: Served) -> None:
    results: list[Any] = []
    thread = in_background(served, results)
    served.post("/pause?mode=keep")
    assert served.http.get("/is_paused").json() == {"is_paused": True}
    num_steps = served.llm.num_steps
    time.sleep(0.2)
    assert served.llm.num_steps == num_steps
    served.post("/resume")
    served.post("/pause?mode=wait")
    thread.join()
    assert results[0]["choices"][0]["finish_reason"] == "length"
    late: list[Any] = []
    waiting = threading.Thread(target=lambda: late.append(generated(served)))
    waiting.start()
    time.sleep(0.2)
    assert not late
    served.post("/resume")
    waiting.join()
    assert len(late[0]["token_ids"]) == 8


def test_abort(served: Served) -> None:
    for path in ("/pause?mode=abort", "/abort_requests"):
        results: list[Any] = []
        thread = in_background(served, results)
        served.post(path)
        thread.join()
        assert results[0]["choices"][0]["finish_reason"] == "abort"
        served.post("/resume")
    assert served.is_idle()


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_gives_memory_back_and_wakes_as_before(served: Served, level: int) -> None:
    before = said(served)
    served.post(f"/sleep?level={level}")
    assert served.http.get("/is_sleeping").json() == {"is_sleeping": True}
    assert sum(cache.k.untyped_storage().nbytes() for cache in served.llm.runner.caches) == 0
    held = sum(p.untyped_storage().nbytes() for p in served.llm.model.parameters())  # type: ignore[attr-defined]
    assert (held == 0) == (level == 2)
    assert served.post("/wake_up?tags=weights")["status"] == "sleeping"
    if level == 2:
        assert served.http.post("/v1/completions", json={"prompt": "abc"}).status_code == 409
        Sender(served).update(weights())
    assert served.post("/wake_up?tags=kv_cache")["status"] == "awake"
    served.post("/resume")
    assert said(served) == before
    assert served.http.post("/wake_up?tags=brains").status_code == 400


def test_answers_of_every_route_name_the_version(served: Served) -> None:
    Sender(served).update(weights(), "v5")
    spans = [{"version": "v5", "start": 0, "end": 3}]
    ids = {"return_token_ids": True, "return_tokens_as_token_ids": True, "logprobs": 1, "max_tokens": 3, "n": 2}
    answer = served.complete([[70, 71, 72], [73, 74]], ignore_eos=True, temperature=1.0, **ids)
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [[70, 71, 72]] * 2 + [[73, 74]] * 2
    for choice in answer["choices"]:
        assert len(choice["token_ids"]) == 3
        assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]
        assert choice["weight_versions"] == spans
    chat = served.chat("hi", max_tokens=3, ignore_eos=True, return_token_ids=True, logprobs=True)
    assert (chat["weight_version"], chat["choices"][0]["weight_versions"]) == ("v5", spans)
    assert chat["prompt_token_ids"] == served.post("/tokenize", messages=[{"role": "user", "content": "hi"}])["tokens"]
    *events, _ = served.events("/v1/completions", prompt="abc", max_tokens=3, ignore_eos=True, return_token_ids=True)
    assert [token for event in events for token in event["choices"][0]["token_ids"]] == served.complete(
        "abc", max_tokens=3, ignore_eos=True, return_token_ids=True
    )["choices"][0]["token_ids"]
    assert events[-1]["choices"][0]["weight_versions"] == spans


def test_scores_of_a_prompt_as_a_teacher_is_asked(served: Served) -> None:
    body = {"prompt": [[70, 71, 72], [73, 74]], "max_tokens": 1, "prompt_logprobs": 5, "temperature": 1.0}
    for prompt, choice in zip(body["prompt"], served.post("/v1/completions", **body)["choices"], strict=True):  # type: ignore[arg-type]
        first, *rest = choice["prompt_logprobs"]
        assert first is None
        for token_id, entries in zip(prompt[1:], rest, strict=True):
            ranks = sorted(entry["rank"] for entry in entries.values())
            assert ranks[:5] == [1, 2, 3, 4, 5]
            own = entries[str(token_id)]
            assert own["logprob"] <= max(entry["logprob"] for entry in entries.values())
            assert (own["rank"] in range(1, 6)) == (len(entries) == 5)


def test_more_alternatives_if_the_server_allows() -> None:
    with trainable_server(max_logprobs=-1) as served:
        (choice,) = served.complete("abc", max_tokens=1, logprobs=100)["choices"]
        assert len(choice["logprobs"]["top_logprobs"][0]) >= 90
    with trainable_server() as served:
        refused = served.http.post("/v1/completions", json={"prompt": "abc", "logprobs": 21})
        assert (refused.status_code, "up to 20: --max-logprobs" in refused.text) == (400, True)


def test_sync_under_load_loses_nothing(served: Served) -> None:
    """64 streams while the weights change three times: every one ends, and its spans cover its tokens."""
    sender, answers = Sender(served, packed=True), []

    def ask(number: int) -> Any:
        params = {"max_tokens": 30, "temperature": 1.0, "seed": number, "ignore_eos": True, "logprobs": 0}
        body = {"token_ids": [5 + number % 40, 6, 7], "sampling_params": params}
        return httpx.post(f"{served.url}/inference/v1/generate", json=body, timeout=120).json()

    with ThreadPoolExecutor(64) as pool:
        answers = [pool.submit(ask, number) for number in range(64)]
        for step in range(3):
            wait_until(lambda: bool(served.llm.scheduler.running))
            sender.update(changed(weights(), step), f"s{step}")
        choices = [answer.result()["choices"][0] for answer in answers]
    for choice in choices:
        spans = choice["weight_versions"]
        assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == 30
        assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]
        assert spans[-1]["end"] == 30
    assert served.is_idle()
