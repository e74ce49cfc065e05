"""What the name of a model means: ids, files and the URLs that people copy from a browser."""

from pathlib import Path

import pytest

from whorl.engine.model_names import HubModel, local_or_hub, plain_name


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("https://huggingface.co/Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("http://www.huggingface.co/Qwen/Qwen3-0.6B/", "Qwen/Qwen3-0.6B"),
        ("hf.co/unsloth/Qwen3-GGUF:Q4_K_M", "unsloth/Qwen3-GGUF:Q4_K_M"),
        ("https://huggingface.co/Qwen/Qwen3-0.6B/tree/main", "Qwen/Qwen3-0.6B"),
        ("https://huggingface.co/Qwen/Qwen3-0.6B/tree/refs%2Fpr%2F1", "Qwen/Qwen3-0.6B@refs/pr/1"),
        ("https://huggingface.co/a/b/blob/main/b-Q4_1.gguf", "a/b:b-Q4_1.gguf"),
        ("https://huggingface.co/a/b/resolve/v1/sub/b.gguf?download=true", "a/b@v1:sub/b.gguf"),
        ("https://huggingface.co/a/b?library=transformers#files", "a/b"),
        ("Qwen/Qwen3-0.6B@main:Q4_K_M", "Qwen/Qwen3-0.6B@main:Q4_K_M"),
        ("models/huggingface.co/a", "models/huggingface.co/a"),
    ],
)
def test_a_url_is_the_id_that_it_shows(url: str, name: str) -> None:
    assert plain_name(url) == name
    if url.startswith("http"):
        model = local_or_hub(url)
        assert isinstance(model, HubModel)
        assert str(model) == name


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("https://huggingface.co/datasets/a/b", "expected the page of a model"),
        ("https://huggingface.co/datasets/a", "expected the page of a model"),
        ("https://huggingface.co/gpt2", "expected the page of a model, huggingface.co/ORG/NAME"),
        ("https://huggingface.co/a/b/blob/main/config.json", "or of one of its .gguf files"),
        ("https://huggingface.co/a/b/tree/main/onnx", "a folder inside a repository"),
        ("https://example.com/a/b", "a URL of huggingface.co is expected"),
        ("s3://bucket/model", "a URL of huggingface.co is expected"),
    ],
)
def test_another_url_is_refused_with_what_to_do(url: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        local_or_hub(url)


def test_a_folder_may_be_named_as_it_likes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "config.json").write_text("{}")
    assert local_or_hub("a/b") == Path("a/b"), "the folder comes before the hub"
    (tmp_path / "a" / "b" / "config.json").rename(tmp_path / "a" / "b" / "c.json")
    with pytest.raises(ValueError, match=r"expected config.json .*; found c.json"):
        local_or_hub("a/b")
