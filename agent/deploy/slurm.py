"""A job as an array of Slurm, each task a node that comes and goes by itself."""

from __future__ import annotations

import shlex

from dalsegno.protos.contract import EXIT_LEFT, EXIT_LEFT_UNSAVED

from .command_lines import node_line
from .job import Job
from .on_hosts import checkpoints, files

__all__ = ("script",)


def script(job: Job) -> str:
    """The text for sbatch, of a job that has no `refusals`.

    Slurm tells the batch shell alone (`B:`), `grace` seconds before the time limit; the shell tells the agent.
    A pre-empted task has the partition's `GraceTime` instead.
    """
    options = {
        "job-name": job.name,
        "array": f"0-{job.replicas - 1}",
        "nodes": "1",
        "open-mode": "append",
        "signal": f"B:TERM@{job.grace}",
        **job.slurm,
    }
    line = node_line(job, job.host.master, checkpoints(job), files(job))
    words = [shlex.quote(word) for word in [f"{job.host.bin}/{line[0]}", *line[1:]]]
    exports = [f"export {name}={shlex.quote(value)}" for name, value in job.env.items()]
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH --{name}={value}" if value else f"#SBATCH --{name}" for name, value in options.items()),
        "#SBATCH --requeue",
        "",
        f"cd {shlex.quote(job.host.directory)} || exit 2",
        *exports,
        " \\\n  ".join(words) + " &",
        "agent=$!",
        "trap 'noticed=1; kill -TERM $agent' TERM",
        "noticed=1",
        'while [ "$noticed" ]; do noticed=; wait $agent; code=$?; done # a notice interrupts the wait',
        "case $code in",
        f'  {EXIT_LEFT} | {EXIT_LEFT_UNSAVED}) scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_${{SLURM_ARRAY_TASK_ID}}" ;;',
        "esac",
        "exit $code",
    ]
    return "\n".join(lines) + "\n"
