"""`whorl generate` and `whorl chat`: options to an engine, then one answer or a conversation."""

import json
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .text_streams import as_argument, prepare_streams, read_stdin

if TYPE_CHECKING:
    from whorl.engine.llm import LLM
    from whorl.engine.sequence import SamplingParams, Sequence
    from whorl.engine.speculate import Proposer

    from .conversation import Conversation

DEFAULT_TOKENS = 256  # of `whorl generate`: a base model may never stop by itself


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The command line; None is "not given"."""

    model: str | None = None
    prompt: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int = 0  # 0: another one each time
    chat: bool = False
    system: str | None = None
    interactive: bool = False
    reset: bool = False
    stream: bool = True
    think: bool | None = None
    max_seq: int | None = None
    max_step_tokens: int | None = None
    tp: int | None = None
    sp: str = "off"
    sp_quantize: str | None = None
    report: bool = False
    device: str | None = None
    dtype: str | None = None
    pld: bool = False
    pld_k: int | None = None
    pld_ngram: int | None = None
    pld_min_hist: int | None = None
    pld_no_guard: bool = False
    pld_guard_distinct: int | None = None
    pld_guard_tail: int | None = None
    pld_loop_warn: int | None = None
    draft_model: str | None = None
    draft_k: int | None = None
    draft_fixed: bool = False
    as_json: bool = False

    def check(self) -> None:
        """What contradicts itself or cannot be done is refused before anything is loaded."""
        self.check_drafting()
        if self.prompt is None and not self.interactive:
            raise ValueError(
                "nothing to complete: give --prompt TEXT, --prompt-file FILE or --interactive, or pipe a text in"
            )
        if self.prompt is not None and self.interactive:
            raise ValueError("--prompt and --interactive: say one of them")
        if not self.chat and (self.system is not None or self.think is not None):
            raise ValueError("--system, --think and --no-think are written by the chat template: add --chat")
        if self.reset and not self.interactive:
            raise ValueError("--reset is about a conversation: add --interactive")
        if self.as_json and self.interactive:
            raise ValueError("--json is for one answer, not for --interactive")

    def check_drafting(self) -> None:
        pld = ("pld_k", "pld_ngram", "pld_min_hist", "pld_guard_distinct", "pld_guard_tail", "pld_loop_warn")
        given = [name for name in pld if getattr(self, name) is not None] + ["pld_no_guard"] * self.pld_no_guard
        if given and not self.pld:
            raise ValueError(f"--{given[0].replace('_', '-')} needs --pld")
        if self.pld_no_guard and (self.pld_guard_distinct is not None or self.pld_guard_tail is not None):
            raise ValueError("--pld-no-guard switches off what --pld-guard-distinct and --pld-guard-tail set")
        if self.draft_model is not None and self.pld:
            raise ValueError("--draft-model and --pld: say one of them")
        if self.draft_model is None and self.draft_k is not None:
            raise ValueError("--draft-k needs --draft-model")
        if self.draft_fixed and self.draft_model is None and not self.pld:
            raise ValueError("--draft-fixed needs --pld or --draft-model")


def prepare(options: Options) -> Callable[[], int]:
    """Load the model and take the prompt in, refusing with ValueError what cannot be done. The rest is the work: it
    gives the exit code, 0, or 130 after Ctrl-C."""
    from .chat import Chat, Screen
    from .conversation import Conversation

    options.check()
    system = as_argument(options.system, "--system")
    prepare_streams()
    # What the engine warns about, such as a model that repeats itself.
    logging.basicConfig(format="[warn] %(message)s", level=logging.WARNING)
    llm = load(options)
    if options.report:
        print_report(llm)
    params = sampling(options, llm)
    conversation = Conversation(
        llm,
        system=system,
        is_chat=options.chat,
        has_memory=not options.reset,
        enable_thinking=options.think,
    )
    if options.prompt is not None:
        seq = conversation.ask(options.prompt, params, fit=options.max_tokens is None)
        return lambda: _answer_once(options, conversation, seq)
    if options.chat:
        conversation.check()
    screen = Screen()
    if screen.is_terminal:
        screen.note(f"{options.model or 'SmolLM2-135M-Instruct'}: type a message, or /help. Ctrl-D ends.")
    return Chat(conversation, params, screen=screen, is_streaming=options.stream).run


def load(options: Options) -> "LLM":
    import torch

    from whorl.engine.llm import LLM

    return LLM(
        options.model,
        device=options.device,
        dtype=getattr(torch, options.dtype) if options.dtype else None,
        speculate=proposer(options),
        draft_length="fixed" if options.draft_fixed else "measured",
        max_model_len=options.max_seq,
        max_num_seqs=1,
        max_num_batched_tokens=max(2048, options.max_step_tokens or 0),
        max_prompt_tokens=options.max_step_tokens,
        tp=options.tp,
        sp=options.sp,  # type: ignore[arg-type]
        sp_quantize=options.sp_quantize,  # type: ignore[arg-type]
    )


def print_report(llm: "LLM") -> None:
    """What --sp has rewritten, where no answer goes."""
    print(llm.sp_report or "sequence parallelism is off: it takes --sp, and --tp of 2 or more", file=sys.stderr)


def sampling(options: Options, llm: "LLM") -> "SamplingParams":
    """What was asked, else what the model's generation_config.json advises, else greedy."""
    from whorl.engine.sequence import SamplingParams
    from whorl.engine.tokenizer import Tokenizer

    advised: dict[str, Any] = {"temperature": 0.0}
    if isinstance(llm.tokenizer, Tokenizer):
        advised |= llm.tokenizer.sampling
    asked = {name: getattr(options, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    given = {name: value for name, value in asked.items() if value is not None}
    max_tokens = options.max_tokens or (None if options.interactive and options.chat else DEFAULT_TOKENS)
    return SamplingParams(max_tokens=max_tokens, seed=options.seed or None, **(advised | given))


def proposer(options: Options) -> "Proposer | None":
    if options.draft_model is not None:
        from whorl.engine.speculate.draft_model import DraftModel

        return DraftModel(options.draft_model, k=options.draft_k or 4, device=options.device)
    if not options.pld:
        return None
    from whorl.engine.speculate.prompt_lookup import PromptLookup

    names = ("k", "ngram", "min_hist", "guard_distinct", "guard_tail", "loop_warn")
    given = {name: value for name in names if (value := getattr(options, f"pld_{name}")) is not None}
    return PromptLookup(guard=not options.pld_no_guard, **given)


def _answer_once(options: Options, conversation: "Conversation", seq: "Sequence") -> int:
    from whorl.engine.sequence import FinishReason

    from .chat import Answer, Screen, describe, stream

    answer = Answer(Screen(), conversation)
    is_live = options.stream and not options.as_json
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
