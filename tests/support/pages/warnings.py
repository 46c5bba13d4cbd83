"""Every text that agents print as a warning and that the master's events show as one, read from the sources."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

__all__ = ("Rooms", "Said")

# What shows a text as a warning, and where that stands among its arguments. The level is the next one, or `warning=`.
SHOWN = {"agent": {"Say": 0, "say": 0}, "master": {"notice": 0, "note": 1}}
# Functions that pass a text on to those, with its place and the name of its parameter: their callers are looked at.
CARRIED = {
    "Remark": (0, "text"),
    "JoinFailed": (2, "message"),
    "StartFailed": (1, "message"),
    "start_anew": (0, "why"),
    "report_failure": (1, "text"),
    "end": (2, "message"),
    "exit": (1, "message"),
}
# Functions whose whole text is passed on, with their file.
PASSED_ON = {"mismatch": "agent/control/handshake.py"}
# Those say how something ended, which is a warning where their first own argument is one of these.
BAD_ENDINGS = {"end": ("Phase.FAILED",), "exit": ("ev.EXIT_LEFT_UNSAVED",)}


@dataclass(frozen=True)
class Said:
    """A warning as the sources have it: "{}" stands for what is filled in."""

    text: str
    where: str


@dataclass
class Rooms:
    """The sources of some rooms of the product."""

    root: Path
    rooms: tuple[str, ...]
    # Expressions whose text could not be found, with the file that has them.
    unknown: set[tuple[str, str]] = field(default_factory=set)

    @cached_property
    def trees(self) -> dict[str, ast.Module]:
        files = (path for room in self.rooms for path in sorted((self.root / room).rglob("*.py")))
        return {str(path.relative_to(self.root)): ast.parse(path.read_text(encoding="utf-8")) for path in files}

    @cached_property
    def functions(self) -> dict[str, list[tuple[str, ast.FunctionDef]]]:
        """By name: the file and the definition."""
        found: dict[str, list[tuple[str, ast.FunctionDef]]] = {}
        for path, tree in self.trees.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef):
                    found.setdefault(node.name, []).append((path, node))
        return found

    def warnings(self) -> Iterator[Said]:
        """All of them, those of carriers too."""
        for path, tree in self.trees.items():
            for scope, call in calls(tree):
                text = shown(path.partition("/")[0], call) or carried(call)
                if text is not None:
                    yield from (Said(one, path) for one in self.texts(text, path, scope) if has_words(one))
        for name, path in PASSED_ON.items():
            (made,) = (one for file, one in self.functions[name] if file == path)
            found = (text for value in returned(made) for text in self.texts(value, path, made))
            yield from (Said(one, path) for one in found if has_words(one))

    def texts(self, node: ast.expr, path: str, scope: ast.AST, depth: int = 0) -> list[str]:
        """What an expression says; empty, and noted in `unknown`, where that cannot be seen."""
        match node:
            case ast.Constant(value=str(text)):
                return [text]
            case ast.Constant(value=None):
                return []
            case ast.JoinedStr(values=values):
                whole = "".join(str(one.value) if isinstance(one, ast.Constant) else "{}" for one in values)
                if has_words(whole):
                    return [whole]
                # All that it says is filled in.
                parts = (one.value for one in values if isinstance(one, ast.FormattedValue))
                named = (one for one in parts if isinstance(one, ast.Name | ast.Call | ast.BoolOp))
                return [text for one in named for text in self.texts(one, path, scope, depth)]
            case ast.IfExp(body=body, orelse=other):
                return [*self.texts(body, path, scope, depth), *self.texts(other, path, scope, depth)]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return [*self.texts(left, path, scope, depth), *self.texts(right, path, scope, depth)]
            case ast.BoolOp(values=values):
                return [text for one in values for text in self.texts(one, path, scope, depth)]
            case ast.NamedExpr(value=value):
                return self.texts(value, path, scope, depth)
        found = self.elsewhere(node, path, scope, depth) if depth < 6 else None
        if found is None:
            self.unknown.add((path, ast.unparse(node)))
        return found or []

    def elsewhere(self, node: ast.expr, path: str, scope: ast.AST, depth: int) -> list[str] | None:
        """What a name was given before, or a function of ours returns; None: it is neither."""
        if isinstance(node, ast.Name):
            given = [*assigned(scope, node.id), *assigned(self.trees[path], node.id, deep=False)]
            if node in self.own_parts(given, node.id):
                return []  # What it was before is among them.
            return [text for one in given for text in self.texts(one, path, scope, depth + 1)] if given else None
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            made = self.functions.get(name, [])
            made = [one for one in made if one[0] == path] or made
            return (
                [
                    text
                    for file, one in made
                    for value in returned(one)
                    for text in self.texts(value, file, one, depth + 1)
                ]
                if made
                else None
            )
        return None

    @staticmethod
    def own_parts(given: list[ast.expr], name: str) -> list[ast.expr]:
        """Where a name is given itself, with more or less around it."""
        return [one for value in given for one in ast.walk(value) if isinstance(one, ast.Name) and one.id == name]


def calls(tree: ast.AST, scope: ast.AST | None = None) -> Iterator[tuple[ast.AST, ast.Call]]:
    """Each call with the outermost function in which it stands."""
    for node in ast.iter_child_nodes(tree):
        inside = node if scope is None and isinstance(node, ast.FunctionDef) else scope
        if isinstance(node, ast.Call):
            yield inside or tree, node
        yield from calls(node, inside)


def shown(room: str, call: ast.Call) -> ast.expr | None:
    """The text that a call shows as a warning."""
    function = ast.unparse(call.func)
    place = SHOWN.get(room, {}).get(function.rpartition(".")[2])
    if place is None or len(call.args) <= place or (function.endswith(".note") and function != "turn.note"):
        return None
    named = {given.arg: given.value for given in call.keywords}
    level = named.get("warning", call.args[place + 1] if len(call.args) > place + 1 else None)
    return call.args[place] if level is not None and ast.unparse(level) != "False" else None


def carried(call: ast.Call) -> ast.expr | None:
    """The text that a call passes on to one that shows it."""
    function = ast.unparse(call.func).rpartition(".")[2]
    place, name = CARRIED.get(function, (99, ""))
    if function in BAD_ENDINGS and (
        len(call.args) < place or ast.unparse(call.args[place - 1]) not in BAD_ENDINGS[function]
    ):
        return None
    if len(call.args) > place:
        return call.args[place]
    return next((given.value for given in call.keywords if name and given.arg == name), None)


def assigned(scope: ast.AST, name: str, *, deep: bool = True) -> list[ast.expr]:
    """All that a name is given in a function, or at the top of a module."""
    found: list[ast.expr] = []
    for node in ast.walk(scope) if deep else ast.iter_child_nodes(scope):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if has_target(node) else []  # type: ignore[attr-defined]
        value = getattr(node, "value", None)
        if value is None:
            continue
        for target in targets:
            if isinstance(target, ast.Name) and target.id == name:
                found.append(value)
            elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                found += [one for at, one in zip(target.elts, value.elts, strict=False) if ast.unparse(at) == name]
    return found


def has_words(text: str) -> bool:
    """Whether it says more than what is filled in."""
    return bool(re.search("[a-z]{2}", text))


def has_target(node: ast.AST) -> bool:
    return isinstance(node, ast.AnnAssign | ast.NamedExpr)


def returned(function: ast.FunctionDef) -> list[ast.expr]:
    """What a function gives back."""
    return [node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value is not None]
