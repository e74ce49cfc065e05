"""Parse the tracebacks of a log: which exceptions were raised, and in which frames.

A log mixes the output of ranks, timestamps and prints. An exception is judged only by its own text and its own frames:
a printed config or list of arguments beside it is no evidence of its cause.
"""

import re
from dataclasses import dataclass, field
from typing import Final

ANSI: Final = re.compile(r"(?:\x1b|\^\[)\[[0-9;]*[A-Za-z]")
BOX: Final = "\u2502\u2503"  # the vertical bars of rich's boxes
# Prefixes of a line that name the rank or process that wrote it. All lines of one traceback have the same ones.
OWNER: Final = re.compile(
    r"\[(?:rank|default)\d+\]:?"
    r"|\((?=[^()]*\b(?:pid|rank|ip)=)[^()]*\)"
    r"|(?:worker|node|rank)[-_ ]?\d+:"
    r"|\d{1,5}:(?=\s)"
)
# Prefixes that a logger or a shell writes and that change from line to line.
DECORATION: Final = re.compile(
    r"[\[\u3010]?\d{4}[-/]\d\d[-/]\d\d[ T_-]\d\d:\d\d:\d\d(?:[.,]\d+)*(?:Z|[+-]\d\d:?\d\d)?[\]\u3011]?"
    r"|\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)?"
    r"|\d\d:\d\d:\d\d(?:[.,]\d+)?"
    r"|\b(?:[A-Z]?RROR|ERROR|INFO|WARN|WARNING|CRITICAL|DEBUG|FATAL)\b(?::\w+)?:?(?!:)"
    r"|\[?[\w./<>~-]+\.(?:py|cc|cpp):\d+(?:\]|:(?=\s))"
    r"|\b(?:stderr|stdout)\b|[|>\u2502\u2503]|-(?=\s)"
)
HEADER: Final = re.compile(r"Traceback \(most recent call last\)")
CHAIN: Final = re.compile(r"During handling of the above exception|The above exception was the direct cause")
FRAME: Final = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>.+))?$')
# Notebooks write `File path:12, in f(x)` or `path in f(x)`, rich writes `path:12 in f`.
OTHER_FRAME: Final = re.compile(
    r"(?:File )?\[?(?P<file>(?:[A-Za-z]:)?[~/\\\w.-]*\.py|<ipython-input[^>]*>)(?::(?P<line>\d+))?\]?(?:\([^)]*\))?,? "
    r"in (?P<function><?[\w.]+>?(?: line: ?\d+>)?)(?:\(.*\)?)?$"
)
MARKED_CODE: Final = re.compile(r"(?:-+>|\u2771)\s*(?P<line>\d+)\s*[\u2502|]?\s*(?P<code>.*)$")
MARKS: Final = re.compile(r"[\s~^]+$|\[Previous line repeated ")
NAME: Final = r"(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception|Warning|Interrupt|Exit|Timeout|Iteration|Unsupported)"
EXCEPTION: Final = re.compile(rf"(?P<name>{NAME})(?:\([\w.]+\))?(?::\s?(?P<message>.*))?$")
LIBRARY: Final = re.compile(r"[/\\](?:torch|torch_npu)[/\\]|[/\\](?:contextlib|functools|runpy)\.py$|^<frozen ")
MOST_PREFIXES: Final = 12  # of one line: timestamp, level, source file, rank
LONGEST_MESSAGE: Final = 16  # lines; the lines after them count as other output
LONGEST_GAP: Final = 60  # lines without a frame, after which a traceback counts as cut off


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """One frame of a traceback, with its source line where the log shows it."""

    file: str
    line: int
    function: str
    code: str = ""

    def __str__(self) -> str:
        return f"{self.file} in {self.function}: {self.code}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """One exception: `text` is its name and message, `lines` are the line numbers of that text in the log."""

    text: str
    lines: tuple[int, ...]
    frames: tuple[Frame, ...] = ()

    @property
    def origin(self) -> Frame | None:
        """The frame that raised: the innermost one outside torch and the standard library."""
        frames = [frame for frame in self.frames if not LIBRARY.search(frame.file)]
        return frames[-1] if frames else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A line of the log without its prefixes. `is_code` marks source lines that a traceback quotes."""

    number: int
    text: str
    is_code: bool = False


@dataclass(slots=True)
class _Stream:
    """The traceback that one rank or process is printing, as far as it has been read.

    failures: where its exceptions are added; last_seen: the line number of the last header or frame; wants_code: the
    next line may be the last frame's source; message: number and text of each line of the exception's message;
    decorated: whether the message's first line has a logger's prefix; a line that differs in this does not belong to
    the message.
    """

    failures: list[Failure]
    frames: list[Frame] = field(default_factory=list)
    last_seen: int = 0
    wants_code: bool = False
    message: list[tuple[int, str]] = field(default_factory=list)
    decorated: bool = False

    def finish(self) -> None:
        """Add the exception whose message has been read, if there is one, and start anew."""
        if self.message:
            lines, texts = zip(*self.message, strict=True)
            self.failures.append(Failure(text="\n".join(texts), lines=lines, frames=tuple(self.frames)))
            self.frames, self.message, self.wants_code = [], [], False


def read_failures(text: str) -> tuple[list[Failure], list[Line]]:
    """Return the exceptions of a log, sorted by line, and its lines without their prefixes."""
    streams: dict[str, _Stream] = {}
    failures: list[Failure] = []
    lines: list[Line] = []
    for number, raw in enumerate(text.splitlines(), 1):
        owner, decorated, body = _strip_prefixes(raw)
        is_code = _read_line(streams.setdefault(owner, _Stream(failures)), number, body, decorated)
        lines.append(Line(number=number, text=body, is_code=is_code))
    for stream in streams.values():
        stream.finish()
    return sorted(failures, key=lambda failure: failure.lines), lines


def _strip_prefixes(raw: str) -> tuple[str, bool, str]:
    """Return the rank or process that wrote the line, whether a logger wrote it, and the line without its prefixes."""
    line = ANSI.sub("", raw).rstrip().rstrip(BOX).rstrip()
    owner, decorated, start = "", False, 0
    for _ in range(MOST_PREFIXES):
        at = len(line) - len(line[start:].lstrip())
        if match := OWNER.match(line, at):
            owner += match.group()
        elif match := DECORATION.match(line, at):
            decorated = True
        else:
            break
        start = match.end()
    body = line[start:]
    return owner, decorated, body.removeprefix(" ") if start else body


def _read_line(stream: _Stream, number: int, body: str, decorated: bool) -> bool:
    """Add one line to a stream; return whether it is quoted source code."""
    bare = body.strip()
    frame = FRAME.match(bare) or OTHER_FRAME.match(bare)
    if HEADER.search(bare) or CHAIN.search(bare) or frame:
        stream.finish()
        if not frame or number - stream.last_seen > LONGEST_GAP:
            stream.frames = []
        if frame:
            function = (frame["function"] or "").strip()
            stream.frames.append(Frame(file=frame["file"], line=int(frame["line"] or 0), function=function))
        stream.last_seen, stream.wants_code = number, frame is not None
    elif MARKS.match(bare):
        return True
    elif stream.frames and not stream.message and (marked := MARKED_CODE.match(bare)):
        _set_source_line(stream, marked["code"], int(marked["line"]))
        return True
    elif exception := EXCEPTION.match(bare):
        _start_exception(stream, number, bare, decorated, is_bare=exception["message"] is None)
    elif stream.message:
        # An empty line, a line with another kind of prefix, and too many lines end a message.
        if not bare or decorated != stream.decorated or len(stream.message) == LONGEST_MESSAGE:
            stream.finish()
        else:
            stream.message.append((number, bare))
    elif stream.wants_code and bare:
        _set_source_line(stream, bare, None)
        return True
    return False


def _set_source_line(stream: _Stream, code: str, line: int | None) -> None:
    """Attach a quoted source line to the last frame."""
    last = stream.frames[-1]
    stream.frames[-1] = Frame(file=last.file, line=line or last.line, function=last.function, code=code.strip())
    stream.wants_code = False


def _start_exception(stream: _Stream, number: int, bare: str, decorated: bool, *, is_bare: bool) -> None:
    """Read the first line of an exception.

    is_bare: the line is an exception's name without a message, which counts only at the end of a traceback.
    """
    if stream.message and stream.frames and decorated == stream.decorated:
        stream.message.append((number, bare))  # the message goes on and quotes another process's error
        return
    stream.finish()
    if number - stream.last_seen > LONGEST_GAP:
        stream.frames = []
    if stream.frames or not is_bare:
        stream.message, stream.decorated = [(number, bare)], decorated
