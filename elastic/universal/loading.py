"""Reading DeepSpeed's files without running what is in them.

``torch.load(weights_only=True)`` with a closed list of classes. Measured for DeepSpeed 0.19: optimizer files need the
classes below, model states and parameter files need none. What is mapped `mapping` opens, several times faster.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import os
import re
import sys
from _compat_pickle import IMPORT_MAPPING
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.universal_checkpoint import SubparamShape
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from .archive import refuse_packed
from .errors import EnvironmentFailed
from .mapping import NotPlainError, open_mapped
from .members import member, write_by_value
from .numpys import NO_BYTES, STAND_INS, as_numpys

SAFE_CLASSES: tuple[type, ...] = (LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address, SubparamShape)
_ALLOWED: tuple[Callable[..., Any], ...] = (*SAFE_CLASSES, member, NO_BYTES)
# Here and not around each save: files are also written later, by a thread, and by DeepSpeed where nobody asked us.
write_by_value(SAFE_CLASSES)
# Of Python's own modules, those whose classes only hold values.
_PLAIN = {"argparse", "array", "collections", "datetime", "decimal", "fractions", "ipaddress", "pathlib", "uuid"}
# Such classes of modules that also have others. (A zoneinfo.ZoneInfo is called by name, and so never read.)
_PLAIN_CLASSES = {"random.Random", "time.struct_time", "types.SimpleNamespace"}
_FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
_NUMPYS = re.compile(r"numpy\.(?:dtype|ndarray|(?:_core|core)\.multiarray\.(?:scalar|_reconstruct))")
_REFUSED = re.compile(r"GLOBAL ([\w.]+)")


def load(path: Path, *, mmap: bool = False, seen: Callable[[torch.UntypedStorage], None] | None = None) -> Any:
    """Loads a checkpoint file onto the CPU.

    Args:
        path: A file that ``torch.save`` wrote.
        mmap: Leave tensors on the disk until they are read.
        seen: Called with each storage of the file.

    Raises:
        OSError: It cannot be read.
        pickle.UnpicklingError: It holds a class that is not on the closed list.
        RuntimeError: It is not a whole file of ``torch.save``, or would become more than it is: see ``refuse_packed``.
    """
    known, key = _known.get(), _of(path) if mmap else ()
    content, storages = (known or {}).get(key) or _read(path, mmap)
    if known is not None and mmap:
        known[key] = content, storages
    if seen is not None:
        for storage in storages:
            seen(storage)
    return content


def _read(path: Path, mmap: bool) -> tuple[Any, list[Any]]:
    records = refuse_packed(path)
    if mmap and records is not None:
        with contextlib.suppress(NotPlainError):
            return open_mapped(path, records, SAFE_CLASSES)
    storages: list[Any] = []

    def stay(storage: Any, location: str) -> Any:
        storages.append(storage)
        return storage

    with _our_classes():
        return as_numpys(torch.load(path, map_location=stay, weights_only=True, mmap=mmap)), storages


# What was loaded, and its storages, by file.
_known: ContextVar[dict[tuple[int, ...], tuple[Any, list[Any]]] | None] = ContextVar("known", default=None)


@contextmanager
def each_once() -> Iterator[None]:
    """While it lasts `load` reads a file that is mapped only once: torch goes through each tensor of it in Python.

    The process that loads one changes nothing of it.
    """
    before = _known.set({})
    try:
        yield
    finally:
        _known.reset(before)


def _of(path: Path) -> tuple[int, ...]:
    status = os.stat(path)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _our_classes() -> Any:
    """Those of our list that are not allowed yet: when torch's context ends, it takes away all that it was given."""
    there = torch.serialization.get_safe_globals()
    ours: list[Any] = [found for found in _ALLOWED if found not in there]
    # A script may have allowed NumPy's own, which do not go together with those that stand for them.
    if not {_name(found) for found in there} & {_name(found) for found in STAND_INS}:
        ours += STAND_INS
    return torch.serialization.safe_globals(ours)


def _name(found: Any) -> str:
    """What a file calls it. Newer versions of torch also take a function together with its name."""
    return str(found[1]) if isinstance(found, tuple) else f"{found.__module__}.{found.__qualname__}"


@contextmanager
def allowing(names: Sequence[str]) -> Iterator[None]:
    """Lets `load` make objects of further classes while the context lasts.

    Args:
        names: ``"module.Class"``; they are imported.

    Raises:
        EnvironmentFailed: A name cannot be imported, or is no class.
    """
    classes: list[Any] = []
    for name in names:
        module, _, attribute = name.rpartition(".")
        try:
            found = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise EnvironmentFailed(f"{name} cannot be allowed: {error}") from error
        if not isinstance(found, type):
            raise EnvironmentFailed(f"{name} cannot be allowed: it is not a class")
        classes.append(found)
    with torch.serialization.safe_globals(classes):
        yield


@contextmanager
def only_safe_loading() -> Iterator[None]:
    """Makes every ``torch.load`` of this process use ``weights_only`` and our list, against DeepSpeed's own wishes.

    What others load so may hold what stands for NumPy's: see `as_numpys`.

    This holds as long as the context lasts. Torch reads the variable at each load; nothing of DeepSpeed is replaced.
    """
    before = os.environ.get(_FORCE)
    os.environ[_FORCE] = "1"
    try:
        with _our_classes():
            yield
    finally:
        if before is None:
            del os.environ[_FORCE]
        else:
            os.environ[_FORCE] = before


def describe_refusal(file: str, error: Exception, advice: str = "") -> str:
    """One line for torch's UnpicklingError: which objects are not loaded from checkpoints.

    Args:
        file: Where they are.
        error: Torch's.
        advice: How to load them all the same, from whom one trusts; left out where that would be to run any code.
    """
    found, end = _REFUSED.search(str(error)), ""
    if found:
        end = ": it is not safe to load" if _runs_anything(found[1]) else advice
        if _NUMPYS.fullmatch(found[1]):
            end = ": save NumPy's numbers as float(…), its arrays as tensors" + advice
    what = found[1] if found else "something"
    return f"{file} holds {what}, which is not on the list of what is loaded from checkpoints{end}"


def _runs_anything(name: str) -> bool:
    """Whether it is one of Python's own functions and classes, with which a file can do whatever it likes."""
    module, _, attribute = name.rpartition(".")
    module = IMPORT_MAPPING.get(module, module)  # a file has the names of Python 2
    if module in ("", builtins.__name__):  # torch names these without their module
        found = getattr(builtins, attribute, None)
        return not isinstance(found, type) or found is type
    outer = module.partition(".")[0]
    return outer in sys.stdlib_module_names and outer not in _PLAIN and f"{module}.{attribute}" not in _PLAIN_CLASSES
