"""Frames that no worker of ours writes, on the agent's Unix socket; beside them two good workers who must be served.

The socket, the mailbox and the decisions are the agent's own. Good workers are processes with the library's `Link`.
"""

from __future__ import annotations

import contextlib
import os
import random
import selectors
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from google.protobuf.message import DecodeError

from dalsegno.agent.decisions import events as ev
from dalsegno.agent.decisions import handling
from dalsegno.agent.shell.mailbox import Mailbox
from dalsegno.agent.workers.worker_link import MAX_FRAME_BYTES, WorkerLink
from dalsegno.protos import control_pb2, worker_pb2
from tests.conftest import ROOT

from .good_agents import BOUND, Broken
from .values import DOUBLES, NUMBERS, TEXTS, disturb, mutate

__all__ = ["Deed", "fuzz_frames"]

EPOCH, FIRST_RANK, NPROC = 7, 4, 3
# The first two are good; nobody has told the agent yet which process the third is, so that anyone may be it.
GOOD_RANKS, BAD_RANK = (FIRST_RANK, FIRST_RANK + 1), FIRST_RANK + 2
MOST_DESCRIPTORS = 400
_LOOK_EVERY = 50
_CROWD = 300


@dataclass(frozen=True)
class Deed:
    """What one connection does: `frames` are written as they are, in pieces of `piece` bytes; then it stays or goes."""

    frames: tuple[bytes, ...]
    piece: int = 1 << 16
    stays: bool = False

    def __str__(self) -> str:
        end = "stays" if self.stays else "goes"
        return f"[{', '.join(map(_spelt, self.frames))}] in pieces of {self.piece} bytes, then {end}"


def _spelt(data: bytes) -> str:
    """A frame as a person repeats it."""
    with contextlib.suppress(DecodeError, struct.error):
        if struct.unpack(">I", data[:4])[0] == len(data) - 4:
            return "{" + text_format.MessageToString(worker_pb2.ToAgent.FromString(data[4:]), as_one_line=True) + "}"
    return data[:100].hex() + ("…" if len(data) > 100 else "")


def frame(message: worker_pb2.ToAgent) -> bytes:
    """As a worker writes it."""
    data = message.SerializeToString()
    return struct.pack(">I", len(data)) + data


# ---- what they do ----------------------------------------------------------------------------------------------------


def _hello(rng: random.Random) -> worker_pb2.ToAgent:
    if rng.random() < 0.6:
        return worker_pb2.ToAgent(hello=worker_pb2.Hello(epoch=EPOCH, rank=BAD_RANK, local_rank=BAD_RANK - FIRST_RANK))
    rank = rng.choice((*GOOD_RANKS, BAD_RANK, BAD_RANK, BAD_RANK, 0, FIRST_RANK + NPROC, rng.choice(NUMBERS) % 2**32))
    local = rng.choice((rank - FIRST_RANK, rank - FIRST_RANK, 0, 1, 2, 3, 2**32 - 1)) % 2**32
    epoch = rng.choice((EPOCH, EPOCH, EPOCH, EPOCH - 1, EPOCH + 1, rng.choice(NUMBERS)))
    hello = worker_pb2.Hello(protocol=1, epoch=epoch, rank=rank, local_rank=local, pid=rng.choice((os.getpid(), 1, 0)))
    return worker_pb2.ToAgent(hello=hello)


def _word(rng: random.Random) -> worker_pb2.ToAgent:
    name, digest = f"step-{rng.randrange(1, 99)}.e{EPOCH}.1", f"{rng.getrandbits(256):064x}"
    words: tuple[dict[str, Any], ...] = (
        {"progress": worker_pb2.Progress(step=5, loss=rng.choice(DOUBLES), seconds=0.1, longest=0.1, beats=3)},
        {"saving": worker_pb2.Saving(name=name, bytes=rng.choice(NUMBERS))},
        {"sealed": worker_pb2.Sealed(name=name, digest=digest, step=5)},
        {"save_failed": worker_pb2.SaveFailed(name=name, reason=rng.choice(TEXTS), drain=rng.random() < 0.5, step=5)},
        {"draining": worker_pb2.Draining(step=6)},
        {"drained": worker_pb2.Drained(name=name, digest=digest, step=6)},
        {"finished": worker_pb2.Finished(step=rng.choice((6, 2**53)))},
        {"bad_checkpoint": worker_pb2.BadCheckpoint(name=name, digest=digest, form=1, file="f", message="bad")},
        {},
    )
    message = worker_pb2.ToAgent(**rng.choice(words))
    kind = message.WhichOneof("body")
    if kind is not None and rng.random() < 0.7:
        disturb(rng, getattr(message, kind))
    return message


def deed_of(rng: random.Random) -> Deed:
    """What one hostile connection does."""
    frames: list[bytes] = []
    if rng.random() < 0.8:
        frames.append(frame(_hello(rng)))
    for _ in range(rng.choice((0, 1, 1, 2, 5, 20))):
        said = frame(_word(rng) if rng.random() < 0.95 else _hello(rng))
        match rng.randrange(20):
            case 0:
                said = mutate(rng, said)
            case 1:
                said = said[:4] + mutate(rng, said[4:])
            case 2:
                said = (
                    struct.pack(">I", rng.choice((0, 1, MAX_FRAME_BYTES, MAX_FRAME_BYTES + 1, 2**31, 2**32 - 1)))
                    + said[4:]
                )
            case 3:
                said = said[: rng.randrange(len(said) + 1)]
        frames.append(said)
    return Deed(tuple(frames), rng.choice((1, 3, 1 << 16, 1 << 16, 1 << 16)), rng.random() < 0.1)


# ---- the agent -------------------------------------------------------------------------------------------------------

# A good worker: a step every hundredth of a second, and it says each time it sees the drain flag change.
_WORKER = """
import os, sys, time
from dalsegno.elastic.rank.link import Link
from dalsegno.protos import worker_pb2
epoch, rank, local = map(int, sys.argv[2:5])
hello = worker_pb2.Hello(protocol=1, epoch=epoch, rank=rank, local_rank=local, pid=os.getpid())
sys.stdin.readline()
link = Link(sys.argv[1], hello)
step, seen = 0, None
while True:
    step += 1
    link.send(worker_pb2.ToAgent(progress=worker_pb2.Progress(step=step, loss=1.0, beats=step)))
    if not link.alive:
        print("lost", flush=True)
        break
    if link.drain != seen:
        seen = link.drain
        print("drain" if seen else "train", flush=True)
    time.sleep(0.01)
"""


class GoodWorker:
    """One rank in a process of its own."""

    def __init__(self, link: WorkerLink, rank: int) -> None:
        self.rank = rank
        arguments = [sys.executable, "-c", _WORKER, str(link.path), str(EPOCH), str(rank), str(rank - FIRST_RANK)]
        self.process = subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT / "tests"
        )
        link.started(rank - FIRST_RANK, lambda: self.process.pid)
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def expect(self, word: str) -> None:
        """Raises Broken where it does not say this within the bound."""
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            # The first word comes after the imports of a new process.
            said = self.process.stdout.readline().strip() if selector.select(4 * BOUND) else ""
        if said != word:
            raise Broken(f"the worker of rank {self.rank} was to hear {word!r}; it heard {said or 'nothing'!r}")

    def close(self) -> None:
        """Ends the process."""
        self.process.kill()
        self.process.wait(10)
        for end in (self.process.stdin, self.process.stdout):
            assert end is not None
            end.close()


class Agent:
    """The part of an agent that its workers speak to, and what it decides. Use as a context manager."""

    def __init__(self) -> None:
        self.mailbox: Mailbox[ev.Event] = Mailbox()
        self.problems: list[str] = []
        self.actions: deque[ev.Action] = deque(maxlen=10_000)
        # What was believed of the rank that anyone may be.
        self.heard: Counter[str] = Counter()
        self.state = _running()
        # This process may hold others from earlier tests.
        self._descriptors_before = _descriptors()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._decide, daemon=True)

    def __enter__(self) -> Agent:
        self.link = WorkerLink(self._said)
        self.link.expect(EPOCH, FIRST_RANK, NPROC)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join(10)
        self.link.close()

    def _said(self, epoch: int, rank: int, message: worker_pb2.ToAgent) -> None:
        body = message.WhichOneof("body")
        self.heard[body or "nothing"] += rank == BAD_RANK
        newest = (epoch, rank, body) if body not in ("sealed", "save_failed") else None
        self.mailbox.put(ev.WorkerSaid(epoch, rank, message), replaces=newest)

    def _decide(self) -> None:
        while not self._closing.is_set():
            event = self.mailbox.get(0.2)
            if event is None:
                continue
            try:
                self.state, actions = handling.handle(self.state, event, time.monotonic())
            except Exception as error:
                self.problems.append(f"{type(error).__name__}: {error} after {event}")
                raise
            self.actions.extend(actions)

    def wait_for_steps(self) -> None:
        """Both good ranks are heard anew. Raises Broken where they are not, within the bound."""
        deadline = time.monotonic() + BOUND
        before = {rank: self.state.epoch.beats.get(rank, 0) for rank in GOOD_RANKS}
        while any(self.state.epoch.beats.get(rank, 0) <= heard for rank, heard in before.items()):
            self.check()
            if time.monotonic() > deadline:
                raise Broken(f"for {BOUND:g} s the good workers were not heard: {before}")
            time.sleep(0.005)  # why: another thread folds in what it hears, and tells nobody

    def check(self) -> None:
        """Raises Broken where the agent believes what nobody may say, or is not well."""
        if self.problems:
            raise Broken(self.problems[0])
        if not any(thread.name == "worker-link" for thread in threading.enumerate()):
            raise Broken("nobody serves the workers any more")
        state = self.state
        spoken = {"finished": state.epoch.finished_ranks, "drained": state.epoch.drained_ranks}
        for what, ranks in spoken.items():
            if ranks - {BAD_RANK}:
                raise Broken(f"the agent believes that ranks {sorted(ranks)} {what}")
        if strangers := set(state.epoch.beats) - {*GOOD_RANKS, BAD_RANK}:
            raise Broken(f"the agent believes in ranks {sorted(strangers)}")
        if state.errands.reading:
            raise Broken(f"the agent believes that {sorted(state.errands.reading)[0]!r} was sealed, without rank 0")
        if (most := max(state.epoch.step, state.epoch.saved_bytes, *state.epoch.beats.values(), 0)) > 2**53:
            raise Broken(f"the agent believes in {most} steps, bytes or beats")
        if not 0 <= state.epoch.longest_seconds < 1e8:
            raise Broken(f"the agent believes that a step took {state.epoch.longest_seconds} s")
        if (descriptors := _descriptors() - self._descriptors_before) > MOST_DESCRIPTORS:
            raise Broken(f"{descriptors} descriptors are open that were not before")
        self._check_texts()

    def _check_texts(self) -> None:
        while self.actions:
            action = self.actions.popleft()
            text = action.text if isinstance(action, ev.Say) else ""
            if not text.isprintable() or len(text) > 3000:
                raise Broken(f"a person is shown {text[:200]!r} ({len(text)} characters)")


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _running() -> handling.AgentState:
    """The state of an agent whose world trains."""
    state = handling.fresh(handling.AgentSettings(nproc=NPROC))
    place = control_pb2.Place(node="n", incarnation="i", group_rank=1, first_rank=FIRST_RANK, nproc=NPROC)
    state.node, state.incarnation, state.run_id, state.started = "n", "i", "run-0001", EPOCH
    state.world = control_pb2.World(epoch=EPOCH, run_id="run-0001", nodes=2, world_size=7, place=place)
    state.workers, state.phase = handling.Workers.RUNNING, control_pb2.PHASE_RUNNING
    return state


# ---- both together ---------------------------------------------------------------------------------------------------


class Crowd:
    """The hostile connections that are still open."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open: deque[socket.socket] = deque()

    def do(self, deed: Deed) -> None:
        """Makes one connection, which writes what it wants until it is cut off or done."""
        channel = socket.socket(socket.AF_UNIX)
        channel.settimeout(BOUND)
        try:
            channel.connect(str(self._path))
            for data in deed.frames:
                for begin in range(0, len(data), deed.piece):
                    channel.sendall(data[begin : begin + deed.piece])
        except (BrokenPipeError, ConnectionResetError):
            channel.close()
            return
        except TimeoutError:
            raise Broken(f"the agent did not read or accept for {BOUND:g} s") from None
        if not deed.stays:
            channel.close()
            return
        self._open.append(channel)
        while len(self._open) > _CROWD:
            self._open.popleft().close()

    def close(self) -> None:
        """Ends all connections."""
        while self._open:
            self._open.popleft().close()


def fuzz_frames(seed: int, count: int) -> tuple[str, Counter[str]]:
    """Writes at least `count` hostile frames.

    Returns what did not hold, with what was done before, or ""; and how often the rank that anyone may be was believed.
    """
    agent = Agent()
    lately: deque[Deed] = deque(maxlen=_LOOK_EVERY)
    try:
        with agent, contextlib.ExitStack() as stack:
            workers = [GoodWorker(agent.link, rank) for rank in GOOD_RANKS]
            for worker in workers:
                stack.callback(worker.close)
                worker.expect("train")
            crowd = Crowd(agent.link.path)
            stack.callback(crowd.close)
            drain = False
            for deed in _deeds(seed, count, lately):
                crowd.do(deed)
                if len(lately) == _LOOK_EVERY or deed.piece == 1:
                    agent.check()
                if len(lately) == _LOOK_EVERY:
                    drain = not drain
                    crowd.close()
                    _served(agent, workers, drain)
                    lately.clear()
            crowd.close()
            _served(agent, workers, not drain)
    except Broken as broken:
        return "\n".join((f"seed {seed}: {broken}", *(f"  {deed}" for deed in lately))), agent.heard
    return "", agent.heard


def _deeds(seed: int, count: int, lately: deque[Deed]) -> Iterator[Deed]:
    written = number = 0
    while written < count:
        deed = deed_of(random.Random(f"frames/{seed}/{number}"))
        number += 1
        written += len(deed.frames)
        lately.append(deed)
        yield deed


def _served(agent: Agent, workers: list[GoodWorker], drain: bool) -> None:
    agent.wait_for_steps()
    agent.link.tell(worker_pb2.ToWorker(drain=drain, master_seen=True))
    began = time.monotonic()
    for worker in workers:
        worker.expect("drain" if drain else "train")
    if (took := time.monotonic() - began) > BOUND:
        raise Broken(f"the good workers heard of a drain after {took:.1f} s")
    agent.check()
