"""The environment of a worker: torchrun's variables and ours (docs/contracts.md). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from string import Template

from dalsegno.protos import control_pb2
from dalsegno.protos.contract import Variable

__all__ = ["WorldPlace", "job_environment", "place_of", "prefixes", "worker_environment"]

_FORMS = {control_pb2.FORM_SHARDED: "sharded", control_pb2.FORM_UNIVERSAL: "universal"}


@dataclass(frozen=True)
class WorldPlace:
    """Where one node stands in a world. Ranks are assigned to the nodes in order of their group rank.

    Attributes:
        first_rank: the global rank of the node's local rank 0.
        nodes: number of nodes.
    """

    group_rank: int
    first_rank: int
    nproc: int
    nodes: int
    world_size: int
    node: str


def place_of(world: control_pb2.World, incarnation: str) -> WorldPlace:
    """The place of the incarnation to which this world was sent.

    Raises:
        ValueError: it was sent to another one.
    """
    place = world.place
    if place.incarnation != incarnation:
        raise ValueError(f"incarnation {incarnation} was not told of a place in epoch {world.epoch}")
    return WorldPlace(place.group_rank, place.first_rank, place.nproc, world.nodes, world.world_size, place.node)


def resume_environment(world: control_pb2.World, run_dir: PurePath, memory: PurePath | None = None) -> dict[str, str]:
    """What to start from; empty for step 0."""
    if not world.HasField("resume"):
        return {}
    resume = world.resume
    if resume.source.in_memory and memory is not None:
        run_dir = memory
    environment = {
        Variable.RESUME_NAME: resume.source.ref.name,
        Variable.RESUME_DIGEST: resume.source.ref.digest,
        Variable.RESUME_DIR: str(run_dir / resume.source.ref.name),
        Variable.RESUME_FORM: _FORMS[resume.form],
    }
    if resume.form == control_pb2.FORM_UNIVERSAL:
        environment |= {
            Variable.UNIVERSAL_NAME: resume.universal.name,
            Variable.UNIVERSAL_DIGEST: resume.universal.digest,
            Variable.UNIVERSAL_DIR: str(run_dir / resume.universal.name),
        }
    return environment


def job_environment(job_id: str, role: str, nproc: int, inherited: Mapping[str, str]) -> dict[str, str]:
    """The variables that are the same for all workers of a node in every world, and known before a place is."""
    return {
        "LOCAL_WORLD_SIZE": str(nproc),
        "ROLE_NAME": role,
        "TORCHELASTIC_RUN_ID": job_id,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": inherited.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        Variable.JOB_ID: job_id,
    }


def worker_environment(
    world: control_pb2.World,
    place: WorldPlace,
    settings: control_pb2.Settings,
    generation: int,
    job_id: str,
    run_dir: PurePath,
    role: str,
    inherited: Mapping[str, str],
    memory: PurePath | None = None,
    memory_budget: int | None = None,
) -> list[dict[str, str]]:
    """Per local rank, the variables that differ from the agent's own environment.

    Args:
        memory: where memory checkpoints of this run are; None: there are none.
        memory_budget: the most bytes that all of this node's may have; None: no such limit.

    `LOCAL_RANK` and `CUDA_VISIBLE_DEVICES` are left to torch's agent, `DALSEGNO_SOCKET` and the keeper's token to ours.
    """
    common = {
        **job_environment(job_id, role, place.nproc, inherited),
        "GROUP_RANK": str(place.group_rank),
        "GROUP_WORLD_SIZE": str(place.nodes),
        "WORLD_SIZE": str(place.world_size),
        "ROLE_WORLD_SIZE": str(place.world_size),
        "MASTER_ADDR": world.store_host,
        "MASTER_PORT": str(world.store_port),
        Variable.STORE: f"{world.store_host}:{world.store_port}",
        # The agent of group rank 0 serves the store, and nobody else has used it.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(world.epoch - 1),
        "TORCHELASTIC_MAX_RESTARTS": str(settings.max_restarts),
        Variable.EPOCH: str(world.epoch),
        Variable.RUN_ID: world.run_id,
        Variable.NODE: place.node,
        Variable.GENERATION: str(generation),
        Variable.MIN_NODES: str(settings.min_nodes),
        Variable.MAX_NODES: str(settings.max_nodes),
        Variable.RUN_DIR: str(run_dir),
        Variable.STALL_TIMEOUT: f"{max(0.0, settings.stall_timeout):g}",
        **({Variable.MEMORY_DIR: str(memory)} if memory is not None else {}),
        **({Variable.MEMORY_BUDGET: str(memory_budget)} if memory is not None and memory_budget is not None else {}),
        **resume_environment(world, run_dir, memory),
    }
    return [
        {**common, "RANK": str(place.first_rank + local), "ROLE_RANK": str(place.first_rank + local)}
        for local in range(place.nproc)
    ]


def prefixes(template: str | None, place: WorldPlace, role: str) -> dict[int, str] | None:
    """What is put before each line that is shown of a local rank, by torch's template for it; None without one."""
    if not template:
        return None
    return {
        local: Template(template).safe_substitute(role_name=role, rank=place.first_rank + local, local_rank=local)
        for local in range(place.nproc)
    }
