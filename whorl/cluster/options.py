"""What `whorl serve` takes about replicas of the engine. No torch and no Ray here."""

from dataclasses import dataclass
from typing import Literal

from whorl.fields import check, option

PANEL = "Replicas"


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterOptions:
    """Of these only `on` starts anything: without it there is one engine, in the server's own process."""

    on: Literal["ray"] | None = option(
        None, "ray: engines run as replicas on a Ray cluster, this process answers for all of them.", panel=PANEL
    )
    replicas: int | None = option(
        None, "Engines, each with --tp devices. Default: 1; of a range, its lower end.", panel=PANEL, least=1
    )
    min_replicas: int | None = option(
        None, "With --max-replicas: as few as this while little is asked.", panel=PANEL, least=1
    )
    max_replicas: int | None = option(None, "As many as this while much is asked.", panel=PANEL, least=1)
    replica_cpus: int | None = option(
        None, "Cores that Ray counts for a replica. Default: 1, on a CPU one for each of --tp.", panel=PANEL, least=1
    )
    routing: Literal["prefix", "round_robin"] = option(
        "prefix", "Where a request goes: by cached prompt and load, or to each replica in turn.", panel=PANEL
    )
    ray_address: str | None = option(
        None,
        "A running cluster, HOST:PORT, or auto where this machine is part of one. Default: a new one on this machine, "
        "reachable from it alone.",
        panel=PANEL,
        metavar="ADDRESS",
    )
    ray_dashboard: bool = option(
        False, "Of a new cluster: start Ray's dashboard, on this machine's port 8265.", "--ray-dashboard", panel=PANEL
    )

    def __post_init__(self) -> None:
        check(self)
        if self.on is None:
            self._check_alone()
        if (self.min_replicas is None) != (self.max_replicas is None):
            raise ValueError(
                f"serve: min_replicas is {self.min_replicas} and max_replicas is {self.max_replicas}: say both, or "
                "--replicas alone"
            )
        if self.min_replicas is not None and self.max_replicas is not None:
            self._check_range(self.min_replicas, self.max_replicas)
        if self.ray_dashboard and self.ray_address is not None:
            raise ValueError(
                f"serve: the cluster at {self.ray_address} is running, with its dashboard or without: leave out "
                "--ray-dashboard"
            )

    def _check_alone(self) -> None:
        given = {
            "--replicas": self.replicas,
            "--min-replicas": self.min_replicas,
            "--max-replicas": self.max_replicas,
            "--replica-cpus": self.replica_cpus,
            "--ray-address": self.ray_address,
            "--ray-dashboard": self.ray_dashboard or None,
            "--routing": None if self.routing == "prefix" else self.routing,
        }
        for name, value in given.items():
            if value is not None:
                raise ValueError(f"serve: {name} is {value}, and nothing says where replicas run: add --on ray")

    def _check_range(self, least: int, most: int) -> None:
        if not least <= self.start_with <= most:
            raise ValueError(
                f"serve: from {least} to {most} replicas were asked for, and {self.start_with} to begin with: "
                "say numbers that fit"
            )

    @property
    def start_with(self) -> int:
        return self.replicas or self.min_replicas or 1
