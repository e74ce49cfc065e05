"""What `whorl serve` takes about the server; what it takes about the engine is in `EngineSettings`. No torch here."""

from dataclasses import dataclass
from typing import Any

from whorl.fields import option


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions:
    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0: every network.", vllm=("--host",))
    port: int = option(8000, "To listen on; 0: any that is free.", vllm=("--port",), least=0, most=65535)
    api_keys: tuple[str, ...] = option(
        (),
        "Clients must send it as a bearer token; may be repeated: keys do not share the prefix cache.",
        "--api-key",
        vllm=("--api-key",),
        metavar="KEY",
        env="WHORL_API_KEY",
    )
    api_key_file: str | None = option(
        None,
        "A file with a key a line, each with a name for the log and limits: requests at once, requests and tokens a "
        "minute.",
        metavar="FILE",
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "Names in the header Host that are taken, * for any; may be repeated. Default: this machine's own where only "
        "it can reach the server, else any.",
        metavar="NAME",
    )
    names: tuple[str, ...] = option(
        (),
        "What clients may call the model; may be repeated. Default: its own name.",
        "--name",
        vllm=("--served-model-name",),
        metavar="NAME",
    )
    chat_template: str | None = option(
        None, "A file with a chat template. Default: the model's own.", vllm=("--chat-template",), metavar="FILE"
    )
    tool_parser: str = option(
        "auto",
        "How the model writes tool calls: deepseek_v32, qwen3_coder, hermes, llama3; auto: as its template says.",
        vllm=("--tool-call-parser",),
        metavar="NAME",
    )
    reasoning_parser: str = option(
        "auto",
        "think: what is between think tags is apart; off: it is content; auto: apart where the model has the tags.",
        vllm=("--reasoning-parser",),
        metavar="NAME",
    )
    max_queue: int = option(1024, "Requests that may wait; one more gets 429.", least=1)
    max_body: int = option(4 << 20, "Bytes of a request; more get 413.", least=1)
    timeout: float = option(600.0, "Seconds for a whole request; longer ones get 503.", least=0.001)
    drain: float = option(60.0, "Seconds that running requests have after SIGTERM.", least=1)
    origins: tuple[str, ...] = option(
        (),
        "Origins of web pages that may ask beside the server's own, * for any; may be repeated. Default: none.",
        "--allow-origin",
        metavar="URL",
    )
    media_hosts: tuple[str, ...] = option(
        (),
        "Hosts that pictures and videos may be fetched from by http(s), with a port where it is not the usual one; may "
        "be repeated. Default: none, only data: URIs.",
        vllm=("--allowed-media-domains",),
        metavar="NAME",
    )
    media_folder: str | None = option(
        None,
        "A folder below which file: URLs may name pictures and videos. Default: none.",
        vllm=("--allowed-local-media-path",),
        metavar="FOLDER",
    )

    def settings(self) -> dict[str, Any]:
        """As `openai.prepare` takes them."""
        return {
            "host": self.host,
            "port": self.port,
            "names": self.names,
            "api_key": tuple(self.api_keys) or None,
            "api_key_file": self.api_key_file or None,
            "allowed_hosts": self.allowed_hosts,
            "origins": tuple(self.origins),
            "chat_template": self.chat_template,
            "tool_parser": self.tool_parser,
            "reasoning_parser": self.reasoning_parser,
            "max_queue": self.max_queue,
            "max_body": self.max_body,
            "timeout": self.timeout,
            "drain_seconds": self.drain,
            "media_hosts": tuple(self.media_hosts),
            "media_folder": self.media_folder or None,
        }
