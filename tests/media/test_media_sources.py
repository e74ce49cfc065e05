"""Where pictures may come from. Each way that others' servers were led astray is tried here."""

import ast
import contextlib
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from media_files import data_uri, png

import whorl.media
from whorl.media import Limits, MediaError
from whorl.media.http_source import HttpSource, Target, is_public
from whorl.media.sources import Source, Sources

LIMITS = Limits(max_bytes=100_000, max_frames=8, fetch_seconds=10.0)
PUBLIC = "93.184.215.14"


# ---- who may open anything

MEDIA = Path(whorl.media.__file__).parent
REACHING = {"socket": "http_source.py", "http": "http_source.py", "ssl": "http_source.py"}
NOWHERE = {"requests", "httpx", "aiohttp", "ftplib", "pickle", "torch", "cv2", "imageio", "decord"}


@pytest.mark.parametrize("path", sorted(MEDIA.glob("*.py")), ids=lambda path: path.name)
def test_one_module_reaches_out(path: Path) -> None:
    """What has its own way of fetching gets around every check; what unpickles runs code."""
    tree = ast.walk(ast.parse(path.read_text()))
    names = {
        name
        for node in tree
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names])
    }
    tops = {name.split(".")[0] for name in names}
    assert tops.isdisjoint(NOWHERE)
    assert "urllib.request" not in names
    assert {REACHING[top] for top in tops if top in REACHING} <= {path.name}


# ---- data: URIs


def test_a_data_uri() -> None:
    data = png()
    assert Sources(LIMITS).read(data_uri(data), "image") == Source((data,))
    assert Sources(LIMITS).read(data_uri(data, "IMAGE/JPEG;name=a.png"), "image").parts == (data,)
    assert Sources(LIMITS).read("DATA:image/png;base64,YQ==", "image").parts == (b"a",)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("data:image/png;base64,a", "is not base64"),
        ("data:image/png;base64,YQ=", "is not base64"),
        ("data:image/png;base64,YQ==YQ==", "is not base64"),
        ("data:image/png;base64,Y Q==", "is not base64"),
        ("data:image/png;base64,YQ==\n", "is not base64"),
        ("data:image/png;base64,Y_-=", "is not base64"),
        ("data:image/png;base64,YQ%3D%3D", "is not base64"),
        ("data:image/png;base64,\u00e9", "is not base64"),
        ("data:image/png,abc", "expected data:image/png;base64"),
        ("data:;base64,YQ==", "text/plain; PNG"),
        ("data:image/svg+xml;base64,YQ==", r"image/svg\+xml; PNG"),
        ("data:image/bmp;base64,YQ==", "image/bmp; PNG"),
        ("data:video/mp4;base64,YQ==", "video/mp4; PNG"),
        ("data:image/png;base64", "expected data:"),
        ("data:" + "a" * 10_000 + ";base64,YQ==", "expected data:"),
        ("ftp://example.com/a.png", "its URL is not allowed"),
        ("", "its URL is not allowed"),
        ("javascript:alert(1)", "its URL is not allowed"),
    ],
)
def test_what_is_no_data_uri(url: str, says: str) -> None:
    with pytest.raises(MediaError, match=says):
        Sources(LIMITS).read(url, "image")


def test_a_data_uri_that_is_too_large_is_not_decoded() -> None:
    with pytest.raises(MediaError, match="more than 100000 bytes") as caught:
        Sources(LIMITS).read("data:image/png;base64," + "!" * 200_000, "image")
    assert caught.value.kind == "too_large"


def test_a_video_as_frames() -> None:
    """vLLM's spelling: one data: URI of video/jpeg with a comma between frames."""
    read = Sources(LIMITS).read
    assert read("data:video/jpeg;base64,YQ==,YmI=", "video") == Source((b"a", b"bb"), is_frames=True)
    assert read("data:video/jpeg;fps=12.5;base64,YQ==,YmI=", "video").fps == 12.5
    with pytest.raises(MediaError, match="more than 8 frames"):
        read("data:video/jpeg;base64," + ",".join(["YQ=="] * 9), "video")
    with pytest.raises(MediaError, match="expected a number"):
        read("data:video/jpeg;fps=fast;base64,YQ==", "video")
    with pytest.raises(MediaError, match="MP4, WebM and frames"):
        read("data:image/png;base64,YQ==", "video")


# ---- files


def test_files_are_off_unless_a_folder_is_named() -> None:
    with pytest.raises(MediaError, match="reads no files"):
        Sources(LIMITS).read("file:///etc/passwd", "image")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inside = tmp_path / "media"
    (inside / "deep").mkdir(parents=True)
    (inside / "deep" / "a b.png").write_bytes(b"picture")
    (tmp_path / "secret.png").write_bytes(b"secret")
    (inside / "link.png").symlink_to(tmp_path / "secret.png")
    (inside / "out").symlink_to(tmp_path)
    (inside / "large.png").write_bytes(b"\0" * 100_001)
    os.mkfifo(inside / "pipe.png")
    return inside


def test_a_file_below_the_folder(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(folder)
    for root in (folder, tmp_path / "alias"):
        read = Sources(LIMITS, folder=root).read
        assert read(f"file://{root}/deep/a%20b.png", "image").parts == (b"picture",)
        assert read(f"file://localhost{root}/deep/a%20b.png", "image").parts == (b"picture",)


@pytest.mark.parametrize(
    "name",
    [
        "../secret.png",
        "%2e%2e/secret.png",
        "deep/../../secret.png",
        "link.png",
        "out/secret.png",
        "out/media/deep/a%20b.png",
        "pipe.png",
        "deep",
        "none.png",
        "deep//a%20b.png",
        "deep/./a%20b.png",
        "deep/a%20b.png%00.png",
        "%ff.png",
        "",
    ],
)
def test_no_way_out_of_the_folder(folder: Path, name: str) -> None:
    """Nor through links, nor to what is no plain file; a pipe does not keep anybody waiting."""
    with pytest.raises(MediaError):
        Sources(LIMITS, folder=folder).read(f"file://{folder}/{name}", "image")


@pytest.mark.parametrize("url", ["file:///etc/passwd", "file:///dev/zero", "file://host/etc/passwd", "file:etc/passwd"])
def test_files_elsewhere(folder: Path, url: str) -> None:
    with pytest.raises(MediaError):
        Sources(LIMITS, folder=folder).read(url, "image")


def test_devices_are_no_files() -> None:
    with pytest.raises(MediaError, match="no such file"):
        Sources(LIMITS, folder="/dev").read("file:///dev/zero", "image")


def test_a_large_file(folder: Path) -> None:
    with pytest.raises(MediaError, match="more than 100000 bytes"):
        Sources(LIMITS, folder=folder).read(f"file://{folder}/large.png", "image")


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a folder"):
        Sources(LIMITS, folder=tmp_path / "none")


# ---- addresses


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "127.8.8.8", "0.0.0.0", "10.0.0.1", "172.16.3.4", "192.168.1.1", "100.64.0.1"),
        *("169.254.169.254", "224.0.0.1", "240.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1"),
        *("::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fd12:3456::1", "ff02::1", "2001:db8::1"),
        *("::ffff:127.0.0.1", "::ffff:8.8.8.8", "64:ff9b::7f00:1", "64:ff9b:1::1", "2002:7f00:1::", "2001:0:1::1"),
        *("fec0::1", "::7f00:1", "::ffff:0:127.0.0.1", "localhost", "2130706433", "0x7f000001"),
    ],
)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", [PUBLIC, "8.8.8.8", "2606:4700:4700::1111"])
def test_addresses_that_are(address: str) -> None:
    assert is_public(address)


# ---- the web


class Page(BaseHTTPRequestHandler):
    answer: Callable[["Page"], None]

    def do_GET(self) -> None:
        self.server.seen.append((self.path, dict(self.headers)))  # type: ignore[attr-defined]
        with contextlib.suppress(OSError):
            type(self).answer(self)

    def log_message(self, format: str, *args: Any) -> None: ...


def answering(status: int = 200, body: bytes = b"picture", **headers: str) -> Callable[[Page], None]:
    def answer(page: Page) -> None:
        page.send_response(status)
        for name, value in ({"content_length": str(len(body))} | headers).items():
            page.send_header(name.replace("_", "-"), value)
        page.end_headers()
        page.wfile.write(body)

    return answer


class Web:
    """A server on this machine that the source believes to be at a public address."""

    def __init__(self, server: ThreadingHTTPServer) -> None:
        self.server, self.seen, self.connected = server, server.seen, []  # type: ignore[attr-defined, var-annotated]
        self.names = {"pictures.example": [PUBLIC]}
        self.num_resolved = 0

    def resolve(self, host: str, port: int) -> list[str]:
        self.num_resolved += 1
        return self.names[host]

    def connect(self, address: str, port: int, seconds: float) -> socket.socket:
        self.connected.append((address, port))
        return socket.create_connection(self.server.server_address, timeout=seconds)  # type: ignore[arg-type]

    def fetch(
        self, url: str, seconds: float = 10.0, hosts: tuple[str, ...] = ("pictures.example",), **more: Any
    ) -> bytes:
        source = HttpSource(hosts, resolve=self.resolve, connect=self.connect, **more)
        return source.fetch(url, max_bytes=100_000, deadline=time.monotonic() + seconds)


@contextlib.contextmanager
def web(answer: Callable[[Page], None]) -> Iterator[Web]:
    handler = type("OnePage", (Page,), {"answer": answer})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.seen = []  # type: ignore[attr-defined]
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield Web(server)
        server.shutdown()
        thread.join(10)


URL = "http://pictures.example/a.png?b=1"


def test_a_picture_from_the_web() -> None:
    """Connected to the address that was looked at; the name is still what the server is asked for."""
    with web(answering()) as site:
        assert site.fetch(URL) == b"picture"
        assert site.fetch("HTTP://Pictures.Example:80/a.png?b=1#c") == b"picture"
        assert site.connected == [(PUBLIC, 80)] * 2
        assert site.num_resolved == 2, "once for each"
        assert [path for path, _ in site.seen] == ["/a.png?b=1"] * 2
        assert site.seen[0][1]["Host"] == "pictures.example"


def test_nothing_is_fetched_unless_a_host_is_named() -> None:
    with pytest.raises(MediaError, match="fetches nothing: send the file itself"):
        Sources(LIMITS).read(URL, "image")


@pytest.mark.parametrize(
    "url",
    [
        "http://other.example/",
        "http://pictures.example.other.example/",
        "http://sub.pictures.example/",
        "http://pictures.example:8080/",
        "http://127.0.0.1/",
        "https://pictures.example:80/",
    ],
)
def test_hosts_and_ports_that_are_not_named(url: str) -> None:
    with web(answering()) as site:
        with pytest.raises(MediaError, match="does not fetch from"):
            site.fetch(url)
        assert (site.num_resolved, site.connected) == (0, [])


def test_a_port_that_is_named() -> None:
    with web(answering()) as site:
        assert site.fetch("http://pictures.example:8080/", hosts=("pictures.example:8080",)) == b"picture"
        assert site.seen[0][1]["Host"] == "pictures.example:8080"


@pytest.mark.parametrize(
    "url",
    [
        "http://pictures.example\\@127.0.0.1/",
        "http://127.0.0.1\\@pictures.example/",
        "http://pictures.example@127.0.0.1/",
        "http://user:word@pictures.example/",
        "http://pictures.example/\\..\\x",
        "http://pictures.example /",
        "http://pictures.example/a b",
        "http://pictures.example/\r\nHost: other",
        "http://[::1]/",
        "http://pictures.example:/",
        "http://pictures.example:99999/",
        "http:///pictures.example/",
        "http:pictures.example/",
        "http://pictures%2eexample/",
        "http://pictures\u3002example/",
        "http://pictures.example/\u00e9",
        "http://picture\u017f.example/",
        "http://pictures.example\0/",
        "http://pictures.example/" + "a" * 9000,
        "gopher://pictures.example/",
    ],
)
def test_urls_that_two_readers_would_read_differently(url: str) -> None:
    with pytest.raises(MediaError, match="URL is not allowed"):
        Target.parse(url)


@pytest.mark.parametrize(
    "addresses", [["127.0.0.1"], ["169.254.169.254"], [PUBLIC, "10.0.0.1"], ["::ffff:127.0.0.1"], ["::1"]]
)
def test_a_name_for_a_private_address(addresses: list[str]) -> None:
    """One among several is enough: which of them is taken must not matter."""
    with web(answering()) as site:
        site.names["pictures.example"] = addresses
        with pytest.raises(MediaError, match=r"pictures\.example is not at a public address") as caught:
            site.fetch(URL)
        assert site.connected == []
        assert not any(address in str(caught.value) for address in addresses), "nobody learns what is inside"


def test_a_name_that_changes_between_looks() -> None:
    """Rebinding: the second answer would be this machine. There is no second question."""
    answers = iter([[PUBLIC], ["127.0.0.1"]])
    with web(answering()) as site:
        source = HttpSource(("pictures.example",), resolve=lambda *_: next(answers), connect=site.connect)
        assert source.fetch(URL, max_bytes=100, deadline=time.monotonic() + 10) == b"picture"
        assert site.connected == [(PUBLIC, 80)]
        assert next(answers) == ["127.0.0.1"]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_not_followed(status: int) -> None:
    with web(answering(status, location="http://127.0.0.1/")) as site:
        with pytest.raises(MediaError, match=r"pictures\.example redirects"):
            site.fetch(URL)
        assert len(site.seen) == 1


def test_other_answers() -> None:
    with web(answering(404)) as site, pytest.raises(MediaError, match="status 404"):
        site.fetch(URL)
    with web(answering(content_encoding="gzip")) as site, pytest.raises(MediaError, match="compressed"):
        site.fetch(URL)
    with web(answering(content_length="700")) as site, pytest.raises(MediaError, match="could not be fetched"):
        site.fetch(URL)


def test_a_length_that_lies() -> None:
    """More comes than was announced, in chunks that have no end, or without any length."""

    def endless(page: Page) -> None:
        page.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 10\r\n\r\n")
        while True:
            page.wfile.write(b"1000\r\n" + b"\0" * 4096 + b"\r\n")

    def silent(page: Page) -> None:
        page.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            page.wfile.write(b"\0" * 4096)

    for answer in (endless, silent, answering(body=b"\0" * 100_001)):
        with web(answer) as site, pytest.raises(MediaError, match="more than 100000 bytes") as caught:
            site.fetch(URL)
        assert caught.value.kind == "too_large"
    with web(answering(body=b"12345", content_length="3")) as site:
        assert site.fetch(URL) == b"123"


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_a_server_that_trickles(head: bytes) -> None:
    """Each byte comes in time, and all of them never: the clock is for the whole."""
    gone = threading.Event()

    def answer(page: Page) -> None:
        page.wfile.write(head)
        while not gone.wait(0.02):
            page.wfile.write(b"a")

    with web(answer) as site:
        began = time.monotonic()
        with pytest.raises(MediaError, match="could not be fetched in time") as caught:
            site.fetch(URL, seconds=0.4)
        gone.set()
        assert time.monotonic() - began < 8
    assert caught.value.kind == "not_fetched"


def test_what_is_wrong_with_the_network_is_not_told() -> None:
    def refuse(address: str, port: int, seconds: float) -> socket.socket:
        raise ConnectionRefusedError(111, "Connection refused by 10.1.2.3")

    source = HttpSource(("pictures.example",), resolve=lambda *_: [PUBLIC], connect=refuse)
    with pytest.raises(MediaError) as caught:
        source.fetch(URL, max_bytes=100, deadline=time.monotonic() + 10)
    assert str(caught.value) == "it could not be fetched"


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9/")
    with web(answering()) as site:
        assert site.fetch(URL) == b"picture"
        assert site.seen[0][0] == "/a.png?b=1"


def test_tls_is_asked_for_the_name() -> None:
    """The address is a number; what the certificate is checked against is the name."""

    class Context(ssl.SSLContext):
        hostname: str | None = None

        def wrap_socket(self, sock: Any, *args: Any, server_hostname: str | None = None, **more: Any) -> Any:
            type(self).hostname = server_hostname
            return sock

    with web(answering()) as site:
        assert site.fetch("https://pictures.example/", context=Context(ssl.PROTOCOL_TLS_CLIENT)) == b"picture"
        assert site.connected == [(PUBLIC, 443)]
        assert Context.hostname == "pictures.example"
        with pytest.raises(MediaError, match="could not be fetched"):
            site.fetch("https://pictures.example/")  # the server here speaks no TLS


def test_names_of_hosts() -> None:
    for bad in ("http://a.example", "a.example/", "*", "", "a b", "-a"):
        with pytest.raises(ValueError, match="is not HOST or HOST:PORT"):
            HttpSource((bad,))
