"""Reads the pictures and videos of a request: fetches, decodes and patches them on threads, within limits."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from whorl.media import MediaError, MediaItem, Processor
from whorl.media.pixels import Pixels
from whorl.media.sources import Sources

from .api_error import ApiError
from .engine_thread import EngineError, QueueFull
from .schema_parts import ChatMessage, ImagePart, VideoPart
from .settings import ServerSettings

_T = TypeVar("_T")
_NUM_THREADS = 4  # so that some can wait for the network while others decode
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
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="whorl-media")
        self._num_requests = 0

    @property
    def merge_size(self) -> int:
        return self._processor.merge_size

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
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
        if self._num_requests >= self._max_queue:
            raise QueueFull(f"the pictures of {self._num_requests} requests are being read already")
        self._num_requests += 1
        try:
            return await self._read_all(parts, _TokenBudget(max_tokens), time.monotonic() + self._limits.fetch_seconds)
        finally:
            self._num_requests -= 1

    async def _read_all(
        self, parts: Sequence[tuple[str, ImagePart | VideoPart]], budget: "_TokenBudget", deadline: float
    ) -> list[MediaItem]:
        """Read several at once; the first one that is refused cancels those that have not begun."""

        def reader(where: str, part: ImagePart | VideoPart) -> Callable[[], MediaItem]:
            return lambda: self._item(where, part, budget, deadline)

        tasks = [asyncio.ensure_future(self._on_thread(reader(where, part))) for where, part in parts]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _on_thread(self, work: Callable[[], _T]) -> _T:
        try:
            future = self._threads.submit(work)
        except RuntimeError:
            raise EngineError("the server is shutting down") from None
        return await asyncio.wrap_future(future)

    def _item(self, where: str, part: ImagePart | VideoPart, budget: "_TokenBudget", deadline: float) -> MediaItem:
        try:
            pixels = self._pixels(part, deadline)
            budget.take(pixels.num_tokens)
            return pixels.item()
        except MediaError as error:
            status, code = _STATUS.get(error.kind, 400), _CODES[error.kind]
            raise ApiError(status, f"{where}: {error}", param=where, code=code) from None

    def _pixels(self, part: ImagePart | VideoPart, deadline: float) -> Pixels:
        if isinstance(part, ImagePart):
            image = part.image_url
            url, is_low = (image, False) if isinstance(image, str) else (image.url, image.detail == "low")
            return self._processor.image(self._sources.read(url, "image", deadline=deadline).parts[0], is_low=is_low)
        url = part.video_url if isinstance(part.video_url, str) else part.video_url.url
        source = self._sources.read(url, "video", deadline=deadline)
        if source.is_frames:
            return self._processor.frames(source.parts, fps=source.fps)
        return self._processor.video(source.parts[0])


class _TokenBudget:
    """Counts the tokens of one request's pictures and videos, so that those that do not fit are not patched."""

    def __init__(self, max_tokens: int) -> None:
        self._most, self._used = max_tokens, 0
        self._lock = threading.Lock()

    def take(self, count: int) -> None:
        with self._lock:
            self._used += count
            if self._used > self._most:
                size = f"the pictures and videos have {self._used} tokens or more"
                limit = f"this model's maximum context length is {self._most} tokens"
                raise ApiError(400, f"{size}; {limit}. Send fewer or smaller ones.", code="context_length_exceeded")
