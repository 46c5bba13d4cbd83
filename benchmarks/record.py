"""What one turn's save costs: the same rows to SQLite and to an etcd of three members, on the same disk, in turn."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from benchmarks.results import report
from dalsegno.master.brain.state import Job, JobEvent
from dalsegno.master.record.codec import JobCodec
from dalsegno.master.record.store import Rows, Store, open_store
from tests.support.jobs.etcd_members import ETCD, MISSING, etcd_members
from tests.support.jobs.masters import Driven, settings

NODES = (4, 1000)
EVENTS = 1000
REPEATS = 30
# What is asked of a save: not more than so many times what it takes in SQLite.
BOUND = 3.0


def main() -> int:
    """Prints medians; returns 1 if a save to etcd takes more than the bound."""
    if ETCD is None:
        print(f"left out: {MISSING}")
        return 0
    rows = []
    with tempfile.TemporaryDirectory() as folder, etcd_members(Path(folder) / "etcd", 3) as members:
        for nodes in NODES:
            stores = {
                "SQLite": open_store(f"sqlite:///{folder}/{nodes}.sqlite", "job"),
                "etcd": open_store(members.url, f"job-{nodes}"),
            }
            rows += _compared(nodes, _record(nodes), stores)
            for store in stores.values():
                store.close()
    settings_ = {"repeats": REPEATS, "events": EVENTS, "members": 3, "load": f"{os.getloadavg()[0]:.1f}"}
    report("record", rows, title="One turn's save", settings=settings_)
    return int(any(float(str(row["times"])) > BOUND for row in rows))


def _record(nodes: int) -> Job:
    """A running job of so many nodes, with as many events as are kept."""
    job = Driven(settings(max_nodes=nodes))
    started = job.start(nodes)
    started[0].save(1)
    made = job.job
    event = made.events[-1]
    made.events = tuple(_event(event, number) for number in range(1, EVENTS + 1))
    made.sequence = EVENTS
    return made


def _event(like: JobEvent, number: int) -> JobEvent:
    return replace(like, sequence=number)


def _turns(job: Job) -> dict[str, Callable[[int], Rows]]:
    """What turns save, by their names: from the number of the repetition to its rows."""
    everything = JobCodec.everything(job)
    events = sorted(key for key in everything if key.startswith("event/"))
    nodes = [key for key in everything if key.startswith("node/")]
    checkpoint = next(key for key in everything if key.startswith("checkpoint/"))

    def event(number: int) -> Rows:
        return {f"event/{EVENTS + number}": everything[events[-1]], events[number % len(events)]: None}

    def changed(key: str, number: int) -> bytes:
        # As JSON may have it: blanks at the end.
        return everything[key] + b" " * (1 + number % 7)

    def commit(number: int) -> Rows:
        return {"job": changed("job", number), f"checkpoint/{number}": everything[checkpoint], **event(number)}

    def opened(number: int) -> Rows:
        again = {key: changed(key, number) for key in (*nodes, "job", "world", "parts")}
        return {**again, **event(number)}

    return {"a node's row": lambda n: {nodes[0]: changed(nodes[0], n)}, "a commit": commit, "a world": opened}


def _compared(nodes: int, job: Job, stores: dict[str, Store]) -> list[dict[str, object]]:
    generations = {name: store.raise_generation() for name, store in stores.items()}
    for name, store in stores.items():
        store.save(dict(JobCodec.everything(job)), generations[name])
    found = []
    for turn, rows in _turns(job).items():
        seconds: dict[str, list[float]] = {name: [] for name in stores}
        for number in range(REPEATS):
            made = rows(number)
            # In turn, so that both find the same machine.
            for name, store in stores.items():
                began = time.perf_counter()
                store.save(dict(made), generations[name])
                seconds[name].append(time.perf_counter() - began)
        medians = {name: statistics.median(each) for name, each in seconds.items()}
        columns = {f"{name} (ms)": round(1000 * median, 2) for name, median in medians.items()}
        times = round(medians["etcd"] / medians["SQLite"], 2)
        found.append({"nodes": nodes, "saved": turn, "rows": len(rows(0)), **columns, "times": times})
    return found
