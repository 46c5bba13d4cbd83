"""`docs/operations.md` names metrics and lines that there are."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("fastapi", reason="needs the extra http")

from dalsegno.master.http.metrics import metrics
from dalsegno.protos import control_pb2 as pb
from tests.support.pages.sources import ROOT

PAGE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")


def test_the_metrics_are_those_that_the_master_serves() -> None:
    """Every one of them is there, and no other."""
    status = pb.StatusReply(goodput=0.5, history=[pb.EpochRecord(parts=[pb.PausePart(name="saved", seconds=1.0)])])
    served = set(re.findall(r"^# TYPE (\S+)", metrics(status), flags=re.MULTILINE))
    assert set(re.findall(r"dalsegno_[a-z_]+", PAGE)) == served


def test_the_lines_are_those_of_the_program() -> None:
    """What stands in the first column is said by master or agent."""
    files = [path for room in ("master", "agent") for path in (ROOT / room).rglob("*.py")]
    said = "".join(path.read_text(encoding="utf-8") for path in files)
    rows = PAGE.partition("And of the lines")[2].partition("\n## ")[0]
    first = re.findall(r"^\| (`.*?) \| ", rows, flags=re.MULTILINE)
    quoted = [line for cell in first for line in re.findall(r"`([^`]+)`", cell)]
    assert len(quoted) > 10
    assert [line for line in quoted if line not in said] == []
