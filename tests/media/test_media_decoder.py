"""What a stranger's file can do to the process that decodes it, and that it does nothing to ours."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from media_files import IMAGE, OPTIONS, VIDEO, drawn, encoded, film, lying_png, png
from PIL import Image

from whorl.media import Limits, MediaError, Processor
from whorl.media import decoder as decoders
from whorl.media.decoder import Decoder
from whorl.media.errors import DecodeError

LIMITS = Limits(decode_seconds=5.0, max_pixels=1 << 20, max_bytes=1 << 20, max_frames=40)
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def processor() -> Iterator[Processor]:
    made = Processor(OPTIONS, LIMITS, num_processes=1)
    yield made
    made.close()


@pytest.fixture
def decoder() -> Iterator[Decoder]:
    made = Decoder(LIMITS)
    yield made
    made.end()


def refusal(processor: Processor, data: bytes, kind: str = "image") -> MediaError:
    with pytest.raises(MediaError) as caught:
        processor.image(data) if kind == "image" else processor.video(data)
    assert processor.image(png()).values.shape[-1] == 3, "and the next one is decoded"
    return caught.value


# ---- what is refused


@pytest.mark.parametrize("kind", ["BMP", "TIFF", "JPEG2000", "PPM", "ICO", "TGA"])
def test_other_formats(processor: Processor, kind: str) -> None:
    assert str(refusal(processor, encoded(drawn(32, 32), kind))) == "it is not a PNG, JPEG, WebP or GIF picture"


def test_a_header_that_declares_a_huge_picture(processor: Processor) -> None:
    """A bomb: 100 bytes that would be 10 GB. It is refused before anything is decoded."""
    error = refusal(processor, lying_png(60000, 60000))
    assert (error.kind, str(error)) == ("too_large", "it declares 60000 x 60000 pixels; up to 1048576 are allowed")


def test_a_bomb_that_does_hold_what_it_declares(processor: Processor) -> None:
    data = encoded(Image.new("L", (4000, 4000)), optimize=True)
    assert len(data) < 20000
    assert refusal(processor, data).kind == "too_large"


def test_a_header_that_lies(processor: Processor) -> None:
    """It declares what is allowed, and less follows."""
    assert "cannot be decoded" in str(refusal(processor, lying_png(1000, 1000)))


@pytest.mark.parametrize("cut", [8, 40, 200, -1])
def test_a_file_that_ends_early(processor: Processor, cut: int) -> None:
    data = encoded(drawn(64, 64), "JPEG")
    assert "it " in str(refusal(processor, data[:cut][: len(data) // 2]))


def test_too_many_bytes(processor: Processor) -> None:
    with pytest.raises(MediaError, match="it has 1048577 bytes; up to 1048576") as caught:
        processor.image(b"\0" * ((1 << 20) + 1))
    assert caught.value.kind == "too_large"
    with pytest.raises(MediaError, match="it is empty"):
        processor.image(b"")


@pytest.mark.parametrize(("width", "height"), [(1, 201), (4001, 20)])
def test_a_strip(processor: Processor, width: int, height: int) -> None:
    assert "one side is more than 200 times the other" in str(refusal(processor, png(width, height)))


def test_one_pixel_is_a_picture(processor: Processor) -> None:
    assert processor.image(png(1, 1)).item().grid == (1, 4, 4)


def test_too_many_frames(processor: Processor) -> None:
    error = refusal(processor, film(41), "video")
    assert (error.kind, str(error)) == ("too_large", "it has more than 40 frames")
    with pytest.raises(MediaError, match="has 41 frames; up to 40"):
        processor.frames([png()] * 41)


@pytest.mark.parametrize(("codec", "container"), [("mpeg4", "mp4"), ("mjpeg", "matroska"), ("jpeg2000", "matroska")])
def test_codecs_that_are_not_needed(processor: Processor, codec: str, container: str) -> None:
    """JPEG 2000 in a video has been the way in elsewhere."""
    colours = "yuvj420p" if codec == "mjpeg" else "yuv420p"
    data = film(2, codec=codec, container=container, colours=colours)
    assert "it is not an MP4 or WebM video" in str(refusal(processor, data, "video"))


@pytest.mark.parametrize("data", [b"#EXTM3U\nfile:///etc/passwd", b"RIFF\0\0\0\0AVI ", png(), b"\x1aE\xdf\xa3nothing"])
def test_what_is_no_video(processor: Processor, data: bytes) -> None:
    assert str(refusal(processor, data, "video")) in (str(DecodeError("video_format")), str(DecodeError("broken")))


def test_a_video_that_declares_a_huge_picture(processor: Processor) -> None:
    small = Processor(OPTIONS, replace(LIMITS, max_pixels=1000), num_processes=1)
    try:
        with pytest.raises(MediaError, match="it declares 96 x 64 pixels; up to 1000"):
            small.video(film(4))
    finally:
        small.close()


# ---- what a decoder says


def test_what_a_decoder_says_goes_to_the_log_alone(processor: Processor, caplog: pytest.LogCaptureFixture) -> None:
    """Pillow's message has had an address of the heap in it."""
    with caplog.at_level(logging.WARNING, "whorl.media"):
        said = str(refusal(processor, b"not a picture"))
    assert "BytesIO object at 0x" in caplog.text
    assert "0x" not in said
    assert "BytesIO" not in said


def test_a_word_of_the_process_that_is_none_of_ours(decoder: Decoder) -> None:
    """Who has taken it over may say anything, and only numbers get out."""
    for about in ({"code": "open sesame", "numbers": []}, {"code": "pixels", "numbers": ["<b>"]}, {"code": "pixels"}):
        assert str(decoder._refusal(about)) == str(DecodeError("broken"))


@pytest.mark.parametrize("shape", [[1, 31, 32], [1, 32, 1 << 20], [1, 0, 32], [1, 32], "x", None, [1, 32.0, 32]])
def test_a_shape_that_nobody_asked_for(shape: object) -> None:
    with pytest.raises(EOFError):
        decoders._shape(shape, IMAGE, IMAGE.max_pixels)


# ---- its limits


def test_it_can_open_nothing(decoder: Decoder) -> None:
    decoder.image(png(), IMAGE)
    table = Path(f"/proc/{decoder.pid}/limits").read_text().splitlines()
    limits = {line[:26].strip(): line[26:].split()[:2] for line in table}
    assert limits["Max open files"] == ["3", "3"]
    assert limits["Max processes"] == ["0", "0"]
    assert limits["Max file size"] == ["0", "0"]
    assert limits["Max core file size"] == ["0", "0"]
    assert 0 < int(limits["Max address space"][1]) < (8 << 30)
    assert int(limits["Max cpu time"][0]) <= 5 + 60
    assert sorted(os.listdir(f"/proc/{decoder.pid}/fd")) == ["0", "1", "2"]


def test_it_knows_nothing_of_our_environment(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHORL_API_KEY", "secret")
    decoder.image(png(), IMAGE)
    assert b"secret" not in Path(f"/proc/{decoder.pid}/environ").read_bytes()


def test_memory() -> None:
    little = Decoder(replace(LIMITS, decode_memory=24 << 20, max_pixels=1 << 26))
    try:
        with pytest.raises(MediaError) as caught:
            little.image(encoded(Image.new("RGB", (4000, 4000)), compress_level=1), IMAGE)
        assert caught.value.kind == "too_costly" or "cannot be decoded" in str(caught.value)
        assert little.image(png(), IMAGE).shape[0] == 1, "a new process has taken over"
    finally:
        little.end()


def test_cpu_time_ends_the_process() -> None:
    code = "from whorl.sandbox import Fence\nFence(0, 0).allow_seconds()\nwhile True: pass"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False)
    assert done.returncode == -signal.SIGXCPU


def test_a_process_that_hangs_is_ended() -> None:
    late = Decoder(replace(LIMITS, decode_seconds=0.25))
    try:
        late.image(png(), IMAGE)
        first = late.pid
        assert first is not None
        os.kill(first, signal.SIGSTOP)
        with pytest.raises(MediaError, match=r"takes longer than 0\.25 seconds") as caught:
            late.image(png(), IMAGE)
        assert caught.value.kind == "too_costly"
        assert not Path(f"/proc/{first}").exists()
    finally:
        late.end()


def test_one_that_hangs_while_it_is_written_to() -> None:
    """A megabyte does not fit into the pipe: the writer would wait for ever."""
    late = Decoder(replace(LIMITS, decode_seconds=0.25))
    try:
        late.image(png(), IMAGE)
        assert late.pid is not None
        os.kill(late.pid, signal.SIGSTOP)
        with pytest.raises(MediaError, match="takes longer"):
            late.image(b"\0" * (1 << 20), IMAGE)
    finally:
        late.end()


def test_a_process_that_crashes(decoder: Decoder) -> None:
    decoder.image(png(), IMAGE)
    first = decoder.pid
    assert first is not None
    os.kill(first, signal.SIGSTOP)  # so that it is asked before it ends
    crash = threading.Timer(0.2, lambda: [os.kill(first, number) for number in (signal.SIGSEGV, signal.SIGCONT)])
    crash.start()
    with pytest.raises(MediaError, match="cannot be decoded"):
        decoder.image(png(), IMAGE)
    crash.join()
    assert decoder.image(png(), IMAGE).shape[0] == 1
    assert decoder.pid != first


def test_a_job_that_comes_while_the_process_starts(decoder: Decoder) -> None:
    """A spare one is started before it is needed; a job must not read what the process says first."""
    spare = threading.Thread(target=decoder.start)
    spare.start()
    while decoder.pid is None:
        time.sleep(0.001)
    assert decoder.image(png(), IMAGE).shape[0] == 1
    spare.join()


def test_closing_ends_the_processes() -> None:
    made = Processor(OPTIONS, LIMITS, num_processes=2)
    made.image(png())
    with made._use(None) as first:
        pid = first.pid
        made.image(png())
    made.close()
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(RuntimeError, match="closed"):
        made.image(png())


# ---- what is not installed


def test_pillow_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"need Pillow: pip install .*\[vision\]'"):
        Decoder(LIMITS).image(png(), IMAGE)
    with pytest.raises(MediaError, match=r"need PyAV: pip install .*\[video\]'"):
        Decoder(LIMITS).video(b"", VIDEO)


def test_limits_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="max_pixels is 0"):
        Limits(max_pixels=0)
