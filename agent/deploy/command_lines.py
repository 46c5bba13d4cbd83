"""The command lines of a node and of the master, for whoever starts them."""

from __future__ import annotations

from dataclasses import dataclass

from dalsegno.protos.contract import Variable

from .job import JobSpec

__all__ = ("MASTER_PATIENCE_SECONDS", "SecretFiles", "master_line", "node_line")

# How long a supervised node waits for the master's first answer. One that gives up ends with 2, and nobody starts it
# again; in a Job it ends the healthy nodes, too. Within a week somebody has mended the master, or its machine.
MASTER_PATIENCE_SECONDS = 7 * 24 * 3600


@dataclass(frozen=True)
class SecretFiles:
    """Paths of the secrets' files where the command runs; empty: there is none."""

    token: str
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    etcd_ca: str = ""
    etcd_cert: str = ""
    etcd_key: str = ""


def node_line(job: JobSpec, master: str, checkpoints: str, files: SecretFiles, *more: str) -> list[str]:
    """`dlrover-run` and its arguments.

    Args:
        job: What runs.
        master: HOST:PORT, several with commas.
        checkpoints: The checkpoint directory.
        files: Of the secrets.
        more: Flags of this kind of node.
    """
    low, high = job.nnodes
    patience = "" if f"{Variable.FLAG}CONNECT_TIMEOUT" in job.env else str(MASTER_PATIENCE_SECONDS)
    return [
        "dlrover-run",
        f"--nnodes={low}:{high}",
        f"--nproc-per-node={job.nproc or 1}",
        f"--job-id={job.name}",
        f"--master={master}",
        f"--checkpoint-dir={checkpoints}",
        f"--drain-timeout={job.drain_timeout}",
        *_given(("connect-timeout", patience), ("token-file", files.token), ("tls-ca", files.tls_ca)),
        *more,
        *job.flags,
        *job.command,
    ]


def master_line(job: JobSpec, port: int, store: str, files: SecretFiles, *more: str) -> list[str]:
    """`dlrover-master` and its arguments: it listens on all addresses, with a token."""
    return [
        "dlrover-master",
        f"--job-id={job.name}",
        "--host=0.0.0.0",
        f"--port={port}",
        f"--http-port={job.master.http_port}",
        f"--store={store}",
        *_given(("token-file", files.token), ("tls-cert", files.tls_cert), ("tls-key", files.tls_key)),
        *_given(("etcd-ca", files.etcd_ca), ("etcd-cert", files.etcd_cert), ("etcd-key", files.etcd_key)),
        *more,
    ]


def _given(*flags: tuple[str, str]) -> list[str]:
    return [f"--{name}={value}" for name, value in flags if value]
