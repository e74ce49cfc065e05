"""What a server is told once: its names, who may ask, and its limits."""

from dataclasses import dataclass, field
from pathlib import Path

from whorl.media import Limits

from .hosts import check_origin
from .key_limits import ApiKey
from .parsers import check_names

DEFAULT_NAME = "SmolLM2-135M-Instruct"
_JOB = ("job_seconds", "job_memory")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings:
    """names: what clients may call the model, the first is its own. Sizes in bytes, times in seconds.

    max_queue: sequences, of requests without a token yet. timeout: of a whole request. drain: for running requests
    after SIGTERM. stall: a step this long, or a prompt that waits this long for a worker, makes the server unhealthy.
    origins: whose web pages may ask, beside the server's own. api_key: one, or several, which then do not share the
    prefix cache; more_keys: others, with names and limits. allowed_hosts: names that requests may call the server by;
    none or `*`: any. head: from a connection to its request. max_connections: None: by the limit on files. job: what a
    prompt's template and tokens may take of a worker, in CPU time; a schema half the time and a quarter of the memory.
    chat_template: a template's text; None: the model's own. tool_parser, reasoning_parser: how replies are taken apart,
    by name, or auto; see `parsers`. media: what a picture or video may take; max_media_body: of requests that may hold
    some; media_hosts, media_folder: where they may be fetched from, beside data: URIs. pooling: how embeddings come
    about, see `embeddings.read_pooling`; None: there are none.
    """

    names: tuple[str, ...] = (DEFAULT_NAME,)
    api_key: str | tuple[str, ...] | None = None
    more_keys: tuple[ApiKey, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    max_body: int = 4 << 20
    max_queue: int = 1024
    timeout: float = 600.0
    head_seconds: float = 10.0
    body_seconds: float = 30.0
    drain_seconds: float = 60.0
    stall_seconds: float = 120.0
    max_connections: int | None = None
    job_seconds: float = 10.0
    job_memory: int = 1 << 30
    chat_template: str | None = None
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    media: Limits = field(default_factory=Limits)
    max_media_body: int = 64 << 20
    media_hosts: tuple[str, ...] = ()
    media_folder: str | None = None
    pooling: str | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(each.key for each in self.who)

    @property
    def who(self) -> tuple[ApiKey, ...]:
        """Everybody who may ask, where not anybody may."""
        plain = () if self.api_key is None else (self.api_key,) if isinstance(self.api_key, str) else self.api_key
        return (*(ApiKey(key=key, name=f"#{at + 1}") for at, key in enumerate(plain)), *self.more_keys)

    def __post_init__(self) -> None:
        if not self.names or not all(self.names):
            raise ValueError(f"serve: the model's names are {self.names}, at least one is needed")
        if not all(key.strip() for key in self.keys):
            raise ValueError("serve: the API key is empty; leave it out to serve without one")
        for origin in self.origins:
            check_origin(origin)
        if len(set(self.keys)) < len(self.keys):
            raise ValueError("serve: an API key is given twice")
        check_names(self.tool_parser, self.reasoning_parser)
        sizes = ("max_body", "max_media_body", "max_queue", "max_connections", *_JOB)
        for name in (*sizes, "timeout", "head_seconds", "body_seconds", "drain_seconds", "stall_seconds"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ValueError(f"serve: {name} is {getattr(self, name)}, expected more than 0")


def names_for(model: str | Path | None) -> tuple[str, ...]:
    """The model's path or id, and its last part."""
    if model is None:
        return (DEFAULT_NAME,)
    text = str(model).rstrip("/")
    last = text.rsplit("/", 1)[-1]
    return (text,) if last == text else (text, last)
