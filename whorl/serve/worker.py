"""What may take for ever, in a process of its own: a model's chat template, its tokenizer, a client's grammar.

`worker_pool` starts this module, sends the tokenizer, then one job at a time: JSON both ways, after its length.
A job that takes more CPU time or memory than it may ends the process, and nothing else: the template and the tokenizer
are a stranger's, the messages and schemas are anybody's. Torch is not imported, so that a new process starts quickly.
"""

import contextlib
import functools
import json
import os
import signal
import struct
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from whorl.engine.grammar_masks import native_tokenizer
from whorl.engine.reply_parser import THINK
from whorl.engine.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_LENGTH = struct.Struct("<Q")
OVER_MEMORY = "it takes more memory than this server allows"
_PROOF_TOKENS, _PROOF_SECONDS = 16, 0.5  # what the first tokens of an answer may take
_SETUP_SECONDS = 60  # of CPU time: the vocabulary of a large model takes one or two


class Refused(Exception):
    """What was asked for cannot be done; the message is for the client. kind: of what is wrong."""

    def __init__(self, message: str, kind: str = "invalid") -> None:
        super().__init__(message)
        self.kind = kind


def write(stream: IO[bytes], value: Any) -> None:
    data = json.dumps(value).encode()
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def read(stream: IO[bytes]) -> Any:
    """EOFError where the other side has gone."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    (size,) = _LENGTH.unpack(head)
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return json.loads(data)


class Jobs:
    """The work itself, for one tokenizer. Each public method is a job; what it takes and gives is JSON."""

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
    ) -> dict[str, Any]:
        """A conversation's ids, and whether its prompt opens a think tag.

        places: of its pictures and videos, as `Place.to_json` gives them; None: the model takes none.
        """
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=add_generation_prompt, **variables
            )
        except MemoryError:
            raise
        except Exception as error:  # a template is a program, and its variables come from the client
            raise Refused(f"the chat template failed: {error}", "template") from error
        if places is not None:
            from whorl.media.places import Place, expand

            text = expand(text, [Place.from_json(place) for place in places])
        (ids,) = self.encode([text], False, max_bytes, max_tokens)
        return {"ids": ids, "is_thinking": text.rstrip().endswith(THINK)}

    def encode(
        self, texts: Sequence[str], add_special: bool, max_bytes: int | None, max_tokens: int
    ) -> list[list[int]]:
        """max_bytes: a text of more has more than max_tokens tokens; None: that cannot be told from its size."""
        found = []
        for text in texts:
            size = len(text.encode())  # half a surrogate pair raises here
            if max_bytes is not None and size > max_bytes:
                raise Refused(f"the text has {size} bytes; {max_tokens} tokens hold up to {max_bytes}", "length")
            ids = self._tokenizer.encode(text, add_special=add_special)
            if len(ids) > max_tokens:
                raise Refused(f"the text has {len(ids)} tokens; up to {max_tokens} are taken", "length")
            found.append(ids)
        return found

    def decode(self, lists: Sequence[Sequence[int]]) -> list[str]:
        return [self._tokenizer.decode(ids, skip_special=False) for ids in lists]

    def lark(self, grammar: str) -> str:
        """A grammar that may be llama.cpp's GBNF, as llguidance takes it."""
        from llguidance.gbnf_to_lark import any_to_lark

        try:
            return any_to_lark(grammar)
        except MemoryError:
            raise
        except Exception as error:
            raise Refused(f"the grammar cannot be read: {error}", "schema") from error

    def prove(self, grammar: str, what: str) -> None:
        """That the grammar can be compiled, that a text can begin with it, and that its tokens take little time."""
        from llguidance import LLMatcher

        matcher = LLMatcher(self._native, grammar, log_level=0)
        _check(matcher, what)
        began = time.process_time()
        for _ in range(_PROOF_TOKENS):
            mask = matcher.compute_logit_bias()
            _check(matcher, what)
            if time.process_time() - began > _PROOF_SECONDS:
                raise Refused(f"{what} takes too long to follow", "schema")
            token = next((i for i, bias in enumerate(mask) if bias and i not in self._tokenizer.eos_ids), None)
            if token is None or not matcher.try_consume_tokens([token]):
                return

    @functools.cached_property
    def _native(self) -> "LLTokenizer":
        return native_tokenizer(self._tokenizer, self._vocab_size)

    def prepare(self, name: str) -> None:
        """What the first job of a kind needs that is not its own cost."""
        if name == "prove":
            _ = self._native


def _check(matcher: "LLMatcher", what: str) -> None:
    if matcher.is_error():
        reason = matcher.get_error().partition("\n")[0]
        if reason.startswith("NoExtension"):
            reason = "no text is valid"
        raise Refused(f"{what} cannot be followed: {reason}", "schema")


class Limits:
    """seconds: of CPU time, of one job. memory: bytes of address space beside what is in use before the first job."""

    def __init__(self, seconds: float, memory: int) -> None:
        import resource

        self._resource, self._seconds, self._memory = resource, seconds, memory
        self._set(resource.RLIMIT_CORE, 0)

    def allow_seconds(self, seconds: float | None = None) -> None:
        """From now on; the system ends the process that takes more."""
        usage = self._resource.getrusage(self._resource.RUSAGE_SELF)
        self._set(self._resource.RLIMIT_CPU, int(usage.ru_utime + usage.ru_stime + (seconds or self._seconds)) + 1)

    def allow_memory(self) -> None:
        table = Path("/proc/self/statm")
        if self._memory and table.exists():  # other systems do not keep this limit
            used = int(table.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            self._set(self._resource.RLIMIT_AS, used + self._memory)
        self._memory = 0

    def _set(self, what: int, value: int) -> None:
        hard = self._resource.getrlimit(what)[1]
        self._resource.setrlimit(what, (value if hard < 0 else min(value, hard), hard))


def answer(jobs: Jobs, limits: Limits, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """A job's value, or what is wrong with it."""
    try:
        limits.allow_seconds(_SETUP_SECONDS)
        jobs.prepare(name)
        limits.allow_memory()
        limits.allow_seconds()
        return {"value": getattr(jobs, name)(**arguments)}
    except Refused as error:
        return {"refused": str(error), "kind": error.kind}
    except UnicodeError:
        return {"refused": "the text is not valid Unicode", "kind": "invalid"}
    except ValueError as error:
        return {"refused": str(error), "kind": "invalid"}
    except MemoryError:
        return {"refused": OVER_MEMORY, "kind": "memory"}
    except BaseException as error:  # Rust's panics are no Exceptions
        return {"failed": f"{type(error).__name__}: {str(error)[:500]}"}


def main() -> None:
    """Answer until the other side has gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What a library prints must not get between the answers.
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with contextlib.suppress(EOFError, BrokenPipeError):
        setup = read(source)
        limits = Limits(setup["seconds"], setup["memory"])
        limits.allow_seconds(_SETUP_SECONDS)
        jobs = Jobs(Tokenizer.from_state(setup["tokenizer"]), setup["vocab_size"])
        while True:
            write(sink, answer(jobs, limits, *read(source)))


if __name__ == "__main__":
    main()
