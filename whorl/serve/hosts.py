"""Which names a request may call the server by.

A web page of a stranger's may have its name point to this machine (DNS rebinding) and then ask as if it were from here.
Its requests carry that name in Host.
"""

import ipaddress
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import Scope

ANY = "*"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def hosts_for(host: str, asked: Sequence[str]) -> tuple[str, ...]:
    """Allowed names of a server that listens on `host`: what was asked for beside this machine's own; and anything
    where others can reach it and nothing was asked."""
    if ANY in asked or (not asked and not is_loopback(host)):
        return (ANY,)
    return (*dict.fromkeys(name.lower().rstrip(".") for name in ("localhost", "127.0.0.1", "::1", host, *asked)),)


def refused_host(scope: Scope, allowed: Sequence[str]) -> str | None:
    """What is wrong with the name that a request calls the server by."""
    if not allowed or ANY in allowed:
        return None
    given = Headers(scope=scope).get("host", "")
    name = given.partition("]")[0][1:] if given.startswith("[") else given.partition(":")[0]
    if name.lower().rstrip(".") in allowed:
        return None
    what = f"the header Host is {given!r}" if given else "the header Host is missing"
    return f"{what}: this server answers to {', '.join(allowed)}. Allow more with --allowed-hosts"
