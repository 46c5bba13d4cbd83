"""Random number generators across saves and changes of the world.

While the world stays the same, each rank's generators run on bit-exactly from the saved state. When it changes there is
no state to continue from, so they are seeded anew from (seed, step, rank). With fixed micro-batches they are set before
every micro-batch from (seed, step, number of the micro-batch), at every world size, and nothing depends on the ranks.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from .contexts import cards_in_use

DIRECTORY = "rng"


class Taken(NamedTuple):
    """States of generators: Python's, torch's on the CPU, NumPy's and the current card's where they are in use.

    ``cards``: of the others that this process uses, by number.
    """

    python: tuple[Any, ...]
    torch: torch.Tensor
    numpy: Any
    cuda: torch.Tensor | None
    cards: Mapping[int, torch.Tensor]


def derive(*parts: int | str) -> int:
    """A 64-bit seed from plain values, the same on every machine."""
    return int.from_bytes(
        hashlib.blake2b(repr(parts).encode(), digest_size=8, person=b"dalsegno-rng").digest(), "little"
    )


def seed_all(value: int) -> None:
    """Sets the generators of Python, torch (CPU and current device), and numpy if it is in use."""
    torch.manual_seed(value)
    seed_cpu(value)


def seed_cpu(value: int) -> None:
    """Sets the generators on the CPU only. torch.manual_seed would also seed the devices, which belong to training."""
    random.seed(value)
    torch.default_generator.manual_seed(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(value & 0xFFFFFFFF)


def seed_rank(seed: int, step: int, rank: int) -> None:
    """Seeds a rank at the start of a run, and after the world has changed."""
    seed_all(derive("rank", seed, step, rank))


def seed_micro_batch(seed: int, step: int, number: int) -> None:
    """Seeds before every micro-batch with ``fixed_micro_batch``."""
    seed_all(derive("micro-batch", seed, step, number))


def sample_generator(seed: int, data_epoch: int, sample: int) -> torch.Generator:
    """A generator for random augmentation of one sample, the same wherever and whenever the sample is computed."""
    return torch.Generator().manual_seed(derive("sample", seed, data_epoch, sample))


@contextmanager
def aside(*parts: int | str) -> Iterator[None]:
    """Inside, the generators on the CPU draw from a seed made of ``parts``; afterwards their state is what it was."""
    before = cpu_state()
    seed_cpu(derive(*parts))
    try:
        yield
    finally:
        set_cpu_state(before)


def cpu_state() -> tuple[Any, torch.Tensor, Any]:
    """The states of the generators on the CPU: Python's, torch's, and NumPy's if it is in use."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), torch.get_rng_state(), None if numpy is None else numpy.random.get_state()


def set_cpu_state(state: tuple[Any, torch.Tensor, Any]) -> None:
    """The inverse."""
    random.setstate(state[0])
    torch.set_rng_state(state[1])
    if state[2] is not None:
        sys.modules["numpy"].random.set_state(state[2])


def file_name(rank: int) -> str:
    """Path of a rank's state relative to the checkpoint."""
    return f"{DIRECTORY}/rank-{rank}.json"


def capture() -> bytes:
    """The state of all generators as JSON text, including those of the cards that are in use."""
    return encoded(taken())


def taken() -> Taken:
    """The state of all generators as they give it, which takes microseconds."""
    # Asking for a card's generator starts CUDA, and asking all cards would create a context on each of them.
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return Taken(*cpu_state(), None, {})
    # A script may train on another card than the current one.
    others = [number for number in cards_in_use() if number != torch.cuda.current_device()]
    return Taken(
        *cpu_state(), torch.cuda.get_rng_state(), {number: torch.cuda.get_rng_state(number) for number in others}
    )


def encoded(state: Taken) -> bytes:
    """The same as JSON text, for `restore`."""
    version, internal, gauss = state.python
    found: dict[str, Any] = {
        "python": [version, list(internal), gauss],
        "torch": state.torch.numpy().tobytes().hex(),
    }
    if state.cuda is not None:
        found["cuda"] = state.cuda.numpy().tobytes().hex()
        # Not in what earlier versions have saved.
        found["cards"] = {str(number): held.numpy().tobytes().hex() for number, held in state.cards.items()}
    if state.numpy is not None:
        kind, keys, position, has_gauss, cached = state.numpy
        found["numpy"] = [kind, keys.tolist(), position, has_gauss, cached]
    return json.dumps(found, sort_keys=True).encode() + b"\n"


def restore(data: bytes) -> None:
    """Restores what ``capture`` saved, bit by bit. What it did not save is left alone: a card, after a run on CPUs.

    Raises:
        ValueError: ``data`` is not such a state.
    """
    try:
        state = json.loads(data)
        version, internal, gauss = state["python"]
        random.setstate((version, tuple(internal), gauss))
        torch.set_rng_state(_bytes_tensor(state["torch"]))
    except (KeyError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"not a saved generator state: {error}") from error
    if "cuda" in state and torch.cuda.is_available():
        for number, held in state.get("cards", {}).items():
            if int(number) < torch.cuda.device_count():
                torch.cuda.set_rng_state(_bytes_tensor(held), int(number))
        # Last: where the rank has another card now, that may be one of them.
        torch.cuda.set_rng_state(_bytes_tensor(state["cuda"]))
    if "numpy" in state:
        import numpy

        kind, keys, position, has_gauss, cached = state["numpy"]
        numpy.random.set_state((kind, numpy.asarray(keys, dtype=numpy.uint32), position, has_gauss, cached))


def _bytes_tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
