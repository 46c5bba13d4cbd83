"""Which environment variables a script sets, by its text, before it imports the libraries that read them on import.

In a process that has imported these libraries ahead such a line would have no effect, without a word. Pure.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping

__all__ = ["early_variables"]

# Hugging Face's libraries read these, and they have been read by the import of one of them. What torch reads
# (`OMP_NUM_THREADS`, `TORCH_COMPILE_DISABLE`) is not looked for: scripts set that to what it is anyway, and each start
# would take torch's import longer.
_OF_HUB = ("HF_", "HUGGINGFACE_", "TRANSFORMERS_", "XDG_CACHE_HOME", "USE_TORCH", "USE_TF")
_HUBS = frozenset({"huggingface_hub", "transformers", "datasets", "accelerate", "peft", "swift", "trl", "diffusers"})
# These are read when they are needed.
_LATE = re.compile("HF_TOKEN$|TRANSFORMERS_NO_ADVISORY")
# A cheap look at a text, before it is parsed.
_MAY = re.compile(rf"(?s)(?=.*\b(?:environ|putenv)\b).*(?:{'|'.join(_OF_HUB)})")
# What only the script itself will know.
_UNKNOWN = object()


def early_variables(text: str, environment: Mapping[str, str]) -> set[str]:
    """The variables of Hugging Face's libraries that a script, or a module of its own, sets at its top level.

    Only by a name that stands there, and before the import of what reads them: behind it they have no effect anyway.

    Args:
        text: Of the script or module.
        environment: What is set before it runs. What changes nothing there does not count.
    """
    if not _MAY.match(text):
        return set()
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
    found, imported = set[str](), set[str]()
    # Others may have another value in a worker: RANK, if whoever started the agent has set it.
    known: dict[str, object] = {name: value for name, value in environment.items() if name.startswith(_OF_HUB)}
    for node in _at_top(body, known):
        imported |= _imports(node)
        if imported & _HUBS:
            break
        for name, value in _sets(node):
            present = known.get(name, _UNKNOWN)
            if present is not _UNKNOWN and (_is_default(node) or _value(value, known) == present):
                continue
            known[name] = _UNKNOWN  # another one, perhaps
            if name.startswith(_OF_HUB) and not _LATE.match(name):
                found.add(name)
        known.update(dict.fromkeys(_takes_away(node), _UNKNOWN))
    return found


def _is_default(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setdefault"


def _at_top(body: list[ast.stmt], known: Mapping[str, object]) -> Iterator[ast.AST]:
    """What is run as the module is imported, in its order: also in `if`, `try`, `for` and `with`.

    Args:
        body: Of the module, or a block of it.
        known: What is set when the next one is asked for; rules out a branch of an `if`. What is not set here may be
            by then (`load_dotenv()`).
    """
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        names = ["body", "handlers", "orelse", "finalbody"]
        if isinstance(node, ast.If) and (runs := _value(node.test, known)) is not _UNKNOWN:
            names = ["body" if runs else "orelse"]
        elif not any(getattr(node, name, []) for name in names):
            yield from ast.walk(node)
        yield from _at_top([one for name in names for one in getattr(node, name, [])], known)


def _value(node: ast.AST, known: Mapping[str, object]) -> object:
    """What an expression of constants and variables that are set gives; or `_UNKNOWN`."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        value = _value(node.operand, known)
        return value if value is _UNKNOWN else not value
    if isinstance(node, ast.IfExp) and (test := _value(node.test, known)) is not _UNKNOWN:
        return _value(node.body if test else node.orelse, known)
    if isinstance(node, ast.BoolOp):
        for one in node.values:
            value = _value(one, known)
            if value is _UNKNOWN or bool(value) == isinstance(node.op, ast.Or):
                break
        return value
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return _compared(_value(node.left, known), node.ops[0], node.comparators[0], known)
    return _looked_up(node, known)


def _compared(left: object, how: ast.cmpop, node: ast.AST, known: Mapping[str, object]) -> object:
    if isinstance(how, (ast.In, ast.NotIn)):
        is_set = _is_environ(node) and isinstance(left, str) and known.get(left, _UNKNOWN) is not _UNKNOWN
        return isinstance(how, ast.In) if is_set else _UNKNOWN
    right = _value(node, known)
    if left is _UNKNOWN or right is _UNKNOWN or not isinstance(how, (ast.Eq, ast.NotEq, ast.Is, ast.IsNot)):
        return _UNKNOWN
    return (left == right) == isinstance(how, (ast.Eq, ast.Is))


def _looked_up(node: ast.AST, known: Mapping[str, object]) -> object:
    """`environ[NAME]`, `environ.get(NAME, …)` or `getenv(NAME, …)` of what is set."""
    if isinstance(node, ast.Subscript) and _is_environ(node.value):
        name = _value(node.slice, known)
    elif isinstance(node, ast.Call) and node.args and _is_lookup(node.func):
        name = _value(node.args[0], known)
    else:
        return _UNKNOWN
    return known.get(name, _UNKNOWN) if isinstance(name, str) else _UNKNOWN


def _is_lookup(node: ast.AST) -> bool:
    is_get = isinstance(node, ast.Attribute) and node.attr == "get" and _is_environ(node.value)
    return is_get or _last_name(node) == "getenv"


def _imports(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom) and not node.level:
        return {(node.module or "").partition(".")[0]}
    return set()


def _sets(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """The names that one statement or call sets in the environment, with what it sets them to."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Subscript) and _is_environ(target.value):
                yield from _named(target.slice, node.value)
    elif isinstance(node, ast.AugAssign) and _is_environ(node.target):
        yield from _of_mapping(node.value)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        method, owner = node.func.attr, node.func.value
        if (method == "setdefault" and _is_environ(owner)) or method == "putenv":
            if len(node.args) == 2:
                yield from _named(*node.args)
        elif method == "update" and _is_environ(owner):
            yield from ((one.arg, one.value) for one in node.keywords if one.arg is not None)
            for mapping in node.args:
                yield from _of_mapping(mapping)


def _takes_away(node: ast.AST) -> Iterator[str]:
    """The names that one statement or call removes from the environment."""
    if isinstance(node, ast.Delete):
        targets = [one.slice for one in node.targets if isinstance(one, ast.Subscript) and _is_environ(one.value)]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_environ(node.func.value):
        targets = node.args[:1] if node.func.attr == "pop" else []
    else:
        return
    yield from (one.value for one in targets if isinstance(one, ast.Constant) and isinstance(one.value, str))


def _is_environ(node: ast.AST) -> bool:
    """`os.environ`, or `environ` alone."""
    return _last_name(node) == "environ"


def _last_name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _named(name: ast.AST, value: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(name, ast.Constant) and isinstance(name.value, str):
        yield name.value, value


def _of_mapping(mapping: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(mapping, ast.Dict):
        for key, value in zip(mapping.keys, mapping.values, strict=True):
            if key is not None:
                yield from _named(key, value)
    elif isinstance(mapping, ast.Call):  # dict(NAME=…)
        yield from ((one.arg, one.value) for one in mapping.keywords if one.arg is not None)
