"""`/v1/embeddings`: as transformers and Qwen3-Embedding's own recipe compute them, and refused by other models."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from serving import MODEL, Served, byte_tokenizer, prepared, serving, told
from tokenizers import processors
from transformers import AutoModel, Qwen3Config

from whorl.engine.settings import EngineSettings
from whorl.serve.embeddings import read_pooling

SIZE = 64
CONFIG: dict[str, Any] = {
    **{"vocab_size": 280, "hidden_size": SIZE, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": True},
}
TEXTS = ["a cat", "a dog that barks at the cat in the garden", "\u2603", "a cat sat"]
ENGINE = EngineSettings(device="cpu", dtype="float32", block_size=8, num_blocks=128, max_num_seqs=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Laid out as Qwen3-Embedding is: weights without a head, a tokenizer that appends the end, a pooling."""
    made = tmp_path_factory.mktemp("embedding")
    torch.manual_seed(0)
    AutoModel.from_config(Qwen3Config(**CONFIG)).save_pretrained(made)
    config = json.loads((made / "config.json").read_text()) | {"architectures": ["Qwen3ForCausalLM"]}
    (made / "config.json").write_text(json.dumps(config))
    backend = byte_tokenizer()._backend
    end = "<|endoftext|>"
    backend.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, backend.token_to_id(end))]
    )
    backend.save(str(made / "tokenizer.json"))
    (made / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    (made / "modules.json").write_text("[]")
    (made / "1_Pooling").mkdir()
    modes = {"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True, "include_prompt": True}
    (made / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": SIZE} | modes))
    return made


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with prepared(folder, ENGINE, names=(MODEL,)) as running:
        yield running


@pytest.fixture(scope="module")
def theirs(folder: Path) -> dict[str, np.ndarray]:
    """By transformers: the last hidden state of the last token, which is the end's, of length 1."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    words = byte_tokenizer()
    embeddings = {}
    for text in TEXTS:
        ids = [*words.encode(text), words.token_id("<|endoftext|>")]
        with torch.inference_mode():
            hidden = model(torch.tensor([ids])).last_hidden_state[0, -1]
        embeddings[text] = torch.nn.functional.normalize(hidden, dim=0).numpy()
    return embeddings


def test_they_are_transformers(served: Served, theirs: dict[str, np.ndarray]) -> None:
    response = served.post("/v1/embeddings", input=TEXTS, model=MODEL)
    assert [one["index"] for one in response["data"]] == [0, 1, 2, 3]
    for one, text in zip(response["data"], TEXTS, strict=True):
        assert np.allclose(one["embedding"], theirs[text], atol=1e-5)
        assert np.isclose(np.linalg.norm(one["embedding"]), 1)
    num_tokens = sum(len(text.encode()) + 1 for text in TEXTS)
    assert response["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    # Alone, behind what the prefix cache holds, or as ids.
    for index, text in enumerate(TEXTS):
        for source in (text, served.post("/tokenize", prompt=text)["tokens"]):
            again = served.post("/v1/embeddings", input=source)["data"][0]["embedding"]
            assert np.allclose(again, response["data"][index]["embedding"], atol=1e-6)
    assert served.is_idle()


def test_fewer_dimensions(served: Served, theirs: dict[str, np.ndarray]) -> None:
    actual = served.post("/v1/embeddings", input="a cat", dimensions=8)["data"][0]["embedding"]
    expected = theirs["a cat"][:8] / np.linalg.norm(theirs["a cat"][:8])
    assert np.allclose(actual, expected, atol=1e-5)
    refused = served.http.post("/v1/embeddings", json={"input": "a", "dimensions": SIZE + 1})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "dimensions")


def test_openais_client(served: Served, theirs: dict[str, np.ndarray]) -> None:
    """It asks for base64 by itself, and reads it."""
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    response = client.embeddings.create(model=MODEL, input=TEXTS[:2])
    assert np.allclose(response.data[1].embedding, theirs[TEXTS[1]], atol=1e-5)
    packed = served.post("/v1/embeddings", input="a cat", encoding_format="base64")["data"][0]["embedding"]
    assert np.allclose(np.frombuffer(base64.b64decode(packed), "<f4"), theirs["a cat"], atol=1e-5)
    with pytest.raises(openai.BadRequestError, match="tokens"):
        client.embeddings.create(model=MODEL, input="x" * 300)
    assert client.embeddings.create(model="other", input="a cat").model == MODEL
    cut = client.embeddings.create(model=MODEL, input="x" * 300, extra_body={"truncate_prompt_tokens": 3})
    assert cut.usage.prompt_tokens == 3


def test_other_models_are_refused_by_name(tmp_path: Path) -> None:
    with serving(told()) as served:
        refused = served.http.post("/v1/embeddings", json={"input": "a"}).json()["error"]
        assert refused["code"] == "not_an_embedding_model"
        assert f"the model {MODEL!r} was not made for embeddings" in refused["message"]
    with serving(told(), pooling="mean_tokens") as served:
        message = served.http.post("/v1/embeddings", json={"input": "a"}).json()["error"]["message"]
        assert "makes embeddings by mean_tokens, and this server knows lasttoken alone" in message
    assert read_pooling(tmp_path) is None


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_cls_token": False, "include_prompt": True}, "lasttoken"),
        ({"pooling_mode_mean_tokens": True}, "mean_tokens"),
        ({"pooling_mode": "lasttoken"}, "lasttoken"),
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": True}, "lasttoken, mean_tokens"),
    ],
)
def test_poolings(tmp_path: Path, config: dict[str, Any], expected: str) -> None:
    (tmp_path / "modules.json").write_text("[]")
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(config))
    assert read_pooling(tmp_path) == expected
