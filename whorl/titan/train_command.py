"""Run `whorl train RECIPE`: start TorchTitan by torchrun and show the run while it goes."""

import contextlib
import importlib.util
import shlex
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whorl.extras import how_to_install
from whorl.files import CannotWrite

if TYPE_CHECKING:
    from whorl.titan.display import History

RECIPES = Path(__file__).parent / "recipes"
CONFIG = "whorl.titan.config"
LOGS = "logs"
SHOWN_LINES = 25  # how many lines at the end of a failed rank's log are printed
REASON = "whorl: training failed: "  # begins the last message in the log of a rank, if the reason is known
STOPPED = "stopped; the same command resumes from the last checkpoint, if the recipe writes checkpoints"


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A training run that is ready to start."""

    recipe: Path
    folder: Path
    ranks: int  # processes on this machine
    command: list[str]  # the torchrun command line
    # The folders to check for another run before this one starts. Empty if the user sets options of torchrun, because
    # another machine of the same run may then hold the locks.
    locked: list[Path]


def recipes() -> dict[str, str]:
    """Return the description of each of our recipes by its name."""
    descriptions = {}
    for path in sorted(RECIPES.glob("*.toml")):
        descriptions[path.stem] = _read(path).get("job", {}).get("description", "")
    return descriptions


def find_recipe(name: str) -> Path:
    """Return the path of a recipe. name: the name of one of our recipes, or the path of a TorchTitan TOML file.

    Raises ValueError when there is no such recipe or file.
    """
    if name.startswith("-"):
        raise ValueError(f"train: give the recipe before TorchTitan's options: whorl train RECIPE {name} ...")
    path = Path(name)
    if path.suffix == ".toml":
        if not path.is_file():
            raise ValueError(f"train: {name}: no such file")
        return path
    ours = RECIPES / f"{name}.toml"
    if not ours.is_file():
        raise ValueError(f"train: no recipe {name!r}, expected one of {', '.join(recipes())} or a .toml file")
    return ours


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"train: {path}: {error}") from error


def check_options(options: Sequence[str]) -> None:
    """Raise ValueError for an option without a section.

    All options of TorchTitan are `--section.name`, so that an option without a dot is a misspelt option of ours.
    """
    for option in options:
        if option.startswith("-") and "." not in option.split("=")[0] and not _is_number(option):
            raise ValueError(
                f"train: no such option: {option}. TorchTitan's options are --section.name, such as --training.steps 10"
            )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def option_value(options: Sequence[str], section: str, name: str) -> str | None:
    """Return the value of --section.name in the options, None if it is not set; the last of several counts.

    As in TorchTitan, the name may have dashes for underscores, and `=` may join it with the value.
    """
    return _last_value(options, (f"--{section}.{name}", f"--{section}.{name.replace('_', '-')}"))


def _last_value(options: Sequence[str], spellings: Sequence[str]) -> str | None:
    """Return the last value of an option with these spellings: "" if nothing follows it, None if it is not set."""
    result = None
    for i, option in enumerate(options):
        key, is_joined, value = option.partition("=")
        if key in spellings:
            result = value if is_joined else next(iter(options[i + 1 : i + 2]), "")
    return result


def build_job(recipe: str, options: Sequence[str], *, ranks: int | None, torchrun: str) -> Job:
    """Return the job of a recipe with TorchTitan's options; raises ValueError when it cannot run.

    ranks: processes on this machine; None: one for each accelerator. torchrun: more options for torchrun, such as those
    for several machines.

        run(build_job("tiny", ["--training.steps", "10"], ranks=1, torchrun=""))
    """
    _need_torchtitan()
    check_options(options)
    path = find_recipe(recipe)
    settings = _read(path)
    job = settings.get("job", {})
    folder = option_value(options, "job", "dump_folder") or job.get("dump_folder") or f"outputs/{path.stem}"
    count = ranks or _local_ranks()
    config_module = [] if job.get("custom_config_module") else ["--job.custom_config_module", CONFIG]
    if option_value(options, "job", "custom_config_module"):
        config_module = []
    arguments = ["--job.config_file", str(path), "--job.dump_folder", folder, *config_module, *options]
    launch_options = shlex.split(torchrun)
    machines = num_machines(launch_options)
    locked = _check_job(arguments, None if machines is None else machines * count)
    rendezvous = [] if torchrun else ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    command = [
        *(sys.executable, "-m", "torch.distributed.run"),
        *(f"--nproc-per-node={count}", *rendezvous, *launch_options),
        *(f"--log-dir={Path(folder) / LOGS}", "--redirects=3"),
        *("-m", "whorl.titan.worker", *arguments),
    ]
    return Job(recipe=path, folder=Path(folder), ranks=count, command=command, locked=[] if torchrun else locked)


def num_machines(launch: Sequence[str]) -> int | None:
    """Return the number of machines that torchrun's options name, 1 by default.

    The result is None where the number may change during the run (--nnodes 1:4).
    """
    nodes = _last_value(launch, ("--nnodes",))
    first, _, last = ("1" if nodes is None else nodes).partition(":")
    return int(first) if first.isdigit() and last in ("", first) else None


def _check_job(arguments: Sequence[str], num_ranks: int | None) -> list[Path]:
    """Check a job as every rank will, before any rank is started; return the folders that the run will lock."""
    from whorl.titan import job_options

    try:
        config = job_options.read(arguments)
        job_options.check(config, num_ranks)
    except ValueError as error:
        raise ValueError(f"train: {error}") from error
    return job_options.locked_folders(config)


def _need_torchtitan() -> None:
    if importlib.util.find_spec("torchtitan") is None:
        raise ValueError(f"train: TorchTitan is not installed: {how_to_install('train')}")


def _local_ranks() -> int:
    from whorl.device import default_device, device_count

    return device_count(default_device()) or 1


def set_aside(folder: Path) -> Path | None:
    """Rename the folder of a run to FOLDER.1, FOLDER.2, ..., so that the next run starts from scratch.

    Return the new path, or None if the folder does not exist.
    """
    if not folder.exists():
        return None
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    return folder.rename(aside)


def prepare(job: Job, *, is_fresh: bool = False) -> None:
    """Create the folders of a run; is_fresh: rename the folder of an earlier run first.

    Raises FolderLocked when another run writes into the folder, and CannotWrite when this one could not.
    """
    from whorl.titan.folder_lock import check_free

    try:
        check_free(job.locked)
        if is_fresh and (aside := set_aside(job.folder)):
            print(f"the earlier run is now in {aside}")
        (job.folder / LOGS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CannotWrite(f"{error.filename or job.folder}: cannot be written: {error.strerror}") from error


def run(job: Job) -> int:
    """Run a prepared job; return 0, or 1 when it was stopped or a rank failed: its reason is printed."""
    from whorl.titan import ending
    from whorl.titan.display import Display

    logs = job.folder / LOGS
    before = set(logs.iterdir())
    with ending.Signals() as signals:
        process = ending.start(job.command)
        with Display(job.folder) as display:
            errors = ending.wait(process, display.update, signals)
    if errors is None:
        with contextlib.suppress(OSError):  # the terminal may have been closed
            print(STOPPED, file=sys.stderr)
        return 1
    if process.returncode:
        _print_failure(set(logs.iterdir()) - before, errors, process.returncode)
        return 1
    _print_end(job, display.history)
    return 0


def _print_end(job: Job, history: "History") -> None:
    num_steps = history.end.get("steps", 0)
    if history.steps:
        text = f"{len(history.steps)} logged steps are in {job.folder}/metrics.jsonl"
        text += f"; plot: whorl train --plot {job.folder}"
    elif num_steps:
        text = (
            f"{num_steps} steps were trained in {job.folder}, and none was logged; log more with --metrics.log_freq 1"
        )
    else:
        text = (
            f"the run in {job.folder} has already finished its steps; continue it with --training.steps N, start again "
            "with --fresh, or write elsewhere with --job.dump_folder FOLDER"
        )
    print(text)


def _print_failure(folders: set[Path], errors: str, code: int) -> None:
    log = first_failure(folders)
    text = errors.strip() if log is None else log.read_text(encoding="utf-8", errors="replace").rstrip()
    _, is_known, reason = text.rpartition(f"\n{REASON}")
    if is_known:
        print(f"{REASON}{reason} (log: {log})", file=sys.stderr)
        return
    print(f"whorl: training failed (torchrun: exit {code})", file=sys.stderr)
    if log is None:
        print(text, file=sys.stderr)
    else:
        print(f"--- {log}", *text.splitlines()[-SHOWN_LINES:], sep="\n", file=sys.stderr)


def first_failure(folders: set[Path]) -> Path | None:
    """Return the log of the rank that failed first, because its error usually explains those of the other ranks.

    folders: the log folders of the run. torchrun writes an error.json for each failed rank; their times give the order.
    Without such files it is the first log that is not empty; None if there is none.
    """
    marks = [mark for folder in folders for mark in folder.rglob("error.json")]
    logs = [mark.with_name("stderr.log") for mark in sorted(marks, key=lambda mark: mark.stat().st_mtime_ns)]
    logs = logs or sorted(log for folder in folders for log in folder.rglob("stderr.log"))
    return next((log for log in logs if log.is_file() and log.stat().st_size), None)
