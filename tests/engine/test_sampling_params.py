"""A sampling parameter is declared once: the arrays of a call, every API, the flags and /set follow from the table."""

import inspect
from typing import Any

import pytest
import torch
from schedules import tiny
from serving import serving, told

from whorl import ops
from whorl.chat import set_command
from whorl.chat.options import SamplingOptions
from whorl.engine.call import field_offsets
from whorl.engine.llm import LLM
from whorl.engine.sampling_params import FILTERS, PARAMETERS, SamplingParams
from whorl.models.llama import Llama
from whorl.serve import prepare
from whorl.serve.message_schemas import MessagesRequest
from whorl.serve.response_schemas import ResponsesRequest
from whorl.serve.schema_parts import SAMPLING
from whorl.serve.schemas import ChatRequest, CompletionRequest
from whorl.serve.token_generation import GenerateParams

APIS = (ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest, GenerateParams)
ASK = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
REQUESTS = {
    "/v1/chat/completions": ASK,
    "/v1/completions": {"prompt": "hi", "max_tokens": 1},
    "/v1/responses": {"input": "hi", "max_output_tokens": 1},
    "/v1/messages": {**ASK, "model": "told"},
}


def test_the_device_gets_what_its_operator_takes() -> None:
    parameters = inspect.signature(ops.OPS["sample"].reference).parameters
    assert set(FILTERS) == set(parameters) - {"logits", "seeds", "steps"}
    kinds = {name: kind for name, kind, _, _ in field_offsets((1, 1, 1))[0]}
    assert {name: kinds[name] for name in FILTERS} == FILTERS


@pytest.mark.parametrize("name", SAMPLING)
def test_every_way_in_has_every_parameter(name: str) -> None:
    assert all(name in api.model_fields for api in APIS)
    assert name in SamplingOptions.__dataclass_fields__
    assert f"{name} " in "\n".join(set_command.describe(SamplingParams()))


@pytest.mark.parametrize("path", REQUESTS)
def test_a_request_brings_its_parameters(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[SamplingParams] = []

    def record(**fields: Any) -> SamplingParams:
        made.append(SamplingParams(**fields))
        return made[-1]

    monkeypatch.setattr(prepare, "SamplingParams", record)
    values = {name: 0.5 if PARAMETERS[name][0] is float else 7 for name in SAMPLING}
    with serving(told({"hi": "x"})) as served:
        response = served.http.post(path, json=REQUESTS[path] | values)
        assert response.status_code == 200, response.text
        refusal = served.http.post(path, json=REQUESTS[path] | {"top_n_sigma": -1})
    assert {name: getattr(made[0], name) for name in SAMPLING} == values
    assert refusal.status_code == 400
    assert "top_n_sigma" in refusal.text


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_value_out_of_range_is_named(name: str) -> None:
    declared = PARAMETERS[name][1]
    for bound, beyond in ((declared.least, -1), (declared.most, 1), (declared.above, 0)):
        if bound is not None:
            with pytest.raises(ValueError, match=f"SamplingParams: {name} is .*, expected "):
                SamplingParams(**{name: bound + beyond})
    for wrong in (float("nan"), "1", True):
        with pytest.raises(ValueError, match=f"SamplingParams: {name} is "):
            SamplingParams(**{name: wrong})


@pytest.mark.parametrize("logprobs", [None, 0], ids=["on the device", "in the sampler"])
def test_a_small_top_n_sigma_leaves_the_likeliest_token(logprobs: int | None) -> None:
    torch.manual_seed(0)
    llm = LLM(model=tiny(Llama), device="cpu", num_blocks=64, block_size=4)

    def tokens(**more: Any) -> list[int]:
        params = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=logprobs, **more)
        return llm.generate([[1, 2, 3]], params, progress=False)[0].token_ids

    greedy, wild = tokens(temperature=0), tokens(temperature=3, seed=1)
    assert wild != greedy
    assert tokens(temperature=3, seed=1, top_n_sigma=1e-6) == greedy
    assert tokens(temperature=3, seed=1, top_n_sigma=50) == wild
