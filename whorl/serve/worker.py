"""A worker process for what may never end: a model's chat template, its tokenizer, a client's grammar.

`worker_pool` starts this module, sends the tokenizer, then one job at a time: templates and tokenizers come from model
files, messages and schemas from clients, and neither is trusted. Torch is not imported, so that a new process starts
quickly.
"""

import contextlib
import functools
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from whorl.engine.grammar_masks import native_tokenizer
from whorl.engine.reply_parser import END_THINK, THINK
from whorl.engine.tokenizer import Tokenizer
from whorl.sandbox import START_SECONDS, Fence, read, write

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

JOB_SECONDS, JOB_MEMORY = 10.0, 1 << 30  # by default: CPU time, and bytes of address space
OVER_MEMORY = "it takes more memory than this server allows"
_PROOF_TOKENS, _PROOF_SECONDS = 16, 0.5  # CPU time that the first tokens of an answer may take in the grammar


class RequestRefused(Exception):
    """A job cannot be done. The message is for the client; kind: invalid, length, template, schema or memory."""

    def __init__(self, message: str, kind: str = "invalid") -> None:
        super().__init__(message)
        self.kind = kind


class Jobs:
    """The jobs of a worker, for one tokenizer. Each public method is a job; its arguments and result are JSON."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None,
        add_generation_prompt: bool,
        variables: dict[str, Any],
        max_bytes: int | None,
        max_tokens: int,
        places: Sequence[Any] | None,
        family: str | None,
    ) -> dict[str, Any]:
        """Render and tokenize a conversation; `is_thinking` says if its prompt ends with an opening think tag,
        `may_think` if it does not end with a closing one.

        max_bytes, max_tokens: as in `encode`. places: where its pictures and videos stand, from `Placeholder.to_json`;
        None: the model takes text only. family: of a model that takes pictures, as in `expand`.
        """
        text = self.write_prompt(messages, tools, add_generation_prompt, variables)
        if places is not None:
            from whorl.media.families import DEFAULT
            from whorl.media.places import Placeholder, expand

            text = expand(text, [Placeholder.from_json(place) for place in places], family or DEFAULT)
        (ids,) = self.encode([text], False, max_bytes, max_tokens)
        end = text.rstrip()
        return {"ids": ids, "is_thinking": end.endswith(THINK), "may_think": not end.endswith(END_THINK)}

    def write_prompt(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None,
        add_generation_prompt: bool,
        variables: dict[str, Any],
    ) -> str:
        """Render a conversation to the text of a prompt."""
        try:
            return self._tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=add_generation_prompt, **variables
            )
        except MemoryError:
            raise
        except Exception as error:  # a template is a program whose variables come from the client
            raise RequestRefused(f"the chat template failed: {error}", "template") from error

    def encode(
        self, texts: Sequence[str], add_special: bool, max_bytes: int | None, max_tokens: int
    ) -> list[list[int]]:
        """Tokenize texts; raise RequestRefused when one has more than max_tokens tokens.

        max_bytes: a longer text certainly has more than max_tokens tokens; None: the tokenizer gives no such bound.
        """
        encoded = []
        for text in texts:
            size = len(text.encode())  # raises UnicodeError for half a surrogate pair
            if max_bytes is not None and size > max_bytes:
                raise RequestRefused(f"the text has {size} bytes; {max_tokens} tokens hold up to {max_bytes}", "length")
            ids = self._tokenizer.encode(text, add_special=add_special)
            if len(ids) > max_tokens:
                raise RequestRefused(f"the text has {len(ids)} tokens; up to {max_tokens} are allowed", "length")
            encoded.append(ids)
        return encoded

    def decode(self, lists: Sequence[Sequence[int]]) -> list[str]:
        return [self._tokenizer.decode(ids, skip_special=False) for ids in lists]

    def lark(self, grammar: str) -> str:
        """Convert a grammar, which may be llama.cpp's GBNF, to llguidance's Lark."""
        from llguidance.gbnf_to_lark import any_to_lark

        try:
            return any_to_lark(grammar)
        except MemoryError:
            raise
        except Exception as error:
            raise RequestRefused(f"the grammar cannot be read: {error}", "schema") from error

    def prove(self, grammar: str, label: str) -> None:
        """Raise RequestRefused unless the grammar compiles, accepts some text, and computes its first masks quickly.

        label: what the messages call the grammar.
        """
        from llguidance import LLMatcher

        matcher = LLMatcher(self._native, grammar, log_level=0)
        _check(matcher, label)
        began = time.process_time()
        for _ in range(_PROOF_TOKENS):
            mask = matcher.compute_logit_bias()
            _check(matcher, label)
            if time.process_time() - began > _PROOF_SECONDS:
                raise RequestRefused(f"{label} takes too long to follow", "schema")
            token = next((i for i, bias in enumerate(mask) if bias and i not in self._tokenizer.eos_ids), None)
            if token is None or not matcher.try_consume_tokens([token]):
                return

    @functools.cached_property
    def _native(self) -> "LLTokenizer":
        return native_tokenizer(self._tokenizer, self._vocab_size)

    def warm_up(self, name: str) -> None:
        """Build what the first job of a kind needs, so that the job's own limits do not count it."""
        if name == "prove":
            _ = self._native


def _check(matcher: "LLMatcher", label: str) -> None:
    if matcher.is_error():
        reason = matcher.get_error().partition("\n")[0]
        if reason.startswith("NoExtension"):
            reason = "no text is valid"
        raise RequestRefused(f"{label} cannot be followed: {reason}", "schema")


def run_job(jobs: Jobs, fence: Fence, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Run a job; return its `value`, or why it was `refused` or `failed`."""
    try:
        fence.allow_seconds(START_SECONDS)
        jobs.warm_up(name)
        fence.limit_memory()
        fence.allow_seconds()
        return {"value": getattr(jobs, name)(**arguments)}
    except RequestRefused as error:
        return {"refused": str(error), "kind": error.kind}
    except UnicodeError:
        return {"refused": "the text is not valid Unicode", "kind": "invalid"}
    except ValueError as error:
        return {"refused": str(error), "kind": "invalid"}
    except MemoryError:
        return {"refused": OVER_MEMORY, "kind": "memory"}
    except BaseException as error:  # a panic of a Rust library is not an Exception
        return {"failed": f"{type(error).__name__}: {str(error)[:500]}"}


def main() -> None:
    """Run jobs until the server closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What a library prints goes to stderr, as stdout carries the results.
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with contextlib.suppress(EOFError, BrokenPipeError):
        setup = read(source)
        fence = Fence(setup["seconds"], setup["memory"])
        fence.allow_seconds(START_SECONDS)
        jobs = Jobs(Tokenizer.from_state(setup["tokenizer"]), setup["vocab_size"])
        while True:
            write(sink, run_job(jobs, fence, *read(source)))


if __name__ == "__main__":
    main()
