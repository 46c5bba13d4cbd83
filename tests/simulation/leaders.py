"""Several masters of one job over an etcd that loses answers: the product's candidates, leader's key and record.

Ours are etcd itself, with its leases, and what a leader does: it counts, and stores each number.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from dalsegno.master.leadership import candidate as candidates
from dalsegno.master.leadership.candidate import Candidate
from dalsegno.master.leadership.leader_key import LeaderKey
from dalsegno.master.record import chunks
from dalsegno.master.record.etcd_calls import Change, EtcdUnavailable, Value
from dalsegno.master.record.etcd_store import EtcdStore
from dalsegno.master.record.store import StoreAway, StoreError

from .clock import Clock
from .ledger import Violation
from .loop import VirtualLoop

# Seconds. Faults happen until then; then all is well within a time, and stays so.
FAULT_TIME, SETTLES_WITHIN, STAYS = 60.0, 20.0, 20.0
# What was begun before may end within that time.
LAST_FAULTS = 3.0
# How deep calls of masters may come in between one another's.
DEEPEST = 3
HAPPENINGS = (
    *("kill", "kill", "kill_leader", "kill_leader", "stop_leader", "stop_leader", "stop", "end", "end_leader"),
    *("cut", "cut_leader", "away", "away", "expire", "expire", "delete", "nonsense"),
)


@dataclass(frozen=True)
class LeaderPlan:
    """What one seed means. Times in seconds."""

    seed: int
    masters: int
    happenings: tuple[tuple[float, str], ...]
    # How likely a call's answer is lost, a call is made twice, and other masters' calls come in between.
    lost: float
    twice: float
    between: float
    # How much later than it must a lease ends, at most.
    late: float
    slow: float
    kind: str = "leaders"


def leader_plan_of(seed: int) -> LeaderPlan:
    """The plan of a seed."""
    random = Random(f"leaders {seed}")
    count = random.randint(1, 12)
    return LeaderPlan(
        seed,
        random.choice((1, 2, 3, 3, 3, 5)),
        tuple(sorted((random.uniform(0.0, FAULT_TIME), random.choice(HAPPENINGS)) for _ in range(count))),
        *(random.choice((0.0, 0.0, 0.02, 0.2)), random.choice((0.0, 0.1)), random.choice((0.0, 0.3))),
        *(random.choice((0.0, 1.0, 5.0)), random.choice((0.002, 0.02, 0.3))),
    )


@dataclass
class Lease:
    seconds: float
    ends_at: float
    keys: set[str] = field(default_factory=set)


class SimEtcd:
    """Keys, revisions and leases."""

    def __init__(self, world: LeaderWorld) -> None:
        self.world = world
        self.revision = 1
        self.keys: dict[str, tuple[bytes, int]] = {}
        # All that each key has had, with the revisions from which on.
        self.history: dict[str, list[tuple[int, bytes | None]]] = {}
        self.leases: dict[int, Lease] = {}
        self.away_until = 0.0

    def grant(self, seconds: float) -> int:
        number = len(self.leases) + 1
        self.leases[number] = Lease(seconds, 0.0)
        self.keep(number)
        return number

    def keep(self, number: int) -> None:
        lease = self.leases[number]
        if lease.ends_at < 0:
            return
        world = self.world
        lease.ends_at = world.clock.now + lease.seconds + world.random.uniform(0.0, world.plan.late)
        world.clock.after(lease.ends_at - world.clock.now, self._look, number)

    def _look(self, number: int) -> None:
        if 0 <= self.leases[number].ends_at <= self.world.clock.now:
            self.end(number)

    def end(self, number: int) -> None:
        """The lease is over, in its time or before."""
        self.leases[number].ends_at = -1.0
        for key in sorted(self.leases[number].keys):
            self.delete(key)

    def delete(self, key: str) -> None:
        if key in self.keys:
            self.revision += 1
            self._put(key, None)
            for lease in self.leases.values():
                lease.keys.discard(key)

    def _put(self, key: str, data: bytes | None) -> None:
        self.history.setdefault(key, []).append((self.revision, data))
        if data is None:
            self.keys.pop(key, None)
        else:
            self.keys[key] = (data, self.revision)

    def get(self, key: str, at: int) -> Value | None:
        had = [one for one in self.history.get(key, []) if one[0] <= (at or self.revision)]
        if not had or had[-1][1] is None:
            return None
        revision, data = had[-1]
        assert data is not None
        lease = next((number for number, one in self.leases.items() if key in one.keys), 0)
        return Value(data, revision, self.revision, lease)

    def change(self, key: str, revision: int, changes: Sequence[Change], held: bytes | None = None) -> int:
        found = self.keys.get(key, (b"", 0))
        if found[1] != revision or (revision and held is not None and found[0] != held):
            return 0
        if any(one.lease and self.leases[one.lease].ends_at < 0 for one in changes):
            raise EtcdUnavailable("requested lease not found")
        self.revision += 1
        for one in changes:
            self._put(one.key, one.data)
            if one.data is None:
                continue
            for number, lease in self.leases.items():
                (lease.keys.add if number == one.lease else lease.keys.discard)(one.key)
            if one.key.endswith("/head"):
                self.world.ledger.wrote(one.data)
        return self.revision


class SimClient:
    """`etcd_calls.Etcd`, of one master."""

    def __init__(self, master: SimMaster) -> None:
        self._master, self._world, self._etcd = master, master.world, master.world.etcd

    def get(self, key: str, at: int = 0) -> Value | None:
        found: Value | None = self._call(lambda: self._etcd.get(key, at))
        return found

    def get_all(self, keys: Sequence[str], at: int = 0) -> list[Value | None]:
        found: list[Value | None] = self._call(lambda: [self._etcd.get(key, at) for key in keys])
        return found

    def names(self, prefix: str) -> list[str]:
        return self._call(lambda: [key for key in self._etcd.keys if key.startswith(prefix)])

    def change(self, key: str, revision: int, changes: Sequence[Change], held: bytes | None = None) -> int:
        return self._call(lambda: self._etcd.change(key, revision, changes, held))

    def grant(self, seconds: int) -> int:
        return self._call(lambda: self._etcd.grant(seconds))

    def keep(self, lease: int) -> None:
        self._call(lambda: self._etcd.keep(lease))

    def strangers(self) -> None:
        """All endpoints are of one etcd."""

    def close(self) -> None:
        """Nothing is held."""

    def _call(self, act: Callable[[], Any]) -> Any:
        world, random = self._world, self._world.random
        if random.random() < world.between:
            world.come_between()
        if world.clock.now < max(self._etcd.away_until, self._master.cut_until):
            raise EtcdUnavailable("no member answers")
        done = act()
        if random.random() < world.twice:
            # What happens where a member carries a call out and dies, and the next one is asked.
            done = act()
        if random.random() < world.lost:
            raise EtcdUnavailable("the answer was lost")
        return done


@dataclass
class Job:
    """Work of an executor, which another master's may have come before."""

    loop: VirtualLoop
    thread: tuple[int, int]
    work: Callable[[], Any]
    done: bool = False
    result: Any = None
    error: Exception | None = None

    def run(self, world: LeaderWorld) -> Any:
        if not self.done:
            self.done = True
            world.pending.remove(self)
            world.running.append(self.thread)
            try:
                self.result = self.work()
            except Exception as error:
                self.error = error
            finally:
                world.running.pop()
        if self.error is not None:
            raise self.error
        return self.result


class Loop(VirtualLoop):
    """Tells the world what its executors have to do."""

    world: LeaderWorld

    def charge(self, seconds: float) -> None:
        """Its own work takes next to no time, and always the same: calls to etcd are what takes time here."""
        self.hold_up(1e-6)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        job = Job(self, (id(self), id(executor)), lambda: func(*args))
        self.world.pending.append(job)
        return super().run_in_executor(executor, job.run, self.world)


class SimServer:
    """What a leader does here: it counts."""

    def __init__(self, master: SimMaster, store: EtcdStore) -> None:
        self._master, self._store = master, store
        self.generation = self._count = 0
        self.serves = False
        self.leader = ""
        self._stopping = False

    async def lead(self) -> int:
        self._stopping = False
        self.generation = await asyncio.get_running_loop().run_in_executor(self, self._take)
        return self.generation

    def _take(self) -> int:
        generation = self._store.raise_generation()
        self._count = int(self._store.load().get("count", b"0"))
        self._master.world.ledger.took(generation, self._count)
        return generation

    async def run(self) -> None:
        self.serves = True
        self._master.world.trace(self._master.name, "serves, generation {}", self.generation)
        try:
            while not self._stopping:
                await asyncio.sleep(self._master.world.random.uniform(0.05, 0.5))
                self._count += 1
                await self._save()
        finally:
            self.serves = False

    async def _save(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                await loop.run_in_executor(self, self._put, self._count)
                return
            except StoreAway:
                if self._stopping:
                    raise
                await asyncio.sleep(0.5)

    def _put(self, count: int) -> None:
        self._store.save({"count": str(count).encode()}, self.generation)
        # Here, where the answer has come: the loop may hear of it later than of another leader's.
        self._master.world.ledger.acked(self.generation, count)

    def stop(self) -> None:
        self._stopping = True

    def stand_by(self, leader: str | None, etcd_is_away: bool = False) -> None:
        self.leader = leader or ""


class SimMaster:
    """One place where a master is started again whenever it has ended."""

    def __init__(self, world: LeaderWorld, number: int) -> None:
        self.world, self.name = world, f"m{number}"
        self.address = f"{self.name}:1"
        self.cut_until = 0.0
        self.starts = 0
        self.loop: Loop | None = None
        self.server: SimServer | None = None
        self.candidate: Candidate | None = None
        world.clock.after(world.random.uniform(0.0, 2.0), self.start)

    @property
    def runs(self) -> bool:
        return self.loop is not None and not self.loop.frozen

    def start(self) -> None:
        world = self.world
        self.starts += 1
        plan = world.plan
        self.loop = loop = Loop(world.clock, world.random, 1.0, lambda: world.random.uniform(0.0005, plan.slow))
        loop.world = world
        store = EtcdStore(SimClient(self), "job")  # type: ignore[arg-type]
        self.server = SimServer(self, store)
        key = LeaderKey(SimClient(self), "job")  # type: ignore[arg-type]
        me = f"{self.name}#{self.starts}"
        self.candidate = Candidate(key, self.server, self.address, clock=loop.time, me=me)
        loop.create_task(self._main(loop, self.candidate))

    async def _main(self, loop: Loop, candidate: Candidate) -> None:
        try:
            await candidate.run()
        except StoreError as error:
            if not loop.dead:
                self.world.ledger.violated("no master ends by itself", str(error))
        except Exception as error:
            if not loop.dead:
                self.world.ledger.violated("no master breaks", repr(error))
        if not loop.dead:
            self.world.clock.after(0.0, self.kill, loop)

    def kill(self, loop: Loop | None = None) -> None:
        """SIGKILL, or the end of its own; it is started again soon."""
        if self.loop is None or loop not in (None, self.loop):
            return
        self.world.trace(self.name, "ends")
        self.loop.kill()
        self.world.pending = [job for job in self.world.pending if job.loop is not self.loop]
        self.loop = self.server = self.candidate = None
        self.world.clock.after(self.world.random.uniform(0.1, 5.0), self.start)

    def freeze(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT."""
        loop = self.loop
        if loop is not None and not loop.frozen:
            loop.frozen = True
            self.world.clock.after(seconds, lambda: None if loop.dead else loop.thaw())

    def end(self) -> None:
        """SIGTERM."""
        if self.candidate is not None and self.loop is not None and self.runs:
            self.loop.call_soon(self.candidate.stop)


class LeaderLedger:
    """What must hold."""

    def __init__(self, world: LeaderWorld) -> None:
        self.world = world
        self.violation: Violation | None = None
        self.generation = self.most = self.number = 0
        self.owners: dict[int, str] = {}

    def violated(self, name: str, how: str) -> None:
        self.violation = self.violation or Violation(name, f"{self.world.clock.now:.3f}: {how}")

    def wrote(self, data: bytes) -> None:
        """Each head of the record, in the order in which etcd had them."""
        head = chunks.decoded(data)
        self.world.trace("etcd", "head {}: generation {}", head.number, head.generation)
        if head.generation < self.generation:
            self.violated("generations never fall", f"{head.generation} after {self.generation}")
        if head.number != self.number + 1:
            self.violated("no head is written over unseen", f"{head.number} after {self.number}")
        if self.owners.setdefault(head.generation, head.owner) != head.owner:
            self.violated("one writer for each generation", f"generation {head.generation} has two")
        self.generation, self.number = head.generation, head.number

    def took(self, generation: int, count: int) -> None:
        if count < self.most:
            self.violated("no decision is forgotten", f"generation {generation} begins at {count}, not {self.most}")

    def acked(self, generation: int, count: int) -> None:
        if count <= self.most:
            self.violated("no decision is made twice", f"{count} after {self.most}, generation {generation}")
        self.most = max(self.most, count)


class LeaderWorld:
    """Runs one plan to its end; `run` raises `Violation`."""

    def __init__(self, plan: LeaderPlan, tracing: bool = False) -> None:
        self.plan, self.tracing = plan, tracing
        self.lines: list[str] = []
        self._digest = hashlib.sha256()
        self.random = Random(f"leaders' world {plan.seed}")
        self.clock = Clock()
        self.lost, self.twice, self.between = plan.lost, plan.twice, plan.between
        self.pending: list[Job] = []
        self.running: list[tuple[int, int]] = []
        self.ledger = LeaderLedger(self)
        self.etcd = SimEtcd(self)
        self.masters = [SimMaster(self, number) for number in range(plan.masters)]
        for at, name in plan.happenings:
            self.clock.after(at, self._happen, name)
        self.clock.after(FAULT_TIME, self._calm)

    def trace(self, who: str, text: str, *values: Any) -> None:
        line = f"{self.clock.now:8.3f} {who:>5} {text.format(*values)}"
        self._digest.update(line.encode())
        if self.tracing:
            self.lines.append(line)

    def come_between(self) -> None:
        """Another master's work is done in the middle of this one's."""
        busy = {loop for loop, _ in self.running}
        free = [job for job in self.pending if id(job.loop) not in busy and not job.loop.frozen]
        if free and len(self.running) < DEEPEST:
            job = self.random.choice(free)
            try:
                job.run(self)
            except Exception:
                # It hears of it in its own time.
                return

    def run(self) -> str:
        """The schedule's digest."""
        level = candidates.log.level
        candidates.log.setLevel(logging.CRITICAL)
        try:
            return self._run()
        finally:
            candidates.log.setLevel(level)

    def _run(self) -> str:
        first: SimMaster | None = None
        end = FAULT_TIME + SETTLES_WITHIN
        while self.clock.now < end + STAYS and self.clock.step():
            if self.ledger.violation is not None:
                raise self.ledger.violation
            if self.clock.now <= FAULT_TIME + LAST_FAULTS:
                continue
            first = first or (self._leader() if self._is_known() else None)
            if first is None and self.clock.now > end:
                raise Violation("one leads in the end", f"{self._standing()}")
            if first is not None and self._leader() is not first:
                raise Violation("who leads goes on", f"{first.name} led, and now {self._standing()}")
        if not self._is_known():
            raise Violation("one leads in the end", f"{self._standing()}")
        return self._digest.hexdigest()

    def _leader(self) -> SimMaster | None:
        """Who leads, if it is one alone."""
        leading = [master for master in self.masters if master.server is not None and master.server.serves]
        return leading[0] if len(leading) == 1 else None

    def _is_known(self) -> bool:
        """Whether all masters are there, and know the one who leads."""
        first = self._leader()
        others = [master.server for master in self.masters if master is not first]
        return first is not None and all(one is not None and one.leader == first.address for one in others)

    def _standing(self) -> dict[str, object]:
        return {one.name: one.server and (one.server.serves, one.server.leader) for one in self.masters}

    def _calm(self) -> None:
        self.trace("world", "is calm")
        self.lost = self.twice = 0.0
        self.etcd.away_until = 0.0
        for master in self.masters:
            master.cut_until = 0.0
            if master.loop is not None and master.loop.frozen:
                master.loop.thaw()

    def _happen(self, name: str) -> None:
        self.trace("world", "{}", name)
        random = self.random
        leading = [one for one in self.masters if one.server is not None and one.server.serves]
        master = random.choice(leading if name.endswith("_leader") and leading else self.masters)
        kind = name.partition("_")[0]
        seconds = random.choice((0.3, 2.0, 4.0, 12.0))
        if kind == "kill":
            master.kill()
        elif kind == "stop":
            master.freeze(seconds)
        elif kind == "end":
            master.end()
        elif kind == "cut":
            master.cut_until = self.clock.now + seconds
        elif kind == "away":
            self.etcd.away_until = self.clock.now + seconds
        elif kind == "expire":
            for number, lease in self.etcd.leases.items():
                if lease.ends_at > 0:
                    self.etcd.end(number)
        elif kind == "delete":
            self.etcd.delete("/dalsegno/job/leader")
        elif "/dalsegno/job/leader" in self.etcd.keys:
            found = self.etcd.keys["/dalsegno/job/leader"][1]
            self.etcd.change("/dalsegno/job/leader", found, [Change("/dalsegno/job/leader", b"nonsense")])
