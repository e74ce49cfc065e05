"""Checks of the address of a server, and of the headers Host, Origin and Sec-Fetch-Site that a foreign page sends.

A foreign web page may let its domain resolve to this machine (DNS rebinding) and then send requests as if it came from
here; such requests carry its domain in Host. And any page may send requests to a server that its reader can reach: the
browser withholds the answer, but only after the work is done. Such requests show it in Origin or in Sec-Fetch-Site.
"""

import ipaddress
import re
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:  # settings import this module, and must do so without the server's libraries
    from starlette.types import Scope

ANY = "*"
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^:\[\]@]+))(?::[0-9]*)?")  # an address in brackets or a name, and a port
_PEER = re.compile(r"https?://([a-z0-9.-]+|\[[0-9a-f:]+\])(:[0-9]{1,5})?")


def check_address(host: str, port: int) -> None:
    """Raise ValueError when the port cannot be bound on every address of the host."""
    try:
        for family, kind, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with socket.socket(family, kind) as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(address)
    except OSError as error:
        raise ValueError(f"serve: cannot listen on {host}, port {port}: {error.strerror}") from error


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def hosts_for(host: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return the accepted values of the header Host for a server that listens on `host`.

    These are `names` and this machine's own; or `*` when `names` is empty and other machines can reach the server.
    Raises ValueError when one of the names is empty: it would accept requests without the header.
    """
    if not all(name.strip() for name in names):
        raise ValueError("serve: --allowed-hosts has an empty name; leave it out, or give * to accept every name")
    if ANY in names or (not names and not is_loopback(host)):
        return (ANY,)
    return (*dict.fromkeys(name.lower().rstrip(".") for name in ("localhost", "127.0.0.1", "::1", host, *names)),)


def refused_host(scope: "Scope", allowed: Sequence[str]) -> str | None:
    """Return why the header Host of a request is refused; None when it is accepted."""
    if not allowed or ANY in allowed:
        return None
    from starlette.datastructures import Headers

    host = Headers(scope=scope).get("host", "")
    parts = _HOST.fullmatch(host)
    if parts is not None and (parts[1] or parts[2]).lower().rstrip(".") in allowed:
        return None
    problem = f"the header Host is {host!r}" if host else "the header Host is missing"
    return f"{problem}: this server answers to {', '.join(allowed)}. Allow more with --allowed-hosts"


def check_origin(origin: str) -> None:
    """Raise ValueError when no browser would send this origin."""
    parts = urlsplit(origin)
    is_origin = bool(parts.scheme and parts.netloc) and origin == f"{parts.scheme}://{parts.netloc}"
    if origin not in (ANY, "null") and not (is_origin and origin == origin.lower()):
        raise ValueError(f"serve: --allow-origin is {origin!r}, expected one such as http://localhost:3000, or *")


def check_peer(url: str) -> None:
    """Raise ValueError when it is no address of another server: it goes into the policy of the page as it is."""
    if not _PEER.fullmatch(url):
        raise ValueError(f"serve: --compare-with is {url!r}, expected one such as http://127.0.0.1:8001")


def refused_origin(scope: "Scope", allowed: Sequence[str]) -> str | None:
    """Return why a request from a web page is refused; None when it is accepted. Only browsers send these headers.

    The server's own page is the one whose origin equals Host, which `refused_host` has checked.
    """
    from starlette.datastructures import Headers

    headers = Headers(scope=scope)
    origin = headers.get("origin")
    if origin is None:
        # An image or a form in another page is refused; a link that the reader follows is not.
        site, is_link = headers.get("sec-fetch-site", ""), headers.get("sec-fetch-mode") == "navigate"
        if site not in ("cross-site", "same-site") or (is_link and scope["method"] == "GET"):
            return None
        return "the request comes from a web page of another origin. Allow pages with --allow-origin"
    host = headers.get("host", "").lower()
    if ANY in allowed or origin in allowed or (host and urlsplit(origin).netloc.lower() == host):
        return None
    return f"web pages of {origin!r} may not use this server. Allow them with --allow-origin {origin}"
