"""A server whose model is told what to say, and takes pictures: what it was given is kept for the test to look at."""

import contextlib
from collections.abc import Iterator
from typing import Any

from media_files import OPTIONS
from serving import TEMPLATE, Served, Told, byte_tokenizer, serving
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from whorl.engine.llm import LLM
from whorl.engine.tokenizer import Tokenizer
from whorl.media import Limits, MediaItem, Processor

VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
# As Qwen3-VL's template writes what is in a message.
PARTS = """{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}\
{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>\
{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>\
{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"""
SEEING_TEMPLATE = TEMPLATE.replace("{{ m.content }}", PARTS)


def seeing_tokenizer(template: str = SEEING_TEMPLATE) -> Tokenizer:
    plain = byte_tokenizer()
    backend = Backend.from_str(plain.to_json())
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in VISION])
    return Tokenizer(backend, eos_ids=plain.eos_ids, roles={"eos_token": "<|im_end|>"}, templates={"default": template})


class Looking(LLM):
    """The engine, which keeps the pictures of each prompt and reads their places as plain tokens."""

    seen: list[tuple[list[int], list[MediaItem]]]

    def add(self, prompt: Any, params: Any = None, *, media: Any = (), **more: Any) -> Any:
        self.seen.append((list(prompt), list(media)))
        return super().add(prompt, params, **more)


def looking(answers: dict[str, str] | None = None, *, tokenizer: Tokenizer | None = None) -> Looking:
    tokenizer = tokenizer or seeing_tokenizer()
    settings: dict[str, Any] = {"device": "cpu", "max_num_seqs": 8, "block_size": 8, "num_blocks": 512}
    llm = Looking(model=Told(tokenizer, answers or {}), tokenizer=tokenizer, **settings)  # type: ignore[arg-type]
    llm.seen = []
    return llm


@contextlib.contextmanager
def seeing(
    answers: dict[str, str] | None = None, *, limits: Limits | None = None, llm: Looking | None = None, **settings: Any
) -> Iterator[Served]:
    processor = Processor(OPTIONS, limits, num_processes=1)
    with serving(llm or looking(answers), processor=processor, **settings) as served:
        yield served
