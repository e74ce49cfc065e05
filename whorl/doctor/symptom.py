"""A `Symptom` is the message of a failure, with its cause and its fix."""

import functools
import re
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace

from whorl.doctor.launch import Launch
from whorl.doctor.report import Severity, Steps
from whorl.doctor.tracebacks import Failure


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a message was read: from its start on (`text`), in which exception (None: a printed line), log and launch.

    launch: that of the files beside the log; None where there are none.
    """

    text: str
    log: str = ""
    failure: Failure | None = None
    launch: Launch | None = None


@dataclass(frozen=True, slots=True)
class Symptom:
    """The message of a failure, its cause and its fix. `code` is that of the check that reports it before the launch.

    `text` is a pattern that is searched in the exception's name and message. An exception that any code can raise also
    needs `raised_in`, a pattern that is searched in the frame that raised it ("file in function: code"). `is_printed`
    marks a text that a library's logger writes on a separate line, without an exception. `with_numbers` returns the
    symptom of one message, whose cause, expected value and fix are computed from the numbers in it.
    """

    code: str
    text: str
    _: KW_ONLY
    cause: str
    expected: str
    fix: Steps
    severity: Severity = "error"
    raised_in: str | None = None
    is_printed: bool = False
    with_numbers: Callable[["Symptom", re.Match[str], Place], "Symptom"] | None = None

    def at(self, place: Place) -> "Symptom":
        """Return this symptom for one message, or itself where its sentences need no numbers."""
        match = re.search(self.text, place.text)
        return self if match is None or self.with_numbers is None else self.with_numbers(self, match, place)

    def saying(self, *causes: str | None, expected: str = "", fix: Steps) -> "Symptom":
        """Return this symptom with more sentences of its cause, and with another expected value and fix."""
        cause = " ".join(sentence for sentence in (self.cause, *causes) if sentence)
        return replace(self, cause=cause, expected=expected or self.expected, fix=fix)


printed = functools.partial(Symptom, is_printed=True)
