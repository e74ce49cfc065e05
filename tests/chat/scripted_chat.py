"""A chat on a scripted model: what is typed, and what the screen shows of it."""

import io
from collections.abc import Iterator
from typing import Any

from whorl.chat.conversation import Conversation
from whorl.chat.loop import Chat
from whorl.chat.terminal import Screen
from whorl.engine.sequence import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=24)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def talk(llm: Any, *lines: str, out: io.StringIO | None = None, params: SamplingParams = GREEDY, **options: Any) -> str:
    """What the screen shows after these lines. options: of Chat, or of its conversation."""
    screen = Screen(out or io.StringIO())
    told: Iterator[str] = iter(lines)

    def read(prompt: str) -> str:
        for line in told:
            return line
        raise EOFError

    how = {name: options.pop(name) for name in ("is_streaming", "when_full") if name in options}
    assert Chat(Conversation(llm, **options), params, screen=screen, read=read, **how).run() == 0
    return screen.out.getvalue()


def prompts(llm: Any) -> list[str]:
    """What the model was asked, each time."""
    return [llm.tokenizer.decode(seq.token_ids[: seq.prompt_len], skip_special=False) for seq in llm.added]


def turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"
