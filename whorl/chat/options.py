"""The options of `whorl generate` and `whorl chat` about prompts and answers. Does not import torch."""

from dataclasses import dataclass, make_dataclass
from typing import TYPE_CHECKING, Any, Literal

from whorl.engine.sampling_params import PARAMETERS
from whorl.fields import option, restated

AT_ONCE = 16  # default of max_num_seqs when there are many prompts
SAMPLING, CHAT, MEDIA, ANSWERS = "Sampling", "Chat", "Pictures", "Answers"


def _optional(name: str) -> tuple[str, Any, Any]:
    """Return the field of a sampling parameter: None leaves it to the model's generation_config.json."""
    hint, declared = PARAMETERS[name]
    return name, hint | None, restated(declared, None, panel=SAMPLING)


_SHARED = [name for name, (_, declared) in PARAMETERS.items() if declared.is_in_apis and name != "seed"]
if TYPE_CHECKING:
    _Shared = object
else:
    _Shared = make_dataclass("_Shared", map(_optional, _SHARED), frozen=True, kw_only=True, slots=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingOptions(_Shared):
    """Sampling parameters: those that the APIs have as well, and these."""

    max_tokens: int | None = option(
        None,
        "Longest answer, in tokens. Default: 256; in a chat as many as fit.",
        *("--max-tokens", "--n-predict", "-n"),
        panel=SAMPLING,
        least=1,
    )
    seed: int = option(
        0,
        "The same seed gives the same text; 0: a new seed each time.",
        "--seed",
        "-s",
        vllm=("--seed",),
        panel=SAMPLING,
    )
    stop: tuple[str, ...] = option(
        (), "An answer ends before this text; may be repeated.", panel=SAMPLING, metavar="TEXT"
    )

    def values(self) -> dict[str, Any]:
        """Return the parameters of `SamplingParams` that the options set."""
        return {name: value for name in _SHARED if (value := getattr(self, name)) is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatOptions:
    """How prompts are built and answers shown."""

    chat: bool = option(False, "The prompt is a message: apply the model's chat template.", "--chat", panel=CHAT)
    system: str | None = option(None, "The system message.", panel=CHAT, metavar="TEXT")
    think: bool | None = option(
        None,
        "Whether a reasoning model thinks before it answers. Default: the model's.",
        "--think/--no-think",
        panel=CHAT,
    )
    interactive: bool = option(
        False, "Read prompts line by line; with --chat a conversation.", "--interactive", "-i", panel=CHAT
    )
    reset: bool = option(False, "No memory: each message starts a new conversation.", panel=CHAT)
    when_full: Literal["ask", "drop", "stop"] = option(
        "ask",
        "When the conversation no longer fits into the context: drop the oldest turns, stop, or ask; without a "
        "terminal ask means stop.",
        panel=CHAT,
    )
    no_stream: bool = option(False, "Print an answer when it is complete.", panel=CHAT)


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerOptions:
    """Several prompts or answers, and a schema for the answers."""

    prompts: str | None = option(
        None,
        "A file with a prompt on each line; .jsonl: JSON strings, or objects with prompt; -: standard input. Answers "
        "are JSON lines.",
        panel=ANSWERS,
        metavar="FILE",
    )
    samples: int = option(1, "Answers to each prompt; more than one are JSON lines.", panel=ANSWERS, least=1)
    schema: str | None = option(
        None,
        "Answers are JSON that follows this schema: a file, or the schema itself.",
        panel=ANSWERS,
        metavar="SCHEMA",
    )

    @property
    def are_many(self) -> bool:
        return self.prompts is not None or self.samples > 1


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaOptions:
    """Files that belong to the prompt; in a conversation to its first message."""

    images: tuple[str, ...] = option(
        (), "A picture for the prompt; may be repeated.", "--image", panel=MEDIA, metavar="FILE"
    )
    videos: tuple[str, ...] = option(
        (),
        "A video, or a folder with its frames as pictures; may be repeated.",
        "--video",
        panel=MEDIA,
        metavar="FILE",
    )
