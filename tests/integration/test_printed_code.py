"""Every block of Python code that the project prints is run, each in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.pages import printed
from tests.support.pages.printed_code import CODE, Snippet
from tests.support.pages.sources import ROOT
from tests.support.workers.tiny_swift import OFFLINE
from tests.support.workers.zero_runs import run_world

pytestmark = pytest.mark.timeout(180)


@pytest.mark.parametrize("snippet", CODE, ids=lambda snippet: f"{snippet.page}-{snippet.line[:30]}")
def test_printed_code_runs(snippet: Snippet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends, having done what it says."""
    (block,) = (block for block in printed.code() if snippet.is_of(block))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    script = tmp_path / "printed.py"
    script.write_text(snippet.source(block), encoding="utf-8")
    for name, value in OFFLINE.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    ((code, output),) = run_world(1, [str(script)], preloaded=snippet.preloaded)
    assert code == 0, f"{output}\n{script.read_text(encoding='utf-8')}"
