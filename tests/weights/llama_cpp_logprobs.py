"""Log-probabilities of a GGUF file by llama.cpp, in an environment that has xllamacpp: PATH COUNT PROMPTS.

Prints, for each prompt of token ids, the tokens of a greedy answer and the log-probabilities of all tokens at each.
"""

import json
import sys
from typing import Any

import xllamacpp


def main(path: str, count: int, prompts: list[list[int]]) -> None:
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.n_ctx, params.n_parallel, params.warmup = 512, 1, False
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(params)
    for prompt in prompts:
        body: dict[str, Any] = {"prompt": prompt, "n_predict": count, "temperature": 0, "ignore_eos": True}
        body |= {"n_probs": 100000, "cache_prompt": False}
        steps = server.handle_completions(body)["choices"][0]["logprobs"]["content"]
        rows = [{each["id"]: each["logprob"] for each in step["top_logprobs"]} for step in steps]
        print(json.dumps({"tokens": [step["id"] for step in steps], "logprobs": rows}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))
