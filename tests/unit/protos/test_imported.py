"""A function is called with a module once that is imported."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

import pytest

from dalsegno.protos.imported import when_imported

NAME = "dalsegno_test_imported"


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module that can be imported."""
    (tmp_path / f"{NAME}.py").write_text("value = 1\n", encoding="ascii")
    monkeypatch.syspath_prepend(tmp_path)
    before = list(sys.meta_path)
    yield
    sys.modules.pop(NAME, None)
    sys.meta_path[:] = before


def test_when_it_is_imported() -> None:
    """After its own code, and once; looking for it is no import."""
    seen: list[ModuleType] = []
    before = list(sys.meta_path)
    when_imported(NAME, seen.append)
    assert importlib.util.find_spec(NAME) is not None
    assert not seen
    module = importlib.import_module(NAME)
    assert seen == [module]
    assert module.value == 1
    importlib.import_module(NAME)
    assert seen == [module]
    assert sys.meta_path == before


def test_an_import_that_is_under_way_passes_over_no_finder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its hook goes while an import, here or on another thread, is at a finder behind it."""
    (tmp_path / "found_all_the_same.py").write_text("", encoding="ascii")
    seen: list[ModuleType] = []

    class Other:
        """What another thread imports at this moment."""

        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name == "found_all_the_same":
                importlib.import_module(NAME)

    monkeypatch.setattr(sys, "meta_path", [Other(), PathFinder])
    when_imported(NAME, seen.append)
    assert importlib.import_module("found_all_the_same").__name__ in sys.modules
    assert [module.__name__ for module in seen] == [NAME]
    del sys.modules["found_all_the_same"]


def test_what_is_imported_already() -> None:
    """At once."""
    seen: list[ModuleType] = []
    module = importlib.import_module(NAME)
    when_imported(NAME, seen.append)
    assert seen == [module]
