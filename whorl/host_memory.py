"""The memory that this process may still take on its host."""

import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path

if sys.platform != "win32":
    import resource

_PROC = Path("/proc")
_GROUPS = Path("/sys/fs/cgroup")
# Of control groups: files of the limit and of the use, and keys of what the kernel takes back when it is needed.
_VERSIONS = (
    ("memory.max", "memory.current", ("inactive_file", "active_file")),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
)
# What torch, the system and its loader of libraries say where Python itself raises MemoryError.
_NO_MEMORY = (
    *("can't allocate memory", "not enough memory", "Cannot allocate memory", "out of memory"),
    *("failed to map segment from shared object", "can't start new thread", "cannot allocate memory in static TLS"),
)


def is_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out."""
    return (
        isinstance(error, MemoryError)
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or any(text in str(error) for text in _NO_MEMORY)
    )


def free_memory() -> int | None:
    """Return the bytes that this process may still take, by the system, by the limits of its control groups, such as a
    container's, and by its own (`ulimit -v`, `ulimit -d`); None if this system reports none of them."""
    return min((num_bytes for num_bytes, _ in limits()), default=None)


def limits() -> Iterator[tuple[int, str]]:
    """Yield the free bytes by everything that limits them, with its name for people."""
    try:
        lines = dict(line.split(":", 1) for line in (_PROC / "meminfo").read_text().splitlines())
        yield int(lines["MemAvailable"].split()[0]) * 1024, "of this machine's memory"
    except (OSError, KeyError, ValueError):
        pass
    for folder in _control_groups():
        for limit, used, cached in _VERSIONS:
            try:
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                in_use = int((folder / used).read_text()) - sum(int(stat.get(key, 0)) for key in cached)
                yield max(0, int((folder / limit).read_text()) - in_use), "of the container's limit (cgroup)"
            except (OSError, ValueError):  # another version, or "max"
                continue
    yield from _own_limits()


def _control_groups() -> Iterator[Path]:
    """Yield the folders of this process's control groups for memory and of those around them."""
    try:
        lines = (_PROC / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers in ("", "memory"):
            root = _GROUPS / controllers
            # Inside a container the path may be that of the host; then only the root is there.
            folder = root / path.lstrip("/")
            yield from (part for part in (folder, *folder.parents) if part.is_relative_to(root) and part.is_dir())


def _own_limits() -> Iterator[tuple[int, str]]:
    if sys.platform == "win32":
        return
    try:
        fields = [int(field) * os.sysconf("SC_PAGE_SIZE") for field in (_PROC / "self/statm").read_text().split()]
    except (OSError, ValueError):
        return
    named = (
        (resource.RLIMIT_AS, fields[0], "address space, ulimit -v"),
        (resource.RLIMIT_DATA, fields[5], "ulimit -d"),
    )
    for limit, used, name in named:
        if (most := resource.getrlimit(limit)[0]) != resource.RLIM_INFINITY:
            yield max(0, most - used), f"of this process's limit ({name})"
