"""The README's quickstart, typed as it is printed and at its printed length: nothing is smaller or faster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.jobs.stage import Stage
from tests.support.pages.printed_commands import COMMANDS, Scene
from tests.support.workers import tiny_swift

pytestmark = [pytest.mark.timeout(1500), pytest.mark.full]
# Seconds for the whole run on a machine that has other things to do: it takes about 380 on two cores.
WHOLE_RUN = 1200.0


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    one = Stage(tmp_path / "stage", tiny_swift.OFFLINE)
    yield one
    one.close()


def printed(start: str) -> str:
    """The command of the quickstart that begins so."""
    (found,) = (
        line for line, how in COMMANDS.items() if how == Scene("test_the_quickstart") and line.startswith(start)
    )
    return found


def test_it_lasts_long_enough_to_join_scale_and_look(stage: Stage) -> None:
    """Two terminals: the second joins, one looks, makes it smaller and larger again, and the run ends in both."""
    command = printed("dlrover-run")
    assert command.endswith(" examples/train.py --steps=1000")
    first = stage.start(command)
    first.wait_for(r"epoch 1: .* 1 node\b")
    second = stage.start(command)
    first.wait_for(r"epoch 2: .* 2 nodes.*, lost 0 steps")
    said = stage.type(printed("dalsegno status"))
    assert "running" in said
    stage.type(printed("dalsegno scale 1"))
    first.wait_for(r"epoch 3: .* 1 node\b.*, lost 0 steps")
    stage.type(printed("dalsegno scale 4"))
    first.wait_for(r"epoch 4: .* 2 nodes.*, lost 0 steps")
    assert (first.wait(WHOLE_RUN), second.wait()) == (0, 0)
    assert "the run finished at step 1000" in first.text
    assert "Traceback" not in first.text + second.text
    assert "finished" in stage.type(command), "the same command again trains nothing"
