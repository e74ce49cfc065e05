"""`whorl generate` and `whorl chat`: options to an engine, then one answer or a conversation."""

import json
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whorl.engine.drafting import DraftOptions
from whorl.engine.settings import EngineSettings

from .options import ChatOptions, MediaOptions, SamplingOptions
from .text_streams import as_argument, prepare_streams, read_stdin

if TYPE_CHECKING:
    from whorl.engine.llm import LLM
    from whorl.engine.sequence import SamplingParams, Sequence

    from .attachments import Attachment, Attachments
    from .conversation import Conversation

DEFAULT_TOKENS = 256  # of `whorl generate`: a base model may never stop by itself


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The command line of `whorl generate`; `whorl chat` is one of them."""

    model: str | None = None
    prompt: str | None = None
    engine: EngineSettings = field(default_factory=lambda: EngineSettings(max_num_seqs=1))
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    chat: ChatOptions = field(default_factory=ChatOptions)
    drafting: DraftOptions = field(default_factory=DraftOptions)
    media: MediaOptions = field(default_factory=MediaOptions)
    report: bool = False
    as_json: bool = False

    def check(self) -> None:
        """What contradicts itself or cannot be done is refused before anything is loaded."""
        self.drafting.check()
        chat = self.chat
        if self.prompt is None and not chat.interactive:
            raise ValueError(
                "nothing to complete: give --prompt TEXT, --prompt-file FILE or --interactive, or pipe a text in"
            )
        if self.prompt is not None and chat.interactive:
            raise ValueError("--prompt and --interactive: say one of them")
        if not chat.chat and (chat.system is not None or chat.think is not None):
            raise ValueError("--system, --think and --no-think are written by the chat template: add --chat")
        if not chat.chat and (self.media.images or self.media.videos):
            raise ValueError("--image and --video are written by the chat template: add --chat")
        if chat.reset and not chat.interactive:
            raise ValueError("--reset is about a conversation: add --interactive")
        if self.as_json and chat.interactive:
            raise ValueError("--json is for one answer, not for --interactive")


def prepare(options: Options) -> Callable[[], int]:
    """Load the model and take the prompt in, refusing with ValueError what cannot be done. The rest is the work: it
    gives the exit code, 0, or 130 after Ctrl-C."""
    from .attachments import Attachments
    from .conversation import Conversation
    from .terminal import Chat, Screen

    options.check()
    attachments = Attachments(options.model)
    attached = _attached(options.media, attachments)  # before minutes of loading
    chat = options.chat
    system = as_argument(chat.system, "--system")
    prepare_streams()
    # What the engine warns about, such as a model that repeats itself.
    logging.basicConfig(format="[warn] %(message)s", level=logging.WARNING)
    llm = load(options)
    if options.report:
        from whorl.engine.sequence_parallel import describe

        print(describe(llm.sp_report), file=sys.stderr)
    params = sampling(options, llm)
    conversation = Conversation(
        llm, system=system, is_chat=chat.chat, has_memory=not chat.reset, enable_thinking=chat.think
    )
    if options.prompt is not None:
        fit = options.sampling.max_tokens is None
        seq = conversation.ask(options.prompt, params, fit=fit, attached=attached)
        return lambda: _answer_once(options, conversation, seq)
    if chat.chat:
        conversation.check()
    screen = Screen()
    if screen.is_terminal:
        screen.note(f"{options.model or 'SmolLM2-135M-Instruct'}: type a message, or /help. Ctrl-D ends.")
    return Chat(
        conversation,
        params,
        screen=screen,
        is_streaming=not chat.no_stream,
        attachments=attachments,
        attached=attached,
    ).run


def _attached(media: MediaOptions, attachments: "Attachments") -> "list[Attachment]":
    images = [attachments.read("image", file) for file in media.images]
    return images + [attachments.read("video", file) for file in media.videos]


def load(options: Options) -> "LLM":
    from whorl.engine.llm import LLM

    drafting = options.drafting
    speculate = drafting.proposer(options.engine.device)
    return LLM(options.model, options.engine, speculate=speculate, draft_length=drafting.draft_length)


def sampling(options: Options, llm: "LLM") -> "SamplingParams":
    """What was asked, else what the model's generation_config.json advises, else greedy."""
    from whorl.engine.sequence import SamplingParams
    from whorl.engine.tokenizer import Tokenizer

    advised: dict[str, Any] = {"temperature": 0.0}
    if isinstance(llm.tokenizer, Tokenizer):
        advised |= llm.tokenizer.sampling
    asked, chat = options.sampling, options.chat
    named = {name: getattr(asked, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    given = {name: value for name, value in named.items() if value is not None}
    max_tokens = asked.max_tokens or (None if chat.interactive and chat.chat else DEFAULT_TOKENS)
    return SamplingParams(max_tokens=max_tokens, seed=asked.seed or None, **(advised | given))


def _answer_once(options: Options, conversation: "Conversation", seq: "Sequence") -> int:
    from whorl.engine.sequence import FinishReason

    from .terminal import Answer, Screen, describe, stream

    answer = Answer(Screen(), conversation)
    is_live = not options.chat.no_stream and not options.as_json
    stream(conversation.llm, seq, answer.add if is_live else lambda text: None)
    if options.as_json:
        print(json.dumps(_document(seq), indent=2))
        return 0
    if not is_live:
        answer.add(seq.text.value)
    answer.finish()
    if sys.stderr.isatty():
        Screen(sys.stderr).note(describe(seq))
    return 130 if seq.finish_reason is FinishReason.ABORT else 0


def _document(seq: "Sequence") -> dict[str, Any]:
    timings = seq.timings
    return {
        "text": seq.text.value,
        "token_ids": seq.output_ids,
        "finish_reason": str(seq.finish_reason),
        "prompt_tokens": seq.prompt_len,
        "completion_tokens": seq.num_outputs,
        "time_to_first_token": timings.time_to_first_token,
        "tokens_per_second": timings.tokens_per_second,
        "drafted_tokens": seq.num_drafted,
        "accepted_tokens": seq.num_accepted,
    }


def read_prompt(prompt: str | None, file: str | None, *, or_pipe: bool = False) -> str | None:
    """--prompt, or what is in --prompt-file, to the letter; `-` is standard input.

    or_pipe: without either, what is piped in, without the line break that `echo` ends it with.
    """
    if prompt is not None and file is not None:
        raise ValueError("--prompt and --prompt-file: say one of them")
    if prompt is None and file is None and or_pipe and sys.stdin is not None and not sys.stdin.isatty():
        return read_stdin().removesuffix("\n") or None
    if file is None:
        return as_argument(prompt, "--prompt")
    if file == "-":
        return read_stdin()
    try:
        return Path(file).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--prompt-file {file}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompt-file {file}: is not UTF-8 text: {error}") from error
