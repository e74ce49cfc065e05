"""What `whorl generate` and `whorl chat` take about the text they make. No torch here."""

from dataclasses import dataclass

from whorl.fields import option

SAMPLING, CHAT, MEDIA = "Sampling", "Chat", "Pictures"


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
    no_stream: bool = option(False, "Print an answer when it is whole.", panel=CHAT)


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
