"""The removal of semaphores that ranks have left which were killed, see `elastic.rank.semaphores`."""

from __future__ import annotations

from dalsegno.protos.contract import semaphores_of

from .keeper import remove_files

__all__ = ["remove_semaphores", "semaphore_files"]


def semaphore_files(socket_directory: str, pid: int | None = None) -> str:
    """How the paths of their files begin. For the arguments see `semaphores_of`."""
    return f"/dev/shm/sem.{semaphores_of(socket_directory, pid)}"


def remove_semaphores(socket_directory: str, pid: int | None = None) -> None:
    """Removes them, once nothing of the process, or without `pid` of the agent, is left."""
    remove_files(semaphore_files(socket_directory, pid))
