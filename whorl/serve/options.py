"""The server's options of `whorl serve`; those of the engine are in `EngineSettings`. Does not import torch.

What `ServerSettings` has as well is declared here, once: `ServerFields`. A field that is added there is an option of
the command, a row of its documentation and an argument of `build_server`, with the same default and bounds.
"""

import json
import os
from dataclasses import dataclass, fields
from typing import Any, Literal

from whorl.fields import check, option

_KEY_VARIABLE = "WHORL_API_KEY"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerFields:
    """The settings of a server that are options of the command as they are."""

    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0: every network.", vllm=("--host",))
    port: int = option(8000, "Port to listen on; 0: any free port.", vllm=("--port",), least=0, most=65535)
    allowed_hosts: tuple[str, ...] = option(
        (),
        "Accepted name in the header Host, * for any; may be repeated. Default: this machine's names if --host is "
        "local, else any.",
        metavar="NAME",
    )
    names: tuple[str, ...] = option(
        (),
        "Name by which clients may call the model; may be repeated. Default: its own name.",
        "--name",
        vllm=("--served-model-name",),
        metavar="NAME",
    )
    strict_model_name: bool = option(
        False, "Refuse requests for a model of another name with 404. Default: answer them, with a warning in the log."
    )
    runtime_lora: bool = option(
        False,
        "Let clients load adapters of this machine's folders and of the hub, and unload them: /v1/load_lora_adapter.",
        env="VLLM_ALLOW_RUNTIME_LORA_UPDATING",
    )
    tool_parser: str = option(
        "auto",
        "How the model writes tool calls: deepseek_v32, qwen3_coder, hermes, llama3; auto: as its template says.",
        vllm=("--tool-call-parser",),
        metavar="NAME",
    )
    reasoning_parser: str = option(
        "auto",
        "think: text between think tags is separated; off: it stays in the content; auto: separated if the model has "
        "the tags.",
        vllm=("--reasoning-parser",),
        metavar="NAME",
    )
    override_generation_config: str | None = option(
        None,
        'Sampling of requests that do not say it, over the model\'s: {"temperature": 0.6, "top_p": 0.9}.',
        vllm=("--override-generation-config",),
        metavar="JSON",
    )
    log_level: Literal["critical", "error", "warning", "info", "debug", "trace"] = option(
        "info", "Least level of the lines of the log.", vllm=("--uvicorn-log-level",)
    )
    max_queue: int = option(1024, "Sequences that may wait; further requests get 429.", least=1)
    max_logprobs: int = option(
        20,
        "Most alternatives that a request may get with each token; -1: any number.",
        vllm=("--max-logprobs",),
        least=-1,
    )
    rl: bool = option(
        False,
        "Let a trainer pause the engine, replace its weights and put it to sleep: docs/rl.md. Whoever reaches the port "
        "may then do so, unless there is an API key.",
    )
    weight_transfer_config: str | None = option(
        None,
        'How weights come, with --rl: {"backend": "nccl"}, gloo, ipc or shm. Default: nccl on a GPU, else gloo.',
        vllm=("--weight-transfer-config",),
        metavar="JSON",
    )
    max_body: int = option(4 << 20, "Largest request in bytes; larger ones get 413.", least=1)
    timeout: float = option(600.0, "Seconds for a whole request; longer ones get 503.", least=0.001)
    drain_seconds: float = option(60.0, "Seconds that running requests have after SIGTERM.", "--drain", above=0)
    origins: tuple[str, ...] = option(
        (),
        "Origin of web pages that may send requests in addition to the server's page, * for any; may be repeated.",
        "--allow-origin",
        metavar="URL",
    )
    mcp_servers: tuple[str, ...] = option(
        (),
        "MCP server whose tools the page may call: its URL, or loopback for any of this machine; may be repeated. "
        "Default: none.",
        "--mcp-server",
        metavar="URL",
    )
    compare_with: tuple[str, ...] = option(
        (),
        "Another whorl server that the page may compare this one with, such as http://127.0.0.1:8001; may be repeated. "
        "It needs --allow-origin with the page's address.",
        metavar="URL",
    )
    media_hosts: tuple[str, ...] = option(
        (),
        "Host to fetch pictures and videos from, with its port unless default; may be repeated. Default: none, only "
        "data: URIs.",
        vllm=("--allowed-media-domains",),
        metavar="NAME",
    )
    media_folder: str | None = option(
        None,
        "A folder below which file: URLs may name pictures and videos. Default: none.",
        vllm=("--allowed-local-media-path",),
        metavar="FOLDER",
    )

    def __post_init__(self) -> None:
        try:
            check(self)
        except ValueError as error:
            raise ValueError(f"serve: {error}") from None


def read_counts(name: str, text: str | None) -> dict[str, int]:
    """Return the counts of an option that is JSON, of images and videos; ValueError when it is something else."""
    counts = {} if text is None else json_object(name, text)
    for kind, count in counts.items():
        if kind not in ("image", "video") or isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise ValueError(f"serve: {name}: {kind} is {count!r}, expected image or video, and how many")
    return counts


def json_object(name: str, text: str) -> dict[str, Any]:
    """Return the JSON object of an option; ValueError when it is none."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"serve: {name} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"serve: {name} is {text[:40]}, expected a JSON object")
    return value


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions(ServerFields):
    """The options of the command: those of `ServerFields`, and what it reads from files or passes on in parts."""

    api_keys: tuple[str, ...] = option(
        (),
        "Key that clients must send as a bearer token; may be repeated: keys do not share the prefix cache.",
        "--api-key",
        vllm=("--api-key",),
        metavar="KEY",
        env=_KEY_VARIABLE,
    )
    api_key_file: str | None = option(
        None,
        "A file with one key on each line, each with a name for the log and limits.",
        metavar="FILE",
    )
    chat_template: str | None = option(
        None, "A file with a chat template. Default: the model's own.", vllm=("--chat-template",), metavar="FILE"
    )
    max_request_pixels: int = option(
        1 << 30, "Pixels that the pictures of one request may declare together; more get 413.", least=1
    )

    limit_mm_per_prompt: str | None = option(
        None,
        'Most pictures and videos of a request: {"image": 4, "video": 0}. Default: 64 together.',
        vllm=("--limit-mm-per-prompt",),
        metavar="JSON",
    )

    def __post_init__(self) -> None:
        """Raise ValueError for a key that is meant but empty: the server would be open to everybody."""
        ServerFields.__post_init__(self)
        if not self.api_keys and not os.environ.get(_KEY_VARIABLE, "unset").strip():
            raise ValueError(f"serve: {_KEY_VARIABLE} is set but empty: unset it to serve without a key")
        if self.api_key_file == "":
            raise ValueError("serve: --api-key-file is empty, expected the path of a file with keys")

    def settings(self) -> dict[str, Any]:
        """Return the arguments of `openai.build_server`."""
        from whorl.media import Limits

        return {field.name: getattr(self, field.name) for field in fields(ServerFields)} | {
            "api_key": self.api_keys or None,
            "api_key_file": self.api_key_file,
            "chat_template": self.chat_template,
            "media": Limits(
                max_request_pixels=self.max_request_pixels,
                max_of_kind=read_counts("--limit-mm-per-prompt", self.limit_mm_per_prompt),
            ),
            "media_folder": self.media_folder or None,
        }
