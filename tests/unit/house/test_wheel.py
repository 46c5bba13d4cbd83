"""The built wheel carries the whole tree, and is what the tests run against in `make test`."""

from __future__ import annotations

import configparser
import importlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.pages.sources import PACKAGES, ROOT

BUILT_FROM = (*PACKAGES, "setup.cfg", "pyproject.toml", "README.md", "LICENSE")
CARRIED = (".py", ".pyi", ".proto", ".typed", ".html")


def tree_files() -> set[str]:
    """Names that the wheel must carry, as they appear in it."""
    found = set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*"):
            if path.is_file() and (path.suffix in CARRIED or path.name == "py.typed"):
                found.add(f"dalsegno/{path.relative_to(ROOT).as_posix()}")
    return found


def build(source: Path, to: Path) -> Path:
    """Builds a wheel of the tree `source` without touching a network."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(to), str(source)], check=True, timeout=120)
    (wheel,) = to.glob("*.whl")
    return wheel


def copy_tree(to: Path) -> Path:
    """The part of the checkout that a wheel is built from, without leftovers of earlier builds."""
    to.mkdir()
    for name in BUILT_FROM:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, to / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy(source, to / name)
    return to


def wheel_files(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if name.startswith("dalsegno/")}


@pytest.mark.slow
def test_the_wheel_carries_the_tree(tmp_path: Path) -> None:
    """Every module, stub, .proto and py.typed of the tree is in the wheel, and nothing else."""
    built = os.environ.get("DALSEGNO_WHEEL")
    wheel = Path(built) if built else build(copy_tree(tmp_path / "tree"), tmp_path / "wheel")
    assert wheel_files(wheel) == tree_files()


def test_every_package_is_listed() -> None:
    """A sub-package that setup.cfg doesn't list imports from a checkout and is absent from the wheel."""
    config = configparser.ConfigParser(interpolation=None)
    config.read(ROOT / "setup.cfg")
    listed = set(config["options"]["packages"].split())
    present = {
        f"dalsegno.{path.parent.relative_to(ROOT).as_posix().replace('/', '.')}"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
    }
    assert listed == present
    for package in listed:
        folder = ROOT / package.removeprefix("dalsegno.").replace(".", "/")
        assert (folder / "__init__.py").exists(), f"{package} has no __init__.py"
    for package in PACKAGES:
        assert (ROOT / package / "py.typed").exists(), f"dalsegno.{package} has no py.typed"


@pytest.mark.slow
def test_an_unlisted_package_is_missed(tmp_path: Path) -> None:
    """The comparison can fail: a new sub-package nobody listed doesn't reach the wheel."""
    tree = copy_tree(tmp_path / "tree")
    (tree / "elastic" / "unlisted").mkdir()
    (tree / "elastic" / "unlisted" / "__init__.py").write_text("")
    assert "dalsegno/elastic/unlisted/__init__.py" not in wheel_files(build(tree, tmp_path / "wheel"))


@pytest.mark.skipif("DALSEGNO_TEST_WHEEL" not in os.environ, reason="runs against the checkout here; see make test")
@pytest.mark.parametrize("package", PACKAGES)
def test_tests_run_against_the_wheel(package: str) -> None:
    """`make test` tests what users install."""
    module = importlib.import_module(f"dalsegno.{package}")
    assert module.__file__ is not None
    where = Path(module.__file__).resolve()
    assert "site-packages" in where.parts
    assert Path(sys.prefix).resolve() in where.parents
