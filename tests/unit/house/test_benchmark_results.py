"""What benchmarks write down: rows, machine and versions, as a table and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import results


def test_report_writes_rows_machine_and_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The JSON has everything that the table shows, unrounded, and where it was measured."""
    monkeypatch.setenv(results.DIRECTORY_VARIABLE, str(tmp_path / "new"))
    rows = [{"what": "ours", "seconds": 0.123456}, {"what": "theirs", "seconds": None, "note": "out of memory"}]
    path = results.report("example", rows, title="An example", settings={"samples": 10**6})
    content = json.loads(path.read_text(encoding="utf-8"))
    assert path == tmp_path / "new" / "example.json"
    assert content["rows"] == rows
    assert content["settings"] == {"samples": 10**6}
    assert content["machine"]["cores"] >= 1
    assert content["machine"]["memory_bytes"] > 2**20
    assert content["versions"]["python"]
    assert "torch" in content["versions"]
    shown = capsys.readouterr().out
    for text in ("An example", "0.1235", "out of memory", "1,000,000", "python"):
        assert text in shown


def test_no_results_are_an_error() -> None:
    """A benchmark that measured nothing does not pass for one that did."""
    with pytest.raises(ValueError, match="no results"):
        results.report("example", [], title="An example")
