"""Fetches pictures and videos by HTTP: only from allowed hosts at public addresses, without redirects, within limits.

The URL is parsed once, by a pattern without user names, backslashes and escapes in the host. The host is resolved once,
and the connection goes to the address that was checked. Proxies from the environment are not used.
"""

import contextlib
import http.client
import ipaddress
import logging
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .errors import MediaError

_LOG = logging.getLogger("whorl.media")
_URL = re.compile(
    r"(?P<scheme>https?)://(?P<host>[a-z0-9.-]+)(:(?P<port>[0-9]{1,5}))?(?P<path>[/?][!-~]*)?", re.I | re.A
)
_HOST = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?(:[0-9]{1,5})?", re.I | re.A)
_PORTS = {"http": 80, "https": 443}
_PIECE = 64 << 10
_MAX_URL = 8192
_HEADERS = {"Accept": "image/png, image/jpeg, image/webp, video/mp4, video/webm", "Accept-Encoding": "identity"}
_HEADERS |= {"User-Agent": "whorl", "Connection": "close"}
_UNICAST = ipaddress.IPv6Network("2000::/3")  # excludes IPv4-mapped, IPv4-compatible and translated addresses
_TUNNELS = [ipaddress.IPv6Network(text) for text in ("2002::/16", "2001::/32")]  # 6to4, Teredo: they embed an IPv4 one
NOT_FETCHED = "it could not be fetched"

Resolve = Callable[[str, int], Sequence[str]]
Connect = Callable[[str, int, float], socket.socket]


@dataclass(frozen=True, slots=True)
class Target:
    """A parsed URL. The text is not parsed a second time, so that two parsers cannot disagree."""

    scheme: str
    host: str
    port: int
    path: str

    @classmethod
    def parse(cls, url: str) -> "Target":
        """Parse a URL; raise MediaError when it is not allowed."""
        match = _URL.fullmatch(url) if len(url) <= _MAX_URL else None
        port = 0 if match is None else int(match["port"] or _PORTS[match["scheme"].lower()])
        if match is None or "\\" in url or not 0 < port < 65536:
            raise MediaError("its URL is not allowed: expected http(s)://HOST/PATH in ASCII, without a user name")
        scheme, host = match["scheme"].lower(), match["host"].lower().removesuffix(".")
        path = (match["path"] or "/").partition("#")[0]
        return cls(scheme, host, port, path if path.startswith("/") else f"/{path}")

    @property
    def host_header(self) -> str:
        return self.host if self.port == _PORTS[self.scheme] else f"{self.host}:{self.port}"


def resolve(host: str, port: int) -> list[str]:
    """Return every address of a host."""
    return [entry[4][0] for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]  # type: ignore[misc]


def connect(address: str, port: int, seconds: float) -> socket.socket:
    """Connect to an address. seconds: to connect, and later for each single read or write."""
    return socket.create_connection((address, port), timeout=seconds)


def is_public(text: str) -> bool:
    """Return whether a text is a public unicast address: not private, loopback, link-local, multicast or reserved, and
    not one that embeds another address."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and (
        address not in _UNICAST or any(address in network for network in _TUNNELS)
    ):
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved


@contextlib.contextmanager
def open_connection(
    target: Target,
    address: str,
    deadline: float,
    *,
    connect: Connect = connect,
    context: ssl.SSLContext | None = None,
) -> Iterator[http.client.HTTPConnection]:
    """Connect to an address of the target's host, which the caller has checked; neither proxies nor redirects are used.

    A timer shuts the connection down at the deadline, on `time.monotonic`'s clock: a timeout limits only each single
    read. Raises TimeoutError when it has passed. context: of TLS; None: the system's.
    """
    with connect(address, target.port, _seconds_left(deadline)) as raw, raw.dup() as handle:
        # The timer needs its own handle, as wrapping in TLS takes over that of `raw`.
        timer = threading.Timer(_seconds_left(deadline), _shut, (handle,))
        timer.daemon = True
        timer.start()
        connection = http.client.HTTPConnection(target.host, target.port)
        try:
            raw.settimeout(_seconds_left(deadline))
            connection.sock = raw if target.scheme == "http" else _wrap_tls(raw, target, context)
            yield connection
            _seconds_left(deadline)  # a connection that was shut down may look like the end of the body
        finally:
            timer.cancel()
            connection.close()


def _wrap_tls(raw: socket.socket, target: Target, context: ssl.SSLContext | None) -> socket.socket:
    return (context or ssl.create_default_context()).wrap_socket(raw, server_hostname=target.host)


class HttpSource:
    """Fetches from allowed hosts.

    hosts: names, each with a port unless it is the scheme's default. Raises ValueError for an invalid name. resolve,
    connect, context: replaced by tests.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        *,
        resolve: Resolve = resolve,
        connect: Connect = connect,
        context: ssl.SSLContext | None = None,
    ) -> None:
        if bad := [host for host in hosts if not _HOST.fullmatch(host)]:
            raise ValueError(f"media_hosts: {bad[0]!r} is not HOST or HOST:PORT")
        self._hosts = frozenset(host.lower() for host in hosts)
        self._resolve, self._connect, self._context = resolve, connect, context

    def fetch(self, url: str, *, max_bytes: int, deadline: float) -> bytes:
        """Fetch a URL. deadline: for the whole fetch, on `time.monotonic`'s clock. Raises MediaError."""
        target = Target.parse(url)
        self._check_host(target)
        try:
            address = self._address(target)
            with open_connection(target, address, deadline, connect=self._connect, context=self._context) as connection:
                data = _body(connection, target, max_bytes)
            return data
        except (OSError, http.client.HTTPException, ValueError) as error:
            if isinstance(error, MediaError):
                raise
            _LOG.warning("not fetched from %s: %s: %s", target.host, type(error).__name__, ascii(str(error))[:300])
            is_late = time.monotonic() >= deadline
            raise MediaError(f"{NOT_FETCHED} in time" if is_late else NOT_FETCHED, "not_fetched") from None

    def _check_host(self, target: Target) -> None:
        if not self._hosts:
            raise MediaError("this server fetches nothing: send the file itself as a data: URI")
        name = f"{target.host}:{target.port}"
        has_usual_port = target.port == _PORTS[target.scheme]
        if name not in self._hosts and not (has_usual_port and target.host in self._hosts):
            raise MediaError(f"this server does not fetch from {target.host_header}")

    def _address(self, target: Target) -> str:
        """Return the address to connect to; raise MediaError unless every address of the host is public."""
        addresses = self._resolve(target.host, target.port)
        if bad := [address for address in addresses if not is_public(address)]:
            _LOG.warning("not fetched from %s: its address %s is not public", target.host, bad[0])
            raise MediaError(f"{target.host} is not at a public address", "not_fetched")
        if not addresses:
            raise OSError("no address")
        return addresses[0]


def _seconds_left(deadline: float) -> float:
    """Return the seconds until the deadline; raise TimeoutError when it has passed."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    return seconds


def _shut(raw: socket.socket) -> None:
    with contextlib.suppress(OSError):
        raw.shutdown(socket.SHUT_RDWR)


def _body(connection: http.client.HTTPConnection, target: Target, max_bytes: int) -> bytes:
    """Send the request and return the body; MediaError for any status but 200, a redirect included."""
    connection.request("GET", target.path, headers=_HEADERS | {"Host": target.host_header})
    response = connection.getresponse()
    if 300 <= response.status < 400:
        raise MediaError(f"{target.host} redirects, which this server does not follow", "not_fetched")
    if response.status != 200:
        raise MediaError(f"{NOT_FETCHED}: {target.host} answers with status {response.status}", "not_fetched")
    if response.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise MediaError(f"{NOT_FETCHED}: {target.host} sends it compressed", "not_fetched")
    data = bytearray()
    # Counts the bytes as they arrive: the Content-Length header may be wrong.
    while piece := response.read(min(_PIECE, max_bytes + 1 - len(data))):
        data += piece
        if len(data) > max_bytes:
            raise MediaError(f"it has more than {max_bytes} bytes", "too_large")
    if response.length:
        raise http.client.IncompleteRead(b"", response.length)
    return bytes(data)
