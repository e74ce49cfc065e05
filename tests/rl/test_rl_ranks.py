"""A server with two ranks: a trainer sends to one of them, and both have the new weights, or neither serves."""

from pathlib import Path

from checkpoints import write_checkpoints
from serving import byte_tokenizer
from trainer import CONFIG, Sender, changed, generated, trainable_server

from whorl.engine.llm import LLM


def test_updates_of_a_server_with_two_ranks(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    path = write_checkpoints(tmp_path, {"model": CONFIG})["model"]
    old = load_file(path / "model.safetensors")
    new = changed(old)
    settings = {"device": "cpu", "num_blocks": 64, "block_size": 8, "max_num_seqs": 4}
    llm = LLM(path, tokenizer=byte_tokenizer(), tp=2, **settings)  # type: ignore[arg-type]
    try:
        with trainable_server(llm) as served:
            assert served.http.get("/get_world_size").json() == {"world_size": 1}
            assert served.http.get("/server_info").json()["tp_size"] == 2
            before = generated(served)
            sender = Sender(served, packed=True, packed_bytes=20_000)
            assert sender.update(new, "new")["weight_version"] == "new"
            after = generated(served)
            assert after["weight_versions"] == [{"version": "new", "start": 0, "end": 8}]
            assert after["logprobs"] != before["logprobs"]
            assert sender.post("/start_weight_update").status_code == 200
            assert sender.send({n: t for n, t in old.items() if n != "model.norm.weight"}).status_code == 200
            answer = sender.post("/finish_weight_update")
            assert (answer.status_code, "missing: model.norm.weight" in answer.text) == (400, True)
            assert served.http.post("/v1/completions", json={"prompt": "abc"}).status_code == 409
            sender.update(old)
            again = generated(served)
            assert (again["token_ids"], again["logprobs"]) == (before["token_ids"], before["logprobs"])
            served.post("/sleep?level=2")
            assert served.post("/wake_up")["status"] == "awake"
            assert served.http.post("/v1/completions", json={"prompt": "abc"}).status_code == 409
            sender.update(new)
            served.post("/resume")
            assert generated(served)["logprobs"] == after["logprobs"]
    finally:
        llm.close()
