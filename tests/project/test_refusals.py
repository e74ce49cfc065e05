"""What commands refuse: one line each, that says what was asked wrongly."""

import pytest
from refusals import check_refused
from typer.testing import CliRunner

from whorl.cli import app

REFUSED = {
    "generate": "there is no prompt: give --prompt TEXT, --prompt-file FILE, --prompts FILE or --interactive",
    "generate --prompt x --tp-size 10 --device cpu": "query heads: 9 cannot be shared by 10 ranks: take 9 or fewer",
    "generate --prompt x --pld-k 4": "--pld-k needs --pld",
    "generate --prompt x --draft-k 4": "--draft-k needs --draft-model",
    "generate --prompt x --draft-fixed": "--draft-fixed needs --pld or --draft-model",
    "generate --prompt x --pld --draft-model y": "give only one of --draft-model and --pld",
    "generate --prompt x --draft-model no-such-model": "no-such-model: no such file or folder",
    "generate --prompt x --pld-no-guard": "--pld-no-guard needs --pld",
    "generate --prompt x --pld --pld-no-guard --pld-guard-tail 3": "--pld-no-guard switches off what",
    "generate --prompt x --prompt-file y": "give only one of --prompt and --prompt-file",
    "generate --prompt-file no-such-file": "--prompt-file no-such-file: cannot be read: No such file or directory\n",
    "generate --prompt x --interactive": "give only one of --prompt and --interactive",
    "generate --prompt x --system y": "need the chat template: add --chat",
    "generate --prompt x --no-think": "need the chat template: add --chat",
    "generate --prompt x --reset": "--reset needs a conversation: add --interactive",
    "generate --interactive --json": "--json is for one answer",
    "generate a --model-dir b --prompt x": "MODEL a and --model-dir b mean the same; give only one of them",
    "generate no-such-model --prompt x": "no-such-model: no such file or folder",
    "generate SmolLM2-135M-Instruct --prompt x": "; leave it out for the default model",
    "generate --prompt x --device npu": "device 'npu' is not available; this machine has only",
    "bench decode --classify --profile": "give only one of --classify and --profile",
    "bench decode --random-config Qwen3-0.6B --classify": "--classify needs a trained MODEL",
    "bench decode --random-config no-such-shape": "expected one of Qwen3-30B-A3B, Qwen3-0.6B, ",
    "bench decode --random-config Qwen3-0.6B some-model": "give only one of MODEL (some-model) and --random-config",
    "bench decode --peer vllm": "--peer is vllm, expected transformers",
    "bench decode --batch x": "--batch is x, expected numbers",
    "bench decode --pld-k 3": "--pld-k is an option of drafting; add --classify",
    "bench decode --classify --draft-k 3": "--draft-k needs --draft-model",
    "bench decode --classify --speculate mtp --pld-k 3": "give only one of --speculate and the --pld options",
    "generate --prompt x --speculate mtq": "--speculate mtq: expected one of lookup, mtp",
    "generate --prompt x --speculate mtp --pld": "give only one of --speculate and --pld",
    "generate --prompt x --speculate mtp --draft-model y": "give only one of --draft-model and --speculate",
    "generate --prompt x --speculate lookup --draft-k 3": "--draft-k needs --draft-model or --speculate mtp",
    "bench decode --classify --draft-model x --pld-k 3": "give only one of --draft-model and the --pld options",
    # Options of vLLM and of others that there are not.
    "serve m --quantization fp8": "serve: there is no --quantization: the checkpoint says how its weights are",
    "serve m --quantization=fp8": "serve: there is no --quantization",
    "chat m --revision main": "chat: there is no --revision: download the revision and give its folder",
    "generate m -p x --pipeline_parallel_size 2": "generate: there is no --pipeline-parallel-size: tensor",
    "bench decode --tensor-parallel-size 2": "decode: there is no --tensor-parallel-size: decoding is timed on one",
    "bench decode --tp 2": "decode: there is no --tp: decoding is timed on one rank",
    "bench decode --max-num-seqs 3": "decode: there is no --max-num-seqs: the benchmark sizes the engine for --batch",
    "chat --interactive": "chat: there is no --interactive: whorl chat always is",
    "serve --compilation-config 3": "compilation config: expected an object with names and values, got 3",
    "serve --gpu-memory-utilization 0": "gpu_memory_utilization is 0.0, expected more than 0",
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.items())
def test_refused_with_a_line(arguments: str, message: str) -> None:
    check_refused(CliRunner().invoke(app, arguments.split()), message)
