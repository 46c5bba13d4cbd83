"""In a standby worker: the script runs before it has a place in a world, as far as it can.

Nothing that it does ahead may be seen from outside, nor rest on what may be otherwise by then. So it waits for its
place where it first

- reads one of the variables that tell its place (`session()` does, and `init_process_group()`), or all variables;
- would write a file, change a directory, start a process, open a connection, or touch a card (`holds.py`);
- has ended well.

What it writes to its streams is kept until then. What it looks at is noted (`looked.py`): where a file is another one
by the time the place is there, the worker says so and ends, and another one is started the usual way. The same happens
where its script fails ahead.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

from dalsegno.protos.contract import is_of_a_world

from .holds import Holds
from .looked import Looked
from .word import Word

__all__ = ["RunAhead", "report_of"]

# Bytes of output that wait in a stream; a script that writes more ahead waits, too.
_KEPT_OUTPUT = 1 << 20
# The kernel's first choice while nobody needs this process; the trainers beside it are not to pay for it.
_FIRST_TO_DIE = "1000"
_OOM_SCORE = "/proc/self/oom_score_adj"


class _Environ(os._Environ[str]):
    """`os.environ` while the variables of a place are not known: who asks for one, or for all, waits.

    Meanwhile it becomes a plain one again, so its base class is called by name.
    """

    ahead: RunAhead

    def __getitem__(self, key: str) -> str:
        self._meet(key)
        return os._Environ.__getitem__(self, key)

    def __setitem__(self, key: str, value: str) -> None:
        self._meet(key)
        os._Environ.__setitem__(self, key, value)

    def __delitem__(self, key: str) -> None:
        self._meet(key)
        os._Environ.__delitem__(self, key)

    def __iter__(self) -> Iterator[str]:
        _Environ.ahead.meet("all variables")
        return os._Environ.__iter__(self)

    def __len__(self) -> int:
        _Environ.ahead.meet("all variables")
        return os._Environ.__len__(self)

    @staticmethod
    def _meet(key: object) -> None:
        if isinstance(key, str) and is_of_a_world(key):
            _Environ.ahead.meet(key)


class RunAhead:
    """This process's life ahead of a world.

    Args:
        word: To the nursery: `{"parked": NEED}`, `{"stale": WHAT}`, `{"failed": WHY}` and `{"taken": true}` out; in
            comes a place, `{"environment": {…}, "drop": […], "stdout": PATH or null, "stderr": PATH or null}`.
        console: Where output goes that the place names no file for.
    """

    def __init__(self, word: Word, console: tuple[int, int]) -> None:
        self._word = word
        self._console = console
        self._placed = threading.Event()
        self._lock = threading.Lock()
        self._said = False
        self._looked = Looked()
        self._holds = Holds(self.meet, self._looked)
        self._oom_score = ""
        self._thread: threading.Thread | None = None
        self._outputs: list[tuple[int, int]] = []

    @property
    def over(self) -> bool:
        """It has its place: what happens now is the worker's own."""
        return self._placed.is_set()

    def begin(self) -> None:
        """From now on the script runs ahead."""
        for stream in (1, 2):
            reader, writer = os.pipe()
            os.dup2(writer, stream)
            os.close(writer)
            with contextlib.suppress(OSError):
                fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, _KEPT_OUTPUT)
            self._outputs.append((stream, reader))
        self._set_oom_score(_FIRST_TO_DIE)
        self._holds.begin()
        _Environ.ahead = self
        os.environ.__class__ = _Environ
        self._thread = threading.Thread(target=self._take_place, name="run-ahead", daemon=True)
        self._thread.start()

    def meet(self, need: str) -> None:
        """Waits for the place. `need`: what the script wants it for, for a person."""
        if self.over or threading.current_thread() is self._thread:
            return
        with self._lock:
            if not self._said and not self.over:
                self._said = True
                if not self._word.say({"parked": need}):
                    os._exit(1)  # The script has closed what it does not know: no place would reach it.
        self._placed.wait()

    def failed(self, why: str) -> None:
        """The script has ended with an error. Ends the process where nobody has given it a place yet."""
        with self._lock:
            if not self.over:
                self._end({"failed": why})

    def _take_place(self) -> None:
        try:
            place = self._word.hear()
            if place is None:
                os._exit(1)  # The nursery is gone, and this process with it.
            if changed := self._looked.changed():
                self._end({"stale": changed})
            with self._lock:
                self._settle(place)
                if not self._word.say({"taken": True}):
                    os._exit(1)
                self._placed.set()
        except BaseException as error:
            self._end({"failed": f"{type(error).__name__}: {error}"})

    def _settle(self, place: dict[str, Any]) -> None:
        environ = os.environ
        environ.__class__ = os._Environ
        for name in place["drop"]:
            environ.pop(name, None)
        environ.update(place["environment"])
        self._holds.end()
        self._set_oom_score(self._oom_score)
        for (stream, reader), path in zip(self._outputs, (place["stdout"], place["stderr"]), strict=True):
            self._release(stream, reader, path)

    def _release(self, stream: int, kept: int, path: str | None) -> None:
        """Hands out what was written ahead, then lets the stream go where it belongs."""
        if path is None:
            target = self._console[stream - 1]
        else:
            target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        fcntl.fcntl(kept, fcntl.F_SETFL, os.O_NONBLOCK)
        _pass_on(kept, target)
        os.dup2(target, stream)
        # What another thread has written since, into a pipe that nobody else reads.
        _pass_on(kept, target)
        os.close(kept)
        os.close(target)

    def _set_oom_score(self, score: str) -> None:
        with contextlib.suppress(OSError), open(_OOM_SCORE, "r+", encoding="ascii") as file:
            self._oom_score = self._oom_score or file.read()
            file.seek(0)
            file.write(score)

    def _end(self, message: dict[str, object]) -> NoReturn:
        self._word.say(message)
        os._exit(1)


def _pass_on(source: int, target: int) -> None:
    while select.select([source], [], [], 0)[0]:
        try:
            data = os.read(source, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            return
        while data:
            data = data[os.write(target, data) :]


def report_of(error: BaseException) -> str:
    """One line about an error that ended a script ahead."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]
