"""GGUF files by their name on a hub: one that runs here, and what it says."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from test_gguf_weights import GGUFS, write_gguf
from test_models import save
from test_weights import load, logits

from whorl.engine import weights
from whorl.engine.weights.hub import choose_gguf

COMMIT = "c" * 40


class Hub:
    """Repositories as the hub answers about them; `asked` are the files that were fetched."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.requests: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: Any) -> None:
                pass

            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                parts = self.path.partition("?")[0].strip("/").split("/")
                is_listing = parts[:2] == ["api", "models"]
                name = "/".join(parts[2:4] if is_listing else parts[:2])
                files = hub.repositories.get(name)
                reply = (
                    None
                    if files is None
                    else hub.listing(name, parts[4:5] == ["tree"])
                    if is_listing
                    else files.get("/".join(parts[4:]))
                )
                if reply is None:
                    self.answer(404, b"", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "no such repository"})
                    return
                if not is_listing and self.command == "GET":
                    hub.requests.append("/".join(parts[4:]))
                self.answer(200, reply, {"X-Repo-Commit": COMMIT, "ETag": f'"{abs(hash(reply))}"'})

            def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
                self.send_response(status)
                for key, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(key, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def listing(self, name: str, is_tree: bool) -> bytes:
        files = self.repositories[name].items()
        if is_tree:
            return json.dumps([{"type": "file", "path": p, "size": len(b), "oid": p} for p, b in files]).encode()
        siblings = [{"rfilename": file} for file in self.repositories[name]]
        return json.dumps({"_id": "1", "id": name, "sha": COMMIT, "private": False, "siblings": siblings}).encode()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    from huggingface_hub import constants

    made = Hub()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "ENDPOINT", made.url)
    template = made.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    yield made
    made.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    arch, config = GGUFS["qwen2"]
    write_gguf(folder / "model.gguf", arch, save(folder / "hf", config))
    return folder / "model.gguf"


def test_a_file_of_a_repository(hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name, by the type of its weights, and the usual one. It alone is fetched, once."""
    from huggingface_hub import constants

    config = json.dumps({"architectures": ["Gemma3ForConditionalGeneration"]}).encode()
    files = {
        "tiny-Q8_0.gguf": b"8",
        "tiny-Q4_K_M.gguf": model.read_bytes(),
        "mmproj-F16.gguf": b"p",
        "config.json": config,
    }
    hub.repositories["org/tiny-GGUF"] = files
    paths = [weights.resolve(f"org/tiny-GGUF{end}") for end in (":tiny-Q4_K_M.gguf", ":q4_k_m", "", "@main:Q4_K_M")]
    assert {path.name for path in paths} == {"tiny-Q4_K_M.gguf"}
    assert len({path.resolve() for path in paths}) == 1
    assert hub.requests == ["tiny-Q4_K_M.gguf", "config.json"], "of the whole model's configuration nothing is wanted"
    assert logits(load(paths[0])).equal(logits(load(model)))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert weights.resolve("org/tiny-GGUF") == paths[0]
    assert weights.resolve("org/tiny-GGUF:Q4_K_M") == paths[0]


def test_a_repository_with_both(hub: Hub, model: Path) -> None:
    """Weights in safetensors come first; a GGUF file is what somebody asks for."""
    config = json.dumps(GGUFS["qwen2"][1]).encode()
    hub.repositories["org/both"] = {
        "config.json": config,
        "model.safetensors": b"weights",
        "model.gguf": model.read_bytes(),
    }
    assert weights.resolve("org/both").is_dir()
    assert sorted(hub.requests) == ["config.json", "model.safetensors"]
    assert weights.resolve("org/both:model.gguf").read_bytes() == model.read_bytes()


def test_repositories_that_are_refused(hub: Hub) -> None:
    hub.repositories["org/parts"] = {"a-00001-of-00002.gguf": b"", "a-00002-of-00002.gguf": b""}
    hub.repositories["org/other"] = {
        "config.json": b'{"architectures": ["Gemma3nForConditionalGeneration"]}',
        "model.safetensors": b"",
    }
    for name, message in (
        ("org/parts", "which GGUF file.*found none, and 2 that are a part or no model"),
        ("org/gone:Q4_K_M", "not in the Hugging Face cache, and the hub did not give it"),
        ("org/other", "Gemma3nForConditionalGeneration needs per-layer embeddings"),
        ("org/other:Q4_0", r"Q4_0 is not one GGUF file\. Give org/other:FILE"),
    ):
        with pytest.raises(ValueError, match=message):
            weights.resolve(name)
    assert hub.requests == ["config.json"], "no weights of a model that cannot run"


@pytest.mark.parametrize(
    ("files", "requested", "chosen"),
    [
        (["m-Q8_0.gguf", "m-Q4_0.gguf"], None, "m-Q4_0.gguf"),
        (["only.gguf", "mmproj-only.gguf"], None, "only.gguf"),
        (["m.Q4_K_M.gguf", "m-UD-Q4_K_XL.gguf"], None, "m.Q4_K_M.gguf"),
        (["Q8_0/m-Q8_0.gguf", "BF16/m-BF16.gguf"], "bf16", "BF16/m-BF16.gguf"),
        (["m-Q8_0.gguf", "m-IQ8_0.gguf"], "Q8_0", "m-Q8_0.gguf"),
        (["m-IQ2_XS.gguf", "m-IQ3_XS.gguf"], None, None),
        (["a-Q4_0.gguf", "b-Q4_0.gguf"], "Q4_0", None),
        (["a/m-Q4_0.gguf", "b/m-Q4_0.gguf"], "b/m-Q4_0.gguf", "b/m-Q4_0.gguf"),
    ],
)
def test_which_file_is_chosen(files: list[str], requested: str | None, chosen: str | None) -> None:
    if chosen is not None:
        assert choose_gguf("org/name", files, requested) == chosen
        return
    with pytest.raises(ValueError, match="Give org/name:FILE or org/name:TYPE; found"):
        choose_gguf("org/name", files, requested)
