"""How many nodes and workers a command line means that does not say so, and which cards are here. No torch needed."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping
from pathlib import Path

from dalsegno.protos.options import UsageError, nnodes

__all__ = ["cards", "idle_cards", "settle_size"]

# DLRover's operator has the number of nodes there, in each pod.
_NODE_NUM = "NODE_NUM"
_CARD = re.compile("nvidia[0-9]+")
_DEVICES = Path("/dev")


def settle_size(options: argparse.Namespace, environ: Mapping[str, str]) -> None:
    """Sets `nnodes` (a pair) and `nproc_per_node` where they were not given, which `…_is_given` says.

    Like DLRover's, `--auto-config` means `NODE_NUM` nodes, if there is that variable, and a worker for each card. In
    contrast to it, what is given counts. Whether there are any cards only torch can say: "gpu" stands for them, or 1.

    Args:
        options: parsed; None is what was not given.
        environ: variables.

    Raises:
        UsageError: `NODE_NUM` is no number of nodes.
    """
    options.nnodes_is_given = options.nnodes is not None
    if not options.nnodes_is_given:
        given = environ.get(_NODE_NUM, "").strip() if options.auto_config else ""
        options.nnodes = _nodes(given) if given else (1, 1)
    options.nproc_is_given = options.nproc_per_node is not None
    if not options.nproc_is_given:
        options.nproc_per_node = "gpu" if options.auto_config else "1"


def _nodes(given: str) -> tuple[int, int]:
    try:
        return nnodes(given if given.isdecimal() else "")
    except argparse.ArgumentTypeError as error:
        raise UsageError(
            f"environment variable {_NODE_NUM}, which --auto-config reads: {given[:40]!r} is no number of nodes:"
            " give --nnodes"
        ) from error


def cards(environ: Mapping[str, str]) -> int:
    """How many NVIDIA cards the workers would see: a guess, for which no driver is asked."""
    try:
        found = sum(bool(_CARD.fullmatch(name)) for name in os.listdir(_DEVICES))
    except OSError:
        return 0
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return found
    # CUDA reads it up to what names no card, such as -1.
    named = [one.strip() for one in visible.split(",")]
    return min(found, next((at for at, one in enumerate(named) if not one or one.startswith("-")), len(named)))


def idle_cards(options: argparse.Namespace, environ: Mapping[str, str]) -> list[str]:
    """A line where cards stay idle because nobody has said how many workers there are to be."""
    if options.nproc_is_given or options.nproc_per_node != "1" or (found := cards(environ)) < 2:
        return []
    how = "--nproc-per-node=gpu starts a worker for each card (=1: one is meant)"
    return [f"this node has {found} cards and one worker: {how}"]
