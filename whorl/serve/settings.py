"""The settings of a server: the model's names, who may use it, and its limits."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whorl.engine.sampling_params import PARAMETERS, SamplingParams
from whorl.fields import option
from whorl.media import Limits

from .hosts import ANY, check_origin, check_peer, is_loopback
from .key_limits import ApiKey
from .mcp_client import check_servers
from .options import ServerFields, json_object
from .parsers import check_names
from .worker import JOB_MEMORY, JOB_SECONDS

DEFAULT_NAME = "SmolLM2-135M-Instruct"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings(ServerFields):
    """Validated settings of one server: the fields that `whorl serve` has as options, and these. Sizes are in bytes,
    times in seconds. Raises ValueError for invalid values.

    names: answers use the first one. allowed_hosts: empty or `*`: any. api_key: one key, or several, which then do not
    share the prefix cache; more_keys: further keys, with names and limits. chat_template: the text of a template; None:
    the model's own. max_queue: counts sequences of requests that have no token yet. media: limits on pictures and
    videos. more_routes: functions of the application and its service that add routes, those of `whorl.rl` with `rl`.
    pooling: how the model pools embeddings, see `embeddings.read_pooling`; None: it makes none.

    Example: `ServerSettings(names=("qwen",), api_key="secret", max_queue=256)`.
    """

    names: tuple[str, ...] = (DEFAULT_NAME,)
    api_key: str | tuple[str, ...] | None = None
    more_keys: tuple[ApiKey, ...] = ()
    chat_template: str | None = None
    media: Limits = field(default_factory=Limits)
    pooling: str | None = None
    more_routes: tuple[Callable[[Any, Any], None], ...] = ()
    max_media_body: int = option(64 << 20, "Largest request with pictures or videos.", least=1)
    max_bodies: int = option(
        512 << 20,
        "Bodies of all requests in progress; above it those with more than an equal share are refused.",
        least=1,
    )
    head_seconds: float = option(10.0, "From a connection's start to its request's headers.", above=0)
    body_seconds: float = option(30.0, "To receive a request's body.", above=0)
    stall_seconds: float = option(120.0, "A step that runs this long makes the server unhealthy.", above=0)
    max_connections: int | None = option(None, "Connections at once; none: from the limit on open files.", least=1)
    job_seconds: float = option(
        JOB_SECONDS,
        "CPU time of a worker for a prompt's template and tokens; a schema gets half of it.",
        above=0,
    )
    job_memory: int = option(JOB_MEMORY, "Memory of a worker for the same; a schema gets a quarter of it.", least=1)

    def sampling(self) -> dict[str, float]:
        """Return the sampling parameters of `override_generation_config`; ValueError for one that is not known."""
        name = "override_generation_config"
        values = {} if self.override_generation_config is None else json_object(name, self.override_generation_config)
        for key, value in values.items():
            if key == "max_new_tokens":
                raise ValueError(f"serve: {name}: clients say max_tokens: leave max_new_tokens out")
            known = [parameter for parameter, (_, declared) in PARAMETERS.items() if declared.is_in_apis]
            if key not in known:
                raise ValueError(f"serve: {name}: {key} is not known. Has: {', '.join(known)}")
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"serve: {name}: {key} is {value!r}, expected a number")
        SamplingParams(**values)
        return values

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
        ServerFields.__post_init__(self)
        if not self.names or not all(self.names):
            raise ValueError(f"serve: names is {self.names}, expected at least one name and none empty")
        if self.api_key == () or not all(key.strip() for key in self.keys):
            raise ValueError("serve: the API key is empty; leave it out to serve without one")
        if self.rl != bool(self.more_routes):
            raise ValueError(
                "serve: rl needs the routes of trainers: set rl to True and more_routes to "
                "(whorl.rl.routes.add_routes,), or neither"
            )
        self.sampling()
        for origin in self.origins:
            check_origin(origin)
        for peer in self.compare_with:
            check_peer(peer)
        is_open = ANY in (*self.origins, *self.allowed_hosts)  # to every web page that somebody on this machine opens
        check_servers(self.mcp_servers, is_private=is_loopback(self.host) and not is_open)
        if len(set(self.keys)) < len(self.keys):
            raise ValueError("serve: an API key is given twice")
        check_names(self.tool_parser, self.reasoning_parser)


def names_for(model: str | Path | None) -> tuple[str, ...]:
    """Return the default names of a model: its path or id, and the last component of that."""
    if model is None:
        return (DEFAULT_NAME,)
    text = str(model).rstrip("/")
    last = text.rsplit("/", 1)[-1]
    return (text,) if last == text else (text, last)
