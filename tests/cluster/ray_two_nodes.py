"""A server over two replicas on a cluster of two nodes, all on this machine: `python ray_two_nodes.py PORT`."""

import sys

import ray_told
from ray.cluster_utils import Cluster

from whorl.cluster.command import build_server
from whorl.cluster.options import ClusterOptions
from whorl.engine.settings import EngineSettings


def main(port: int) -> int:
    # A node has room for one replica.
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    options = ClusterOptions(on="ray", replicas=2, ray_address=cluster.address)
    try:
        return build_server(
            "told", EngineSettings(device="cpu"), options, port=port, timeout=120.0, make=ray_told.make
        )()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
