"""`docs/operations.md` names metrics and lines that there are."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi", reason="needs the extra http")

from dalsegno.master.http.metrics import metrics
from dalsegno.protos import control_pb2 as pb
from tests.support.pages.sources import ROOT
from tests.support.pages.warnings import Rooms

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
    assert len(quoted) > 20
    # A text may be put together of several, or of a verb and the rest.
    said = re.sub(r'"\s*\n\s*f?"', "", said).replace("cannot {doing}", "cannot read").replace('\\"', '"')
    assert [line for line in quoted if line.replace("cannot write the", "cannot read the") not in said] == []


LOGS = ("log.warning", "log.error", "log.exception", "log.critical")


def warnings() -> Iterator[str]:
    """The texts that the master logs as warnings and errors, and what it says as it ends because it hangs.

    Those that are somebody's own error have none.
    """
    for path in sorted((ROOT / "master").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in LOGS:
                text = node.args[0]
                if isinstance(text, ast.Constant) and isinstance(text.value, str):
                    yield text.value
    # The watchdog trusts no logger.
    yield "the master's event loop has stood still for %s s"


def test_what_the_master_warns_of_is_on_the_page() -> None:
    """Its longest part without a place for values is quoted, or quoted in part."""
    parts = [max(re.split(r"%\.?\d*[a-z]|\n", text), key=len).strip(" :;,") for text in warnings()]
    worded = [part for part in parts if len(part.split()) > 2]
    rows = "".join(line for line in PAGE.splitlines() if line.startswith("| "))
    quoted = re.findall(r"`([^`]+)`", rows)
    assert len(worded) > 5
    assert [part for part in worded if not any(one in part for one in quoted if len(one.split()) > 2)] == []


# What shows a text that it gets from elsewhere, where that is found.
FROM_ELSEWHERE = {
    "ending.message": "Exit, in the master or the agent: `end`, `exit`",
    "under_way.message": "`end`, where that was put off",
    "why": "`start_anew`",
    "notice.text": "an event of the master's",
    "event.detail": "an exception of Python's, or a reply of the master's that ends this node with exit code 2 or 76",
    "event.message": "`JoinFailed`, `StartFailed`, or an error of a rank's",
    "event.reply.remark": "`reopen` and `go_back`, which say it as events, too",
    "event.text": "`Remark`",
    "refusal": "what a session says of its script: docs/what-is-exact.md",
    "action.text": "`Say`",
    "text": "what `MemoryTier` says",
    "cause": "`mismatch`",
    "why_not_started('the workers', error)": "`the workers cannot be started`, or a line that says what to do",
    "shortage(error)": "`shortage`: threads, memory or descriptors that the system does not give",
    "str(error)": "an exception of Python's",
    "message": "`end`, or the error of a rank",
}
# Found beside warnings, in the same variable or function, and said without a warning, or with more words.
NO_WARNINGS = {
    "left on notice",
    "left by order",
    "{} left",
    "{} {} gone ({})",
    "the script does not know {}; it is started again and finds the files in its environment",
    "the job was stopped by order{}: {} goes on from {}{}",
    "{} was stopped: {} takes it up again from {}",
}


def test_what_consoles_and_events_warn_of_is_on_the_page() -> None:
    """Each of them has a row, whose first column quotes a part of it; wherever its text is put together."""
    rows = PAGE.partition("And of the lines")[2].partition("And of those that stand")[0]
    quoted = [
        line
        for cell in re.findall(r"^\| (`.*?) \| ", rows, flags=re.MULTILINE)
        for line in re.findall(r"`([^`]+)`", cell)
    ]
    rooms = Rooms(ROOT, ("agent", "master"))
    shown = {one.text for one in rooms.warnings()}
    assert len(shown) > 90
    assert shown >= NO_WARNINGS
    assert [text for text in shown - NO_WARNINGS if not any(part in text for part in quoted)] == []
    assert {expression for _, expression in rooms.unknown} == set(FROM_ELSEWHERE)
