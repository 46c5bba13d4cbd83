"""Members of enumerations in files: written so that each Python can read them, and read as some Pythons wrote them.

Most versions of CPython write a call of the class with the value. 3.11.0 to 3.11.4 write ``getattr`` of the class and
the name (bpo-44342; gh-105332 took that back), and ``torch.load(weights_only=True)`` takes no such call: with
``getattr`` a file has any code at hand.
"""

from __future__ import annotations

import copyreg
from collections.abc import Iterable, Mapping
from enum import Enum, EnumMeta
from pickle import UnpicklingError
from typing import Any


def write_by_value(classes: Iterable[type]) -> None:
    """Has every pickle of this process name the members of these classes by value, as most Pythons do by themselves.

    Args:
        classes: Those that are no enumerations are left as they are.
    """
    for one in classes:
        if issubclass(one, Enum):
            copyreg.pickle(one, _by_value)


def _by_value(member: Enum) -> tuple[type[Enum], tuple[Any]]:
    return type(member), (member.value,)


def member(*arguments: Any) -> Enum:
    """Stands for ``getattr`` in a file, and gives members of enumerations alone.

    Nothing has a class in hand but from torch's list, so these are members of what is on it.

    Args:
        arguments: The class, and the member's name.

    Raises:
        pickle.UnpicklingError: It is another call of ``getattr``.
    """
    if len(arguments) == 2 and isinstance(arguments[0], EnumMeta) and type(arguments[1]) is str:
        members: Mapping[str, Enum] = arguments[0].__members__
        if arguments[1] in members:
            return members[arguments[1]]
    # `describe_refusal` finds the name.
    raise UnpicklingError("GLOBAL getattr of anything but a member of a listed Enum is not called")


# torch's list knows a function by these. Its newer versions would take a name beside the function as well.
member.__module__, member.__name__, member.__qualname__ = "builtins", "getattr", "getattr"
