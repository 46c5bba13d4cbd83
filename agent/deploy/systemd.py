"""A job as units of systemd: a node of it on each machine, and its master on one that stays."""

from __future__ import annotations

import re
from collections.abc import Iterable

from dalsegno.protos.contract import EXIT_FAILED, EXIT_LEFT, EXIT_LEFT_UNSAVED, EXIT_USAGE

from .command_lines import SecretFiles, master_line, node_line
from .job import JobSpec
from .on_hosts import checkpoints

__all__ = ("units",)

# What systemd reads as root and hands to the unit alone: the directory is %d.
CREDENTIALS = "%d"
HARDENING = (
    "NoNewPrivileges=yes",
    "ProtectSystem=full",
)


def units(job: JobSpec) -> dict[str, str]:
    """Names of unit files and their texts, of a job that has no `refusals`."""
    return {f"{job.name}.service": _node(job), f"{job.name}-master.service": _master(job)}


def _node(job: JobSpec) -> str:
    credentials = _credentials(job, {"token": (job.secrets.token, "token"), "ca.crt": (job.secrets.tls, "ca.crt")})
    files = SecretFiles(f"{CREDENTIALS}/token", f"{CREDENTIALS}/ca.crt" if job.secrets.tls else "")
    line = node_line(job, job.host.master, checkpoints(job), files)
    return _unit(
        f"A node of the job {job.name}",
        [
            "StartLimitIntervalSec=600",
            "StartLimitBurst=5",
        ],
        [
            "# Libraries cache in its user's home (DeepSpeed, Hugging Face): there has to be one.",
            *_user(job),
            f"WorkingDirectory={job.host.directory}",
            *(f"Environment={_word(f'{name}={value}', dollar='$')}" for name, value in job.env.items()),
            *credentials,
            f"ExecStart={_line(job, line)}",
            "# The notice goes to the agent alone, and its workers follow it; after the time all are killed.",
            "KillMode=mixed",
            f"TimeoutStopSec={job.grace}",
            f"SuccessExitStatus={EXIT_LEFT}",
            "Restart=on-failure",
            f"RestartForceExitStatus={EXIT_LEFT} {EXIT_LEFT_UNSAVED}",
            f"RestartPreventExitStatus={EXIT_FAILED} {EXIT_USAGE}",
            "RestartSec=5",
            *HARDENING,
        ],
    )


def _master(job: JobSpec) -> str:
    """With etcd on as many machines as there are masters, each of which names itself by its host name."""
    tls, etcd = job.secrets.tls, job.secrets.etcd
    credentials = _credentials(
        job,
        {
            **{"token": (job.secrets.token, "token"), "tls.crt": (tls, "tls.crt"), "tls.key": (tls, "tls.key")},
            **{f"etcd-{key}": (etcd, key) for key in ("ca.crt", "tls.crt", "tls.key")},
        },
    )
    files = SecretFiles(
        f"{CREDENTIALS}/token",
        "",
        *((f"{CREDENTIALS}/tls.crt", f"{CREDENTIALS}/tls.key") if tls else ("", "")),
        *([f"{CREDENTIALS}/etcd-{key}" for key in ("ca.crt", "tls.crt", "tls.key")] if etcd else ["", "", ""]),
    )
    port = int(job.host.master.split(",")[0].rpartition(":")[2])
    store = job.store if job.etcd else "sqlite:///%S/" + f"dalsegno-{job.name}/job.sqlite"
    line = master_line(job, port, store, files, *([f"--advertise=%H:{port}"] if job.etcd else []))
    return _unit(
        f"The master of the job {job.name}",
        # It is never given up: its machine may be short of something for longer than a few starts take.
        ["StartLimitIntervalSec=0"],
        [
            *_user(job),
            f"StateDirectory=dalsegno-{job.name}",
            *credentials,
            f"ExecStart={_line(job, line)}",
            "# Training goes on without it; 2: its command line is wrong, 3: another master has taken over.",
            "Restart=always",
            "RestartPreventExitStatus=2 3",
            "RestartSec=1",
            *HARDENING,
            # Not out of sight: its programs, or their Python, may lie in somebody's home.
            "ProtectHome=read-only",
            "UMask=0077",
        ],
    )


def _unit(text: str, unit: Iterable[str], service: Iterable[str]) -> str:
    lines = [
        *("[Unit]", f"Description={text}", "Wants=network-online.target", "After=network-online.target", *unit, ""),
        *("[Service]", *service, ""),
        *("[Install]", "WantedBy=multi-user.target"),
    ]
    return "\n".join(lines) + "\n"


def _user(job: JobSpec) -> list[str]:
    return ["# host.user: where it does not exist the unit fails with 217/USER.", f"User={job.host.user}"]


def _credentials(job: JobSpec, wanted: dict[str, tuple[str, str]]) -> list[str]:
    root = job.host.secrets.rstrip("/")
    return [f"LoadCredential={name}:{root}/{secret}/{key}" for name, (secret, key) in wanted.items() if secret]


def _line(job: JobSpec, words: list[str]) -> str:
    """A command line of ExecStart. Words of the person's own are literal; ours name what systemd knows (`%d`)."""
    own = len(job.flags) + len(job.command) if words[0] == "dlrover-run" else 0
    ours, theirs = words[1 : len(words) - own], words[len(words) - own :]
    return " \\\n  ".join([f"{job.host.bin}/{words[0]}", *ours, *map(_word, theirs)])


def _word(text: str, dollar: str = "$$") -> str:
    """A word that systemd takes as it is (systemd.service(5), "Command lines"; variables expand in these alone)."""
    text = text.replace("\\", "\\\\").replace("%", "%%").replace("$", dollar)
    return text if re.fullmatch(r"[^\s'\";]+", text) else '"' + text.replace('"', '\\"') + '"'
