"""The names by which DLRover's trainer classes find their launcher: variables, sockets, shared memory. Pure.

They never talk to DLRover's master. They read the environment, two JSON files, Unix sockets below `SOCKETS` and
segments in `SHARED_MEMORY`. The last two carry the run's name, so each agent of a machine needs one of its own.
"""

from __future__ import annotations

import hashlib
from pathlib import PurePosixPath

__all__ = [
    "ROLE",
    "SHARED_MEMORY",
    "SOCKETS",
    "job_variables",
    "metrics_file",
    "run_name",
    "segments",
    "sockets",
    "world_variables",
]

# Written into dlrover's own source.
SOCKETS = PurePosixPath("/tmp/ckpt_sock")
SHARED_MEMORY = PurePosixPath("/dev/shm")
# Under any other role Flash Checkpoint forks a saver from local rank 0, which dies with it.
ROLE = "dlrover-trainer"
# The longest name of a run: the kernel takes 107 characters for a socket's path, and dlrover's longest file name of up
# to three-digit ranks has 41.
_LONGEST_NAME = 107 - len(f"{SOCKETS}//") - 41


def run_name(job_id: str, number: int) -> str:
    """The name under which one agent's workers find its saver: the job's, or a short form of it.

    Args:
        number: how many agents of this job on this machine have one already.
    """
    suffix = f".{number + 1}" if number else ""
    if len(job_id) + len(suffix) > _LONGEST_NAME:
        digest = hashlib.sha256(job_id.encode()).hexdigest()[:8]
        job_id = f"{job_id[: _LONGEST_NAME - len(suffix) - len(digest) - 1]}-{digest}"
    return job_id + suffix


def sockets(name: str) -> PurePosixPath:
    """The directory of a run's sockets."""
    return SOCKETS / name


def segments(name: str) -> str:
    """How the paths of all segments of a run begin."""
    return f"{SHARED_MEMORY}/{name}_ckpt_shm_"


def metrics_file(directory: str) -> str:
    """Where `ElasticTrainer` writes its steps."""
    return f"{directory}/runtime_metrics.json"


def job_variables(name: str, directory: str) -> dict[str, str]:
    """What its classes read, as far as it is the same in every world.

    Args:
        name: the run's name.
        directory: where the two JSON files are.
    """
    return {
        "ROLE_NAME": ROLE,
        "TORCHELASTIC_RUN_ID": name,
        "DLROVER_PARAL_CONFIG_PATH": f"{directory}/paral_config.json",
        "RUNTIME_METRICS_PATH": metrics_file(directory),
    }


def world_variables(group_rank: int, nodes: int, max_nodes: int) -> dict[str, str]:
    """What its classes read, for one world: replicas are dealt to `NODE_NUM` nodes, so it is the world's.

    `ElasticTrainer` accumulates as many micro-batches as keep the batch that `WORKER_NUM` nodes would have.
    """
    return {"NODE_RANK": str(group_rank), "NODE_NUM": str(nodes), "WORKER_NUM": str(max_nodes)}
