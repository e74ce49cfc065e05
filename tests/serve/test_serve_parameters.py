"""Every field that vLLM's, OpenAI's and Anthropic's clients send is served, or refused by a sentence that helps."""

import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from serving import Served, serving, told

from whorl.engine.speculate.prompt_lookup import PromptLookup
from whorl.serve.embeddings import EmbeddingRequest
from whorl.serve.message_schemas import MessagesRequest
from whorl.serve.refused_fields import REFUSED
from whorl.serve.response_schemas import ResponsesRequest
from whorl.serve.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from whorl.serve.token_generation import GenerateParams

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
ASK = [{"role": "user", "content": "hi"}]
BEGUN = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The first letters are abc"}]

# The fields of vLLM 0.11 to 0.15, OpenAI's and Anthropic's own among them. `priority` needs the scheduler.
SAMPLING = (
    "model frequency_penalty logit_bias n presence_penalty seed stop stream stream_options temperature top_p user "
    "best_of use_beam_search top_k min_p repetition_penalty length_penalty stop_token_ids include_stop_str_in_output "
    "ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side "
    "allowed_token_ids bad_words prompt_logprobs response_format structured_outputs guided_json guided_regex "
    "guided_choice guided_grammar guided_decoding_backend guided_whitespace_pattern structural_tag request_id "
    "logits_processors return_tokens_as_token_ids return_token_ids cache_salt kv_transfer_params vllm_xargs "
    "repetition_detection max_tokens logprobs echo add_special_tokens"
)
FIELDS: dict[Any, str] = {
    ChatRequest: f"{SAMPLING} messages top_logprobs max_completion_tokens tools tool_choice reasoning_effort "
    "include_reasoning parallel_tool_calls add_generation_prompt continue_final_message documents chat_template "
    "chat_template_kwargs mm_processor_kwargs media_io_kwargs thinking_token_budget audio function_call functions "
    "metadata modalities prediction prompt_cache_key prompt_cache_retention safety_identifier service_tier store "
    "verbosity web_search_options",
    CompletionRequest: f"{SAMPLING} prompt suffix prompt_embeds",
    TokenizeRequest: "model prompt messages add_special_tokens return_token_strs add_generation_prompt tools "
    "continue_final_message chat_template chat_template_kwargs mm_processor_kwargs",
    DetokenizeRequest: "model tokens",
    ResponsesRequest: "background conversation context_management include input instructions max_output_tokens "
    "max_tool_calls metadata model parallel_tool_calls previous_response_id prompt prompt_cache_key "
    "prompt_cache_retention reasoning safety_identifier service_tier store stream stream_options temperature text "
    "tool_choice tools top_logprobs top_p truncation user request_id media_io_kwargs mm_processor_kwargs cache_salt "
    "enable_response_messages previous_input_messages structured_outputs repetition_penalty seed stop ignore_eos "
    "skip_special_tokens include_stop_str_in_output vllm_xargs kv_transfer_params top_k min_p",
    MessagesRequest: "model messages max_tokens metadata stop_sequences stream system temperature tool_choice tools "
    "top_k top_p thinking service_tier container context_management mcp_servers output_config inference_geo "
    "cache_control",
    EmbeddingRequest: "input model encoding_format dimensions user add_special_tokens truncate_prompt_tokens "
    "cache_salt",
    GenerateParams: "n max_tokens min_tokens temperature top_p top_k min_p presence_penalty frequency_penalty "
    "repetition_penalty seed stop_token_ids ignore_eos logprobs prompt_logprobs logit_bias detokenize "
    "skip_special_tokens spaces_between_special_tokens",
}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(told({"special": "a<|im_start|>b"})) as running:
        yield running


def refusal(response: httpx.Response, status: int = 400) -> str:
    assert response.status_code == status, response.text
    return str(response.json()["error"]["message"])


@pytest.mark.parametrize("kind", FIELDS)
def test_every_field_that_clients_send_is_known(kind: Any) -> None:
    known = {field.alias or name for name, field in kind.model_fields.items()}
    assert set(FIELDS[kind].split()) <= known


def refused_fields() -> list[tuple[str, dict[str, Any], str, Any]]:
    cases = []
    for path, kind, base in (
        (CHAT, ChatRequest, {"messages": ASK}),
        (COMPLETIONS, CompletionRequest, {"prompt": "a"}),
        ("/tokenize", TokenizeRequest, {"messages": ASK}),
        ("/v1/responses", ResponsesRequest, {"input": "hi"}),
        (MESSAGES, MessagesRequest, {"model": "told", "messages": ASK}),
    ):
        short = {CHAT: {"max_tokens": 1}, COMPLETIONS: {"max_tokens": 1}, MESSAGES: {"max_tokens": 1}}
        for name, field in kind.model_json_schema()["properties"].items():
            if field.get("description", "").startswith(REFUSED):
                limit = {"max_output_tokens": 1} if path == "/v1/responses" else short.get(path, {})
                cases.append((path, base | limit, name, field["enum"]))
    return cases


def test_what_is_refused_says_what_to_do_and_what_asks_for_nothing_is_taken(served: Served) -> None:
    cases = refused_fields()
    assert len(cases) > 50
    for path, body, name, neutral in cases:
        message = refusal(served.http.post(path, json=body | {name: "x y"}))
        assert message.startswith(f"{name}: is refused: "), message
        assert len(message.split()) > 6, message
        for value in neutral:
            assert served.http.post(path, json=body | {name: value}).status_code == 200, (name, value)


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        (COMPLETIONS, {"prompt": "a", "n": 2, "best_of": 3}, "best_of is 3 and n 2"),
        (CHAT, {"messages": ASK, "best_of": 2}, "best_of is 2 and n 1: all answers are returned"),
        (CHAT, {"messages": ASK, "truncate_prompt_tokens": 0}, "leaves no prompt"),
        (CHAT, {"messages": ASK, "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        (CHAT, {"messages": ASK, "allowed_token_ids": [10**6]}, "allowed_token_ids: [1000000] are outside"),
        (CHAT, {"messages": ASK, "allowed_token_ids": []}, "allowed_token_ids"),
        (CHAT, {"messages": ASK, "allowed_token_ids": [1], "guided_regex": "a"}, "and a grammar exclude each other"),
        (CHAT, {"messages": ASK, "allowed_token_ids": [258], "min_tokens": 1}, "each of them ends the answer"),
        (CHAT, {"messages": ASK, "chat_template_kwargs": {"continue_final_message": True}}, "has a field of its own"),
        (
            CHAT,
            {"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message and add_generation_prompt exclude each other",
        ),
        (
            CHAT,
            {"messages": [*ASK, {"role": "assistant", "content": ""}], "continue_final_message": True},
            "the last message has no text to continue",
        ),
        ("/tokenize", {"prompt": "a", "continue_final_message": True}, "the last message has no text"),
    ],
)
def test_what_does_not_fit_together_is_told(served: Served, path: str, body: Any, says: str) -> None:
    assert says in refusal(served.http.post(path, json=body))


# ---- what is served


def test_special_tokens_are_shown_on_request(served: Served) -> None:
    messages = [{"role": "user", "content": "special"}]
    for skips, expected in ((True, "ab"), (False, "a<|im_start|>b")):
        body = {"messages": messages, "temperature": 0, "skip_special_tokens": skips}
        assert content_of(served.post(CHAT, **body)) == expected
        events = served.events(CHAT, **body)
        assert "".join(e["choices"][0]["delta"].get("content", "") for e in events[:-1]) == expected
    answer = served.post("/v1/responses", input="special", skip_special_tokens=False, temperature=0)
    assert answer["output"][0]["content"][0]["text"] == "a<|im_start|>b"


def test_a_prompt_is_truncated_at_its_beginning(served: Served) -> None:
    for prompt in ("x" * 3000 + "abc", [*[120] * 3000, 64, 65, 66]):  # the ids of a, b and c
        answer = served.complete(prompt, truncate_prompt_tokens=2, max_tokens=2, echo=True)
        assert answer["choices"][0]["text"] == "bcde"
        assert answer["usage"]["prompt_tokens"] == 2
        assert served.complete(prompt, truncate_prompt_tokens=-1, max_tokens=24)["usage"]["prompt_tokens"] == 1000
    answer = served.chat("x" * 3000, truncate_prompt_tokens=7, max_tokens=1)
    assert answer["usage"]["prompt_tokens"] == 7
    assert served.complete("abc", truncate_prompt_tokens=50, max_tokens=1)["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize("speculates", [False, True])
def test_only_the_allowed_tokens_are_sampled(speculates: bool) -> None:
    options = {"speculate": PromptLookup(k=4, min_hist=1), "draft_length": "fixed"} if speculates else {}
    with serving(told(**options)) as served:
        (ids,) = (served.post("/tokenize", prompt="bcdq")["tokens"],)
        body = {"allowed_token_ids": ids, "max_tokens": 12, "temperature": 0}
        answer = served.complete("abcabcabc", **body)
        text = answer["choices"][0]["text"]
        assert set(text) <= set("bcdq")
        assert len(text) == 12
        free = served.complete("abcabcabc", temperature=0, max_tokens=12)["choices"][0]["text"]
        assert set(free) - set("bcdq")


@pytest.mark.parametrize("speculates", [False, True])
def test_no_end_before_min_tokens(speculates: bool) -> None:
    options = {"speculate": PromptLookup(k=4, min_hist=1), "draft_length": "fixed"} if speculates else {}
    with serving(told({"hi": "ab"}, **options)) as served:
        (stop,) = served.post("/tokenize", prompt="g")["tokens"]
        for body in ({}, {"stop_token_ids": [stop]}):
            answer = served.chat("hi", min_tokens=9, max_tokens=12, **body)
            assert answer["usage"]["completion_tokens"] >= 9
        answer = served.complete("abcabc", min_tokens=6, max_tokens=9, stop_token_ids=[stop])
        assert answer["usage"]["completion_tokens"] >= 6


def test_documents_reach_the_template() -> None:
    template = "{% for d in documents or [] %}{{ d.title }};{% endfor %}{{ messages[-1].content }}"
    with serving(told(), chat_template=template) as served:
        counts = [
            served.post(CHAT, messages=ASK, max_tokens=1, **more)["usage"]["prompt_tokens"]
            for more in ({}, {"documents": [{"title": "abc", "text": ""}]})
        ]
        assert counts == [2, 6]


# ---- a last message that is continued

TRIMS = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}[end]{% endfor %}"


def content_of(answer: Any) -> str:
    return str(answer["choices"][0]["message"]["content"])


@pytest.mark.parametrize("content", ["The first letters are abc", "abc ", "  abc", [{"type": "text", "text": "abc"}]])
@pytest.mark.parametrize("template", [None, TRIMS])
def test_the_answer_continues_the_last_message(template: str | None, content: Any) -> None:
    with serving(told(), chat_template=template) as served:
        messages = [ASK[0], {"role": "assistant", "content": content}]
        body = {"messages": messages, "continue_final_message": True}
        ids = served.post("/tokenize", **body)["tokens"]
        rendered = served.post("/detokenize", tokens=ids)["prompt"]
        assert rendered.endswith("abc " if content == "abc " else "abc")
        expected = served.complete(ids, max_tokens=4)["choices"][0]["text"]
        assert content_of(served.post(CHAT, **body, max_tokens=4, temperature=0)) == expected
        events = served.events(CHAT, **body, max_tokens=4, temperature=0)
        assert "".join(e["choices"][0]["delta"].get("content", "") for e in events[:-1]) == expected


def test_a_message_that_begins_with_thinking_goes_on_thinking(served: Served) -> None:
    for begun, names in (("<think>\nabc", ("reasoning_content",)), ("<think>\nhm\n</think>\n\nabc", ("content",))):
        messages = [ASK[0], {"role": "assistant", "content": begun}]
        answer = served.post(CHAT, messages=messages, continue_final_message=True, max_tokens=3, temperature=0)
        message = answer["choices"][0]["message"]
        assert [name for name in ("reasoning_content", "content") if message.get(name)] == list(names)
        assert len(message[names[0]]) == 3


def test_a_template_that_leaves_the_end_out() -> None:
    with serving(told(), chat_template="{{ messages[0].content }}") as served:
        message = refusal(served.http.post(CHAT, json={"messages": BEGUN, "continue_final_message": True}))
        assert "leaves out the end of the last message" in message


def test_anthropic_s_last_message_of_the_assistant_is_continued(served: Served) -> None:
    body = {"model": "told", "max_tokens": 4, "temperature": 0}
    answer = served.post(MESSAGES, messages=BEGUN, **body)
    chat = {"messages": BEGUN, "continue_final_message": True, "max_tokens": 4, "temperature": 0}
    assert answer["content"] == [{"type": "text", "text": content_of(served.post(CHAT, **chat))}]
    counted = served.post(f"{MESSAGES}/count_tokens", model="told", messages=BEGUN)["input_tokens"]
    assert counted == answer["usage"]["input_tokens"] + answer["usage"]["cache_read_input_tokens"]
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    messages = [ASK[0], {"role": "assistant", "content": [{"type": "text", "text": "abc"}, call]}]
    assert "has no text to continue" in refusal(served.http.post(MESSAGES, json=body | {"messages": messages}))


# ---- the model's name


def test_a_name_that_is_not_the_model_s_is_answered_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with serving(told()) as served:
        answer = served.post(COMPLETIONS, prompt="a", model="gpt-9\nforged", max_tokens=1)
        assert answer["model"] == "told"
        warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert any("'gpt-9\\nforged': told answers it; --strict-model-name refuses it" in line for line in warnings)
        caplog.clear()
        assert served.post(COMPLETIONS, prompt="a", model="told", max_tokens=1)["model"] == "told"
        assert "strict" not in caplog.text
        assert "gpt-9" in refusal(served.http.get("/v1/models/gpt-9"), 404)
    with serving(told(), strict_model_name=True) as strict:
        for path, body in ((COMPLETIONS, {"prompt": "a"}), ("/tokenize", {"prompt": "a"})):
            assert "Served: told" in refusal(strict.http.post(path, json=body | {"model": "gpt-9"}), 404)


# ---- the page of the interface


def test_the_page_at_docs_has_every_endpoint_and_field_and_loads_nothing() -> None:
    with serving(told(), api_key="secret") as served:
        page = httpx.get(f"{served.url}/docs")
        assert page.status_code == 200
        openapi = httpx.get(f"{served.url}/openapi.json").json()
        for path in openapi["paths"]:
            assert f" {path}</code>" in page.text
        for name in ("continue_final_message", "truncate_prompt_tokens", "stop_sequences", "max_output_tokens"):
            assert f"<code>{name}</code>" in page.text
        assert "src=" not in page.text
        assert "http" not in page.text.replace("http-equiv", "")
        json.dumps(openapi, allow_nan=False)
