"""Prints of samples: the same sample is known again, another one is told from it."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from dalsegno.elastic.data.prints import Likeness, likeness, print_of


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@dataclasses.dataclass
class Pair:
    words: list[int]
    label: str


class Image:
    """As Pillow's."""

    mode, size = "L", (8, 8)

    def __init__(self, seed: int) -> None:
        self._bytes = np.random.default_rng(seed).integers(0, 255, 64, dtype=np.uint8).tobytes()

    def tobytes(self) -> bytes:
        return self._bytes


# What a data set may give for a sample, made of a number.
SAMPLES: dict[str, Any] = {
    "rows": lambda n: noise(n, 9),
    "large": lambda n: noise(n, 300, 300),
    "a number": lambda n: 0.5 + n,
    "words": lambda n: {"input_ids": list(range(n, n + 40)), "labels": [n, -100]},
    "text": lambda n: {"text": f"line {n} of the file", "id": 3},
    "bytes": lambda n: (b"x", bytes([n])),
    "array": lambda n: np.random.default_rng(n).normal(size=(4, 5)),
    "tokens": lambda n: np.arange(n, n + 5, dtype=np.uint16),
    "pixels": lambda n: (noise(n, 3, 16, 16) * 60 + 128).clamp(0, 255).to(torch.uint8),
    "image": Image,
    "deep": lambda n: [{"a": [(1, {"b": noise(n, 3)})]}],
    "a dataclass": lambda n: Pair([1, 2], f"{n}"),
    "a named tuple": lambda n: collections.namedtuple("Point", "x y")(noise(1, 2), n),
    "a label": lambda n: (noise(1, 4), n),
    "half": lambda n: noise(n, 6).bfloat16(),
    "complex": lambda n: torch.view_as_complex(noise(n, 6, 2)),
    "a flag": lambda n: torch.tensor([n == 0, True]),
    "nothing finite": lambda n: (torch.full((3,), float("nan")), n),
    "empty": lambda n: (torch.zeros(0), n),
    "an array in numpy's": lambda n: np.int64(n),
}


@pytest.mark.parametrize("kind", list(SAMPLES))
def test_samples_are_known_again_and_told_apart(kind: str) -> None:
    make = SAMPLES[kind]
    prints = [print_of(make(n)) for n in range(3)]
    assert [print_of(make(n)) for n in range(3)] == prints
    assert likeness(prints[0], prints[1]) is Likeness.OTHER
    assert likeness(prints[1], prints[2]) is (Likeness.SAME if kind == "a flag" else Likeness.OTHER)
    assert all(len(text) < 300 for text in prints)


def test_what_is_rounded_otherwise_is_the_same_sample() -> None:
    """Another processor's last bits; what a decoder makes otherwise is close; a shape or a kind counts exactly."""
    sample = noise(1, 3, 32, 32)
    assert likeness(print_of(sample), print_of(sample * (1 + 3e-7))) is Likeness.SAME
    pixels = (sample * 40 + 128).clamp(0, 255).to(torch.uint8)
    other = (pixels.int() + (noise(2, 3, 32, 32) > 1).int()).clamp(0, 255).to(torch.uint8)
    assert likeness(print_of(pixels), print_of(other)) is Likeness.CLOSE
    assert likeness(print_of(sample), print_of(sample.double())) is Likeness.OTHER
    assert likeness(print_of(sample), print_of(sample[:2])) is Likeness.OTHER
    assert likeness(print_of([1, 2]), print_of([1.0, 2.0])) is Likeness.OTHER


def test_what_means_the_same_elsewhere() -> None:
    """A file that lies in another directory; an object that shows where in memory it is; another order of keys."""
    assert print_of({"path": "/scratch/a/img-1.png"}) == print_of({"path": "/data/b/img-1.png"})
    assert print_of({"path": "/scratch/a/img-1.png"}) != print_of({"path": "/scratch/a/img-2.png"})
    assert print_of("/ or a blank") != print_of("a blank")
    assert print_of(object()) == print_of(object())
    assert print_of({"a": 1, "b": 2}) == print_of({"b": 2, "a": 1})
    assert print_of(torch.zeros(2, device="meta")) == print_of(torch.ones(2, device="meta"))


def test_what_contains_itself_comes_to_an_end() -> None:
    endless: list[Any] = [1]
    endless.append(endless)
    assert print_of(endless) == print_of(endless)


def test_prints_of_another_version_say_nothing() -> None:
    assert likeness("2 abc 1,2", print_of(1)) is Likeness.SAME
