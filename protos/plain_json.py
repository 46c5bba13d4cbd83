"""Messages as JSON has them for people's programs: each field by its name in the `.proto`, and numbers as numbers."""

from __future__ import annotations

from functools import cache
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

__all__ = ("plain",)

_WHOLE = (FieldDescriptor.CPPTYPE_UINT64, FieldDescriptor.CPPTYPE_INT64)


def plain(message: Message) -> dict[str, Any]:
    """All fields of a message; those with presence only where they are set.

    Protobuf's own JSON has numbers of 64 bits as text, with which programs cannot reckon. Here they are numbers: none
    of ours is above `limits.MOST`, which JSON's numbers hold exactly.
    """
    found = dict(MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True))
    _with_numbers(found, message.DESCRIPTOR)
    return found


def _with_numbers(found: dict[str, Any], of: Any) -> None:
    for name, inner in _wide(of):
        value = found.get(name)
        if value is None:
            continue
        if inner is None:
            found[name] = [int(one) for one in value] if isinstance(value, list) else int(value)
        else:
            for one in value if isinstance(value, list) else (value,):
                _with_numbers(one, inner)


@cache
def _wide(of: Any) -> tuple[tuple[str, Any], ...]:
    """Of a descriptor the fields that are such numbers (None), and those that have such in them, with their own."""
    wide: list[tuple[str, Any]] = []
    for field in of.fields:
        if field.cpp_type in _WHOLE:
            wide.append((field.name, None))
        elif field.message_type is not None and _wide(field.message_type):
            wide.append((field.name, field.message_type))
    return tuple(wide)
