"""`whorl generate` and `whorl chat`: load an engine from the options, then give one answer or hold a conversation."""

import json
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from whorl.engine.drafting import DraftOptions
from whorl.engine.settings import EngineSettings
from whorl.startup import starting

from .options import AnswerOptions, ChatOptions, MediaOptions, SamplingOptions
from .text_streams import as_argument, prepare_streams, read_file, read_stdin

if TYPE_CHECKING:
    from whorl.engine.llm import LLM
    from whorl.engine.sequence import SamplingParams, Sequence

    from .attachments import Attachment, Attachments
    from .conversation import Conversation
    from .many import PromptAnswers

DEFAULT_TOKENS = 256  # max_tokens of `whorl generate`: a base model may never stop by itself


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The options of `whorl generate`; `whorl chat` is the same with --chat and --interactive."""

    model: str | None = None
    prompt: str | None = None
    engine: EngineSettings = field(default_factory=lambda: EngineSettings(max_num_seqs=1))
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    chat: ChatOptions = field(default_factory=ChatOptions)
    drafting: DraftOptions = field(default_factory=DraftOptions)
    media: MediaOptions = field(default_factory=MediaOptions)
    answers: AnswerOptions = field(default_factory=AnswerOptions)
    report: bool = False
    as_json: bool = False
    default_tokens: int | None = DEFAULT_TOKENS  # None: as many as fit

    def check(self) -> None:
        """Raise ValueError for options that contradict each other, before anything is loaded."""
        self.drafting.check()
        chat = self.chat
        has_prompt = self.prompt is not None or self.answers.prompts is not None
        if not has_prompt and not chat.interactive:
            raise ValueError(
                "there is no prompt: give --prompt TEXT, --prompt-file FILE, --prompts FILE or --interactive, or pipe "
                "a text in"
            )
        self._check_answers()
        if self.prompt is not None and chat.interactive:
            raise ValueError("give only one of --prompt and --interactive")
        if not chat.chat and (chat.system is not None or chat.think is not None):
            raise ValueError("--system, --think and --no-think need the chat template: add --chat")
        if not chat.chat and (self.media.images or self.media.videos):
            raise ValueError("--image and --video need the chat template: add --chat")
        if chat.reset and not chat.interactive:
            raise ValueError("--reset needs a conversation: add --interactive")
        if self.as_json and chat.interactive:
            raise ValueError("--json is for one answer, not for --interactive")

    def _check_answers(self) -> None:
        answers = self.answers
        if answers.prompts is not None and self.prompt is not None:
            raise ValueError("give only one of --prompt and --prompts")
        if self.chat.interactive and (answers.are_many or answers.schema is not None):
            raise ValueError("--prompts, --samples and --schema are not for --interactive")
        if answers.prompts is not None and (self.media.images or self.media.videos):
            raise ValueError("--image and --video go with one prompt, not with --prompts")


def build_session(options: Options) -> Callable[[], int]:
    """Load the model, queue the prompt, and return a function that generates and returns the exit code.

    The exit code is 0, 1 when a prompt got no answer or generating failed, or 130 after Ctrl-C. Raises ValueError for
    options and inputs that cannot be honoured.
    """
    work = _session(options)  # first: it checks the options, and imports torch only then
    from whorl.engine.memory import OutOfMemory, named_errors
    from whorl.engine.tokenizer import DecodeError

    def run() -> int:
        try:
            with named_errors("generating"):
                return work()
        except (OutOfMemory, DecodeError) as error:
            print(f"whorl: {error}", file=sys.stderr)
            return 1

    return run


def _session(options: Options) -> Callable[[], int]:
    options.check()  # before the imports below, which take half a second
    from whorl.engine.tokenizer import Tokenizer

    from .attachments import Attachments
    from .conversation import BoundedPrompts, Conversation
    from .keyboard import history_file
    from .loop import Chat
    from .schema import grammar_masks, read_schema
    from .terminal import Screen

    prompts = _read_prompts(options)
    schema = None if options.answers.schema is None else read_schema(options.answers.schema)
    attachments = Attachments(options.model)
    attached = _attached(options.media, attachments)  # a bad file is reported before the model loads
    chat = options.chat
    system = as_argument(chat.system, "--system")
    prepare_streams()
    # Shows the engine's warnings, such as a model that repeats itself.
    logging.basicConfig(format="[warn] %(message)s", level=logging.WARNING)
    llm = load(options)
    if options.report and (llm.sp_report is not None or (options.engine.tp or 1) > 1):
        from whorl.engine.sequence_parallel import describe

        print(describe(llm.sp_report), file=sys.stderr)
    params = sampling(options, llm)
    assert isinstance(llm.tokenizer, Tokenizer)
    conversation = Conversation(
        llm,
        system=system,
        is_chat=chat.chat,
        has_memory=chat.interactive and not chat.reset,
        enable_thinking=chat.think,
        allow=None if schema is None else grammar_masks(schema, llm),
        prompts=BoundedPrompts(llm.tokenizer),
    )
    fit = options.sampling.max_tokens is None
    if prompts:
        from . import many

        many.queue(conversation, prompts, params, fit=fit, attached=attached)
        return lambda: many.run(conversation, prompts)
    if options.prompt is not None:
        seq = conversation.ask(options.prompt, params, fit=fit, attached=attached)
        return lambda: _answer_once(options, conversation, seq)
    if chat.chat:
        conversation.check()
    screen = Screen()
    if screen.is_terminal:
        how = "greedy" if params.temperature == 0 else f"temperature {params.temperature:g}"
        screen.note(f"{options.model or 'SmolLM2-135M-Instruct'}, {how}: type a message, or /help. Ctrl-D ends.")
        if (file := history_file()) is not None and not file.exists():
            screen.note(f"(The model lies in {_place(options.model)}. Messages are kept in {file}.)")
    return Chat(
        conversation,
        params,
        screen=screen,
        is_streaming=not chat.no_stream,
        attachments=attachments,
        attached=attached,
        when_full=chat.when_full,
    ).run


def _place(model: str | None) -> str:
    from whorl.engine.weights import resolve

    return str(resolve(model))


def _read_prompts(options: Options) -> "list[PromptAnswers]":
    """Return the prompts whose answers are printed as JSON lines; empty if there is just one answer."""
    from . import many

    if options.answers.prompts is not None:
        return many.read_prompts(options.answers.prompts)
    assert options.prompt is not None or options.answers.samples == 1
    return [many.PromptAnswers(options.prompt)] if options.answers.samples > 1 and options.prompt is not None else []


def _attached(media: MediaOptions, attachments: "Attachments") -> "list[Attachment]":
    """Read the files of --image, then those of --video."""
    images = [attachments.read("image", file) for file in media.images]
    return images + [attachments.read("video", file) for file in media.videos]


def load(options: Options) -> "LLM":
    """Load the model with the engine's and the drafting options."""
    with starting():
        from whorl.engine.llm import LLM
        from whorl.engine.load import use_one_stream

    use_one_stream(options.engine)
    drafting = options.drafting
    speculate = drafting.proposer(options.engine.device)
    return LLM(options.model, options.engine, speculate=speculate, draft_length=drafting.draft_length)


def sampling(options: Options, llm: "LLM") -> "SamplingParams":
    """Return the sampling parameters: the options, else the model's generation_config.json, else greedy."""
    from whorl.engine.sequence import SamplingParams
    from whorl.engine.tokenizer import Tokenizer

    assert isinstance(llm.tokenizer, Tokenizer)
    sampling_options, chat = options.sampling, options.chat
    fields = llm.tokenizer.sampling | sampling_options.values()
    fields |= {"stop": sampling_options.stop, "n": options.answers.samples}
    if options.as_json and not options.answers.are_many and options.engine.logprobs_mode == "raw_logprobs":
        fields["logprobs"] = 0  # for `whorl verify`
    max_tokens = sampling_options.max_tokens or (None if chat.interactive and chat.chat else options.default_tokens)
    lora = next(reversed(options.engine.adapters), None)
    return SamplingParams(max_tokens=max_tokens, seed=sampling_options.seed or None, lora=lora, **fields)


def _answer_once(options: Options, conversation: "Conversation", seq: "Sequence") -> int:
    """Generate one answer and print it, streamed, whole or as JSON; return the exit code."""
    from whorl.engine.sequence import FinishReason

    from .many import document
    from .terminal import Answer, Screen, describe, stream

    answer = Answer(Screen(), conversation)
    is_live = not options.chat.no_stream and not options.as_json
    stream(conversation.llm, seq, answer.add if is_live else lambda text: None)
    if seq.error is not None:
        print(f"whorl: {seq.error}", file=sys.stderr)
        return 1
    if options.as_json:
        print(json.dumps(document(seq), indent=2))
        return 0
    if not is_live:
        answer.add(seq.text.value)
    answer.finish()
    if sys.stderr.isatty() or options.report:
        Screen(sys.stderr).note(describe(seq))
    return 130 if seq.finish_reason is FinishReason.ABORT else 0


def read_prompt(prompt: str | None, file: str | None, *, or_pipe: bool = False) -> str | None:
    """Return the text of --prompt, or of the file --prompt-file, unchanged; the file `-` is standard input.

    or_pipe: without either, read standard input if it is a pipe, without the line break that `echo` adds at its end.
    Raises ValueError when both are given or the file cannot be read.
    """
    if prompt is not None and file is not None:
        raise ValueError("give only one of --prompt and --prompt-file")
    if prompt is None and file is None and or_pipe and sys.stdin is not None and not sys.stdin.isatty():
        return read_stdin().removesuffix("\n") or None
    if file is None:
        return as_argument(prompt, "--prompt")
    if file == "-":
        return read_stdin()
    return read_file(file, f"--prompt-file {file}")
