"""What a person is told at the end of a failed job, and where errors go."""

from __future__ import annotations

from pathlib import Path

from dalsegno.agent.commands.arguments import parse
from dalsegno.agent.commands.launch import verdict


def test_the_verdict_of_a_failed_job_says_what_to_do(tmp_path: Path) -> None:
    """Under either kind of master the next agent takes the run up again."""
    line = verdict("a: no luck (see /tmp/errors); 4 failures", tmp_path)
    assert line.startswith("the job failed: a: no luck; 4 failures; ")
    assert str(tmp_path) in line
    assert "the same command tries again" in line
    assert "--new-run starts over" in line


def test_the_verdict_does_not_repeat_the_line_before_it(tmp_path: Path) -> None:
    """With no restart both would give the same reason; how often it failed is new. Any other line is no reason."""
    cause = "a: no luck (see /tmp/errors)"
    line = verdict("a: no luck (see /tmp/errors); 1 failure (--max-restarts 0)", tmp_path, said=cause)
    assert line.startswith("the job failed, for the reason above; 1 failure (--max-restarts 0); logs in ")
    for other in ("", "a: failed as before, attempt 4 of 4", "b: no luck (see /tmp/errors)"):
        assert verdict("a: no luck; 4 failures", tmp_path, said=other).startswith("the job failed: a: no luck; ")


def test_errors_go_into_files_unless_told_otherwise() -> None:
    """The console is for what happened to the run; a peer's death would fill it with tracebacks."""
    assert parse(["train.py"]).redirects == "2"
    assert parse(["--redirects=0", "train.py"]).redirects == "0"
