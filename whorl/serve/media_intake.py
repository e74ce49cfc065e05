"""Reads the pictures and videos of a request: fetches, decodes and patches them on threads, within limits.

Clients take turns, and a process that decodes for a client that left is ended.
"""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from whorl.engine.fair_queue import has_room
from whorl.media import Limits, MediaError, MediaItem, Processor
from whorl.media.decoder import Decoder
from whorl.media.sources import Source, Sources

from .api_error import ApiError
from .engine_thread import QueueFull
from .fair_slots import FairSlots, Nothing
from .running import CURRENT_CLIENT
from .schema_parts import ChatMessage, ImagePart, VideoPart
from .settings import ServerSettings

_T = TypeVar("_T")
_NUM_FETCHED = 5  # media that are fetched or decoded at the same time: some can wait for the network
_STATUS = {"too_large": 413}
_CODES = {
    "invalid": "invalid_media",
    "too_large": "media_too_large",
    "too_costly": "too_costly",
    "not_fetched": "media_not_fetched",
}


def media_parts(messages: Sequence[ChatMessage]) -> Iterator[tuple[str, ImagePart | VideoPart]]:
    """Yield every picture and video of the messages, with its path in the request."""
    for number, message in enumerate(messages):
        for index, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if isinstance(part, ImagePart | VideoPart):
                yield f"messages.{number}.content.{index}", part


class MediaIntake:
    """Reads pictures and videos for the model.

    processor: is closed with this object. settings: which hosts and folder may be read, and how many requests at once.
    """

    def __init__(self, processor: Processor, settings: ServerSettings) -> None:
        self._processor, self._limits, self._max_queue = processor, processor.limits, settings.max_queue
        self._sources = Sources(processor.limits, hosts=settings.media_hosts, folder=settings.media_folder)
        self._places = FairSlots("media", [Nothing() for _ in range(_NUM_FETCHED)])
        self._decoders = FairSlots("decoding", processor.decoders)
        self._num_requests: Counter[str | None] = Counter()

    @property
    def merge_size(self) -> int:
        return self._processor.merge_size

    @property
    def family(self) -> str:
        return self._processor.family

    def close(self) -> None:
        self._places.close()
        self._decoders.close()
        self._processor.close()

    async def read(self, messages: Sequence[ChatMessage], max_tokens: int) -> list[MediaItem]:
        """Return the pictures and videos of the messages, in their order, ready for the model.

        max_tokens: how many tokens they may have together. Raises ApiError and QueueFull.
        """
        parts = list(media_parts(messages))
        if not parts:
            return []
        if len(parts) > self._limits.max_items:
            most = self._limits.max_items
            raise ApiError(400, f"{len(parts)} pictures and videos in one request; up to {most} are allowed")
        for kind, most in self._limits.max_of_kind.items():
            count = sum((kind == "image") == isinstance(part, ImagePart) for _, part in parts)
            if count > most:
                raise ApiError(400, f"the request has {count} parts of kind {kind}; up to {most} are allowed")
        client = CURRENT_CLIENT.get()
        if not has_room(self._num_requests, client, 1, self._max_queue):
            raise QueueFull(f"the pictures of {self._num_requests.total()} requests are being read already")
        self._num_requests[client] += 1
        try:
            budget = _Budget(max_tokens, self._limits, sum(isinstance(part, ImagePart) for _, part in parts))
            if budget.counts_pixels:
                budget.take_pixels(sum(await _all(self._count(where, part) for where, part in parts if _is_here(part))))
            return await _all(self._item(where, part, budget) for where, part in parts)
        finally:
            self._num_requests[client] -= 1
            if not self._num_requests[client]:
                del self._num_requests[client]

    async def _count(self, where: str, part: ImagePart | VideoPart) -> int:
        """Return the pixels of a picture that came with the request, before any of them is decoded."""

        def count(decoder: Decoder) -> int:
            data = self._sources.read(_url(part), "image").parts[0]
            return self._processor.count_pixels(data, decoder=decoder)

        async with self._decoders.slot() as slot:
            with _refusing(where):
                return await slot.run(count)

    async def _item(self, where: str, part: ImagePart | VideoPart, budget: "_Budget") -> MediaItem:
        """Fetch one, then decode it. Its place is held until then, so that few wait in memory."""
        kind = "image" if isinstance(part, ImagePart) else "video"
        async with self._places.slot() as place:
            deadline = budget.deadline = budget.deadline or time.monotonic() + self._limits.fetch_seconds
            with _refusing(where):
                source = await place.run(lambda _: self._sources.read(_url(part), kind, deadline=deadline))
                async with self._decoders.slot() as slot:
                    return await slot.run(partial(self._decode, part, source, budget))

    def _decode(self, part: ImagePart | VideoPart, source: Source, budget: "_Budget", decoder: Decoder) -> MediaItem:
        if isinstance(part, ImagePart):
            if budget.counts_pixels and not _is_here(part):
                budget.take_pixels(self._processor.count_pixels(source.parts[0], decoder=decoder))
            is_low = not isinstance(part.image_url, str) and part.image_url.detail == "low"
            pixels = self._processor.image(source.parts[0], is_low=is_low, decoder=decoder)
        elif source.is_frames:
            pixels = self._processor.frames(source.parts, fps=source.fps, decoder=decoder)
        else:
            pixels = self._processor.video(source.parts[0], decoder=decoder)
        budget.take(pixels.num_tokens)
        return pixels.item()


def _url(part: ImagePart | VideoPart) -> str:
    url = part.image_url if isinstance(part, ImagePart) else part.video_url
    return url if isinstance(url, str) else url.url


def _is_here(part: ImagePart | VideoPart) -> bool:
    """Whether it is a picture that need not be fetched from another host."""
    return isinstance(part, ImagePart) and _url(part)[:4].lower() != "http"


async def _all(work: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Do several things at once; the first one that fails cancels the others."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        while tasks:  # a list that is kept by the frame, which an error keeps, would keep the error
            tasks.pop().cancel()


@contextmanager
def _refusing(where: str) -> Iterator[None]:
    """Turn a MediaError into the ApiError that names the field of the request."""
    try:
        yield
    except MediaError as error:
        status, code = _STATUS.get(error.kind, 400), _CODES[error.kind]
        raise ApiError(status, f"{where}: {error}", param=where, code=code) from None


class _Budget:
    """Counts the tokens of one request's media, so that those that do not fit are not patched, and the pixels of its
    pictures, so that too many are not decoded. counts_pixels: there could be too many pixels. deadline: to fetch all
    media; None: none has been fetched yet."""

    def __init__(self, max_tokens: int, limits: Limits, num_pictures: int) -> None:
        self._most, self._used, self._most_pixels, self._num_pixels = max_tokens, 0, limits.max_request_pixels, 0
        self.counts_pixels = num_pictures * limits.max_pixels > limits.max_request_pixels
        self.deadline: float | None = None
        self._lock = threading.Lock()

    def take_pixels(self, count: int) -> None:
        with self._lock:
            self._num_pixels += count
            if self._num_pixels > self._most_pixels:
                size = f"the pictures of this request have {self._num_pixels} pixels"
                problem = f"{size}; up to {self._most_pixels} are allowed together. Send fewer or smaller ones."
                raise ApiError(413, problem, code="media_too_large")

    def take(self, count: int) -> None:
        with self._lock:
            self._used += count
            if self._used > self._most:
                size = f"the pictures and videos have {self._used} tokens or more"
                limit = f"this model's maximum context length is {self._most} tokens"
                raise ApiError(400, f"{size}; {limit}. Send fewer or smaller ones.", code="context_length_exceeded")
