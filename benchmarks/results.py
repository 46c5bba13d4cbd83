"""What benchmarks share: a description of the machine, a table for people, and the same as JSON."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

# Where results go, unless the environment names another directory.
DIRECTORY_VARIABLE = "DALSEGNO_BENCH_DIR"
DEFAULT_DIRECTORY = Path("build/benchmarks")
WIDTH = 160
PACKAGES = ("dalsegno", "torch", "deepspeed", "numpy", "grpcio", "protobuf", "xxhash")

Row = Mapping[str, Any]


def machine() -> dict[str, Any]:
    """The machine of this process: processor, cores that it may use, memory, system; no host names."""
    return {
        "processor": _first("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
    }


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Versions of Python and of those of the packages that are installed."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def report(name: str, rows: Sequence[Row], *, title: str, settings: Row | None = None) -> Path:
    """Prints ``rows`` as a table, with machine and versions below it, and writes all of it as JSON.

    Args:
        name: The benchmark's name; the file is ``<name>.json``.
        rows: One mapping for each line: column to value, with units in the columns' names. Lines may lack columns.
        title: What the table shows.
        settings: The benchmark's settings, for the JSON and the line below the table.

    Returns:
        The file.

    Raises:
        ValueError: There are no rows, or a value is no JSON.
        OSError: The file cannot be written.
    """
    if not rows:
        raise ValueError(f"benchmark {name} has no results")
    here, installed = machine(), versions()
    columns = list(dict.fromkeys(column for row in rows for column in row))
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*(_text(row.get(column)) for column in columns))
    # Output to a file or a pipe is not squeezed into 80 columns.
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    console.print(table)
    memory = f"{here['memory_bytes'] / 2**30:.0f} GiB"
    console.print(f"{here['processor']}, {here['cores']} cores, {memory}, {here['system']}", highlight=False)
    console.print(", ".join(f"{package} {version}" for package, version in installed.items()), highlight=False)
    if settings:
        console.print(", ".join(f"{key} {_text(value)}" for key, value in settings.items()), highlight=False)
    content = {
        "benchmark": name,
        "title": title,
        "machine": here,
        "versions": installed,
        "settings": dict(settings or {}),
        "rows": [dict(row) for row in rows],
    }
    directory = Path(os.environ.get(DIRECTORY_VARIABLE) or DEFAULT_DIRECTORY)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.json"
    path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    console.print(f"as JSON: {path}", highlight=False)
    return path


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def _first(path: str, key: str) -> str | None:
    """The value of the first line ``key : value`` of a file such as /proc/cpuinfo."""
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return None
