"""The settings of a server: the model's names, who may use it, and its limits."""

from dataclasses import dataclass, field
from pathlib import Path

from whorl.media import Limits

from .hosts import check_origin
from .key_limits import ApiKey
from .parsers import check_names
from .worker import JOB_MEMORY, JOB_SECONDS

DEFAULT_NAME = "SmolLM2-135M-Instruct"
_JOB_LIMITS = ("job_seconds", "job_memory")  # of a job in a worker process


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings:
    """Validated settings of one server. Sizes are in bytes, times in seconds. Raises ValueError for invalid values.

    names: what clients may call the model; answers use the first one. strict_model_name: refuse other names; else the
    model answers to any, with a warning in the log. api_key: one key, or several, which then do not
    share the prefix cache; more_keys: further keys, with names and limits. allowed_hosts: accepted values of the header
    Host; empty or `*`: any. origins: origins of web pages that may send requests, beside the server's own page.
    max_body: size of a request; max_media_body: with pictures or videos; max_bodies: of all requests in progress, above
    which those with more than an equal share are refused. max_queue: how many sequences may wait, counting those of
    requests that have no token yet. timeout: for a whole request. head_seconds: from a connection's start to its
    request's headers. body_seconds: to receive a request's body. drain_seconds: for running requests after SIGTERM.
    stall_seconds: a step that runs this long makes the server unhealthy. max_connections: None: from the limit on open
    files. job_seconds, job_memory: CPU time and memory that a worker may use for a prompt's template and tokens; a
    schema gets half the time and a quarter of the memory. chat_template: the text of a template; None: the model's own.
    tool_parser, reasoning_parser:
    the names of the parsers of replies, or auto; see `parsers`. media: limits on pictures and videos; media_hosts,
    media_folder: where they may be fetched from, beside data: URIs. pooling: how the model pools embeddings, see
    `embeddings.read_pooling`; None: it makes none.

    Example: `ServerSettings(names=("qwen",), api_key="secret", max_queue=256)`.
    """

    names: tuple[str, ...] = (DEFAULT_NAME,)
    strict_model_name: bool = False
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
    job_seconds: float = JOB_SECONDS
    job_memory: int = JOB_MEMORY
    chat_template: str | None = None
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    media: Limits = field(default_factory=Limits)
    max_media_body: int = 64 << 20
    max_bodies: int = 512 << 20
    media_hosts: tuple[str, ...] = ()
    media_folder: str | None = None
    pooling: str | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """The secret of every API key."""
        return tuple(api_key.key for api_key in self.all_keys)

    @property
    def all_keys(self) -> tuple[ApiKey, ...]:
        """Every API key with its name and limits; empty: no key is needed."""
        plain = () if self.api_key is None else (self.api_key,) if isinstance(self.api_key, str) else self.api_key
        return (*(ApiKey(key=key, name=f"#{index + 1}") for index, key in enumerate(plain)), *self.more_keys)

    def __post_init__(self) -> None:
        if not self.names or not all(self.names):
            raise ValueError(f"serve: names is {self.names}, expected at least one name and none empty")
        if self.api_key == () or not all(key.strip() for key in self.keys):
            raise ValueError("serve: the API key is empty; leave it out to serve without one")
        for origin in self.origins:
            check_origin(origin)
        if len(set(self.keys)) < len(self.keys):
            raise ValueError("serve: an API key is given twice")
        check_names(self.tool_parser, self.reasoning_parser)
        sizes = ("max_body", "max_media_body", "max_bodies", "max_queue", "max_connections", *_JOB_LIMITS)
        for name in (*sizes, "timeout", "head_seconds", "body_seconds", "drain_seconds", "stall_seconds"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ValueError(f"serve: {name} is {getattr(self, name)}, expected more than 0")


def names_for(model: str | Path | None) -> tuple[str, ...]:
    """Return the default names of a model: its path or id, and the last component of that."""
    if model is None:
        return (DEFAULT_NAME,)
    text = str(model).rstrip("/")
    last = text.rsplit("/", 1)[-1]
    return (text,) if last == text else (text, last)
