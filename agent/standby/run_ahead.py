"""In a standby worker: runs the script before its place in a world is known, as far as possible.

Nothing that the script does ahead may be seen from outside, nor depend on anything that may change meanwhile. So it
waits for its place as soon as it

- reads one of the variables that tell its place (`init_process_group()` does), or all variables;
- uses its session (`session()` alone tells only what comes first once the place is known), or what TrainingArguments of
  transformers tell of the place (`training_arguments.py`);
- would write a file, change a directory, start a process, open a connection, or touch a card (`holds.py`);
- has written as much as is kept (`kept_output.py`);
- has ended well.

Output is kept until then. What the script looks at is recorded (`looked.py`): if a file has changed by the time the
place is known, the worker reports that and ends, and another one is started the usual way. The same happens if its
script fails ahead, or would wait while it holds a lock that others may want.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, SupportsIndex

from dalsegno.protos import ahead
from dalsegno.protos.contract import is_of_a_world

from . import hub_offline
from .holds import Holds
from .kept_output import KeptOutput
from .looked import Looked, holds_a_lock
from .training_arguments import TrainingArgumentsAhead
from .word import Word

__all__ = ["RunAhead", "report_of"]

# Seconds between checks whether the script waits for its output to be read; and seconds for the last of its output.
_LOOK_AT_OUTPUT_SECONDS = 0.5
_LAST_OUTPUT_SECONDS = 5.0
# Seconds that a place waits for a script that is on its way to where it needs one, and between two looks. (Less than
# what the agent waits for a worker to take its place.)
_ON_ITS_WAY_SECONDS, _LOOK_SECONDS = 15.0, 0.02
# Makes it the kernel's first choice when memory is short, as long as nobody needs it: trainers must not pay for it.
_FIRST_TO_DIE = "1000"
_OOM_SCORE = "/proc/self/oom_score_adj"


class _Environ(os._Environ[Any]):
    """`os.environ` or `os.environb` while the place's variables are not known: reading one of them, or all, waits.

    Meanwhile it becomes a plain mapping again, so the base class is called by name.
    """

    ahead: RunAhead

    def __getitem__(self, key: Any) -> Any:
        _Environ._meet(key)
        return os._Environ.__getitem__(self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        _Environ._meet(key)
        os._Environ.__setitem__(self, key, value)

    def __delitem__(self, key: Any) -> None:
        _Environ._meet(key)
        os._Environ.__delitem__(self, key)

    def __iter__(self) -> Iterator[Any]:
        _Environ.ahead.meet("all variables")
        return os._Environ.__iter__(self)

    def __len__(self) -> int:
        _Environ.ahead.meet("all variables")
        return os._Environ.__len__(self)

    def __repr__(self) -> str:
        _Environ.ahead.meet("all variables")
        return os._Environ.__repr__(self)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        _Environ.ahead.meet("all variables")
        return object.__reduce_ex__(self, protocol)

    @staticmethod
    def _meet(key: object) -> None:
        name = os.fsdecode(key) if isinstance(key, bytes) else key
        if isinstance(name, str) and is_of_a_world(name):
            _Environ.ahead.meet(name)


class RunAhead:
    """This process's life ahead of a world.

    Args:
        word: The way to the nursery. Sends `{"parked": NEED}`, `{"stale": WHAT}`, `{"failed": WHY}` (with `"plainly"`
            where it is worth another try that leaves TrainingArguments as they are), `{"late": WHY}` and
            `{"taken": true}`; receives a place, `{"environment": {…}, "drop": […], "stdout": PATH or null, "stderr":
            PATH or null}`.
        console: Descriptors for output for which the place names no file.
        plainly: TrainingArguments are left as they are.
    """

    def __init__(self, word: Word, console: tuple[int, int], *, plainly: bool = False) -> None:
        self._word = word
        self._console = console
        self._placed = threading.Event()
        # A signal's handler, or a finalizer, may need the place while its thread reports that it waits.
        self._lock = threading.RLock()
        self._said = False
        # Some thread, and the main one, is in `meet`, and does nothing until the place comes.
        self._waits = self._main_waits = False
        # The place has come, and nothing more is put before what goes on with it.
        self._comes = False
        self._looked = Looked()
        self._holds = Holds(self.meet, self._looked)
        self._plainly = plainly
        self._training_arguments = TrainingArgumentsAhead(self)
        self._oom_score = ""
        self._thread: threading.Thread | None = None
        self._outputs: list[KeptOutput] = []
        self._environs: tuple[Any, Any] = (os.environ, os.environb)
        self._firsts: list[Callable[[], None]] = []

    @property
    def over(self) -> bool:
        """Whether it has its place, so that what happens now is the worker's own."""
        return self._placed.is_set()

    def begin(self) -> None:
        """Begins to run the script ahead."""
        self._outputs = [KeptOutput(stream) for stream in (1, 2)]
        self._set_oom_score(_FIRST_TO_DIE)
        self._holds.begin()
        if not self._plainly:
            self._training_arguments.begin()
        _Environ.ahead = self
        for environ in self._environs:
            environ.__class__ = _Environ
        ahead.begin(self)
        self._thread = threading.Thread(target=self._take_place, name="run-ahead", daemon=True)
        self._thread.start()

    def first(self, call: Callable[[], None]) -> None:
        """See `protos.ahead.Ahead`."""
        with self._lock:
            if not self._comes:
                self._firsts.append(call)
                return
        self._placed.wait()
        call()

    def meet(self, need: str) -> None:
        """Waits for the place. `need`: why the script wants it, for people."""
        if self.over or threading.current_thread() is self._thread:
            return
        is_main = threading.current_thread() is threading.main_thread()
        if self._firsts and not is_main:
            # What comes first is the main thread's, and nobody knows what that is doing.
            self._end({"failed": f"a thread of its own needs its place ({need}) before its session is used"})
        # Before anybody hears of it, as the place may come at once.
        self._waits, self._main_waits = True, self._main_waits or is_main
        self._say_parked(need)
        self._placed.wait()
        if self._thread is not None:
            # This thread ends now, because a script may fork while it has no other thread.
            self._thread.join(_LAST_OUTPUT_SECONDS)
        while is_main and self._firsts:
            self._firsts.pop(0)()

    def _say_parked(self, need: str) -> None:
        with self._lock:
            if self._said or self.over:
                return
            if holds_a_lock():
                # Others that want the lock, perhaps the present workers, would wait as long as this process does.
                self._end({"failed": f"it needs its place ({need}) while it holds a lock on a file"})
            self._said = True
            if not self._word.say({"parked": need}):
                os._exit(1)  # the script has closed descriptors that it does not know, so no place would reach it

    def failed(self, why: str) -> None:
        """Handles a script that ended with an error. Ends the process if it has no place yet."""
        if self.over:
            return
        with self._lock:
            if not self.over:
                self._end({"failed": why})

    def _take_place(self) -> None:
        try:
            while not self._said and not self._word.waits(_LOOK_AT_OUTPUT_SECONDS):
                if any(output.full for output in self._outputs):
                    self._say_parked("its output is read")
            place = self._word.hear()
            if place is None:
                os._exit(1)  # the nursery is gone, and this process with it
            with self._lock:
                self._said = True  # nobody needs to hear any more that it waits
            self._await_script()
            if changed := self._looked.changed():
                self._end({"stale": changed})
            with self._lock:
                self._settle(place)
                if not self._word.say({"taken": True}):
                    os._exit(1)
                self._placed.set()
        except BaseException as error:
            self._end({"failed": f"{type(error).__name__}: {error}"})

    def _await_script(self) -> None:
        """Waits until the script waits, if something must come before it goes on with its place, such as its session.

        Otherwise it just goes on.
        """
        deadline = time.monotonic() + _ON_ITS_WAY_SECONDS
        while True:
            with self._lock:
                self._comes = self._main_waits or not self._firsts
            if self._comes:
                return
            if any(output.full for output in self._outputs):
                self._end({"failed": "it has not used its session when there was no room for more of its output"})
            if time.monotonic() >= deadline:
                self._end({"late": f"its script was still on its way to its session {_ON_ITS_WAY_SECONDS:.0f} s later"})
            # Whoever waits notes that under no lock that could be waited for here: it may be a signal's handler.
            threading.Event().wait(_LOOK_SECONDS)

    def _settle(self, place: dict[str, Any]) -> None:
        # The script may still run. Its kept output comes first, and it sees all variables of its place, or waits.
        for output, path, console in zip(self._outputs, (place["stdout"], place["stderr"]), self._console, strict=True):
            output.release(path, console, writes=not self._waits)
        environ = self._environs[0]
        for name in place["drop"]:
            environ.pop(name, None)
        environ.update(place["environment"])
        for each in self._environs:
            each.__class__ = os._Environ
        hub_offline.install(place["environment"])
        self._holds.end()
        self._training_arguments.end()
        self._set_oom_score(self._oom_score)

    def _set_oom_score(self, score: str) -> None:
        with contextlib.suppress(OSError), open(_OOM_SCORE, "r+", encoding="ascii") as file:
            self._oom_score = self._oom_score or file.read()
            file.seek(0)
            file.write(score)

    def _end(self, message: dict[str, object]) -> NoReturn:
        if "failed" in message and self._training_arguments.owes:
            message["plainly"] = True  # It may have failed for that.
        self._word.say(message)
        os._exit(1)


def report_of(error: BaseException) -> str:
    """One line about the error with which a script ended ahead."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]
