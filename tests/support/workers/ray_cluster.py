"""A Ray cluster on this machine: a head without room for anything, and machines that come and go by order.

Each line that it reads is an order: `add`; `lose`, which kills all that Ray has of the oldest machine; or `vanish`,
which stops all that runs on it, without a word to anybody, as a power cut does. It answers each with a line, after one
with the cluster's address.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster

# Loopback under a name that Ray does not replace by the machine's own address; no more memory than it must have.
SMALL: dict[str, Any] = {"node_ip_address": "127.0.0.2", "object_store_memory": 80_000_000}


def vanish(machine: Any) -> None:
    """Stops a machine's processes of Ray, and all that these have started. Their connections stay open."""
    kinds = machine.all_processes.values()
    pids = [info.process.pid for kind in kinds for info in kind]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            pids += [int(child) for child in children.read_text(encoding="ascii").split()]


def main() -> None:
    """Until its input ends."""
    cluster = Cluster(initialize_head=True, head_node_args={**SMALL, "num_cpus": 0, "include_dashboard": False})
    try:
        machines: list[Any] = []
        print(cluster.address, flush=True)
        for line in sys.stdin:
            if line.strip() == "add":
                machines.append(cluster.add_node(**SMALL, num_cpus=1))
            elif line.strip() == "vanish":
                vanish(machines.pop(0))
            else:
                cluster.remove_node(machines.pop(0), allow_graceful=False)
            print("done", flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
