"""Which functions may draw random numbers, told by the names in their code. Pure.

Layers tell what they drop. But a loss or a ``forward`` that calls ``torch.randn`` shows it only in its code.
"""

from __future__ import annotations

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


def drawn_in(function: Any) -> tuple[str, ...]:
    """Names in a function's own code that draw random numbers; empty: none is seen."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function) if callable(function) else function
    if not inspect.isroutine(function):
        function = vars(type(function)).get("__call__")
    code = getattr(function, "__code__", None)
    return tuple(dict.fromkeys(_names(code))) if isinstance(code, CodeType) else ()


def _names(code: CodeType) -> Iterator[str]:
    yield from (name for name in code.co_names if _DRAWS.fullmatch(name))
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)
