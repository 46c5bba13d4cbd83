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

# Names that nothing else has: of torch, of Python's random, of NumPy.
_DRAWS = re.compile(
    r"(native_|alpha_|feature_)*dropout[123]?d?|drop_path|rrelu|gumbel_softmax|fractional_max_pool[23]d|"
    r"(svd|pca)_lowrank|rand(n|int|perm|om)?(_like)?|multinomial|bernoulli_?|rsample|"
    r"(normal|log_normal|uniform|cauchy|exponential|geometric|random)_|"
    r"(beta|expo|gamma|gauss|lognorm|normal|pareto|vonmises|weibull|binomial)variate|randrange|randbytes|getrandbits|"
    r"random_(sample|integers)|standard_(normal|exponential|gamma|cauchy|t)|(lognormal|logseries|hypergeometric)|"
    r"multivariate_(normal|hypergeometric)|negative_binomial|noncentral_(chisquare|f)|permuted|tomaxint"
)
# Everyday names, of draws only where they are called: of something else than `self`, or by a name that was imported
# from one of those. Left out are gamma, beta, laplace, logistic, power: code has functions of its own with these names.
_CALLED = frozenset(
    (
        *("normal", "exponential", "geometric", "poisson", "binomial", "uniform", "integers", "gauss", "gumbel"),
        *("triangular", "choice", "choices", "shuffle", "permutation", "rayleigh", "weibull", "pareto", "vonmises"),
        *("dirichlet", "chisquare", "sample"),
    )
)
# Of something, this one draws only if it is given nothing: a distribution's. With places to sample at, it reads there.
_GIVEN_NOTHING = "sample"


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
    if not isinstance(code, CodeType):
        return ()
    known = getattr(function, "__globals__", {})
    return _drawn(code, silent, frozenset(name for name in _CALLED if name in known and _is_a_draw(known[name])))


# A model has one code for many layers, and reading its instructions takes a while.
@functools.lru_cache(maxsize=1024)
def _drawn(code: CodeType, silent: frozenset[str], imported: frozenset[str]) -> tuple[str, ...]:
    first = code.co_varnames[0] if code.co_argcount else ""
    found = dict.fromkeys(_names(code, imported))
    loud = set(_names_but_of(first, code)) if silent & found.keys() else set()
    return tuple(name for name in found if name not in silent or name in loud)


def _is_a_draw(value: Any) -> bool:
    """Whether a function is one of Python's random, NumPy or torch. Theirs are methods, many without a module."""
    owner = getattr(value, "__self__", None)
    homes = (getattr(one, "__module__", None) for one in (value, owner, type(owner)))
    return any(str(home).partition(".")[0] in ("random", "numpy", "torch") for home in homes)


def _names(code: CodeType, imported: frozenset[str]) -> Iterator[str]:
    called = set(_called(code, imported)) if _CALLED.intersection(code.co_names) else set()
    yield from (name for name in code.co_names if name in called or _DRAWS.fullmatch(name))
    for inner in _inside(code):
        yield from _names(inner, imported)


def _called(code: CodeType, imported: frozenset[str]) -> Iterator[str]:
    """The everyday names whose calls draw."""
    instructions = list(dis.get_instructions(code))
    call_of = _call_by_place if hasattr(code, "co_positions") else _call_by_stack
    before: Any = None
    for at, one in enumerate(instructions):
        if one.opcode in dis.hasname and one.argval in _CALLED:
            of_something = _is_attribute(one)
            if before != "self" if of_something else one.argval in imported:
                call = call_of(instructions, at)
                bare = call is not None and call.argval == 0 and not call.opname.endswith("_EX")
                if call is not None and (bare or not of_something or one.argval != _GIVEN_NOTHING):
                    yield str(one.argval)
        before = _variable(one)


def _call_by_place(instructions: list[dis.Instruction], at: int) -> dis.Instruction | None:
    """What calls the result of an instruction. A call begins in the script's text where the name that it calls does."""
    begin, end = _place(instructions[at])
    for later in instructions[at + 1 :]:
        other_begin, other_end = _place(later)
        if begin is not None and other_begin == begin and other_end > end:
            if later.opname.startswith("CALL") and "INTRINSIC" not in later.opname:
                return later
            if later.opname not in _PREPARES:
                return None  # an attribute, an item or a sum of it
    return None


# Instructions of a call before it.
_PREPARES = (
    *("PRECALL", "KW_NAMES", "PUSH_NULL", "LOAD_CONST", "BUILD_MAP", "DICT_MERGE", "DICT_UPDATE", "BUILD_TUPLE"),
    *("BUILD_LIST", "LIST_EXTEND", "LIST_APPEND", "LIST_TO_TUPLE", "CALL_INTRINSIC_1", "BUILD_CONST_KEY_MAP"),
)


def _place(one: Any) -> tuple[Any, Any]:
    line, end_line, column, end_column = one.positions or (None,) * 4
    return (None if line is None else (line, column)), (end_line, end_column)


def _call_by_stack(instructions: list[dis.Instruction], at: int) -> dis.Instruction | None:
    """The same before Python 3.11, where code has no columns: who takes it from the stack, if no argument branches."""
    depth = 1 if instructions[at].opname == "LOAD_METHOD" else 0
    for later in instructions[at + 1 :]:
        if depth == 0 and _is_attribute(later):
            return None
        depth += dis.stack_effect(later.opcode, later.arg)
        if depth <= 0:
            return later if later.opname.startswith("CALL") else None
    return None


def _names_but_of(owner: str, code: CodeType) -> Iterator[str]:
    """All names but those of attributes of this variable."""
    before: Any = None
    for one in dis.get_instructions(code):
        if one.opcode in dis.hasname and not (_is_attribute(one) and before == owner):
            yield str(one.argval)
        before = _variable(one)
    for inner in _inside(code):
        yield from _names_but_of(owner, inner)


def _is_attribute(one: dis.Instruction) -> bool:
    return "ATTR" in one.opname or "METHOD" in one.opname


def _variable(one: dis.Instruction) -> Any:
    """The variable that an instruction puts on top; None: it is no variable."""
    name = one.argval if "_FAST" in one.opname or "_DEREF" in one.opname else None
    # Python 3.13 and later: two variables at once, of which the last one is on top.
    return name[-1] if isinstance(name, tuple) else name


def _inside(code: CodeType) -> Iterator[CodeType]:
    return (inner for inner in code.co_consts if isinstance(inner, CodeType))
