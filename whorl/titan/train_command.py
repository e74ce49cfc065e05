"""`whorl train RECIPE`: torchrun around TorchTitan, with the run shown while it goes."""

import contextlib
import importlib.util
import shlex
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RECIPES = Path(__file__).parent / "recipes"
CONFIG = "whorl.titan.config"
LOGS = "logs"
SHOWN_LINES = 25  # of a rank's log when it failed
STOPPED = "stopped; the same command goes on from the last checkpoint, where the recipe makes them"


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    recipe: Path
    folder: Path
    ranks: int
    command: list[str]
    locked: list[Path]  # folders that one run at a time writes into; none where several machines share them


def recipes() -> dict[str, str]:
    """Names, and what each says of itself."""
    found = {}
    for path in sorted(RECIPES.glob("*.toml")):
        found[path.stem] = _read(path).get("job", {}).get("description", "")
    return found


def find_recipe(name: str) -> Path:
    """A recipe of ours by name, or any TorchTitan TOML by path."""
    if name.startswith("-"):
        raise ValueError(f"train: say the recipe first, then TorchTitan's options: whorl train RECIPE {name} ...")
    path = Path(name)
    if path.suffix == ".toml":
        if not path.is_file():
            raise ValueError(f"train: {name}: no such file")
        return path
    ours = RECIPES / f"{name}.toml"
    if not ours.is_file():
        raise ValueError(f"train: no recipe {name!r}; there are {', '.join(recipes())}, or give a .toml file")
    return ours


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"train: {path}: {error}") from error


def check_options(options: Sequence[str]) -> None:
    """TorchTitan's all have a section; what has none was meant for us and misspelt."""
    for option in options:
        if option.startswith("-") and "." not in option.split("=")[0] and not _is_number(option):
            raise ValueError(
                f"train: no such option: {option}. TorchTitan's are --section.name, as --training.steps 10"
            )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def given(options: Sequence[str], section: str, name: str) -> str | None:
    """The value of an option, however it is spelt; the last one counts."""
    found = None
    spellings = {f"--{section}.{name}", f"--{section}.{name.replace('_', '-')}"}
    for i, option in enumerate(options):
        key, is_joined, value = option.partition("=")
        if key in spellings:
            found = value if is_joined else next(iter(options[i + 1 : i + 2]), None)
    return found


def prepare(recipe: str, options: Sequence[str], *, ranks: int | None, torchrun: str) -> Job:
    """ranks: of this machine; None: one for each accelerator. torchrun: more of its options, for several machines."""
    _need_torchtitan()
    check_options(options)
    path = find_recipe(recipe)
    settings = _read(path)
    job = settings.get("job", {})
    folder = given(options, "job", "dump_folder") or job.get("dump_folder") or f"outputs/{path.stem}"
    count = ranks or _local_ranks()
    more = [] if job.get("custom_config_module") else ["--job.custom_config_module", CONFIG]
    if given(options, "job", "custom_config_module"):
        more = []
    arguments = ["--job.config_file", str(path), "--job.dump_folder", folder, *more, *options]
    launch = shlex.split(torchrun)
    machines = num_machines(launch)
    locked = _check_job(arguments, None if machines is None else machines * count)
    meeting = [] if torchrun else ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    command = [
        *(sys.executable, "-m", "torch.distributed.run"),
        *(f"--nproc-per-node={count}", *meeting, *launch),
        *(f"--log-dir={Path(folder) / LOGS}", "--redirects=3"),
        *("-m", "whorl.titan.worker", *arguments),
    ]
    return Job(recipe=path, folder=Path(folder), ranks=count, command=command, locked=[] if torchrun else locked)


def num_machines(launch: Sequence[str]) -> int | None:
    """By torchrun's options; None where it may change while the run goes."""
    found = "1"
    for i, option in enumerate(launch):
        key, is_joined, value = option.partition("=")
        if key == "--nnodes":
            found = value if is_joined else next(iter(launch[i + 1 : i + 2]), "")
    first, _, last = found.partition(":")
    return int(first) if first.isdigit() and last in ("", first) else None


def _check_job(arguments: Sequence[str], num_ranks: int | None) -> list[Path]:
    """As every rank reads and checks it, but before there are any. The folders that the run will lock."""
    from whorl.titan import job_options

    try:
        config = job_options.read(arguments)
        job_options.check(config, num_ranks)
    except ValueError as error:
        raise ValueError(f"train: {error}") from error
    return job_options.locked_folders(config)


def _need_torchtitan() -> None:
    if importlib.util.find_spec("torchtitan") is None:
        raise ValueError("train needs TorchTitan: pip install 'whorl[train]'")


def _local_ranks() -> int:
    from whorl.device import default_device, device_count

    return device_count(default_device()) or 1


def set_aside(folder: Path) -> Path | None:
    """Rename a run's folder, so that the next one starts anew; its new name, or None where there is none."""
    if not folder.exists():
        return None
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    return folder.rename(aside)


def run(job: Job) -> int:
    """The exit code: 0, or 1 when it was stopped or a rank failed; then the end of that rank's log is printed."""
    from whorl.titan import ending
    from whorl.titan.display import Display

    logs = job.folder / LOGS
    logs.mkdir(parents=True, exist_ok=True)
    before = set(logs.iterdir())
    with ending.Signals() as signals:
        process = ending.start(job.command)
        with Display(job.folder) as display:
            errors = ending.wait(process, display.update, signals)
    if errors is None:
        with contextlib.suppress(OSError):  # the terminal may be what is gone
            print(STOPPED, file=sys.stderr)
        return 1
    if process.returncode:
        _say_failure(set(logs.iterdir()) - before, errors, process.returncode)
        return 1
    _say_end(job, len(display.history.steps))
    return 0


def _say_end(job: Job, num_steps: int) -> None:
    if num_steps:
        print(f"{num_steps} logged steps are in {job.folder}/metrics.jsonl; whorl train --plot {job.folder} draws them")
        return
    print(
        f"{job.folder} holds a run that has made all its steps: --training.steps N goes on, --fresh starts anew, "
        "--job.dump_folder FOLDER keeps both"
    )


def _say_failure(folders: set[Path], errors: str, code: int) -> None:
    print(f"whorl: training failed (torchrun: exit {code})", file=sys.stderr)
    log = first_failure(folders)
    if log is None:
        print(errors.strip(), file=sys.stderr)
        return
    text = log.read_text(encoding="utf-8", errors="replace").rstrip()
    print(f"--- {log}", *text.splitlines()[-SHOWN_LINES:], sep="\n", file=sys.stderr)


def first_failure(folders: set[Path]) -> Path | None:
    """The log of the rank that failed first: others fail because of it. torchrun has a file of each one's error."""
    marks = [mark for folder in folders for mark in folder.rglob("error.json")]
    logs = [mark.with_name("stderr.log") for mark in sorted(marks, key=lambda mark: mark.stat().st_mtime_ns)]
    logs = logs or sorted(log for folder in folders for log in folder.rglob("stderr.log"))
    return next((log for log in logs if log.is_file() and log.stat().st_size), None)
