"""What every test starts from: one seed, one device, and memory in which nothing is zero by luck."""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

# As `make test` has it, also for a single file: what a test forks would wait for its parent's threads for ever. torch
# reads it when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Every run makes its trials itself, and leaves nothing in anybody's home.
os.environ["WHORL_CACHE_DIR"] = os.environ["WHORL_STATE_DIR"] = ""

import pytest
import torch
from folders import ROOMS
from interpreter import compute_as_hardware

sys.path[:0] = ROOMS
pytest_plugins = ["chromium"]  # fixtures of tests/serve; a conftest.py there would hide this one
HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    # Read when a kernel is defined, so it is set before any test imports one.
    os.environ.setdefault("TRITON_INTERPRET", "1")
    compute_as_hardware()

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As in the background of a shell, where programs ignore Ctrl-C and so would those that the tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)

RUN_ALL = "WHORL_TEST_ALL"
LONG = Path(__file__).with_name("long_tests.txt")


def runs_slow(config: pytest.Config) -> bool:
    return bool(config.getoption("--slow")) or os.environ.get(RUN_ALL) == "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help=f"run the tests marked slow too (as does {RUN_ALL}=1)")
    parser.addoption("--quick", action="store_true", help="no long tests, and few variants of tests marked `sampled`")
    parser.addoption("--rest", action="store_true", help="what --quick leaves out")


def pytest_configure(config: pytest.Config) -> None:
    # Deterministic mode is on for the NaN filling alone.
    config.addinivalue_line("filterwarnings", "ignore:.*does not have a deterministic implementation:UserWarning")
    config.addinivalue_line("filterwarnings", "ignore:Deterministic behavior was enabled:UserWarning")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Thousands of tests stay until the end: whoever collects garbage need not walk through them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--quick") or config.getoption("--rest"):
        chosen, is_quick = quick(items), bool(config.getoption("--quick"))
        config.hook.pytest_deselected(items=[item for item in items if (item in chosen) is not is_quick])
        items[:] = [item for item in items if (item in chosen) is is_quick]
    skip_slow = pytest.mark.skip(reason=f"slow: pass --slow or set {RUN_ALL}=1")
    skip_gpu = pytest.mark.skip(reason="needs an NVIDIA GPU")
    run_slow = runs_slow(config)
    for item in items:
        if "slow" in item.keywords:
            item.user_properties.append(("slow", "1"))  # record_all.py reads it
            if not run_slow:
                item.add_marker(skip_slow)
        if "gpu" in item.keywords and not HAS_CUDA:
            item.add_marker(skip_gpu)


def quick(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return what `make test` runs: of long tests none, but the shortest of a file that has no others; of tests marked
    `sampled` a few variants.

    Long tests are those in long_tests.txt, which `make test-all` writes. `sampled(*names, keep=1)`: of the variants
    that are equal in the parameters `names` it runs `keep`, evenly spaced, so that every value of those is tested.
    """
    seconds = {name: int(time) for time, name in (line.split(" ", 1) for line in LONG.read_text().splitlines())}
    chosen: set[pytest.Item] = set()
    variants: dict[tuple[object, ...], list[pytest.Item]] = {}
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        if "slow" not in item.keywords:
            files.setdefault(item.path, []).append(item)
    for path, of_file in files.items():
        short = [item for item in of_file if f"{path.stem}::{item.name}" not in seconds]
        for item in short or sorted(of_file, key=lambda item: seconds[f"{path.stem}::{item.name}"])[:1]:
            sampled = item.get_closest_marker("sampled")
            if sampled is None:
                chosen.add(item)
                continue
            values = (item.callspec.params[name] for name in sampled.args)  # type: ignore[attr-defined]
            key = path, item.originalname, *(getattr(value, "name", value) for value in values)  # type: ignore[attr-defined]
            variants.setdefault(key, []).append(item)
    for alike in variants.values():
        keep = min(alike[0].get_closest_marker("sampled").kwargs.get("keep", 1), len(alike))  # type: ignore[union-attr]
        chosen |= {alike[i * len(alike) // keep] for i in range(keep)}
    return chosen


@pytest.fixture
def device() -> str:
    return "cuda" if HAS_CUDA else "cpu"


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    """One seed, and NaN in torch.empty: a kernel that leaves an element unwritten, or reads one too many, shows."""
    # Without a GPU torch.manual_seed keeps a written stack for each device that might come, milliseconds every time.
    (torch.manual_seed if HAS_CUDA else torch.default_generator.manual_seed)(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
