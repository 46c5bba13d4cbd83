"""Who may import whom (the table of the design's section 3), and what imports without torch."""

from __future__ import annotations

import ast
import configparser
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.sources import ROOT, imports, module_name, product_files

# Package -> prefixes of `dalsegno.` that it may import besides itself.
ALLOWED: dict[str, tuple[str, ...]] = {
    "protos": (),
    "elastic": ("dalsegno.protos",),
    "master": ("dalsegno.protos",),
    "agent": ("dalsegno.protos", "dalsegno.elastic.checkpoint", "dalsegno.elastic.universal"),
    "swift_plugin": ("dalsegno.elastic",),
}
# Distribution -> the name it is imported by, where they differ.
IMPORT_NAMES = {"grpcio": "grpc", "protobuf": "google", "ms-swift": "swift", "prometheus-client": "prometheus_client"}
# Extras that each package may lean on; the base install is for all.
EXTRAS: dict[str, tuple[str, ...]] = {
    "protos": (),
    "elastic": ("train", "log"),
    "master": ("etcd", "http"),
    "agent": ("train",),
    "swift_plugin": ("train", "swift"),
}


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


def declared(package: str) -> set[str]:
    """Top-level names from outside that a package may import: declared in setup.cfg for it."""
    config = configparser.ConfigParser(interpolation=None)
    config.read(ROOT / "setup.cfg")
    names = distributions(config["options"]["install_requires"])
    for extra in EXTRAS[package]:
        names |= distributions(config["options.extras_require"][extra])
    return names


def listed(name: str) -> str:
    """The innermost package of setup.cfg that a module or name belongs to."""
    config = configparser.ConfigParser(interpolation=None)
    config.read(ROOT / "setup.cfg")
    return max((package for package in config["options"]["packages"].split() if within(name, package)), key=len)


def violations(path: Path, source: str) -> list[str]:
    """What is wrong with the imports of one product file (path relative to the checkout)."""
    package = path.parts[0]
    outside = declared(package)
    wrong = []
    for line, name, relative in imports(path, ast.parse(source)):
        where = f"{path}:{line}: {name}"
        top = name.split(".")[0]
        own = within(name, f"dalsegno.{package}")
        if relative and not own:
            wrong.append(f"{where}: relative import leaves the package")
        # A sub-package that setup.cfg lists is a package of its own.
        elif own and not relative and listed(name) == listed(module_name(path)):
            wrong.append(f"{where}: import relatively within a package")
        elif top == "dalsegno" and not own and not any(within(name, prefix) for prefix in ALLOWED[package]):
            wrong.append(f"{where}: {package} may not import this")
        elif top in ALLOWED:
            wrong.append(f"{where}: a second copy of the module; import it from dalsegno")
        elif top not in sys.stdlib_module_names and top != "dalsegno" and top not in outside:
            wrong.append(f"{where}: not among the requirements that setup.cfg declares for {package}")
    return wrong


@pytest.mark.parametrize("path", product_files(), ids=str)
def test_imports_follow_the_table(path: Path) -> None:
    """No package imports what the design forbids it, lazily or otherwise."""
    assert violations(path, (ROOT / path).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("master/brain.py", "from dalsegno.agent import cli"),
        ("master/brain.py", "def f():\n    import dalsegno.elastic.checkpoint"),
        ("master/brain.py", "from dalsegno import agent"),
        ("master/brain.py", "import torch"),
        ("agent/cli.py", "from dalsegno.elastic import session"),
        ("agent/cli.py", "from dalsegno.master import brain"),
        ("agent/cli.py", "from ..master import brain"),
        ("agent/cli.py", "from dalsegno.agent import decisions"),
        ("agent/cli.py", "import protos"),
        ("elastic/data/sampler.py", "from ...agent import cli"),
        ("elastic/session.py", "import transformers"),
        ("protos/__init__.py", "from dalsegno.elastic import checkpoint"),
    ],
)
def test_a_planted_violation_is_seen(path: str, source: str) -> None:
    """The rule checker can fail."""
    assert len(violations(Path(path), source)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("agent/cli.py", "from dalsegno.elastic.checkpoint import inventory"),
        ("agent/cli.py", "from dalsegno.elastic import checkpoint, universal"),
        ("agent/cli.py", "from dalsegno.protos import control_pb2\nfrom . import decisions\nimport torch, grpc"),
        ("elastic/data/sampler.py", "from ..checkpoint import store\nimport numpy, google.protobuf"),
        ("elastic/universal/convert.py", "from dalsegno.elastic.checkpoint import seal"),
        ("swift_plugin/sft.py", "from dalsegno.elastic import session\nimport swift"),
    ],
)
def test_what_is_allowed_passes(path: str, source: str) -> None:
    """The rule checker doesn't cry wolf."""
    assert violations(Path(path), source) == []


LIGHT = ["dalsegno.protos.control_pb2", "dalsegno.elastic.checkpoint", "dalsegno.agent.cli", "dalsegno.master.cli"]
# None in sys.modules makes an import of that name raise ImportError.
WITHOUT = "import sys; sys.modules.update(dict.fromkeys(('torch', 'deepspeed', 'numpy'))); import {module}"


@pytest.mark.parametrize("module", LIGHT)
def test_imports_without_torch(module: str) -> None:
    """A base install (no `train` extra) can load the parts that a person and the control plane need."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT.format(module=module)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_block_on_torch_works() -> None:
    """The test above would see an import of torch."""
    code = WITHOUT.format(module="torch")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "import of torch halted" in done.stderr
