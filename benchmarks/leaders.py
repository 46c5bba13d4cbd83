"""How long a job has no master when the leader of three goes: from the signal until a new node is registered.

The node is an agent's own client, which knows all masters and asks from the moment of the signal on. Etcd has three
members. Each time whoever went comes back before the next one goes.
"""

from __future__ import annotations

import argparse
import queue
import secrets
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from benchmarks.results import report
from dalsegno.agent.control.connection import Connector, Credentials
from dalsegno.agent.control.master_client import ClientCallbacks, MasterClient
from dalsegno.protos import control_pb2 as pb
from tests.support.jobs.etcd_members import ETCD, MISSING, Members, etcd_members
from tests.support.jobs.master_process import settings
from tests.support.jobs.several_masters import Several

REPEATS = 5
PATIENCE_SECONDS = 60.0
# What goes, and the seconds within which membership changes are to work again.
GOALS = {"SIGTERM": 1.0, "killed": 5.0, "killed with etcd's leader": 8.0}


def main(arguments: Sequence[str] = ()) -> int:
    """Prints medians and the longest; returns 1 if a median misses its goal."""
    flags = argparse.ArgumentParser(prog="python -m benchmarks leaders", description=__doc__)
    flags.add_argument("--repeats", type=int, default=REPEATS, help=f"of each way to go ({REPEATS})")
    repeats = flags.parse_args(arguments).repeats
    if ETCD is None:
        print(f"left out: {MISSING}")
        return 0
    rows, missed = [], False
    with (
        tempfile.TemporaryDirectory() as folder,
        etcd_members(Path(folder) / "etcd", 3) as members,
        Several(Path(folder) / "job", members=members) as job,
    ):
        for how, goal in GOALS.items():
            seconds = [_measured(job, members, how) for _ in range(repeats)]
            median = statistics.median(seconds)
            missed = missed or median > goal
            columns = {"median (s)": round(median, 2), "longest (s)": round(max(seconds), 2)}
            rows.append({"the leader": how, **columns, "goal (s)": goal})
    report("leaders", rows, title="A change of leader", settings={"repeats": repeats, "masters": 3, "members": 3})
    return int(missed)


def _measured(job: Several, members: Members, how: str) -> float:
    """Seconds from the signal to the answer; then everybody is there again."""
    leader, before = job.leader()
    for name in job.ports:
        if name != leader:
            job.wait_standby(name, leader)
    number = members.leader()
    if how == "killed with etcd's leader":
        members.send(number, signal.SIGKILL)
    job.masters[leader].send_signal(signal.SIGTERM if how == "SIGTERM" else signal.SIGKILL)
    began = time.monotonic()
    _registered(job, before)
    took = time.monotonic() - began
    job.masters[leader].wait(PATIENCE_SECONDS)
    job.start_master(leader)
    if members.gone(number):
        members.start(number)
        members.wait(number)
    return took


def _registered(job: Several, before: int) -> None:
    """Has a new node registered by a master of a later generation than this one."""
    heard: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
    listener = ClientCallbacks(
        registered=lambda incarnation, reply: heard.put((reply.generation, "")),
        refused=lambda code, detail: heard.put((0, f"{code}: {detail}")),
        directed=lambda directive: None,
        failed=lambda method, code, detail: None,
        link=lambda up: None,
    )
    addresses = list(job.addresses.values())
    with closing(MasterClient(Connector(lambda: addresses, Credentials), job.job, listener)) as client:
        generation = 0
        while generation <= before:
            # The one that goes may still answer the first.
            name = secrets.token_hex(4)
            client.register(
                pb.RegisterRequest(
                    node=name, host=name, incarnation=name, nproc=1, probe="probe", settings=settings((1, 4))
                )
            )
            generation, refusal = heard.get(timeout=PATIENCE_SECONDS)
            if refusal:
                raise RuntimeError(f"the node is not registered: {refusal}")
