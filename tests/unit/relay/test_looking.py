"""What people are shown of a run."""

from __future__ import annotations

from dalsegno.relay.looking import status_lines


def test_a_script_that_tells_no_steps_is_as_far_as_its_newest_commit() -> None:
    """The Commander hears of its saves only: where it resumed is not where it is."""
    run = {"run_id": "it", "state": "RUNNING", "step": 800, "head": {"name": "step-1100.e3.1", "step": 1100}}
    assert next(iter(status_lines(run))) == "it: RUNNING, step 1100"
    assert next(iter(status_lines({**run, "step": 1150}))) == "it: RUNNING, step 1150"
    assert next(iter(status_lines({**run, "step": None, "head": None}))) == "it: RUNNING"
