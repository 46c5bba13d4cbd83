"""The command line of the agent that carries a run."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from dalsegno.protos.contract import LEAST_NODE_TIMEOUT_SECONDS
from dalsegno.protos.options import UsageError
from dalsegno.protos.run_file import RunFile

from .volume import Volume

__all__ = ("agent_command", "check_command")

_RESUME = "${resume_dir"


def check_command(file: RunFile, name: str) -> None:
    """Checks that there is something to run, and that a baseline would be read.

    Raises:
        UsageError: one line.
    """
    program = file.command[0]
    if shutil.which(program) is None:
        raise UsageError(f"{name}: command: the program {program} does not exist or cannot be executed")
    if file.baseline is not None and file.resume_flag is None and not any(_RESUME in word for word in file.command):
        raise UsageError(
            f"{name}: baseline: the command has neither ${{resume_dir}} nor resume_flag, so nothing would read it"
        )


def agent_command(
    file: RunFile,
    volume: Volume,
    master: str,
    notice_seconds: float,
    *,
    ranks: str = "1",
    logs: Path,
    tls: Sequence[str] = (),
    initial: Path | None = None,
    back: str = "",
) -> list[str]:
    """What is executed, but for `--tell-fd`, which comes first.

    Args:
        file: the run.
        volume: its place.
        master: HOST:PORT of its master.
        notice_seconds: seconds that SIGTERM gives.
        ranks: for `--nproc-per-node`.
        logs: where the agent and the trainer write their logs.
        tls: flags about certificates.
        initial: what a run without a checkpoint starts from; None: nothing.
        back: for `--resume-step`; "": it goes on from the newest.
    """
    flags = [
        "--nnodes=1:1",
        f"--nproc-per-node={ranks}",
        f"--master={master}",
        *tls,
        f"--job-id={file.run_id}",
        f"--checkpoint-dir={volume.store}",
        f"--log-dir={logs}",
        f"--node-timeout={max(LEAST_NODE_TIMEOUT_SECONDS, file.lease_seconds):g}",
        # A token that is refused is borne as long as silence is.
        f"--master-outage-timeout={file.lease_seconds:g}",
        "--quiet-time=0",
        f"--drain-timeout={notice_seconds:g}",
        # What the pod passes on, see `_Pod._for_agent`.
        "--signals-to-handle=SIGTERM,SIGINT,SIGHUP",
        f"--keep-checkpoints={file.keep_last}",
        "--make-room",
        "--keep-saves=1",
        # What it writes is seen here, too, as it would be without us.
        "--tee=3",
    ]
    if file.self_fence:
        flags.append(f"--self-fence={file.lease_seconds:g}")
    if file.save_signal is not None:
        flags.append(f"--save-signal={file.save_signal}")
    if file.checkpoint_glob is not None:
        flags.append(f"--checkpoint-glob={file.checkpoint_glob}")
    improve = None if file.hf is None else file.hf.on_improve
    if file.hf is not None and improve is not None:
        best = f"--best={improve.metric}:{improve.mode}", f"--best-min-delta={improve.min_delta!r}"
        flags += [*best, f"--metrics-file={file.hf.metrics}"]
    if initial is not None:
        flags.append(f"--initial-checkpoint={initial}")
    if back:
        flags.append(f"--resume-step={back}")
    command = list(file.command)
    if file.resume_flag is not None and not any(_RESUME in word for word in command):
        joined = file.resume_flag.endswith("=")
        command += [f"{file.resume_flag}${{resume_dir}}"] if joined else [file.resume_flag, "${resume_dir}"]
    return [*flags, *_as_script(command)]


def _as_script(command: list[str]) -> list[str]:
    """A script of our own interpreter may begin in a process that has imported what it needs; else it is a program."""
    found = shutil.which(command[0])
    ours = found is not None and os.path.realpath(found) == os.path.realpath(sys.executable)
    if ours and len(command) > 1 and os.path.samefile(os.path.dirname(found or ""), os.path.dirname(sys.executable)):
        if command[1] == "-m" and len(command) > 2:
            return command[1:]
        if not command[1].startswith("-"):
            return command[1:]
    return ["--no-python", *command]
