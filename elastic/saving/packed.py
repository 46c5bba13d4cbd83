"""Content of a file that is written in a form of its own, and not as ``torch.save`` would."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


class PackedFile(dict[str, Any]):
    """A dictionary with tensors, and how its file is laid out."""

    def alike(self, items: Mapping[str, Any]) -> PackedFile:
        """The same with other items: copies of these."""
        raise NotImplementedError

    def pieces(self) -> Iterator[bytes | memoryview]:
        """The bytes of the file, in order, in buffers that are good until the next one is asked for."""
        raise NotImplementedError
