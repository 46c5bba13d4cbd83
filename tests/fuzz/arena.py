"""A real master with two good agents in a world, and whoever else calls it; what must hold is asserted throughout."""

from __future__ import annotations

import contextlib
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from dalsegno.protos import control_pb2 as pb
from tests.support.jobs.master_process import MasterProcess, master_process

from .calls import FAMILIES, SERVICE, Call, Rogue, Scene, registration
from .good_agents import KEEP, Broken, GoodAgent

__all__ = ["Arena", "Failure", "fuzz"]

TOKEN = "the-token-of-the-job-under-attack"
# Bytes that the master may hold in memory; it begins with about 60 MB.
MEMORY = 400 << 20
# Bytes of a node's name.
LONGEST_NAME = 512
BURST = 25
# Seconds. Only so that a call that is never answered is noticed.
_CALL_TIMEOUT = 30.0
_COMMIT_EVERY, _STEPS = 4, 10
_SENSIBLE = frozenset(
    {
        grpc.StatusCode.OK,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
)


@dataclass(frozen=True)
class Failure:
    """What did not hold, and after which calls."""

    what: str
    calls: tuple[Call, ...]
    # Where the run was.
    step: int = 0

    def __str__(self) -> str:
        return "\n".join((self.what, *(f"  {call}" for call in self.calls)))


class _Answered(Broken):
    """A call got an answer that it should not get."""

    def __init__(self, call: Call, code: grpc.StatusCode) -> None:
        super().__init__(f"it was answered {code.name}")
        self.calls = (call,)


class Arena:
    """One job under attack. Use as a context manager.

    Args:
        directory: for its store and its token.
        replay: the step at which the run stays; otherwise it goes on, and commits, from burst to burst.
    """

    def __init__(self, directory: Path, replay: int = 0) -> None:
        self._stack = contextlib.ExitStack()
        self._directory = directory
        (directory / "token").write_text(TOKEN)
        self._metadata = {
            "right": (("authorization", f"Bearer {TOKEN}"),),
            "wrong": (("authorization", "Bearer of-bad-news-for-once"),),
            "none": (),
        }
        self._bursts = 0
        self._replay = replay
        self._commits: list[pb.Checkpoint] = []

    def __enter__(self) -> Arena:
        try:
            self._open()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.good:
            agent.close()
        self._channel.close()
        self._stack.close()

    def _open(self) -> None:
        self.master = self._start()
        self.good = [GoodAgent(self.master.address, f"good-{n}", self._metadata["right"]) for n in range(2)]
        self._connect()
        for agent in self.good:
            agent.register()
            agent.watch()
        epoch = self._form()
        self.scene = Scene(
            [(agent.name, agent.incarnation) for agent in self.good],
            [Rogue(number) for number in range(4)],
            self.good[0].run_id,
            epoch,
            self.master.generation,
        )
        while self.scene.step < max(self._replay, _STEPS):
            self.commit()
        for rogue in self.scene.rogues:
            self.send([Call("Register", registration(rogue).SerializeToString())])

    # ---- the good ---------------------------------------------------------------------------------------------------

    def commit(self) -> None:
        """The good agents make steps and record a checkpoint."""
        self.scene.step += _STEPS
        saved = self.good[0].commit(self.scene.epoch, self.scene.step, self.scene.generation)
        self._commits.append(saved)
        self.scene.commits.append(saved.ref)

    def check(self) -> None:
        """Raises Broken where the good agents notice anything of the others."""
        if self.master.process.poll() is not None:
            raise Broken(f"the master ended with {self.master.process.returncode}: {self._last_words()}")
        if (memory := self._memory()) > MEMORY:
            raise Broken(f"the master holds {memory >> 20} MiB")
        for agent in self.good:
            agent.live(self.scene.epoch, self.scene.step + 1)
            agent.check(tuple(saved.ref.name for saved in self._commits[-KEEP:]))
            agent.expect_undisturbed(self.scene.epoch)
        self._check_status(self.good[0].status())

    def end(self) -> None:
        """The master is killed and started again: the same record, from which the next world starts."""
        before = self.good[0].status()
        self._channel.close()
        for agent in self.good:
            agent.close()
        self.master.kill()
        self.master = self._start()
        self._connect()
        for agent in self.good:
            agent.connect(self.master.address)
            agent.watch()
        for agent in self.good:
            agent.wait_for("its world", lambda directive: directive.WhichOneof("order") == "run")
        after = self.good[0].status()
        for name in ("run_id", "epoch", "phase", "head", "settings", "limit"):
            if getattr(before, name) != getattr(after, name):
                raise Broken(f"{name} was {getattr(before, name)}, and is {getattr(after, name)} after a restart")
        self.check()
        self.good[0].fail(self.scene.epoch, self.scene.step)
        epoch = self._form()
        if epoch <= self.scene.epoch:
            raise Broken(f"epoch {epoch} was opened after {self.scene.epoch}")
        self.scene.epoch = epoch

    def _form(self) -> int:
        """Both answer what they are told until they are in a world; its epoch."""
        inventory = self._commits
        for agent in self.good:
            told = agent.wait_for("a gathering", lambda directive: directive.WhichOneof("order") == "gather")
            if inventory and told.gather.resume.digest != inventory[-1].ref.digest:
                raise Broken(f"the run is to go on from {told.gather.resume.name}, not {inventory[-1].ref.name}")
            agent.join(told.gather.round, inventory)
        epochs = {agent.wait_for_world() for agent in self.good}
        if len(epochs) != 1:
            raise Broken(f"the good agents are in the worlds {epochs}")
        return int(epochs.pop())

    def _check_status(self, status: pb.StatusReply) -> None:
        scene = self.scene
        if status.phase != pb.PHASE_RUNNING or status.epoch != scene.epoch:
            raise Broken(f"the job is in phase {pb.Phase.Name(status.phase)}, epoch {status.epoch}, not {scene.epoch}")
        if status.head.ref != self._commits[-1].ref:
            raise Broken(f"the newest commit is {status.head.ref.name}, not {self._commits[-1].ref.name}")
        if status.step != scene.step + 1:
            raise Broken(f"the run is said to be at step {status.step}, not {scene.step + 1}")
        members = sorted(node.node for node in status.nodes if node.role == "member")
        if members != sorted(agent.name for agent in self.good):
            raise Broken(f"the members are {members}")
        for name in (node.node for node in status.nodes):
            if not name.isprintable() or not 0 < len(name.encode()) <= LONGEST_NAME:
                raise Broken(f"a node is called {name[:80]!r} ({len(name)} characters)")

    # ---- the others -------------------------------------------------------------------------------------------------

    def send(self, calls: Sequence[Call]) -> None:
        """Makes all calls at once, the good agents' among them, and looks at the answers."""
        streams, unary = [], []
        for call in calls:
            path = f"/{SERVICE.full_name}/{call.method}"
            metadata = self._metadata[call.token]
            made: Any
            if call.method == "Watch":
                made = self._channel.unary_stream(path)(call.data, timeout=_CALL_TIMEOUT, metadata=metadata)
            else:
                made = self._channel.unary_unary(path).future(call.data, timeout=_CALL_TIMEOUT, metadata=metadata)
            if call.dropped:
                made.cancel()
            else:
                (streams if call.method == "Watch" else unary).append((call, made))
        self._bursts += 1
        if self._bursts % _COMMIT_EVERY == 0 and not self._replay:
            self.commit()
        self.check()
        for call, future in unary:
            self._judge(call, future.code())
        for call, stream in streams:
            # A stream that nobody refuses stays open until its reader drops it.
            if call.forged or call.token != "right":
                self._judge(call, _ending(stream))
            stream.cancel()
        self.check()

    def _judge(self, call: Call, code: grpc.StatusCode) -> None:
        if call.token != "right":
            wrong = code is not grpc.StatusCode.UNAUTHENTICATED
        elif call.forged:
            wrong = code not in _SENSIBLE or code is grpc.StatusCode.OK
        else:
            wrong = code not in _SENSIBLE
        if wrong:
            raise _Answered(call, code)

    def _connect(self) -> None:
        self._channel = grpc.insecure_channel(self.master.address, options=[("grpc.use_local_subchannel_pool", 1)])

    # ---- the process ------------------------------------------------------------------------------------------------

    def _start(self) -> MasterProcess:
        log = self._directory / "master.log"
        flags = ("--nnodes", "2:2", "--token-file", str(self._directory / "token"), "--log-file", str(log))
        return self._stack.enter_context(master_process(self._directory / "job.sqlite", *flags))

    def _memory(self) -> int:
        """Resident bytes of the master."""
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            lines = Path(f"/proc/{self.master.process.pid}/status").read_text(encoding="ascii", errors="replace")
            return next((int(line.split()[1]) << 10 for line in lines.splitlines() if line.startswith("VmRSS")), 0)
        return 0

    def _last_words(self) -> str:
        log = self._directory / "master.log"
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
        return lines[-1] if lines else "it said nothing"


def _ending(stream: Any) -> grpc.StatusCode:
    """How a stream ended that should have been refused; OK where it brought a directive."""
    try:
        next(stream)
    except StopIteration:
        return grpc.StatusCode.OK
    except grpc.RpcError:
        code: grpc.StatusCode = stream.code()
        return code
    return grpc.StatusCode.OK


def fuzz(directory: Path, family: str, seed: int, count: int, per_master: int = 2_500) -> Failure | None:
    """Makes `count` calls of a family, with a new master every so many; what did not hold, or None."""
    for number, begun in enumerate(range(0, count, per_master)):
        rng = random.Random(f"{family}/{seed}/{number}")
        failure = _attack(_place(directory), family, rng, min(per_master, count - begun))
        if failure is not None:
            shrunk = _shrink(directory, failure)
            return Failure(f"seed {seed}, master {number}: {shrunk.what}", shrunk.calls)
    return None


def _attack(directory: Path, family: str, rng: random.Random, count: int) -> Failure | None:
    sent: tuple[Call, ...] = ()
    arena = Arena(directory)
    try:
        with arena:
            calls = FAMILIES[family](rng, arena.scene)
            for begun in range(0, count, BURST):
                sent = tuple(next(calls) for _ in range(min(BURST, count - begun)))
                arena.send(sent)
            arena.end()
    except AssertionError as broken:
        return Failure(str(broken), broken.calls if isinstance(broken, _Answered) else sent, arena.scene.step)
    return None


def _shrink(directory: Path, failure: Failure) -> Failure:
    """The one call of a burst that does it alone, or else the calls up to the one that did it, where they do."""
    if len(failure.calls) == 1:
        return failure
    guilty: list[Call] = []
    for call in _one_by_one(directory, failure, failure.calls, guilty):
        alone = _one_by_one(directory, failure, [call], [])
        return Failure(failure.what, (call,) if any(True for _ in alone) else tuple(guilty))
    return failure


def _one_by_one(directory: Path, failure: Failure, calls: Sequence[Call], made: list[Call]) -> Iterator[Call]:
    """Makes the calls in turn in a job of their own; yields the one at which something no longer held."""
    try:
        with Arena(_place(directory), failure.step) as arena:
            for call in calls:
                made.append(call)
                arena.send([call])
            arena.end()
    except AssertionError:
        yield made[-1]


def _place(directory: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=directory))
