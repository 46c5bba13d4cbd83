"""Which functions may draw random numbers, told by the names in their code. Pure.

Layers tell what they drop. But a loss or a ``forward`` that calls ``torch.randn`` shows it only in its code.
"""

from __future__ import annotations

import dis
import functools
import inspect
import re
from collections.abc import Iterator
from types import CodeType
from typing import Any

_DRAWS = re.compile(
    r"(alpha_|feature_)?dropout[123]?d?|rand(n|int|perm|om)?(_like)?|bernoulli_?|multinomial|poisson|normal_|uniform_|"
    r"gumbel_softmax|rrelu|shuffle|choices?|rsample|drop_path"
)


def drawn_in(function: Any, silent: frozenset[str] = frozenset()) -> tuple[str, ...]:
    """Names in a function's own code that draw random numbers; empty: none is seen.

    Args:
        function: Whose code it is.
        silent: Attributes of its first argument (``self``) that draw nothing, whatever their names are.
    """
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function) if callable(function) else function
    if not inspect.isroutine(function):
        function = vars(type(function)).get("__call__")
    code = getattr(function, "__code__", None)
    return _drawn(code, silent) if isinstance(code, CodeType) else ()


# A model has one code for many layers, and reading its instructions takes a while.
@functools.lru_cache(maxsize=1024)
def _drawn(code: CodeType, silent: frozenset[str]) -> tuple[str, ...]:
    first = code.co_varnames[0] if code.co_argcount else ""
    found = dict.fromkeys(_names(code))
    loud = set(_names_but_of(first, code)) if silent & found.keys() else set()
    return tuple(name for name in found if name not in silent or name in loud)


def _names(code: CodeType) -> Iterator[str]:
    yield from (name for name in code.co_names if _DRAWS.fullmatch(name))
    for inner in _inside(code):
        yield from _names(inner)


def _names_but_of(owner: str, code: CodeType) -> Iterator[str]:
    """All names but those of attributes of this variable."""
    before: Any = None
    for one in dis.get_instructions(code):
        is_attribute = "ATTR" in one.opname or "METHOD" in one.opname
        if one.opcode in dis.hasname and not (is_attribute and before == owner):
            yield str(one.argval)
        before = one.argval if "_FAST" in one.opname or "_DEREF" in one.opname else None
        if isinstance(before, tuple):  # Python 3.13 and later: two variables at once, of which this one is on top
            before = before[-1]
    for inner in _inside(code):
        yield from _names_but_of(owner, inner)


def _inside(code: CodeType) -> Iterator[CodeType]:
    return (inner for inner in code.co_consts if isinstance(inner, CodeType))
