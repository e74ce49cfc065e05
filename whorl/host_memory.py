"""The memory of the host that is free."""

from pathlib import Path

_MEMORY = Path("/proc/meminfo")
_LIMIT, _USED = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))


def free_memory() -> int | None:
    """Return the free bytes, by the system and by a container's limit; None if this system does not report them."""
    try:
        lines = dict(line.split(":", 1) for line in _MEMORY.read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
    try:
        return min(free, int(_LIMIT.read_text()) - int(_USED.read_text()))
    except (OSError, ValueError):  # no container, or none with a limit
        return free
