"""Documentation is held to the code: links lead somewhere, commands parse, figures are those that were measured."""

import functools
import importlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from whorl.cli import app

ROOT = Path(__file__).parents[2]
UsageError = typer.BadParameter.__mro__[1]  # newer typer carries its own click, older ones import it
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").glob("**/*.md")),
    *sorted((ROOT / "bench" / "results").glob("*.md")),
]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_INLINE = re.compile(r"`((?:whorl |python -m bench\.)[^`]+)`")
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


def prose(page: Path) -> str:
    """The page without its blocks of code."""
    return _FENCE.sub("", page.read_text())


# ---- links


def anchors(page: Path) -> set[str]:
    """Names of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)).lower() for text in headings]
    return {text.strip().replace(" ", "-") for text in plain}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page: Path) -> None:
    for target in _LINK.findall(prose(page)):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: the link {target} leads nowhere"
        assert file.is_relative_to(ROOT), f"{page.name}: the link {target} leaves the repository"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{page.name}: {file.name} has no heading for #{anchor}"


def test_the_map_has_every_page() -> None:
    listed = set(_LINK.findall((ROOT / "docs" / "README.md").read_text()))
    missing = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"} - listed
    assert not missing, f"docs/README.md does not mention {sorted(missing)}"


# ---- commands


def lines_of_blocks(page: Path) -> Iterator[str]:
    """Lines of code blocks that a person might type, with continued lines joined."""
    for language, block in _FENCE.findall(page.read_text()):
        if language in ("", "sh", "bash", "console"):
            yield from block.replace("\\\n", " ").splitlines()


def commands(page: Path) -> list[str]:
    typed = [line.removeprefix("$ ").strip() for line in lines_of_blocks(page)]
    return [part.strip() for line in typed for part in re.split(r"\s&&\s", line)]


def arguments(command: str) -> list[str]:
    """What the shell would pass on, of a command line that may be a synopsis: comments and brackets are taken off,
    of alternatives the first is taken, and what is left out (...) stays out."""
    command = re.split(r"\s#\s|\s{2,}|\s[<>]\s", command)[0].replace('"..."', "TEXT")
    command = re.sub(r"\[([^\[\]]*?)\s\|\s[^\[\]]*\]", r"\1", command)
    if "{" not in command:  # JSON has brackets of its own
        command = re.sub(r"(\w)\|[\w|]+", r"\1", command.replace("[", " ").replace("]", " "))
    return [word for word in shlex.split(command) if word != "..."]


def program_of(command: str) -> tuple[Any, str] | None:
    """The program that a command line runs and the rest of the line: whorl, or a script in bench; None for others."""
    if command.startswith("whorl "):
        return typer.main.get_command(app), command
    if (script := re.match(r"python -m (bench\.\w+)", command)) is None:
        return None
    return typer.main.get_command(importlib.import_module(script[1]).app), command.removeprefix("python -m ")


def known_options(command: Any, words: list[str]) -> set[str]:
    """Options of the command that the words begin with."""
    for word in words:
        command = getattr(command, "commands", {}).get(word, command)
    options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return options | {"--help", "--help-all"}


def parse(words: list[str], command: Any = None) -> None:
    """Parse without running: unknown commands, options and values raise UsageError or Exit."""
    command = command or typer.main.get_command(app)
    context: Any = None
    while True:
        context = command.make_context(command.name or "whorl", list(words), parent=context)
        rest = [*getattr(context, "_protected_args", ()), *context.args]
        if not rest or not hasattr(command, "resolve_command"):
            return
        _, command, words = command.resolve_command(context, rest)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_parse(page: Path) -> None:
    problems = []
    for command in commands(page):
        program, line = program_of(command) or (None, "")
        if program is None:
            continue
        try:
            parse(["4" if word == "N" else word for word in arguments(line)[1:]], program)
        except typer.Exit as end:  # 0: --help
            problems += [command] if end.exit_code else []
        except (UsageError, ValueError) as error:
            problems.append(f"{command}: {error}")
    assert not problems, f"{page.name}: " + "\n".join(problems)


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=str)
def test_options_in_sentences_exist(page: Path) -> None:
    for command in _INLINE.findall(prose(page)):
        program, line = program_of(command) or (None, "")
        words = re.sub(r"[\[\],|]", " ", line).split()[1:]
        options = {word.partition("=")[0] for word in words if re.fullmatch(r"--[a-z][\w-]*(=.*)?", word)}
        unknown = options - known_options(program, words)
        # `whorl train` hands options on to TorchTitan, which knows them.
        assert not unknown or words[:1] == ["train"], f"{page.name}: {command}: there is no {sorted(unknown)}"


def test_a_wrong_command_would_be_noticed() -> None:
    with pytest.raises(UsageError, match="No such option"):
        parse(["ops", "--no-such-option"])
    with pytest.raises(typer.Exit):
        parse(["serve", "MODEL", "--no-such-option"])
    with pytest.raises(UsageError, match="No such command"):
        parse(["bench", "nonsense"])
    assert arguments("whorl chat [MODEL] [--pld | --no-pld]   talk # with it") == ["whorl", "chat", "MODEL", "--pld"]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_files_and_targets_of_commands_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in commands(page):
        words = command.split("#")[0].split()
        if words[:1] == ["make"]:
            missing = [word for word in words[1:] if re.fullmatch(r"[a-z][\w-]*", word) and word not in targets]
            assert not missing, f"{page.name}: {command}: the Makefile has no {missing[0]}"
        for word in words:
            if re.fullmatch(r"(examples|tests|bench|docs)/[\w/.-]+\.(py|md|json|sh|toml)", word):
                assert (ROOT / word).exists() or ">" in command, f"{page.name}: {command}: there is no {word}"


# ---- sessions and programs


def sessions() -> dict[str, tuple[str, str]]:
    """Commands that a page shows together with their output: `$ command`, then lines; `...` stands for any lines."""
    commands = {}
    for page in PAGES:
        for language, block in _FENCE.findall(page.read_text()):
            if language in ("", "console") and block.startswith("$ whorl "):
                command, _, output = block.partition("\n")
                commands[f"{page.name}: {command}"] = (command.removeprefix("$ "), output)
    return commands


SESSIONS = sessions()
_SLOW = ("generate", "train", "selftest", "bench")


def session_cases() -> list[Any]:
    marks = {name: [pytest.mark.slow] * (command.split()[1] in _SLOW) for name, (command, _) in SESSIONS.items()}
    return [pytest.param(name, marks=marks[name]) for name in SESSIONS]


@pytest.mark.parametrize("name", session_cases())
def test_sessions_show_what_is_printed(name: str) -> None:
    command, shown = SESSIONS[name]
    words = [sys.executable, "-m", "whorl", *shlex.split(command)[1:]]
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    printed = iter(line.rstrip() for line in result.stdout.splitlines())
    skip = False
    for line in shown.splitlines():
        if line.strip() == "...":
            skip = True
            continue
        expected = re.sub(r"(\\ )*\\\.\\\.\\\.", ".*", re.escape(line.rstrip()))
        for actual in printed:
            if re.fullmatch(expected, actual):
                break
            assert skip, f"{name}: expected {line!r}, got {actual!r}"
        else:
            raise AssertionError(f"{name}: {line!r} is not printed\n{result.stdout}{result.stderr}")
        skip = False


# Commands of the pages that take seconds on a CPU and need no download, run as they are written. Other tests run
# `whorl train tiny`, `whorl selftest`, `whorl serve` and the examples.
RUN = {
    "docs/training.md": "whorl train --plan deepseek-v3.2 --cards 64 --dies 2 --memory 64 --seq 32768",
    "docs/operators.md": "whorl ops",
}


@pytest.mark.parametrize("page", RUN)
def test_commands_run(page: str, tmp_path: Path) -> None:
    command = RUN[page]
    assert command in (ROOT / page).read_text(), f"{page} no longer has {command}"
    words = [sys.executable, "-m", "whorl", *shlex.split(command)[1:]]
    result = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_the_programs_of_the_readme_run(tmp_path: Path) -> None:
    blocks = [block for language, block in _FENCE.findall((ROOT / "README.md").read_text()) if language == "python"]
    ready = [block for block in blocks if "install(model)" not in block]  # that one needs the reader's model
    assert len(ready) == 2
    for block in ready:
        subprocess.run([sys.executable, "-c", block], cwd=tmp_path, check=True, timeout=300)


@pytest.mark.slow
def test_the_program_of_passes_runs(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "passes.md").read_text()
    (program,) = [block for _, block in _FENCE.findall(text) if "init_process_group" in block]
    (tmp_path / "sp.py").write_text(program)
    words = ["--standalone", "--nproc-per-node", "2", "sp.py"]
    assert f"torchrun {shlex.join(words)}" in text
    command = [sys.executable, "-m", "torch.distributed.run", *words]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "equal bits: True" in result.stdout
    assert "3 of 3 collectives rewritten" in result.stdout


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_programs_compile(page: Path) -> None:
    for language, block in _FENCE.findall(page.read_text()):
        if language == "python" and page.name != "api.md":  # signatures, not programs
            compile(block, str(page), "exec", flags=1 << 13)  # ast.PyCF_ALLOW_TOP_LEVEL_AWAIT


# ---- figures


def test_generated_files_are_current() -> None:
    result = subprocess.run(
        [sys.executable, "docs/source/build.py", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


_FIGURE = re.compile(r"(?<![\w.])(\d[\d.]*)(?: ?(?:tok/s|TFLOP/s|TB/s|us)\b|x (?:as fast|transformers))")


@functools.cache
def measured() -> set[str]:
    """Every number in the recorded results, and those of the JSON documents rounded to what a page would say."""
    texts = [path.read_text() for path in (ROOT / "bench" / "results").glob("*.md")]
    numbers = {number.rstrip(".") for text in texts for number in re.findall(r"\d[\d.]*", text)}
    for path in (ROOT / "bench" / "results").glob("*.json"):
        for number in re.findall(r"(?<![\w.])\d+\.\d+", path.read_text()):
            numbers |= {f"{float(number):.{digits}f}" for digits in (0, 1, 2)}
    return numbers


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))])
def test_figures_were_measured(page: str) -> None:
    """A speed that a page states is in bench/results."""
    known = measured()
    wrong = [match[0] for match in _FIGURE.finditer(prose(ROOT / page)) if match[1].rstrip(".") not in known]
    assert not wrong, f"{page}: no file of bench/results has {wrong}"


def test_a_figure_out_of_nowhere_would_be_noticed() -> None:
    assert _FIGURE.search("it runs at 98765.4 tok/s")
    assert "98765.4" not in measured()
