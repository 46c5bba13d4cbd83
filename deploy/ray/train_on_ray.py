"""One dlrover-run on each of so many machines of a Ray cluster, started again where it has left or was lost."""

import argparse
import ctypes
import os
import signal
import subprocess
import sys

import ray
from ray import exceptions

LEFT = (75, 76)  # on notice: start the same command again, here or elsewhere
MOST_KILLED = 100  # times for each agent: one without enough memory would be killed for ever
SET_PDEATHSIG = 1  # of prctl(2)
# What Ray raises for an actor that is gone. One that its memory monitor has killed is the second, which old Rays lack.
LOST = (exceptions.RayActorError, getattr(exceptions, "OutOfMemoryError", exceptions.RayActorError))


@ray.remote(max_concurrency=2)
class Machine:
    """The agent of one machine. If Ray ends this actor, its agent leaves on notice."""

    agent = None

    def run(self, arguments):
        program = os.path.join(os.path.dirname(sys.executable), "dlrover-run")
        prctl = ctypes.CDLL(None).prctl
        self.agent = subprocess.Popen(
            [program, *arguments],
            start_new_session=True,  # what kills the actor's process group leaves the agent its notice
            preexec_fn=lambda: prctl(SET_PDEATHSIG, signal.SIGHUP),
        )
        return self.agent.wait()

    def leave(self):
        if self.agent:
            self.agent.terminate()


def start(flags, machines):
    """Has Ray start an agent; where there is no room now, as soon as a machine is added."""
    machine = Machine.options(num_cpus=flags.num_cpus, num_gpus=flags.num_gpus, scheduling_strategy="SPREAD").remote()
    machines[machine.run.remote(flags.arguments)] = machine


def end_of(run):
    """An agent's exit code. What is lost with its actor or machine was killed."""
    try:
        return ray.get(run)
    except LOST:
        return -signal.SIGKILL


def train(flags, machines):
    """Until the job is over, its exit code."""
    for _ in range(flags.nodes):
        start(flags, machines)
    code = killed = 0
    while machines:
        (run,), _ = ray.wait(list(machines))
        del machines[run]
        code = end_of(run)
        if code in (0, 1):  # the whole job has finished, or failed: the others hear it, too
            ray.wait(list(machines), num_returns=len(machines), timeout=10) if machines else None
            break
        killed += code < 0
        if killed > MOST_KILLED * flags.nodes:
            print(f"train_on_ray: agents were killed {killed} times: see why, and start this again", file=sys.stderr)
            return 1
        if code in LEFT or code < 0:
            start(flags, machines)  # after 2 a person looks at that machine
    return code


def leave(machines):
    """All agents leave together, so the run is saved. Their exit code."""
    asked = {machine.leave.remote(): run for run, machine in machines.items()}
    there, _ = ray.wait(list(asked), num_returns=len(asked), timeout=10)  # others wait for a machine
    runs = [asked[one] for one in there]
    left, late = ray.wait(runs, num_returns=len(runs), timeout=60) if runs else ([], [])
    return LEFT[1] if late else max(map(end_of, left), default=LEFT[0])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, required=True, help="how many agents")
    parser.add_argument("--num-cpus", type=float, default=1, help="of each: as many as one machine has")
    parser.add_argument("--num-gpus", type=float, default=0, help="of each: as many as one machine has")
    parser.add_argument("--address", default="auto", help="of the Ray cluster")
    parser.add_argument("arguments", nargs="+", help="dlrover-run's own, behind --")
    flags = parser.parse_args()
    ray.init(address=flags.address)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the same as Ctrl-C
    machines = {}
    try:
        return train(flags, machines)
    except KeyboardInterrupt:
        return leave(machines)


if __name__ == "__main__":
    sys.exit(main())
