"""Import hooks whose time is over, while an import is under way: it finds the module all the same."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dalsegno.agent.standby.holds import Holds
from dalsegno.agent.standby.only_installed import OnlyInstalled
from dalsegno.agent.standby.worker_main import _SessionImport


def _of_holds() -> tuple[Any, Callable[[], object]]:
    holds = Holds(lambda reason: None, SimpleNamespace())  # type: ignore[arg-type]
    return holds._imports, holds.end


def _of_installed() -> tuple[Any, Callable[[], object]]:
    hook = OnlyInstalled("")
    return hook, lambda: hook.__exit__(None, None, None)


def _of_session() -> tuple[Any, Callable[[], object]]:
    words: list[dict[str, bool]] = []
    hook = _SessionImport(SimpleNamespace(say=words.append))  # type: ignore[arg-type]

    def end() -> None:
        """Twice: it says so once."""
        for _ in range(2):
            hook.find_spec("dalsegno.elastic.script")
        assert words == [{"imports": True}]

    return hook, end


@pytest.mark.parametrize("of", [_of_holds, _of_installed, _of_session])
def test_an_import_that_is_under_way_passes_over_no_finder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of: Callable[[], tuple[Any, Callable[[], object]]]
) -> None:
    """A rank found no module of an installed package: another thread took a hook out of the list it went through."""
    hook, end = of()
    (tmp_path / "found_all_the_same.py").write_text("", encoding="utf-8")

    class Other:
        """Where the hook's time is over: what another thread does at this moment."""

        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name == "found_all_the_same":
                end()

    monkeypatch.setattr(sys, "meta_path", [hook, Other(), PathFinder])
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.import_module("found_all_the_same").__name__ in sys.modules
    assert hook.find_spec("tarfile") is None
    del sys.modules["found_all_the_same"]
