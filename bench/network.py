"""A simulated slow network on one machine: a network namespace for each rank, joined by a bridge with a rate and delay.

Everything lives in new namespaces and is removed with them; the machine's own network is not touched.
"""

import contextlib
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

SUBNET = "10.203.77"
INTERFACE = "whorl0"
BURST = "32kb"  # bytes that tc lets through at once, above the rate


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """A simulated link. rate: bandwidth of each rank as tc writes it ("100mbit"); delay: one way ("1ms"), or None."""

    rate: str
    delay: str | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\d+(\.\d+)?[kmg]?bit", self.rate):
            raise ValueError(f"--rate is {self.rate}, expected bits per second such as 100mbit or 1gbit")
        if self.delay is not None and not re.fullmatch(r"\d+(\.\d+)?(us|ms|s)", self.delay):
            raise ValueError(f"--delay is {self.delay}, expected a time such as 500us or 2ms")


def refusal() -> str | None:
    """Return why this process cannot create network namespaces, or None."""
    if platform.system() != "Linux":
        return f"network namespaces need Linux, this is {platform.system()}"
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"{' and '.join(missing)} not found: install iproute2"
    return None if os.geteuid() == 0 else "network namespaces need root"


def address(rank: int) -> str:
    """Return the IP address of a rank."""
    return f"{SUBNET}.{rank + 1}"


@contextlib.contextmanager
def namespaces(world: int, link: Link) -> Iterator[list[str]]:
    """Create `world` namespaces whose ranks reach each other at `address(rank)`; yields their names, then removes them.

    Raises ValueError where the machine cannot do that.
    """
    if (reason := refusal()) is not None:
        raise ValueError(f"--rate: {reason}")
    tag = f"whorl{os.getpid()}"
    hub, names = f"{tag}-hub", [f"{tag}-{rank}" for rank in range(world)]
    created: list[str] = []
    try:
        for name in (hub, *names):
            _run("ip", "netns", "add", name)
            created.append(name)
        _run("ip", "-n", hub, "link", "add", "switch", "type", "bridge")
        _run("ip", "-n", hub, "link", "set", "switch", "up")
        for rank, name in enumerate(names):
            _join(hub, name, rank, link)
        yield names
    finally:
        for name in created:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False, timeout=30)


def _join(hub: str, name: str, rank: int, link: Link) -> None:
    port = f"port{rank}"
    _run("ip", "-n", hub, "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", name)
    _run("ip", "-n", hub, "link", "set", port, "master", "switch", "up")
    _run("ip", "-n", name, "addr", "add", f"{address(rank)}/24", "dev", INTERFACE)
    for interface in ("lo", INTERFACE):
        _run("ip", "-n", name, "link", "set", interface, "up")
    shape = ("rate", link.rate, "burst", BURST, "latency", "400ms")
    _run("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, "root", "tbf", *shape)
    if link.delay is not None:  # applied where packets leave the bridge for the rank
        _run("tc", "-n", hub, "qdisc", "add", "dev", port, "root", "netem", "delay", link.delay, "limit", "100000")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    if done.returncode:
        why = done.stderr.strip() or f"exit code {done.returncode}"
        raise ValueError(f"--rate, --delay: this kernel refused `{' '.join(command)}`: {why}")
