"""Who may import whom (the tables of docs/architecture.md), and what imports without torch."""

from __future__ import annotations

import ast
import configparser
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pages.sources import ROOT, imports, module_name, parsed, product_files

# Package -> prefixes of `dalsegno.` that it may import besides itself.
ALLOWED: dict[str, tuple[str, ...]] = {
    "protos": (),
    "elastic": ("dalsegno.protos",),
    "master": ("dalsegno.protos",),
    "agent": ("dalsegno.protos", "dalsegno.elastic.checkpoint", "dalsegno.elastic.universal"),
    "relay": ("dalsegno.protos", "dalsegno.elastic.checkpoint", "dalsegno.agent.commands"),
    "swift_plugin": ("dalsegno.elastic", "dalsegno.protos.contract", "dalsegno.protos.trace"),
}
# Distribution -> the name it is imported by, where they differ.
IMPORT_NAMES = {
    "grpcio": "grpc",
    "protobuf": "google",
    "ms-swift": "swift",
    "PyYAML": "yaml",
    "prometheus-client": "prometheus_client",
}
# Extras that each package may lean on; the base install is for all.
EXTRAS: dict[str, tuple[str, ...]] = {
    "protos": ("deploy",),
    "elastic": ("train", "log"),
    "master": ("etcd", "http"),
    "agent": ("train", "deploy"),
    "relay": ("relay",),
    "swift_plugin": ("train", "swift"),
}


# The rooms of each package, the lowest floor first. A room imports what lies below it, never what lies above or beside.
# What stands in none of them (`master/cli.py`) is above all; `agent/script.py`, `agent/own_modules.py` and
# `agent/set_variables.py` are rooms by themselves.
FLOORS: dict[str, tuple[tuple[str, ...], ...]] = {
    "agent": (
        *(
            ("own_modules", "set_variables"),
            ("decisions", "deploy", "script"),
            ("processes", "storage"),
            ("dlrover", "memory", "standby"),
            ("workers",),
        ),
        *(("control",), ("shell",), ("commands",)),
    ),
    "elastic": (
        *(("checkpoint",), ("rank", "universal"), ("data", "saving")),
        *(("dlrover", "training"), ("deepspeed",), ("script",), ("trainer",)),
    ),
    "master": (("brain",), ("record",), ("leadership", "server"), ("http",)),
    "relay": (("milestones",),),
    "swift_plugin": (("hf",),),
}
# Rooms and modules that decide: nothing in them reads a clock, a file or a socket, draws a number, or starts anything.
PURE = (
    "agent/decisions/",
    "agent/deploy/",
    "agent/set_variables.py",
    "agent/control/master_checks.py",
    "agent/control/pace.py",
    "agent/dlrover/names.py",
    "agent/dlrover/scripts.py",
    "agent/memory/frames.py",
    "agent/storage/best_save.py",
    "agent/storage/macros.py",
    "agent/storage/naming.py",
    "agent/storage/slices.py",
    "agent/workers/worker_env.py",
    "elastic/checkpoint/best.py",
    "elastic/checkpoint/metrics.py",
    "elastic/checkpoint/retention.py",
    "elastic/data/permutation.py",
    "elastic/data/plan.py",
    "elastic/data/same_data.py",
    "elastic/saving/cadence.py",
    "elastic/training/draws.py",
    "elastic/training/findings.py",
    "elastic/training/unchanged.py",
    "master/brain/",
    "master/http/leases.py",
    "master/leadership/standing.py",
    "master/record/chunks.py",
    "relay/recovery.py",
    "relay/milestones/due.py",
    "relay/milestones/run_manifest.py",
)
IMPURE = {
    *("asyncio", "concurrent", "ctypes", "datetime", "fcntl", "glob", "grpc", "http", "io", "logging", "mmap"),
    *("multiprocessing", "os", "pathlib", "queue", "random", "secrets", "select", "selectors", "shutil", "socket"),
    *("sqlite3", "ssl", "subprocess", "sys", "tempfile", "threading", "time", "torch", "urllib", "uuid"),
}
# Names, and no files.
PURE_NAMES = ("pathlib.PurePath", "pathlib.PurePosixPath")
IMPURE_CALLS = {"open", "print", "input", "exec", "eval", "__import__"}


def floor(package: str, name: str) -> tuple[int, str]:
    """How high the room lies that `dalsegno.<package>.…` is in, and its name; what is in no room lies above them."""
    room = name.split(".")[2] if name.count(".") > 1 else ""
    for height, rooms in enumerate(FLOORS.get(package, ())):
        if room in rooms:
            return height, room
    return len(FLOORS.get(package, ())), ""


def impure(path: Path, tree: ast.AST) -> list[str]:
    """What a module that only decides must not touch."""
    if not path.as_posix().startswith(PURE):
        return []
    wrong = [
        f"{path}:{line}: {name}: nothing here may touch the world"
        for line, name, _ in imports(path, tree)
        if name.split(".")[0] in IMPURE and name not in PURE_NAMES
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in IMPURE_CALLS:
            wrong.append(f"{path}:{node.lineno}: {node.func.id}(): nothing here may touch the world")
    return wrong


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def distributions(listing: str) -> set[str]:
    """Import names of a requirements block of setup.cfg."""
    names = set()
    for line in listing.split("\n"):
        name = line.strip()
        for mark in "<>=!~;[ ":
            name = name.split(mark)[0]
        if name and not name.startswith("#"):
            names.add(IMPORT_NAMES.get(name, name.replace("-", "_")))
    return names


@functools.cache
def declared(package: str) -> set[str]:
    """Top-level names from outside that a package may import: declared in setup.cfg for it."""
    config = configparser.ConfigParser(interpolation=None)
    config.read(ROOT / "setup.cfg")
    names = distributions(config["options"]["install_requires"])
    for extra in EXTRAS[package]:
        names |= distributions(config["options.extras_require"][extra])
    return names


def violations(path: Path, source: str) -> list[str]:
    """What is wrong with the imports of one product file (path relative to the checkout)."""
    package = path.parts[0]
    outside = declared(package)
    tree = parsed(source)
    wrong = impure(path, tree)
    height, room = floor(package, module_name(path))
    for line, name, relative in imports(path, tree):
        where = f"{path}:{line}: {name}"
        top = name.split(".")[0]
        own = within(name, f"dalsegno.{package}")
        if relative and not own:
            wrong.append(f"{where}: relative import leaves the package")
        elif own and not relative and "external" not in path.parts:
            wrong.append(f"{where}: import relatively within a package")
        elif own and room and floor(package, name)[1] != room and floor(package, name)[0] >= height:
            wrong.append(f"{where}: lies on no floor below {package}/{room}")
        elif top == "dalsegno" and not own and not any(within(name, prefix) for prefix in ALLOWED[package]):
            wrong.append(f"{where}: {package} may not import this")
        elif top in ALLOWED:
            wrong.append(f"{where}: a second copy of the module; import it from dalsegno")
        elif top not in sys.stdlib_module_names and top != "dalsegno" and top not in outside:
            wrong.append(f"{where}: not among the requirements that setup.cfg declares for {package}")
    return wrong


@pytest.mark.parametrize("path", product_files(), ids=str)
def test_imports_follow_the_table(path: Path) -> None:
    """No package imports what the table forbids it, lazily or otherwise."""
    assert violations(path, (ROOT / path).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("master/brain/brain.py", "from dalsegno.agent import commands"),
        ("master/brain/brain.py", "def f():\n    import dalsegno.elastic.checkpoint"),
        ("master/brain/brain.py", "from dalsegno import agent"),
        ("master/server/driver.py", "import torch"),
        ("agent/commands/launch.py", "from dalsegno.elastic import session"),
        ("agent/commands/launch.py", "from dalsegno.master import brain"),
        ("agent/commands/launch.py", "from ...master import brain"),
        ("agent/commands/launch.py", "from dalsegno.agent import decisions"),
        ("agent/commands/launch.py", "import protos"),
        ("elastic/data/sampler.py", "from ...agent import commands"),
        ("elastic/data/sampler.py", "import transformers"),
        ("protos/__init__.py", "from dalsegno.elastic import checkpoint"),
        # Floors: up, beside, and what is in no room.
        ("agent/decisions/ranks.py", "from ..shell import effects"),
        ("agent/storage/adoption.py", "from ..processes.proc import is_alive"),
        ("elastic/checkpoint/run_directory.py", "from ..rank import identity"),
        ("elastic/data/sampler.py", "from ..saving import saving"),
        ("master/server/driver.py", "from ..cli import main"),
        ("swift_plugin/hf/trainer.py", "from .. import swift_hooks"),
        # What decides touches nothing.
        ("master/brain/turn.py", "import time"),
        ("master/brain/turn.py", "def f():\n    from random import random"),
        ("agent/decisions/ranks.py", "print(1)"),
        ("elastic/data/plan.py", "import torch"),
        ("agent/dlrover/names.py", "from pathlib import Path"),
    ],
)
def test_a_planted_violation_is_seen(path: str, source: str) -> None:
    """The rule checker can fail."""
    assert len(violations(Path(path), source)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("agent/commands/launch.py", "from dalsegno.elastic.checkpoint import inventory"),
        ("agent/commands/launch.py", "from dalsegno.elastic import checkpoint, universal"),
        (
            "agent/shell/effects.py",
            "from dalsegno.protos import control_pb2\nfrom ..decisions import events\nimport torch, grpc",
        ),
        ("elastic/data/sampler.py", "from ..checkpoint import run_directory\nimport numpy, google.protobuf"),
        ("elastic/universal/conversion.py", "from ..checkpoint import seal\nfrom . import forms"),
        ("master/cli.py", "from .http import edge\nfrom .server import server"),
        ("swift_plugin/sft.py", "from dalsegno.elastic import session\nimport swift"),
    ],
)
def test_what_is_allowed_passes(path: str, source: str) -> None:
    """The rule checker doesn't cry wolf."""
    assert violations(Path(path), source) == []


def test_what_calls_itself_pure_is_held_to_it() -> None:
    """A module whose docstring says Pure is among those that are checked, and each of those exists."""
    said = [path for path in product_files() if re.search(r"\bPure\b", docstring(path))]
    assert len(said) > 10
    assert [path.as_posix() for path in said if not path.as_posix().startswith(PURE)] == []
    assert [place for place in PURE if not (ROOT / place).exists()] == []


def docstring(path: Path) -> str:
    return ast.get_docstring(parsed((ROOT / path).read_text(encoding="utf-8"))) or ""


LIGHT = [
    "dalsegno.protos.control_pb2",
    "dalsegno.elastic.checkpoint",
    "dalsegno.agent.commands.dlrover_run",
    "dalsegno.master.cli",
]
# None in sys.modules makes an import of that name raise ImportError.
WITHOUT = "import sys; sys.modules.update(dict.fromkeys(('torch', 'deepspeed', 'numpy'))); import {module}"


@pytest.mark.parametrize("module", LIGHT)
def test_imports_without_torch(module: str) -> None:
    """A base install (no `train` extra) can load the parts that a person and the control plane need."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT.format(module=module)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_room_lies_on_a_floor() -> None:
    """A new folder is given its place."""
    rooms = {path.parts[:2] for path in product_files() if len(path.parts) > 2 and path.parts[1] != "external"}
    known = {(package, room) for package, floors in FLOORS.items() for rooms in floors for room in rooms}
    assert rooms == known - {("agent", name) for name in ("script", "own_modules", "set_variables")}


def test_the_block_on_torch_works() -> None:
    """The test above would see an import of torch."""
    code = WITHOUT.format(module="torch")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "import of torch halted" in done.stderr
