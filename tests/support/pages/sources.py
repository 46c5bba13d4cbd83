"""The product's source files, as the tests on the house see them."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("agent", "elastic", "master", "protos", "relay", "swift_plugin")


def product_files() -> list[Path]:
    """Every hand-written Python file that a wheel would carry, relative to the checkout, sorted."""
    found = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return sorted(path.relative_to(ROOT) for path in found if "_pb2" not in path.name)


@functools.cache
def parsed(source: str) -> ast.Module:
    """The tree of a file's text: several tests walk through the same. Syntax newer than Python 3.10 is refused."""
    return ast.parse(source, feature_version=(3, 10))


def module_name(path: Path) -> str:
    """`agent/commands/dlrover_run.py` is `dalsegno.agent.commands.dlrover_run`."""
    parts = list(path.with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(["dalsegno", *parts])


def imports(path: Path, tree: ast.AST) -> Iterator[tuple[int, str, bool]]:
    """(line, absolute dotted name, was it relative) of every import, lazy ones and those for types included."""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package.pop()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield node.lineno, name.name, False
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = [*base, *(node.module.split(".") if node.module else [])]
            # `from dalsegno.elastic import checkpoint` imports dalsegno.elastic.checkpoint: the full names count.
            for name in node.names:
                yield node.lineno, ".".join([*module, name.name]), node.level > 0
