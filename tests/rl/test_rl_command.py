"""`whorl serve MODEL --rl`, the command itself: a trainer's client against its process."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from checkpoints import write_checkpoints
from folders import ROOT
from safetensors.torch import load_file
from serving import byte_tokenizer
from trainer import CONFIG, changed, free_port

from whorl.rl.client import Client, ServerError


def folder(tmp_path: Path) -> Path:
    path = write_checkpoints(tmp_path, {"model": CONFIG})["model"]
    byte_tokenizer()._backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    return path


def test_a_trainer_and_the_command(tmp_path: Path) -> None:
    path, port = folder(tmp_path), free_port()
    options = ["--rl", "--weight-transfer-config", '{"backend": "shm"}', "--port", str(port), "--num-blocks", "64"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "whorl", "serve", str(path), *options, "--max-logprobs", "-1"]
    log = (tmp_path / "log").open("w")
    with subprocess.Popen(command, env=environment, stdout=log, stderr=log) as process:
        try:
            client = Client(f"http://127.0.0.1:{port}")
            end = time.monotonic() + 120
            while True:
                try:
                    client.get("/health")
                    break
                except ServerError:
                    is_late = process.poll() is not None or time.monotonic() > end
                    assert not is_late, (tmp_path / "log").read_text()[-3000:]
                    time.sleep(0.2)
            params = {"max_tokens": 6, "temperature": 1.0, "ignore_eos": True}
            ((before,),) = client.generate([[70, 71, 72]], params, seed=1)
            tensors = changed(load_file(path / "model.safetensors"))
            assert client.update_weights(tensors.items()) == client.version == "1"
            ((after,),) = client.generate([[70, 71, 72]], params, seed=1)
            assert before.versions == ("0",)
            assert after.versions == ("1",)
            assert before.logprobs != after.logprobs
            with pytest.raises(ServerError, match=r"of another shape: model.norm.weight"):
                client.update_weights((tensors | {"model.norm.weight": torch.ones(3)}).items())
            client.close()
        finally:
            process.terminate()
