"""What `whorl generate` and `whorl chat` take about the text they make. No torch here."""

from dataclasses import dataclass
from typing import Literal

from whorl.fields import option

AT_ONCE = 16  # sequences that run together where there are many prompts, and nothing else is said
SAMPLING, CHAT, MEDIA, ANSWERS = "Sampling", "Chat", "Pictures", "Answers"


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingOptions:
    """None is "what the model advises"."""

    max_tokens: int | None = option(
        None,
        "Longest answer, in tokens. Default: 256; in a chat what fits.",
        *("--max-tokens", "--n-predict", "-n"),
        panel=SAMPLING,
        least=1,
    )
    temperature: float | None = option(
        None, "0: greedy. Default: what the model advises, or 0.", "--temperature", "-t", panel=SAMPLING, least=0
    )
    top_k: int | None = option(None, "Sample from the N likeliest tokens; 0: all.", panel=SAMPLING, least=0)
    top_p: float | None = option(
        None, "Sample from the likeliest, of N probability together; 1: all.", panel=SAMPLING, least=0, most=1
    )
    min_p: float | None = option(
        None,
        "Leave out what is less than N times as likely as the likeliest; 0: none.",
        panel=SAMPLING,
        least=0,
        most=1,
    )
    seed: int = option(
        0, "The same seed, the same text; 0: another one each time.", "--seed", "-s", vllm=("--seed",), panel=SAMPLING
    )
    stop: tuple[str, ...] = option(
        (), "An answer ends before this text; may be repeated.", panel=SAMPLING, metavar="TEXT"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatOptions:
    """How prompts are written and answers shown."""

    chat: bool = option(
        False, "The prompt is a message: write it with the model's chat template.", "--chat", "-c", panel=CHAT
    )
    system: str | None = option(None, "The system message.", panel=CHAT, metavar="TEXT")
    think: bool | None = option(
        None, "Whether a model that can think first does. Default: its own.", "--think/--no-think", panel=CHAT
    )
    interactive: bool = option(
        False, "Read prompts line by line; with --chat a conversation.", "--interactive", "-i", panel=CHAT
    )
    reset: bool = option(False, "No memory: each message is the first.", panel=CHAT)
    when_full: Literal["ask", "drop", "stop"] = option(
        "ask",
        "What a message does that finds the context full: drop the oldest turns, stop there, or ask; without a "
        "terminal ask is stop.",
        panel=CHAT,
    )
    no_stream: bool = option(False, "Print an answer when it is whole.", panel=CHAT)


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerOptions:
    """Several answers at once, and what they must look like."""

    prompts: str | None = option(
        None,
        "Many prompts, a line each; .jsonl: JSON strings, or objects with prompt; -: standard input. Answers are JSON "
        "lines.",
        panel=ANSWERS,
        metavar="FILE",
    )
    samples: int = option(1, "Answers to each prompt; several are JSON lines.", panel=ANSWERS, least=1)
    schema: str | None = option(
        None, "Answers are JSON of this schema: a file, or the schema itself.", panel=ANSWERS, metavar="SCHEMA"
    )

    @property
    def are_many(self) -> bool:
        return self.prompts is not None or self.samples > 1


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaOptions:
    """Files that go with the prompt; in a conversation with its first message."""

    images: tuple[str, ...] = option(
        (), "A picture that goes with the prompt; may be repeated.", "--image", panel=MEDIA, metavar="FILE"
    )
    videos: tuple[str, ...] = option(
        (),
        "A video, or a folder of its frames as pictures; may be repeated.",
        "--video",
        panel=MEDIA,
        metavar="FILE",
    )
