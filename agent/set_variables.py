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
    for node in _at_top(body):
        imported |= _imports(node)
        if imported & _HUBS:
            break
        for name, value in _sets(node):
            same = name in environment and (_is_default(node) or _constant(value) == environment[name])
            if name.startswith(_OF_HUB) and not _LATE.match(name) and not same:
                found.add(name)
    return found


def _is_default(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setdefault"


def _constant(value: ast.AST) -> object:
    return value.value if isinstance(value, ast.Constant) else None


def _at_top(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """What is run as the module is imported, in its order: also in `if`, `try`, `for` and `with`."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        blocks = [getattr(node, name, []) for name in ("body", "handlers", "orelse", "finalbody")]
        if any(blocks):
            yield from _at_top([one for block in blocks for one in block])
        else:
            yield from ast.walk(node)


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


def _is_environ(node: ast.AST) -> bool:
    """`os.environ`, or `environ` alone."""
    return (
        node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    ) == "environ"


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
