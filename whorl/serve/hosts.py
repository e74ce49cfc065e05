"""Which names a request may call the server by, and which web pages may make one.

A web page of a stranger's may have its name point to this machine (DNS rebinding) and then ask as if it were from here.
Its requests carry that name in Host. And any page may ask a server that its reader can reach: the browser keeps the
answer from it, but only after the work is done. Its requests say so in Origin or in Sec-Fetch-Site.
"""

import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit

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


def check_origin(origin: str) -> None:
    """ValueError where no browser would send it."""
    parts = urlsplit(origin)
    is_one = bool(parts.scheme and parts.netloc) and origin == f"{parts.scheme}://{parts.netloc}"
    if origin not in (ANY, "null") and not (is_one and origin == origin.lower()):
        raise ValueError(f"serve: --allow-origin is {origin!r}, expected one such as http://localhost:3000, or *")


def refused_origin(scope: Scope, allowed: Sequence[str]) -> str | None:
    """What is wrong with the page that makes a request. Programs that are no browsers name none.

    The server's own page is the one whose origin is what Host says, which `refused_host` has looked at.
    """
    headers = Headers(scope=scope)
    given = headers.get("origin")
    if given is None:
        # A picture or a form of another page's; a link to here is followed by the reader.
        site, is_link = headers.get("sec-fetch-site", ""), headers.get("sec-fetch-mode") == "navigate"
        if site not in ("cross-site", "same-site") or (is_link and scope["method"] == "GET"):
            return None
        return "a web page of another origin asks. Allow pages with --allow-origin"
    own = headers.get("host", "").lower()
    if ANY in allowed or given in allowed or (own and urlsplit(given).netloc.lower() == own):
        return None
    return f"a web page of {given!r} may not ask this server. Allow it with --allow-origin {given}"
