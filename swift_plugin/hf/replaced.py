"""What is another for a moment while the Trainer's own code runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import transformers.trainer as upstream


@contextlib.contextmanager
def undivided(args: Any) -> Iterator[None]:
    """Whoever writes a ``training_step`` of his own divides by this, as transformers' own did once."""
    slices, args.gradient_accumulation_steps = args.gradient_accumulation_steps, 1
    try:
        yield
    finally:
        args.gradient_accumulation_steps = slices


@contextlib.contextmanager
def replaced(name: str, value: Any) -> Iterator[None]:
    """Replaces a function that the training loop calls by its name in its module."""
    original = getattr(upstream, name)
    setattr(upstream, name, value)
    try:
        yield
    finally:
        setattr(upstream, name, original)
