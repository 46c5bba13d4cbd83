"""What a caller who lies would say: numbers, texts and whole messages, drawn from a seeded generator."""

from __future__ import annotations

import random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

__all__ = ["BYTES", "DOUBLES", "NUMBERS", "TEXTS", "disturb", "mutate", "one_field"]

_POWERS = (2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**53 + 1, 2**63 - 2, 2**63 - 1, 2**63, 2**64 - 1)
NUMBERS = (0, 1, 2, 7, 255, *_POWERS)
DOUBLES = (0.0, -0.0, -1.0, 1e-320, 0.1, 1.0, 1e9, 1e18, 1e308, -1e308, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    "",
    " ",
    ".",
    "..",
    "../../../etc/passwd",
    "/etc/passwd",
    "a/b",
    "name\nwith a second line",
    "\x1b[2J\x1b]0;title\x07",
    "a\0b",
    "\u202eright to left",
    "ünïcödé",
    "\U0001f3b5",
    "'; DROP TABLE record; --",
    "{}",
    "%s%n",
    "step-1.e1.1",
    "step-9999999999999999999.e1.1",
    "step-1.e18446744073709551615.1",
    "step-1.e1.1.universal.1",
    "0" * 64,
    "A" * 64,
    "f" * 63,
    "n" * 300,
    "n" * 5000,
)
BYTES = (b"", b"\0", b"x" * 15, b"x" * 16, b"x" * 64, b"x" * 65, b"\xff" * 16, b"x" * 4096)
# Field numbers of other messages, wire types that do not exist, lengths beyond the end.
_TAGS = (b"\x08", b"\x12\xff\xff\xff\xff\x0f", b"\x0b", b"\x0c", b"\x07", b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f")

_RANGES = {
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_ENUM: (-(2**31), 2**31 - 1),
}


def _scalar(rng: random.Random, field: FieldDescriptor) -> Any:
    if field.type in _RANGES:
        least, most = _RANGES[field.type]
        return max(least, min(most, rng.choice(NUMBERS)))
    if field.type == FieldDescriptor.TYPE_BOOL:
        return rng.random() < 0.5
    if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return rng.choice(DOUBLES)
    if field.type == FieldDescriptor.TYPE_STRING:
        return rng.choice(TEXTS)
    return rng.choice(BYTES)


def one_field(rng: random.Random, message: Message, kept: tuple[str, ...] = ()) -> None:
    """Gives one field of `message`, or of a message in it, a hostile value; fields named in `kept` stay."""
    fields = [field for field in message.DESCRIPTOR.fields if field.name not in kept]
    if not fields:
        return
    field = rng.choice(fields)
    nested = field.type == FieldDescriptor.TYPE_MESSAGE
    values: Any = getattr(message, field.name)
    # Of a repeated field: older and newer protobuf have different names for the question.
    if hasattr(values, "extend"):
        many = rng.choice((0, 1, 2, 3, 300))
        if many == 0:
            message.ClearField(field.name)
        elif nested:
            one_field(rng, first := values.add(), kept)
            for _ in range(many - 1):
                values.add().CopyFrom(first)
        else:
            values.extend([_scalar(rng, field)] * many)
    elif nested and rng.random() < 0.9:
        one_field(rng, values, kept)
    elif nested or rng.random() < 0.1:
        message.ClearField(field.name)
    else:
        setattr(message, field.name, _scalar(rng, field))


def disturb(rng: random.Random, message: Message, kept: tuple[str, ...] = ()) -> None:
    """Makes a sensible message a hostile one, in one to three places; now and then leaves it as it is."""
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        one_field(rng, message, kept)


def mutate(rng: random.Random, data: bytes) -> bytes:
    """The bytes of a valid message after an accident: flipped bits, a cut, a splice, or nothing but noise."""
    result = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        where = rng.randrange(len(result) + 1)
        match rng.randrange(6):
            case 0 if result:
                result[where % len(result)] ^= 1 << rng.randrange(8)
            case 1:
                del result[where:]
            case 2:
                result[where:where] = rng.randbytes(rng.choice((1, 4, 60)))
            case 3:
                result[where:where] = rng.choice(_TAGS)
            case 4 if result:
                result[where:where] = result[: rng.randrange(len(result)) + 1]
            case 5:
                result[:] = rng.randbytes(rng.choice((0, 1, 7, 100, 2000)))
    return bytes(result)
