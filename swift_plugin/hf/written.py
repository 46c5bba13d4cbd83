"""Where a Trainer's files go that it writes with ``torch.save`` or safetensors: nearly all of a checkpoint's bytes.

Its own call writes a new file, which a session then reads once more for its checksum. `written_here` writes the same
file in one pass, over the pages of an older one where that is possible, as all other saves are. `kept_here` writes
nothing: what is to be written is copied at the call, so a thread can write it while the training goes on.
"""

from __future__ import annotations

import io
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from transformers.utils import logging

from dalsegno.elastic.saving.safetensors_files import Safetensors, is_plain
from dalsegno.elastic.saving.writing import write_files

# Who calls safetensors' function by a name of its own. What others write with it they write themselves.
_CALLERS = (
    ("safetensors.torch", "save_file"),
    ("transformers.modeling_utils", "safe_save_file"),
    ("peft.peft_model", "safe_save_file"),
    ("accelerate.utils.other", "safe_save_file"),
)
# Of these a copy is what the original is, and is pickled as it is.
_VALUES = (bool, int, float, complex, str, bytes, type(None))
_OF_AN_OPTIMIZER = frozenset({"state", "param_groups"})

Put = Callable[[str, Any], None]


@contextmanager
def written_here(root: Path) -> Iterator[None]:
    """Writes what this thread gives ``torch.save`` and safetensors for a path below ``root``, a checkpoint's directory.

    Raises:
        OSError: As they do.
    """
    with _intercepted(root, lambda path, content: write_files(root, {path: content})):
        yield


class Kept:
    """Contents of files that are not written, by path.

    Args:
        root: Where they would be: a directory of this process alone.
        copy: Copies tensors, and containers of them.
    """

    def __init__(self, root: Path, copy: Callable[[Any], Any]) -> None:
        self._root, self._copy = root, copy
        # Open until the end: so nobody else's file gets the number of one that was removed.
        self._places: dict[tuple[int, int], tuple[BinaryIO, Any]] = {}
        self._files: dict[str, Any] = {}

    def put(self, path: str, content: Any) -> None:
        """Copies what is to be written there. An empty file is there instead, which may be renamed or removed.

        Raises:
            OSError: It could not be made.
        """
        if not isinstance(content, Safetensors) and not _is_copied_alike(content):
            (self._root / path).write_bytes(pickled(content))
            return
        kept, place = self._copy(content), self._root / path
        place.unlink(missing_ok=True)
        file = open(place, "xb")  # noqa: SIM115
        about = os.fstat(file.fileno())
        self._places[about.st_dev, about.st_ino] = file, kept

    def put_file(self, path: Path, content: Any) -> None:
        """Copies what is to be written there, of what nobody looks for meanwhile."""
        self._files[str(path.relative_to(self._root))] = self._copy(content)

    def files(self) -> dict[str, Any]:
        """All files below the root: what was kept of them, else what is in them."""
        found = dict(self._files)
        for path in sorted(self._root.rglob("*")):
            if path.is_file():
                about = path.stat()
                _, kept = self._places.get((about.st_dev, about.st_ino), (None, None))
                found[str(path.relative_to(self._root))] = path.read_bytes() if about.st_size or kept is None else kept
        return found

    def close(self) -> None:
        """Nothing is asked of it any more."""
        for file, _ in self._places.values():
            file.close()
        self._places.clear()
        self._files.clear()


@contextmanager
def kept_here(root: Path, copy: Callable[[Any], Any]) -> Iterator[Kept]:
    """Keeps copies of what this thread gives ``torch.save`` and safetensors for a path below ``root``.

    The `Kept` is good inside. Nobody is shown how far a save of a model has come, as nothing is written.
    """
    kept, shown = Kept(root, copy), getattr(logging, "_tqdm_active", None)
    # Its function for that would say something to the hub, too, and warn of variables.
    logging._tqdm_active = False
    try:
        with _intercepted(root, kept.put):
            yield kept
    finally:
        kept.close()
        logging._tqdm_active = shown


class _Saving:
    """One save by a Trainer: which files are ours to write. Afterwards none is, whoever still calls its functions."""

    def __init__(self, root: Path, put: Put) -> None:
        self._thread, self._root, self._put = threading.get_ident(), root, put
        self._over = False

    def takes(self, place: Any, content: Any) -> bool:
        """Whether it was ours, and is done."""
        if self._over or threading.get_ident() != self._thread or not isinstance(place, (str, os.PathLike)):
            return False
        path = Path(os.path.abspath(place))
        if not path.is_relative_to(self._root):
            return False
        self._put(str(path.relative_to(self._root)), content)
        return True

    def end(self) -> None:
        """Whoever has imported one of its functions meanwhile has the library's from now on."""
        self._over, self._put = True, lambda path, content: None


@contextmanager
def _intercepted(root: Path, put: Put) -> Iterator[None]:
    """``put`` gets the path below ``root``, and what `writing.save` takes."""
    saving, save = _Saving(root, put), torch.save
    save_file = getattr(sys.modules.get("safetensors.torch"), "save_file", None)

    def our_save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        # All else is small. Besides, an archive of ours has no CRC of its own, and other programs may ask for that.
        if args or kwargs or not _is_of_an_optimizer(obj) or not saving.takes(f, obj):
            save(obj, f, *args, **kwargs)

    def our_save_file(tensors: Any, filename: Any, metadata: Any = None) -> None:
        if not is_plain(tensors, metadata) or not saving.takes(filename, Safetensors(tensors, metadata)):
            assert save_file is not None
            save_file(tensors, filename, metadata)

    with ExitStack() as replaced:
        replaced.callback(saving.end)
        if getattr(save, "__module__", "") == "torch.serialization":  # else it is somebody's own
            replaced.callback(setattr, torch, "save", save)
            torch.save = our_save
        for module, name in _CALLERS if getattr(save_file, "__module__", "") == "safetensors.torch" else ():
            there = sys.modules.get(module)
            if getattr(there, name, None) is save_file:
                replaced.callback(setattr, there, name, save_file)
                setattr(there, name, our_save_file)
        yield


def _is_of_an_optimizer(content: Any) -> bool:
    return type(content) in (dict, OrderedDict) and content.keys() >= _OF_AN_OPTIMIZER


def pickled(content: Any) -> bytes:
    """What ``torch.save`` writes of it."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def _is_copied_alike(content: Any) -> bool:
    """It consists of tensors and plain values in dictionaries, lists and tuples: a copy of it is pickled alike."""
    try:
        return _has_plain_values(content)
    except RecursionError:  # it contains itself
        return False


def _has_plain_values(content: Any) -> bool:
    if type(content) in _VALUES:
        return True
    if type(content) is torch.Tensor:
        return not (content.requires_grad or content.is_neg() or vars(content))
    if type(content) in (dict, OrderedDict):
        return all(type(key) in _VALUES for key in content) and all(map(_has_plain_values, content.values()))
    return type(content) in (list, tuple) and all(map(_has_plain_values, content))
