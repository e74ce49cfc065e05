"""`/v1/chat/completions/render`: what is sent on generates as the conversation does."""

from serving import serving, told


def test_all_that_counts_is_rendered() -> None:
    llm = told({"hi": "Hello there!"})
    llm.tokenizer.sampling = {"temperature": 0.25}  # type: ignore[union-attr]
    with serving(llm) as served:
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
        more = {"stop_token_ids": [40], "ignore_eos": True, "min_tokens": 3, "logit_bias": {"5": 1.0}}
        rendered = served.post("/v1/chat/completions/render", **body, **more)
        usual = {"max_tokens": 9, "n": 1, "temperature": 0.25}
        assert rendered["sampling_params"] == usual | more
        assert served.http.post("/inference/v1/generate", json=rendered).status_code == 200
        for lost in ({"stop": ["x"]}, {"response_format": {"type": "json_object"}}):
            refused = served.http.post("/v1/chat/completions/render", json=body | lost)
            assert (refused.status_code, "do not go with token ids" in refused.text) == (400, True), refused.text
