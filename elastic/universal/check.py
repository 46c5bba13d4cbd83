"""Checks that a universal checkpoint is complete, before it is sealed."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from torch import Tensor

from ..checkpoint.files import list_files
from .errors import EnvironmentFailed
from .forms import PARAM, ZERO, Form
from .loading import load


def check_complete(target: Path, form: Form, *, trusted: Collection[str] = ()) -> None:
    """Checks that every expected file is there, and that files outside `trusted` have the right number of values.

    Args:
        target: The directory.
        form: What must be in it.
        trusted: Files that this conversion has just written, value by value.

    Raises:
        EnvironmentFailed: The converter left something out.
    """
    there = set(list_files(target))
    for path in form.files:
        if path not in there:
            raise EnvironmentFailed(f"the converter left out {path}")
    for name, parameter in form.source.parameters.items():
        for state in form.source.states:
            path = f"{ZERO}/{name}/{state}.pt"
            if path in trusted:
                continue
            have = tensor_of(load(target / path, mmap=True)).numel()
            if have != parameter.numel:
                raise EnvironmentFailed(f"{path} has {have} values, wanted {parameter.numel}")


def tensor_of(content: Any) -> Tensor:
    """The tensor in an atomic file: stage 3's files are raw tensors, the others wrap it in a dictionary."""
    value = content[PARAM] if isinstance(content, dict) else content
    if not isinstance(value, Tensor):
        raise EnvironmentFailed(f"an atomic file holds {type(value).__name__}, not a tensor")
    return value
