"""The durable half of the state as bytes: JSON with a version number, so that a person can read it.

The shape is derived from the dataclasses (pydantic), and every value is checked on the way back: a record of another
shape is refused with one line instead of half understood.
"""

from __future__ import annotations

import json
from typing import Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

from .store import StoreError

__all__ = ("STATE_VERSION", "Codec")

STATE_VERSION = 1

T = TypeVar("T")


class Codec(Generic[T]):
    """Encodes and decodes one stdlib dataclass (with what it contains)."""

    def __init__(self, kind: type[T]) -> None:
        self._adapter: TypeAdapter[T] = TypeAdapter(kind)

    def encode(self, value: T) -> bytes:
        """The same value gives the same bytes: they tell whether there is something to save."""
        # Not pydantic's own JSON: it writes a NaN loss as null, which does not come back as a number.
        plain = self._adapter.dump_python(value, mode="json")
        return json.dumps({"version": STATE_VERSION, "job": plain}, separators=(",", ":")).encode()

    def decode(self, data: bytes) -> T:
        """Raises StoreError where the bytes are not a state of this version."""
        try:
            envelope = json.loads(data)
        except ValueError as error:
            raise StoreError(f"the stored state is not JSON: {error}") from error
        version = envelope.get("version") if isinstance(envelope, dict) else None
        if version != STATE_VERSION:
            raise StoreError(
                f"the stored state has version {version}, this master reads {STATE_VERSION}:"
                " use the version of dalsegno that wrote it"
            )
        try:
            return self._adapter.validate_python(envelope.get("job"))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "job"
            raise StoreError(
                f"the stored state does not fit this version of dalsegno: {where}: {first['msg']}"
            ) from error
