"""The nursery: a process that has imported the heavy modules once, and forks a worker when one is wanted.

Executed as `python -u …/own_program.py dalsegno.agent.standby.nursery --channel FD …` by `standby_pool`. Over the
channel (a socket, JSON messages behind four bytes of length) it reports what it has imported, takes
`{"start": ID, …assignment}`, and answers `{"started": ID, "pid": PID}` and later `{"exited": ID, "code": STATUS}`
(negative for a signal). In between it passes on messages of the worker itself, as `{"of": ID, …}`: `"imports"` if the
script imports `dalsegno.elastic`, where `session()` comes from, and the nursery had not. `{"cancel": ID}` takes back a
start that was not carried out; then only `exited` follows. The forked process becomes the script as
`python -u script.py …` or `python -u -m module …` would have run it, with the assignment's environment, arguments,
working directory and output. At the end of the channel the nursery ends, and its workers with it.

A worker that is started with `"ahead": true` has no place in a world yet: it runs as far as it can without one
(`run_ahead`, also of `"plainly"`) and reports `"parked"`. `{"place": ID, …}` gives it its place, and it reports
`"taken"`. If it cannot take the place, it reports why (`"stale"`, `"failed"`, `"late"`) and ends.

The script's directory is first on `sys.path` before anything is imported for it (`--first`), as where Python runs it.
Imports that come to a module of the user's own are broken off (`"own"`, `only_installed`), and workers then begin with
a fresh interpreter.

Forking is safe because only imports have happened here: one thread, no CUDA, no connection. If an import started
threads, or CUDA's driver, neither of which survives a fork, the nursery says so (`"unforkable"`) and is not used.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import threading
import warnings

from dalsegno.protos.contract import FRAME
from dalsegno.protos.priority import yield_of_thread
from dalsegno.protos.processes import ends_with_parent
from dalsegno.protos.ready import readable
from dalsegno.protos.shortage import shortage

from ..own_modules import take_first_path
from ..processes.proc import adopt_orphans
from .only_installed import OnlyInstalled, OwnModuleMet
from .word import MAX_MESSAGE_BYTES, Word
from .worker_main import Assignment, become

__all__ = ["CANNOT_START", "receive", "send"]

_CUDA_NOT_INITIALIZED = 3
# Stands for an exit status if there was no process (EX_OSERR of sysexits.h).
CANNOT_START = 71
# At once, of what the agent sends.
_MOST_READ_BYTES = 1 << 16


def send(channel: socket.socket, value: dict[str, object]) -> None:
    """Writes one JSON message."""
    data = json.dumps(value).encode()
    channel.sendall(FRAME.pack(len(data)) + data)


def receive(channel: socket.socket) -> dict[str, object] | None:
    """Reads one JSON message; None at the end of the channel."""
    header = _read(channel, FRAME.size)
    data = _read(channel, *FRAME.unpack(header)) if header else None
    return dict(json.loads(data)) if data else None


def _read(channel: socket.socket, count: int) -> bytes | None:
    received = bytearray()
    while len(received) < count:
        data = channel.recv(count - len(received))
        if not data:
            return None
        received += data
    return bytes(received)


def _import_all(modules: list[str], niceness: int, failed: dict[str, str]) -> None:
    if niceness:
        # The main thread, which is going to train, keeps its own: a process without privileges could never raise it.
        yield_of_thread(niceness)
    for name in modules:
        try:
            importlib.import_module(name.removesuffix("?"))
        except OwnModuleMet:
            return  # the script imports the rest
        except Exception as error:  # a foreign module may raise anything; the script itself will raise it again
            if not name.endswith("?"):
                failed[name] = f"{type(error).__name__}: {error}"


def warm_up(modules: list[str], niceness: int, first: str = "") -> dict[str, object]:
    """Imports the modules, on a thread of lower priority if `niceness` says so. Returns what to report.

    Args:
        first: the directory that the script has first on `sys.path`; "": none.
    """
    with OnlyInstalled(first) as installed:
        return {**_warm_up([] if installed.met else modules, niceness), "own": installed.met}


def _warm_up(modules: list[str], niceness: int) -> dict[str, object]:
    if niceness and "torch" in modules:
        # OpenBLAS starts its threads when numpy is imported, and they would keep the lower priority for good.
        _import_all(["numpy"], 0, {})
    failed: dict[str, str] = {}
    thread = threading.Thread(target=_import_all, args=(modules, niceness, failed), name="warm-up")
    # Nearly all that imports make stays for good. To look through it again and again is a tenth of their time.
    gc.disable()
    try:
        thread.start()
        thread.join()
    finally:
        gc.enable()
    return {"failed": failed, "unforkable": "the imports started CUDA's driver" if cuda_started() else ""}


def cuda_started() -> bool:
    """Whether something in this process has initialized CUDA's driver, which then works in no forked process.

    The driver itself is asked: before cuInit, cuDeviceGetCount answers CUDA_ERROR_NOT_INITIALIZED (3). If the library
    was never loaded, nothing can have initialized it.
    """
    with open("/proc/self/maps", encoding="ascii", errors="replace") as maps:
        if not any("libcuda.so" in line for line in maps):
            return False
    count = ctypes.c_int()
    return int(ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(count))) != _CUDA_NOT_INITIALIZED


class _Nursery:
    """The serving side; `serve` returns in the nursery at its end, and in every worker with its assignment.

    Args:
        single: do not fork, but become the first assignment (for a nursery that turned out not to be forkable).
        notices: signals to ignore; blocked until then.
        first: the directory that the script has first on `sys.path`; "": none.
    """

    def __init__(
        self,
        channel: socket.socket,
        modules: list[str],
        niceness: int,
        single: bool,
        notices: list[int],
        first: str = "",
    ) -> None:
        self._channel = channel
        # What was read of a request whose rest has yet to come.
        self._received = bytearray()
        # A signal to all processes of the node is meant for the agent; a worker gets back the handlers from before.
        self._before = {number: signal.signal(number, signal.SIG_IGN) for number in notices}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, notices)
        self._single = single
        self._workers: dict[int, object] = {}
        # For each worker, by its process: the socket over which it reports.
        self._words: dict[int, socket.socket] = {}
        # In a forked worker: its end of that socket; and whether it runs ahead.
        self.word: Word | None = None
        self.ahead = self.plainly = False
        self._selector = selectors.DefaultSelector()
        self._requests: list[dict[str, object]] = []
        self._wake_reader, self._wake_writer = socket.socketpair()
        for end in (self._wake_reader, self._wake_writer):
            end.setblocking(False)
        self._report: dict[str, object] | None = None
        self._ready = False
        self._imports = threading.Thread(target=self._import, args=(modules, niceness, first), name="imports")

    def serve(self) -> Assignment | None:
        """Receives requests from the beginning, and carries them out once the imports are done."""
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)
        signal.set_wakeup_fd(self._wake_writer.fileno(), warn_on_full_buffer=False)
        self._imports.start()
        with self._selector as selector:
            for end in (self._channel, self._wake_reader):
                selector.register(end, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._wake_reader:
                        self._wake_reader.recv(4096)
                        continue
                    if key.data is not None:
                        self._hear_word(key.data)
                    elif not self._take_requests():
                        return None
                if self._report is not None and not self._ready:
                    self._settle()
                if self._ready:
                    # Not before: what the imports start is theirs to wait for, and there are no workers yet.
                    self._reap()
                while self._ready and self._requests:
                    request = self._requests.pop(0)
                    if "place" in request:
                        self._place(request)
                    elif (assignment := self._start(request)) is not None:
                        return assignment

    def _take_requests(self) -> bool:
        """Receives all waiting requests: a start and its cancelling may come together. False: the agent is gone.

        Waits for no rest of a request: it may come late, and workers end meanwhile.
        """
        while readable(self._channel.fileno(), 0):
            data = self._channel.recv(_MOST_READ_BYTES)
            if not data:
                return False
            self._received += data
        while len(self._received) >= FRAME.size:
            end = FRAME.size + FRAME.unpack_from(self._received)[0]
            if len(self._received) < end:
                break
            message = dict(json.loads(self._received[FRAME.size : end]))
            del self._received[:end]
            if "cancel" in message:
                self._cancel(message["cancel"])
            else:
                self._requests.append(message)
        return True

    def _import(self, modules: list[str], niceness: int, first: str) -> None:
        self._report = warm_up(modules, niceness, first)
        self._wake_writer.send(b"\0")

    def _settle(self) -> None:
        # Only one thread is left: only then can this process be forked.
        self._imports.join()
        self._ready = True
        # Frozen, so that this memory stays shared with every worker: the garbage collector would write to it.
        gc.collect()
        gc.freeze()
        assert self._report is not None
        if threading.active_count() > 1:
            names = ", ".join(thread.name for thread in threading.enumerate()[1:])
            self._report["unforkable"] = f"the imports left threads running ({names})"
        send(self._channel, {"ready": self._report})

    def _cancel(self, number: object) -> None:
        """Cancels a start. If it was carried out meanwhile, the agent knows, or is about to hear."""
        left = [request for request in self._requests if request.get("start") != number]
        if len(left) < len(self._requests):
            self._requests = left
            send(self._channel, {"exited": number, "code": -signal.SIGKILL})

    def _start(self, message: dict[str, object]) -> Assignment | None:
        number, ahead = message.pop("start"), bool(message.pop("ahead", False))
        plainly = bool(message.pop("plainly", False))
        assignment = Assignment(**message)  # type: ignore[arg-type]
        if ahead and (self._single or self.execs()):
            send(self._channel, {"exited": number, "code": CANNOT_START, "failure": "it is not forked"})
            return None
        if self._single:
            send(self._channel, {"started": number, "pid": os.getpid()})
            self._leave()
            return assignment
        nursery = os.getpid()
        ends: tuple[socket.socket, ...] = ()
        with warnings.catch_warnings():
            # Python 3.12 warns of threads that libraries (OpenBLAS) keep and restart in the child themselves.
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                ours, theirs = ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                pid = os.fork()
            except OSError as error:
                for end in ends:
                    end.close()
                # Workers that were started before live on: the agent decides about them.
                why = shortage(error) or str(error)
                failure = f"it cannot be started: {why}"
                send(self._channel, {"exited": number, "code": CANNOT_START, "failure": failure})
                return None
        if pid:
            theirs.close()
            # Waits until it has a group of its own; the end of the file if it died before.
            ours.recv(1)
            self._workers[pid] = number
            self._words[pid] = ours
            self._selector.register(ours, selectors.EVENT_READ, pid)
            send(self._channel, {"started": number, "pid": pid})
            return None
        self._leave()
        os.setsid()
        ends_with_parent(signal.SIGKILL, nursery)()
        theirs.send(b"\0")
        ours.close()
        self.word, self.ahead, self.plainly = Word(theirs), ahead, plainly
        return assignment

    def _place(self, message: dict[str, object]) -> None:
        """Gives a worker that runs ahead its place. A worker that is gone, or does not listen, must not live on."""
        number = message.pop("place")
        for pid, known in self._workers.items():
            if known == number and pid in self._words:
                try:
                    self._words[pid].send(json.dumps(message).encode(), socket.MSG_DONTWAIT)
                except OSError:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(pid, signal.SIGKILL)

    def _hear_word(self, pid: int) -> bool:
        """Passes on one message of a worker. False: there is none; if its end is closed, none will come."""
        try:
            data = self._words[pid].recv(MAX_MESSAGE_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            reader = self._words.pop(pid)
            self._selector.unregister(reader)
            reader.close()
            return False
        # A script that writes to descriptors that it does not know must not end the others.
        with contextlib.suppress(ValueError, RecursionError):
            said = json.loads(data)
            if isinstance(said, dict):
                send(self._channel, {**said, "of": self._workers[pid]})
        return True

    def _drop_word(self, pid: int) -> None:
        """Closes the socket of a worker that is gone; its last messages still count."""
        while pid in self._words and self._hear_word(pid):
            pass
        if (reader := self._words.pop(pid, None)) is not None:
            self._selector.unregister(reader)
            reader.close()

    def _leave(self) -> None:
        """Drops what the worker must not keep of the nursery."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        for end in (self._channel, self._wake_reader, self._wake_writer):
            end.close()
        for reader in self._words.values():
            reader.close()
        random = sys.modules.get("numpy.random")
        if random is not None:
            # numpy's global generator was seeded at its import, and workers must not share that state. Python's own
            # `random` seeds itself anew in a forked process.
            random.seed()

    def execs(self) -> bool:
        """Whether a worker must begin with a fresh interpreter because of what the imports started, or broke off."""
        assert self._report is not None
        return bool(self._report["own"]) or (bool(self._report["unforkable"]) and not self._single)

    def _reap(self) -> None:
        """Reaps all that has ended: workers, and what workers left, which comes to this process."""
        while True:
            with contextlib.suppress(ChildProcessError):
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | os.WNOHANG)
                if ended is not None:
                    # Not reaped yet: the number of its group stays its own while the rest of the group is killed.
                    if ended.si_pid in self._workers:
                        with contextlib.suppress(ProcessLookupError, PermissionError):
                            os.killpg(ended.si_pid, signal.SIGKILL)
                    _, status = os.waitpid(ended.si_pid, 0)
                    self._drop_word(ended.si_pid)
                    number = self._workers.pop(ended.si_pid, None)
                    if number is not None:
                        send(self._channel, {"exited": number, "code": os.waitstatus_to_exitcode(status)})
                    continue
            return


def main() -> None:
    """Runs the nursery; in a forked worker, the script."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--channel", type=int, required=True)
    parser.add_argument("--console", type=int, nargs=2, required=True)
    parser.add_argument("--parent", type=int, default=0)
    parser.add_argument("--nice", type=int, default=0)
    parser.add_argument("--single", action="store_true")
    parser.add_argument("--first", default="")
    parser.add_argument("--notices", type=int, nargs="*", default=[])
    parser.add_argument("modules", nargs="*")
    options = parser.parse_args()
    for fd in (options.channel, *options.console):
        os.set_inheritable(fd, False)
    if options.parent:
        # In addition to the keeper.
        ends_with_parent(signal.SIGKILL, options.parent)()
    if not options.single:
        # What a worker leaves would go to process 1 else, which in a container is the agent: it reaps its own only.
        # Workers are forked without this, so a script's orphans never come to another rank.
        adopt_orphans()
    # Lets torch look for devices without initializing CUDA's driver, after which this process could not fork.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    console = (options.console[0], options.console[1])
    channel, first = socket.socket(fileno=options.channel), options.first
    # Before the imports: they are to find what they would find in the script's own process.
    take_first_path(first)
    nursery = _Nursery(channel, options.modules, options.nice, options.single, options.notices, first)
    try:
        assignment = nursery.serve()
    except (BrokenPipeError, ConnectionResetError):
        return  # the agent is gone
    if assignment is not None:
        become(assignment, console, nursery.execs(), nursery.word, ahead=nursery.ahead, plainly=nursery.plainly)


if __name__ == "__main__":
    main()
