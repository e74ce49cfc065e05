"""Prompts written and tokenized in a process with limits: a model's chat template and tokenizer are not trusted."""

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

from whorl.engine.tokenizer import Tokenizer
from whorl.serve.api_error import ApiError
from whorl.serve.worker import JOB_MEMORY, JOB_SECONDS
from whorl.serve.worker_pool import Worker

_MOST_TOKENS = 1 << 40  # the engine compares prompts with its context, and the conversation may drop turns before


class Prompts(Protocol):
    """Writes and tokenizes prompts, as a `Tokenizer` does."""

    def apply_chat_template(self, messages: Sequence[Any], *, enable_thinking: bool | None = None) -> str: ...
    def encode(self, text: str, *, add_special: bool = True) -> list[int]: ...


class BoundedPrompts:
    """Writes and tokenizes prompts in a worker of the server, with its limits on a job's CPU time and memory.

    Raises ValueError when the template or the tokenizer refuses a prompt or exceeds a limit.
    """

    def __init__(self, tokenizer: Tokenizer, *, seconds: float = JOB_SECONDS, memory: int = JOB_MEMORY) -> None:
        state = {"tokenizer": tokenizer.state(), "vocab_size": len(tokenizer)}
        self._worker = Worker(state | {"seconds": seconds, "memory": memory})
        self.close = weakref.finalize(self, self._worker.end)  # ends the process

    def apply_chat_template(self, messages: Sequence[Any], *, enable_thinking: bool | None = None) -> str:
        variables = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        options = {"tools": None, "add_generation_prompt": True, "variables": variables}
        return str(self._ask("the model's chat template", "write_prompt", messages=list(messages), **options))

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        text.encode()  # raises for half a surrogate pair, which JSON would pass on
        limits = {"max_bytes": None, "max_tokens": _MOST_TOKENS}
        ids = self._ask("the model's tokenizer", "encode", texts=[text], add_special=add_special, **limits)
        return list(ids[0])

    def _ask(self, subject: str, job: str, **arguments: Any) -> Any:
        try:
            return self._worker.ask(job, **arguments)
        except ApiError as error:
            raise ValueError(f"{subject}: {error.message}") from error
        except BaseException:  # Ctrl-C: the answer to this job must not be taken for that to the next one
            self._worker.end()
            raise
