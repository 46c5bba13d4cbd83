"""In a worker that runs ahead: TrainingArguments of transformers need no place to be made.

As they are made they initialise torch.distributed, for the sake of those who ask them later. Most scripts make them
first, and then read their model and data, which takes much longer and needs no place. So that is put off until
somebody asks for something that depends on it: the arguments themselves, accelerate's state, or torch's default group.
Whatever asks for the place first, the arguments are set up before it goes on.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import os
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from types import FrameType, ModuleType
from typing import Any

from dalsegno.protos.ahead import Ahead
from dalsegno.protos.contract import is_of_a_world
from dalsegno.protos.imported import when_imported
from dalsegno.protos.replacements import Replacements

__all__ = ["TrainingArgumentsAhead"]

# What they have of their place, besides what they compute from it.
_SET = ("distributed_state", "_n_gpu")
# With this transformers asks whether there is a group, only to find out whether the model is sharded as it is read.
_SHARDS, _ASKS_FOR_SHARDS, _FRAMES = "ACCELERATE_USE_FSDP", "is_fsdp_enabled", 4


class TrainingArgumentsAhead:
    """Puts it off, and makes up for it.

    Args:
        ahead: This process's life ahead.
    """

    def __init__(self, ahead: Ahead) -> None:
        self._ahead = ahead
        self._over = False
        # Those that are being made, and those that are to be set up, in the order in which they were made.
        self._making: list[Any] = []
        self._owed: list[tuple[Any, _Then]] = []
        self._replaced = Replacements()

    @property
    def owes(self) -> bool:
        """Whether something is put off."""
        return bool(self._owed)

    def begin(self) -> None:
        """Does it from now on, as soon as they are imported."""
        when_imported("transformers.training_args", self._change)

    def end(self) -> None:
        """Puts everything back as it was. What is owed is set up by the main thread, see ``Ahead.first``."""
        self._over = True
        self._replaced.put_back()

    def _change(self, module: ModuleType) -> None:
        kind, state = getattr(module, "TrainingArguments", None), getattr(module, "PartialState", None)
        if self._over or kind is None or state is None or not _only_has_it_made(kind):
            return
        plain, device = kind.__post_init__, kind.device

        def made(arguments: Any, *args: Any, **options: Any) -> None:
            self._making.append(arguments)
            try:
                plain(arguments, *args, **options)
            finally:
                self._making.pop()

        def its_device(arguments: Any) -> Any:
            if any(one is arguments for one in self._making) and self._may_owe(arguments, ours):
                self._owe(arguments)
                return None  # which nobody looks at
            self._ask("the device of its TrainingArguments")
            return device.fget(arguments)

        self._replaced.put(kind, "__post_init__", made)
        ours = property(its_device, doc=device.__doc__)
        self._replaced.put(kind, "device", ours)
        self._replaced.put(kind, "__reduce_ex__", self._before("a copy of its TrainingArguments", kind.__reduce_ex__))
        for name in _SET:
            if not hasattr(kind, name):
                self._replaced.put(kind, name, _Asked(name, self._ask))
        self._replaced.put(state, "__init__", self._before("its PartialState", state.__init__))
        self._watch_the_group()
        when_imported("accelerate.logging", self._change_logging)

    def _change_logging(self, module: ModuleType) -> None:
        """accelerate's loggers raise where there is no state yet, also for a message that nobody is to see."""
        kind = getattr(module, "MultiProcessAdapter", None)
        plain = getattr(kind, "log", None)
        if self._over or kind is None or plain is None:
            return

        def log(logger: Any, level: int, *args: Any, **options: Any) -> None:
            if self._owed and not logger.isEnabledFor(level):
                return
            self._ask("a logger of accelerate")
            plain(logger, level, *args, **options)

        self._replaced.put(kind, "log", log)

    def _watch_the_group(self) -> None:
        from torch.distributed.distributed_c10d import GroupMember

        kind = type(GroupMember)
        plain = vars(kind).get("WORLD")
        if not isinstance(plain, property):
            return
        get = plain.fget
        assert get is not None

        def world(member: Any) -> Any:
            if self._owed and not _asks_for_shards(sys._getframe(1)):
                self._ask("its group")
            return get(member)

        self._replaced.put(kind, "WORLD", property(world, plain.fset, plain.fdel, plain.__doc__))

    def _may_owe(self, arguments: Any, ours: property) -> bool:
        """Not where a class of the script's has its own device, which may use ours; or beside the main thread."""
        is_main = threading.current_thread() is threading.main_thread()
        return not self._over and is_main and inspect.getattr_static(type(arguments), "device") is ours

    def _owe(self, arguments: Any) -> None:
        self._owed.append((arguments, _Then(arguments)))
        if len(self._owed) == 1:
            self._ahead.first(self._set_up)

    def _set_up(self) -> None:
        owed, self._owed = self._owed, []
        for arguments, then in owed:
            with then.again():
                _ = arguments._setup_devices  # as they would have done themselves

    def _ask(self, what: str) -> None:
        if self._owed:
            self._ahead.meet(what)

    def _before(self, what: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def asked(*args: Any, **options: Any) -> Any:
            self._ask(what)
            return plain(*args, **options)

        return asked


class _Then:
    """What arguments are set up with, as it was when they were made: a script may have changed it since."""

    def __init__(self, arguments: Any) -> None:
        self._arguments, self._fields = arguments, dict(vars(arguments))
        self._variables = _own_variables()
        self._filters, self._threads = list(warnings.filters), _torch().get_num_threads()

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Inside, it is as it was then. What is set up may change the number of threads, unless the script has."""
        threads, variables, fields = _torch().get_num_threads(), _own_variables(), dict(vars(self._arguments))
        with warnings.catch_warnings():
            warnings.filters[:] = self._filters  # type: ignore[index]
            _put(os.environ, variables, self._variables)
            _put(vars(self._arguments), fields, self._fields)
            try:
                yield
            finally:
                _put(os.environ, self._variables, variables)
                _put(vars(self._arguments), self._fields, fields)
                if threads != self._threads:
                    _torch().set_num_threads(threads)


def _torch() -> Any:
    """Which an agent, that imports this module, too, does not want to wait for."""
    return sys.modules["torch"]


def _own_variables() -> dict[str, str]:
    """Those that are not the place's, without waiting for that."""
    return {name: os.environ[name] for name in map(os.fsdecode, vars(os.environ)["_data"]) if not is_of_a_world(name)}


def _put(where: MutableMapping[str, Any], now: Mapping[str, Any], then: Mapping[str, Any]) -> None:
    """Makes what differs what it was ``then``. What was set in between, and is in neither, stays."""
    for name in now.keys() - then.keys():
        where.pop(name, None)
    for name in then:
        before, after = now.get(name), then[name]
        same = name in now and (before is after or (isinstance(after, str) and before == after))
        if not same:
            where[name] = after


class _Asked:
    """Stands for an attribute that instances do not have yet."""

    def __init__(self, name: str, ask: Callable[[str], None]) -> None:
        self._name, self._ask = name, ask

    def __get__(self, arguments: Any, kind: type[Any] | None = None) -> Any:
        if arguments is not None:
            self._ask(f"{self._name} of its TrainingArguments")
            if self._name in vars(arguments):
                return vars(arguments)[self._name]
        raise AttributeError(f"TrainingArguments have no {self._name}")


def _only_has_it_made(kind: type[Any]) -> bool:
    """Whether ``__post_init__`` names the device in lines that do nothing else, and so does not use it."""
    if not isinstance(vars(kind).get("device"), property) or "_setup_devices" not in vars(kind):
        return False
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind.__post_init__)))
    except (AttributeError, OSError, SyntaxError, TypeError):
        return False
    named = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "device"]
    alone = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    return bool(named) and all(any(node is one for one in alone) for node in named)


def _asks_for_shards(frame: FrameType | None) -> bool:
    """Whether transformers asks, and the answer is no whatever group there is."""
    if os.environ.get(_SHARDS, "false").lower() not in ("0", "false", "no", "off", "n", "f", ""):
        return False
    for _ in range(_FRAMES):
        if frame is None:
            return False
        if frame.f_code.co_name == _ASKS_FOR_SHARDS and str(frame.f_globals.get("__name__")).startswith(
            "transformers."
        ):
            return True
        frame = frame.f_back
    return False
