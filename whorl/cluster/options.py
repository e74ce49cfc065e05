"""The options of `whorl serve` about replicas of the engine. Imports neither torch nor Ray."""

from dataclasses import dataclass, fields
from typing import Literal

from whorl.fields import check, option

PANEL = "Replicas"


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterOptions:
    """Options of replicas. They need `on`: without it there is one engine, in the server's own process."""

    on: Literal["ray"] | None = option(
        None, "ray: engines run as replicas on a Ray cluster, and this process is their endpoint.", panel=PANEL
    )
    replicas: int | None = option(
        None, "Number of engines, each with --tp devices. Default: 1, or --min-replicas.", panel=PANEL, least=1
    )
    min_replicas: int | None = option(None, "Lower limit of autoscaling; needs --max-replicas.", panel=PANEL, least=1)
    max_replicas: int | None = option(None, "Upper limit of autoscaling; needs --min-replicas.", panel=PANEL, least=1)
    replica_cpus: int | None = option(
        None,
        "CPU cores that Ray reserves for a replica. Default: 1; without a GPU one for each rank.",
        panel=PANEL,
        least=1,
    )
    routing: Literal["prefix", "round_robin"] = option(
        "prefix", "How to choose a replica: by cached prefix and load, or each in turn.", panel=PANEL
    )
    ray_address: str | None = option(
        None,
        "A running cluster as HOST:PORT, or auto if this machine is part of one. Default: a new, local one.",
        panel=PANEL,
        metavar="ADDRESS",
    )
    ray_dashboard: bool = option(
        False, "Start Ray's dashboard of a new cluster, on this machine's port 8265.", "--ray-dashboard", panel=PANEL
    )

    def __post_init__(self) -> None:
        check(self)
        if self.on is None:
            self._check_alone()
        if (self.min_replicas is None) != (self.max_replicas is None):
            raise ValueError(
                f"serve: min_replicas is {self.min_replicas} and max_replicas is {self.max_replicas}: give both, or "
                "only --replicas"
            )
        if self.min_replicas is not None and self.max_replicas is not None:
            self._check_range(self.min_replicas, self.max_replicas)
        if self.ray_dashboard and self.ray_address is not None:
            raise ValueError(
                f"serve: --ray-dashboard needs a new cluster, and the one at {self.ray_address} is running already: "
                "leave out --ray-dashboard"
            )

    def _check_alone(self) -> None:
        """Raise ValueError for an option that needs a cluster, when there is none."""
        for field in fields(self):
            if (value := getattr(self, field.name)) != field.default:
                name = field.name.replace("_", "-")
                raise ValueError(f"serve: --{name} is {value}, which needs a cluster: add --on ray")

    def _check_range(self, least: int, most: int) -> None:
        if not least <= self.start_with <= most:
            raise ValueError(
                f"serve: the number of replicas to start with is {self.start_with}, expected --min-replicas {least} to "
                f"--max-replicas {most}"
            )

    @property
    def start_with(self) -> int:
        """The number of replicas to start with."""
        return self.replicas or self.min_replicas or 1
