"""Handles all callbacks of a `Trainer`: calls them in order, and gives each one its own state on a resume.

Callbacks of one class are recognised by their settings, the plain values that they were made with, because their order
is easily changed. If the settings do not tell them apart, the script gives each a `Callback.key`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from ..rank.remarks import remark
from ..training.session import BareSession
from .callbacks import Callback, Console, states_of

if TYPE_CHECKING:
    from .trainer import Trainer

_PLAIN = (bool, int, float, str, bytes, type(None))


class CallbackKey(NamedTuple):
    """What identifies a callback after a restart.

    Attributes:
        kind: Its class.
        settings: A digest of its constructor arguments, which may be private.
    """

    kind: str
    settings: str


class Matches(NamedTuple):
    """Which callback gets which state, by name.

    Attributes:
        pairs: Each state, and the callback that it belongs to.
        gone: States that no callback takes.
        new: Callbacks without a state.
    """

    pairs: dict[str, str]
    gone: list[str]
    new: list[str]


class Hooks:
    """The callbacks of one Trainer.

    Args:
        callbacks: In the order in which they were made, in which they are called.

    Attributes:
        begun: They are still to be told that the training has ended.
    """

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        self._hooks: dict[str, Callback] = {}
        # The names of earlier versions count all callbacks before, including those that some ranks do not have.
        self._old_names: dict[str, str] = {}
        counts: Counter[str] = Counter()
        for hook in callbacks:
            kind = type(hook).__name__
            name = f"{kind}-{counts[kind]}" if counts[kind] else kind
            self._old_names[f"{kind}-{len(self._hooks)}" if counts[kind] else kind] = name
            counts[kind] += 1
            self._hooks[name] = hook
        self._known = {name: known(hook) for name, hook in self._hooks.items()}
        self.begun = False

    def __iter__(self) -> Iterator[Callback]:
        return iter(self._hooks.values())

    @property
    def do_something_at_the_end(self) -> bool:
        """Whether somebody else than the console wants to know that the training has ended."""
        plain = (Callback.on_fit_end, Console.on_fit_end)
        return any(type(hook).on_fit_end not in plain for hook in self)

    def begin(self, trainer: Trainer) -> None:
        """The training begins in this world."""
        self.begun = True
        self.each(lambda hook: hook.on_fit_begin(trainer))

    def end(self, trainer: Trainer) -> None:
        """It has ended, if it has begun since it ended last."""
        if self.begun:
            self.begun = False
            self.each(lambda hook: hook.on_fit_end(trainer))

    @contextmanager
    def ending(self, trainer: Trainer, close: Callable[[], None]) -> Iterator[None]:
        """Around a training: its callbacks hear of the end, however that comes; then ``close`` is called.

        An error is told before, because a rank that fails alone may wait for the others there, and it stays the error
        that is raised.
        """
        failed = False
        try:
            yield
        except Exception as error:
            failed = True
            if self.begun and self.do_something_at_the_end:
                told = f"{_line(error)}: what callbacks do in on_fit_end comes first, perhaps on this rank alone"
                remark("the training fails with %s", told)
            raise
        finally:
            try:
                self.end(trainer)
            except Exception as error:
                if not failed:
                    raise
                remark("on_fit_end fails, too: %s", _line(error))
            finally:
                close()

    def each(self, call: Callable[[Callback], None]) -> None:
        """Calls ``call`` with each callback."""
        for hook in self:
            call(hook)

    def state_dict(self) -> dict[str, Any]:
        """The state of all callbacks, for a checkpoint.

        Raises:
            TypeError, ValueError, RuntimeError: See ``states_of``.
        """
        return {
            "callbacks": states_of(self._hooks),
            "callback_settings": {name: list(known) for name, known in self._known.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any], session: BareSession) -> None:
        """The inverse. Collective: rank 0, which has saved the states, says whose they are.

        Args:
            state: A checkpoint's state. Those of earlier versions have no settings, and are assigned by name.
            session: This process's session.

        Raises:
            ValueError: Nobody can say which callback a state belongs to. Raised on all ranks.
        """
        states = {name: one for name, one in state["callbacks"].items() if one}
        saved = state.get("callback_settings")
        if saved is None:
            here = {name: self._old_names[name] for name in states if name in self._old_names}
            found = Matches(here, [name for name in states if name not in here], [])
        else:
            first = session.gather({name: list(one) for name, one in self._known.items()})[0]
            ours = {name: CallbackKey(*one) for name, one in first.items()}
            found = matched({name: CallbackKey(*saved[name]) for name in states}, ours)
        for name, hook in found.pairs.items():
            if hook in self._hooks:  # some ranks may have fewer
                self._hooks[hook].load_state_dict(states[name])
        if session.rank:
            return
        new = [name for name in found.new if type(self._hooks[name]).state_dict is not Callback.state_dict]
        if found.gone:
            remark("the state of %s is in the checkpoint, and no callback takes it: it is lost", ", ".join(found.gone))
        if new:
            remark("the checkpoint has no state of %s, which begins anew", ", ".join(new))

    @property
    def alike(self) -> list[str]:
        """Classes of which several callbacks have state, and only their order tells them apart."""
        keeping = [
            self._known[name]
            for name, hook in self._hooks.items()
            if type(hook).state_dict is not Callback.state_dict and not hook.key
        ]
        return sorted({one.kind for one in keeping if keeping.count(one) > 1})


def known(hook: Callback) -> CallbackKey:
    """What identifies a callback after a restart."""
    plain = {name: value for name, value in sorted(vars(hook).items()) if _is_plain(value)}
    told = f"key {hook.key}" if hook.key else repr(plain)
    return CallbackKey(type(hook).__name__, xxhash.xxh3_64_hexdigest(told.encode(errors="surrogatepass")))


def matched(saved: Mapping[str, CallbackKey], here: Mapping[str, CallbackKey]) -> Matches:
    """Gives each state to the callback of its class with the same settings; the only one of a class may have changed.

    Raises:
        ValueError: Several callbacks of a class remain whose settings have changed.
    """
    pairs: dict[str, str] = {}
    gone: list[str] = []
    new = [name for name, one in here.items() if one.kind not in {other.kind for other in saved.values()}]
    for kind in dict.fromkeys(one.kind for one in saved.values()):
        theirs = [name for name, one in saved.items() if one.kind == kind]
        ours = [name for name, one in here.items() if one.kind == kind]
        if len(theirs) != 1 or len(ours) != 1:
            for name in list(theirs):
                twin = next((one for one in ours if here[one] == saved[name]), None)
                if twin is not None:
                    pairs[name] = twin
                    theirs.remove(name)
                    ours.remove(twin)
        if len(theirs) == 1 and len(ours) == 1:
            pairs[theirs.pop()] = ours.pop()
        if theirs and ours:
            raise ValueError(
                f"the checkpoint has states of {len(theirs)} callbacks of class {kind} that were made with other "
                f"values than the {len(ours)} here, so nobody can say which state is whose: make them as they were (or "
                "leave all of them out; a key tells them apart whatever they are made with, Callback.key)"
            )
        gone += theirs
        new += ours
    return Matches(pairs, gone, new)


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (type(value) is tuple and all(map(_is_plain, value)))
