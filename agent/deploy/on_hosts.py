"""Where things lie on hosts without containers."""

from __future__ import annotations

from .command_lines import SecretFiles
from .job import JobSpec

__all__ = ("checkpoints", "files")


def checkpoints(job: JobSpec) -> str:
    """The checkpoint directory."""
    return job.host.checkpoints or f"{job.host.directory.rstrip('/')}/checkpoints"


def files(job: JobSpec) -> SecretFiles:
    """What a node reads of the secrets: each secret is a directory below `host.secrets`."""
    root = job.host.secrets.rstrip("/")
    return SecretFiles(
        token=f"{root}/{job.secrets.token}/token",
        tls_ca=f"{root}/{job.secrets.tls}/ca.crt" if job.secrets.tls else "",
    )
