"""What a person is told of a worker's output."""

from __future__ import annotations

from pathlib import Path

from dalsegno.agent.arguments import parse
from dalsegno.agent.workers import last_words


def test_the_last_line_of_the_errors_is_the_reason(tmp_path: Path) -> None:
    """Without torch's `@record` the traceback's last line says it, with the file that has the rest."""
    path = tmp_path / "stderr.log"
    path.write_text("Traceback (most recent call last):\n" + "x" * 20000 + "\nValueError: boom\n\n")
    assert last_words(str(path)) == f"ValueError: boom (see {path})"
    path.write_text("y" * 20000)
    assert len(last_words(str(path))) < 400
    path.write_text("")
    assert last_words(str(path)) == ""
    assert last_words("") == ""
    assert last_words(str(tmp_path / "nothing")) == ""


def test_errors_go_into_files_unless_told_otherwise() -> None:
    """The console is for what happened to the run; a peer's death would fill it with tracebacks."""
    assert parse(["train.py"]).redirects == "2"
    assert parse(["--redirects=0", "train.py"]).redirects == "0"
