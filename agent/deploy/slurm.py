"""A job as an array of Slurm, each task a node that comes and goes by itself."""

from __future__ import annotations

import shlex

from dalsegno.protos.contract import EXIT_LEFT, EXIT_LEFT_UNSAVED

from .command_lines import node_line
from .job import JobSpec
from .on_hosts import checkpoints, files

__all__ = ("script",)

# Of a task whose agent is killed again and again; as many as Kubernetes gives a pod.
MOST_STARTS = 100


def script(job: JobSpec) -> str:
    """The text for sbatch, of a job that has no `refusals`.

    Slurm tells the batch shell alone (`B:`), `grace` seconds before the time limit; the shell tells the agent. When a
    task has to go earlier, the cluster's `ProctrackType` decides who gets SIGTERM: the shell alone (cgroup), or the
    agent, too (linuxproc, pgid). A later SIGTERM would end the agent at once. So the shell passes it on as SIGHUP, and
    a moment later: that is a notice as well, but never counts as a second one.

    `Incomplete` keeps a task that was cancelled from starting again. An agent that was killed has its task started
    again, as by other supervisors, but not for ever.
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
        "trap 'noticed=1; sleep 1; kill -HUP $agent 2> /dev/null' TERM # a later SIGTERM would hurry it",
        "noticed=1 again=",
        'while [ "$noticed" ]; do noticed=; wait $agent; code=$?; done # a notice interrupts the wait',
        "case $code in",
        f"  {EXIT_LEFT} | {EXIT_LEFT_UNSAVED}) again=1 ;; # left on notice",
        f'  *) [ $code -gt 128 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {MOST_STARTS} ] && again=1 ;; # killed',
        "esac",
        '[ "$again" ] && scontrol requeue Incomplete "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"',
        "exit $code",
    ]
    return "\n".join(lines) + "\n"
